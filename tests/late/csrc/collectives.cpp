// Collectives of the device: gloo's, run on a stream of the communicator, with NCCL's rules of
// waiting: a work orders the stream that waits for it, and the host goes on.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include "launch.h"
#include "python.h"

namespace late {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;

struct Work final : c10d::Work {
  Event done;
  Tensors kept;  // until somebody waits
  explicit Work(OpType type) : c10d::Work(-1, type) {}
  bool isCompleted() override { return rt().query(done); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    if (!dropped("wait")) rt().wait_event(current(), done);
    kept.clear();
    return true;
  }
  void synchronize() override { wait({}); }
  Tensors result() override { return kept; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK(false, "late: no futures");
  }
};

Tensors task_views(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(task_view(tensor));
  return views;
}

struct Communicator final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  int stream = -1;

  explicit Communicator(c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {}
  const std::string getBackendName() const override { return "late"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  template <typename Call>
  WorkPtr launch(OpType type, const char* name, const Tensors& reads, const Tensors& writes,
                 bool async, Call call) {
    Runtime& runtime = rt();
    if (runtime.sites) site = python_site();
    std::vector<Span> spans;
    int device = current_device;
    double bytes = 0;
    for (bool write : {false, true})
      for (const auto& tensor : write ? writes : reads) {
        TORCH_CHECK(is_late(tensor), "No backend type associated with device type ",
                    tensor.device().type(), ": ", name, " takes tensors of ", c10::Device(late::type()));
        add_span(tensor, write, spans);
        device = tensor.device().index();
        bytes += double(tensor.numel() * tensor.element_size());
      }
    if (stream < 0) stream = device * kStreamsEach + runtime.new_stream(device);
    int here = current_on(device), on = async ? stream : here;
    if (on != here) runtime.wait_event(on, runtime.record(here));
    Tensors from = task_views(reads), to = task_views(writes);
    runtime.enqueue(on, name, spans, [call, from, to]() mutable { call(from, to)->wait(); },
                    {bytes, 0, Way::network});
    auto work = c10::make_intrusive<Work>(type);
    work->done = runtime.record(on);
    work->kept = writes;
    work->kept.insert(work->kept.end(), reads.begin(), reads.end());
    return work;
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    bool root = options.rootRank == getRank();
    return launch(OpType::BROADCAST, "broadcast", root ? tensors : Tensors{},
                  root ? Tensors{} : tensors, options.asyncOp,
                  [inner = gloo, options](Tensors& from, Tensors& to) {
                    return inner->broadcast(from.empty() ? to : from, options);
                  });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch(OpType::ALLREDUCE, "all_reduce", {}, tensors, options.asyncOp,
                  [inner = gloo, options](Tensors&, Tensors& to) {
                    return inner->allreduce(to, options);
                  });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch(OpType::REDUCE, "reduce", {}, tensors, options.asyncOp,
                  [inner = gloo, options](Tensors&, Tensors& to) {
                    return inner->reduce(to, options);
                  });
  }
  // Gloo wants equal shapes and no overlap; NCCL counts elements, and gathers in place.
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& options) override {
    return launch(OpType::_ALLGATHER_BASE, "all_gather", {in}, {out}, options.asyncOp,
                  [inner = gloo, options](Tensors& from, Tensors& to) {
                    at::Tensor own = from[0].clone().view({-1}), all = to[0].view({-1});
                    return inner->_allgather_base(all, own, options);
                  });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in,
                    const c10d::AllgatherOptions& options) override {
    return launch(OpType::ALLGATHER, "all_gather", in, out[0], options.asyncOp,
                  [inner = gloo, options](Tensors& from, Tensors& to) {
                    std::vector<Tensors> lists{to};
                    return inner->allgather(lists, from, options);
                  });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& options) override {
    return launch(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", {in}, {out}, options.asyncOp,
                  [inner = gloo, options](Tensors& from, Tensors& to) {
                    at::Tensor all = from[0].clone().view({-1}), own = to[0].view({-1});
                    return inner->_reduce_scatter_base(own, all, options);
                  });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    return launch(OpType::ALLTOALL_BASE, "all_to_all", {in}, {out}, options.asyncOp,
                  [inner = gloo, options, out_sizes, in_sizes](Tensors& from, Tensors& to) mutable {
                    return inner->alltoall_base(to[0], from[0], out_sizes, in_sizes, options);
                  });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto work = launch(OpType::BARRIER, "barrier", {}, {}, false,
                       [inner = gloo, options](Tensors&, Tensors&) {
                         return inner->barrier(options);
                       });
    NoGil release;
    rt().host_wait(static_cast<Work*>(work.get())->done);
    return work;
  }
};

}  // namespace
}  // namespace late

void bind_collectives(pybind11::module_& m) {
  m.def("communicator",
        [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
          return c10::make_intrusive<late::Communicator>(gloo);
        });
}
