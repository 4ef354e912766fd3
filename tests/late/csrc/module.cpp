// The Python module `late_C`.
#include <torch/csrc/utils/pybind.h>

#include "launch.h"
#include "python.h"
#include "storage.h"

namespace py = pybind11;
using late::kDevices;
using late::kStreamsEach;
using late::rt;

void bind_collectives(py::module_& module);

namespace {

void wait_all() {
  late::NoGil release;
  for (int device = 0; device < kDevices; device++) rt().host_wait_device(device);
}

void configure(const std::string& mode, int max_us, uint64_t seed, double nap) {
  using late::Mode;
  static const std::map<std::string, Mode> modes{{"inline", Mode::inline_},
                                                 {"eager", Mode::eager},
                                                 {"random", Mode::random},
                                                 {"lazy", Mode::lazy},
                                                 {"aliased", Mode::eager}};
  auto found = modes.find(mode);
  if (found == modes.end()) throw py::value_error("inline, eager, random, lazy or aliased, not " + mode);
  wait_all();
  std::lock_guard<std::mutex> lock(rt().mu);
  rt().mode = found->second;
  rt().aliased = mode == "aliased";
  rt().max_us = max_us;
  rt().nap = nap;
  rt().rng.seed(seed);
}

void flags(bool detect, bool poison, bool guard_host, bool sites) {
  std::lock_guard<std::mutex> lock(rt().mu);
  rt().detect = detect;
  rt().poison = poison;
  rt().guard_host = guard_host;
  rt().sites = sites;
}

auto reports() {
  std::lock_guard<std::mutex> lock(rt().mu);
  std::vector<std::pair<std::string, std::string>> out;
  for (const auto& report : rt().reports) out.emplace_back(report.kind, report.text);
  return out;
}

py::dict stats() {
  std::lock_guard<std::mutex> lock(rt().mu);
  const auto& counts = rt().counts;
  py::dict out;
  out["ops"] = counts.ops;
  out["tasks"] = counts.tasks;
  out["accesses"] = counts.accesses;
  out["syncs"] = counts.syncs;
  out["sync_ops"] = counts.sync_ops;
  out["inferred"] = counts.inferred;
  out["faults"] = counts.faults;
  out["false_shares"] = counts.false_shares;
  out["allocated"] = counts.allocated;
  out["peak"] = counts.peak;
  out["reserved"] = counts.reserved;
  out["pinned"] = counts.pinned;
  out["allocations"] = late::allocations;  // of this thread
  out["queries"] = late::queries;
  out["graph_launches"] = counts.graph_launches;
  return out;
}

void set_rates(const std::map<std::string, double>& given) {
  std::lock_guard<std::mutex> lock(rt().mu);
  auto& rates = rt().rates;
  std::map<std::string, double*> known{
      {"flops", &rates.flops},         {"memory", &rates.memory},   {"to_device", &rates.to_device},
      {"to_host", &rates.to_host},     {"network", &rates.network}, {"launch", &rates.launch},
      {"shortest", &rates.shortest}};
  for (const auto& [name, value] : given) {
    if (!known.count(name)) throw py::key_error(name);
    *known[name] = value;
  }
}

auto trace_rows() {
  std::lock_guard<std::mutex> lock(rt().mu);
  std::vector<std::tuple<int, std::string, std::string, double, double, double>> out;
  for (const auto& task : rt().trace)
    out.emplace_back(task.stream, task.what, task.site, task.start, task.end, task.bytes);
  return out;
}

// Work of the host itself, in simulated time: on the lane of this thread.
double host_work(double seconds, const std::string& what) {
  std::lock_guard<std::mutex> lock(rt().mu);
  double& now = rt().host_time[size_t(late::lane)];
  double start = now;
  now += seconds;
  if (rt().tracing && seconds > 0)
    rt().trace.push_back({late::kHost + late::lane, what, late::site, start, now, 0});
  return now;
}

void host_not_before(double time) {
  std::lock_guard<std::mutex> lock(rt().mu);
  double& now = rt().host_time[size_t(late::lane)];
  now = std::max(now, time);
}

int set_lane(int lane) {
  if (lane < 0 || lane >= late::kLanes) throw py::value_error("no such lane of the host");
  return std::exchange(late::lane, lane);
}

int set_stream(int device, int id) { return std::exchange(late::current_streams[device], id); }

void set_device(int device) {
  if (device < 0 || device >= rt().devices) throw py::value_error("invalid device ordinal");
  late::current_device = device;
}

void sleep(int us) {
  rt().enqueue(late::current(), "sleep", {},
               [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
}

struct PyGraph {  // as torch's CUDAGraph
  std::shared_ptr<late::Graph> graph;
};

void bind_graphs(py::module_& m) {
  py::class_<late::GraphMemory, std::shared_ptr<late::GraphMemory>>(m, "GraphMemory");
  py::class_<PyGraph>(m, "Graph")
      .def(py::init<>())
      .def("begin", [](PyGraph& self, std::shared_ptr<late::GraphMemory> memory) {
        self.graph = rt().begin_capture(late::current_stream_of(late::current_device), std::move(memory));
      })
      .def("end", [](PyGraph&) { rt().end_capture(); })
      .def("launch", [](PyGraph& self) { rt().launch(self.graph); })
      .def("steps", [](PyGraph& self) { return self.graph->steps.size(); })
      .def("memory", [](PyGraph& self) { return self.graph->memory; });
  m.def("is_capturing", [] {
    return rt().captures(late::current_stream_of(late::current_device));
  });
}

void bind_random(py::module_& m) {
  m.def("seed", [](int device, uint64_t seed) {
    at::Generator generator = late::default_generator(device);
    generator.set_current_seed(seed);
  });
  m.def("initial_seed", [](int device) { return late::default_generator(device).current_seed(); });
  m.def("get_rng_state", [](int device) {
    return at::Tensor(late::default_generator(device).unsafeGetGeneratorImpl()->get_state());
  });
  m.def("set_rng_state", [](int device, const at::Tensor& state) {
    at::Tensor dense = state.contiguous();
    late::default_generator(device).unsafeGetGeneratorImpl()->set_state(
        *dense.unsafeGetTensorImpl());
  });
}

}  // namespace

PYBIND11_MODULE(late_C, m) {
  late::register_hooks();
  late::catch_faults();
  rt().on_thread = late::one_thread_each;
  rt().find_site = late::python_site;
  m.attr("MAX_DEVICES") = kDevices;
  m.attr("STREAMS_EACH") = kStreamsEach;
  m.attr("HOST") = late::kHost;
  m.def("configure", configure);
  m.def("flags", flags);
  m.def("reports", reports);
  m.def("forget", [] { rt().forget(); });
  m.def("stats", stats);
  m.def("synchronize_all", wait_all);
  m.def("set_devices", [](int count) { rt().devices = count; });
  m.def("allow_devices", [](uint32_t bits) { rt().allowed = bits; });
  m.def("use_device", [](int device, const std::string& what) {
    rt().use_device(device, what.c_str());
  });
  m.def("drop", late::drop);
  m.def("drop_nothing", late::drop_nothing);
  m.def("drops", late::drops);
  m.def("set_rates", set_rates);
  m.def("set_tracing", [](bool on) { rt().tracing = on; });
  m.def("trace", trace_rows);
  m.def("host_work", host_work);
  m.def("host_not_before", host_not_before);
  m.def("set_lane", set_lane);
  m.def("sync_debug", [](bool on) { rt().sync_error = on; });
  m.def("reset_peak", [](int on) { rt().counts.peak[on] = rt().counts.allocated[on]; });
  m.def("synchronize", [](int device) {
    if (late::dropped("synchronize")) return;
    late::NoGil release;
    rt().host_wait_device(device);
  });
  m.def("device_count", [] { return rt().devices; });
  m.def("current_device", [] { return late::current_device; });
  m.def("set_device", set_device);
  m.def("current_stream", [](int device) { return late::current_streams[device]; });
  m.def("set_stream", set_stream);
  m.def("sleep", static_cast<void (*)(int)>(sleep));
  m.def("host_register", [](uintptr_t at, size_t n) { return rt().host_register((char*)at, n); });
  m.def("host_unregister", [](uintptr_t at) { return rt().host_unregister((char*)at); });
  m.def("resize_storage", [](const at::Tensor& t, size_t bytes) {
    late::resize_bytes(t.storage().unsafeGetStorageImpl(), bytes);
  });
  bind_random(m);
  bind_graphs(m);
  bind_collectives(m);
}
