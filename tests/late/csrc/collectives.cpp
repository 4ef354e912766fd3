// Collectives of the device: gloo's, run on a stream of the communicator, with NCCL's rules. A work
// orders the stream that waits for it, and the host goes on; a collective that meets another one
// leaves garbage and says nothing to the program; messages pair by their order, not by their tag; a
// tensor of a CPU is refused.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "communicator.h"
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

void fill_with_nan(const Tensors& tensors) {
  for (const auto& tensor : tensors)
    if (tensor.numel()) memset(tensor.data_ptr(), 0xFF, tensor.numel() * tensor.element_size());
}

std::string describe(const Tensors& tensors, bool sized) {
  if (tensors.empty()) return "";
  std::string text = std::string(" ") + c10::toString(tensors[0].scalar_type());
  int64_t count = 0;
  for (const auto& tensor : tensors) count += tensor.numel();
  return sized ? text + " " + std::to_string(count) : text;
}

std::string describe(const c10d::ReduceOp& op) {
  static const char* names[] = {"sum", "avg", "product", "min", "max", "and", "or", "xor", "premul"};
  auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
  return kind < 9 ? names[kind] : "?";
}

struct Message {
  bool send;
  int peer;
  at::Tensor tensor;
};

// The ends over this rank and another one, for messages from the lower and from the higher of the
// two: those of batches, and those issued alone, which have a communicator of their own.
struct Pair {
  std::shared_ptr<End> ends[2][2];
  int stream = -1;
};

struct Part {  // of what a task takes part in
  std::shared_ptr<End> end;
  uint64_t number;
};

struct Communicator final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::shared_ptr<End> end;
  std::map<int, Pair> pairs;  // by the other rank
  int priority, stream = -1;
  bool grouping = false;
  std::vector<Message> grouped;

  Communicator(c10::intrusive_ptr<c10d::Backend> inner, const std::string& name, const std::string& board, bool high)
      : c10d::Backend(inner->getRank(), inner->getSize()),
        gloo(std::move(inner)),
        priority(high ? 1 - kPriorities : 0) {
    int me = getRank(), ranks = getSize();
    end = make_end(name, board, 0, me, ranks);
    size_t at = Board::bytes_for(ranks);
    for (int low = 0; low < ranks; low++)
      for (int high = low + 1; high < ranks; high++)
        for (int each = 0; each < 4; each++, at += Board::bytes_for(2)) {
          if (me != low && me != high) continue;
          std::string way = each % 2 ? std::to_string(high) + " to " + std::to_string(low)
                                     : std::to_string(low) + " to " + std::to_string(high);
          pairs[me == low ? high : low].ends[each / 2][each % 2] =
              make_end(name + (each / 2 ? ", single messages of " : ", messages of ") + way, board, at, me == high, 2);
        }
  }
  static size_t board_bytes(int ranks) {
    return Board::bytes_for(ranks) + size_t(ranks) * size_t(ranks - 1) * 2 * Board::bytes_for(2);
  }
  const std::string getBackendName() const override { return "late"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void abort() override {
    end->abort();
    for (auto& [_, pair] : pairs)
      for (auto& kind : pair.ends)
        for (auto& each : kind) each->abort();
  }

  // `sized`: every rank gives as many elements as this one.
  template <typename Call>
  WorkPtr launch(OpType type, const char* name, const std::string& how, const Tensors& reads,
                 const Tensors& writes, bool async, Call call, bool sized = true) {
    if (rt().sites) site = python_site();
    int device = check(name, reads, writes);
    if (stream < 0) stream = device * kStreamsEach + rt().new_stream(device, priority);
    std::string what = name + describe(reads.empty() ? writes : reads, sized) + " " + how + " [" + site + "]";
    if (rt().captures(current_on(device))) {
      std::vector<Span> spans = spans_of(reads, writes);
      Tensors from = task_views(reads), to = task_views(writes);
      double bytes = bytes_of(reads) + bytes_of(writes);
      rt().keep(name, [this, name, what, device, spans, from, to, bytes, call]() mutable {
        Part part{end, end->issue(what, next_place())};
        auto task = [call](const std::vector<bool>& same, Tensors& from, Tensors& to) mutable {
          if (same[0]) call(from, to)->wait();
          else fill_with_nan(to);
        };
        run_parts(name, {part}, current_on(device), spans, from, to, bytes, task);
      });
      auto work = c10::make_intrusive<Work>(type);
      work->done = rt().record(current_on(device));
      return work;
    }
    return enqueue(type, name, {{end, end->issue(what, next_place())}}, device, async ? stream : current_on(device),
                   reads, writes, [call](const std::vector<bool>& same, Tensors& from, Tensors& to) mutable {
                     if (same[0]) call(from, to)->wait();
                     else fill_with_nan(to);
                   });
  }

  int check(const char* name, const Tensors& reads, const Tensors& writes) {
    int device = current_device;
    for (const auto* tensors : {&reads, &writes})
      for (const auto& tensor : *tensors) {
        TORCH_CHECK(is_late(tensor), "No backend type associated with device type ",
                    tensor.device().type(), ": ", name, " takes tensors of ", c10::Device(late::type()));
        TORCH_CHECK(tensor.is_contiguous(), name, ": Tensors must be contiguous");
        device = tensor.device().index();
      }
    return device;
  }

  // `run` gets, for each of `parts`, whether the other ranks have come to the same.
  template <typename Run>
  WorkPtr enqueue(OpType type, const char* name, const std::vector<Part>& parts, int device, int on,
                  const Tensors& reads, const Tensors& writes, Run run) {
    Runtime& runtime = rt();
    int here = current_on(device);
    if (on != here) runtime.wait_event(on, runtime.record(here));
    Event done = run_parts(name, parts, on, spans_of(reads, writes), task_views(reads), task_views(writes),
                           bytes_of(reads) + bytes_of(writes), run);
    auto work = c10::make_intrusive<Work>(type);
    work->done = done;
    work->kept = writes;
    work->kept.insert(work->kept.end(), reads.begin(), reads.end());
    return work;
  }

  static std::vector<Span> spans_of(const Tensors& reads, const Tensors& writes) {
    std::vector<Span> spans;
    for (bool write : {false, true})
      for (const auto& tensor : write ? writes : reads) add_span(tensor, write, spans);
    return spans;
  }
  static double bytes_of(const Tensors& tensors) {
    double bytes = 0;
    for (const auto& tensor : tensors) bytes += double(tensor.numel() * tensor.element_size());
    return bytes;
  }

  template <typename Run>
  static Event run_parts(const char* name, const std::vector<Part>& parts, int on, const std::vector<Span>& spans,
                         Tensors from, Tensors to, double bytes, Run run) {
    Runtime& runtime = rt();
    runtime.enqueue(on, name, spans, [run, from, to, parts]() mutable {
                      struct Over {
                        const std::vector<Part>& parts;
                        ~Over() {
                          for (const Part& part : parts) part.end->over(part.number);
                        }
                      } over{parts};
                      bool alone = parts.size() == 1;
                      for (const Part& part : parts) part.end->enter(part.number, alone);
                      std::vector<bool> same;
                      for (const Part& part : parts) same.push_back(part.end->meet(part.number));
                      run(same, from, to);
                    },
                    {bytes, 0, Way::network});
    Event done = runtime.record(on);
    for (const Part& part : parts) part.end->issued(part.number, done);
    return done;
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    grouping = true;
    grouped.clear();
  }
  WorkPtr endCoalescing() override {
    grouping = false;
    TORCH_CHECK(!grouped.empty(), "late: messages alone are grouped");
    return exchange(std::exchange(grouped, {}), false);
  }
  WorkPtr send(Tensors& tensors, int peer, int) override { return add({true, peer, tensors[0]}); }
  WorkPtr recv(Tensors& tensors, int peer, int) override { return add({false, peer, tensors[0]}); }
  WorkPtr add(const Message& message) {
    if (!grouping) return exchange({message}, true);
    grouped.push_back(message);
    return nullptr;
  }

  // Messages that go at once. One by itself takes the communicator of all ranks where that is bound
  // to a device, else one of the two ranks, with a stream of its own.
  WorkPtr exchange(const std::vector<Message>& messages, bool single) {
    if (rt().sites) site = python_site();
    Tensors sent, received;
    for (const auto& each : messages) (each.send ? sent : received).push_back(each.tensor);
    int device = check("message", sent, received);
    bool own = single && !getBoundDeviceId();
    int& on = own ? pairs.at(messages[0].peer).stream : stream;
    if (on < 0) on = device * kStreamsEach + rt().new_stream(device, priority);
    uint64_t place = next_place();
    std::vector<Part> parts;
    for (const auto& each : messages) {
      auto& towards = pairs.at(each.peer).ends[own][each.send != (getRank() < each.peer)];
      parts.push_back({towards, towards->issue("message" + describe({each.tensor}, true) + " [" + site + "]", place)});
    }
    std::vector<std::pair<bool, int>> plan;
    for (const auto& each : messages) plan.emplace_back(each.send, each.peer);
    return enqueue(OpType::SEND, "message", parts, device, on, sent, received,
                   [inner = gloo, plan](const std::vector<bool>& same, Tensors& from, Tensors& to) {
                     std::vector<WorkPtr> works;
                     size_t out = 0, in = 0;
                     for (size_t at = 0; at < plan.size(); at++) {
                       auto [send, peer] = plan[at];
                       Tensors one{send ? from[out++] : to[in++]};
                       if (same[at]) works.push_back(send ? inner->send(one, peer, 0) : inner->recv(one, peer, 0));
                       else if (!send) fill_with_nan(one);
                     }
                     for (auto& work : works) work->wait();
                   });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    bool root = options.rootRank == getRank();
    return launch(OpType::BROADCAST, "broadcast", "from " + std::to_string(options.rootRank), root ? tensors : Tensors{},
                  root ? Tensors{} : tensors, options.asyncOp,
                  [inner = gloo, options](Tensors& from, Tensors& to) {
                    return inner->broadcast(from.empty() ? to : from, options);
                  });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch(OpType::ALLREDUCE, "all_reduce", describe(options.reduceOp), {}, tensors, options.asyncOp,
                  [inner = gloo, options](Tensors&, Tensors& to) {
                    if (options.reduceOp != c10d::ReduceOp::AVG || to[0].is_floating_point())
                      return inner->allreduce(to, options);
                    c10d::AllreduceOptions sum;  // NCCL has means of integers, gloo has none
                    sum.timeout = options.timeout;
                    auto work = inner->allreduce(to, sum);
                    work->wait();
                    to[0].div_(inner->getSize(), "trunc");
                    return work;
                  });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch(OpType::REDUCE, "reduce",
                  describe(options.reduceOp) + " to " + std::to_string(options.rootRank), {}, tensors, options.asyncOp,
                  [inner = gloo, options](Tensors&, Tensors& to) {
                    return inner->reduce(to, options);
                  });
  }
  // Gloo wants equal shapes and no overlap; NCCL counts elements, and gathers in place.
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& options) override {
    return launch(OpType::_ALLGATHER_BASE, "all_gather", "", {in}, {out}, options.asyncOp,
                  [inner = gloo, options](Tensors& from, Tensors& to) {
                    at::Tensor own = from[0].clone().view({-1}), all = to[0].view({-1});
                    return inner->_allgather_base(all, own, options);
                  });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in,
                    const c10d::AllgatherOptions& options) override {
    return launch(OpType::ALLGATHER, "all_gather", "", in, out[0], options.asyncOp,
                  [inner = gloo, options](Tensors& from, Tensors& to) {
                    std::vector<Tensors> lists{to};
                    return inner->allgather(lists, from, options);
                  });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& options) override {
    return launch(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", describe(options.reduceOp), {in}, {out}, options.asyncOp,
                  [inner = gloo, options](Tensors& from, Tensors& to) {
                    at::Tensor all = from[0].clone().view({-1}), own = to[0].view({-1});
                    return inner->_reduce_scatter_base(own, all, options);
                  });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    return launch(OpType::ALLTOALL_BASE, "all_to_all", "", {in}, {out}, options.asyncOp,
                  [inner = gloo, options, out_sizes, in_sizes](Tensors& from, Tensors& to) mutable {
                    return inner->alltoall_base(to[0], from[0], out_sizes, in_sizes, options);
                  }, in_sizes.empty());
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto work = launch(OpType::BARRIER, "barrier", "", {}, {}, false,
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

namespace {

namespace py = pybind11;

py::list communicators() {
  py::list found;
  for (const auto& end : late::all_ends()) {
    py::dict one;
    one["name"] = end->name;
    one["issued"] = end->board.issued(end->board.rank);
    found.append(one);
  }
  return found;
}

}  // namespace

void bind_collectives(py::module_& m) {
  m.def("communicator",
        [](const c10::intrusive_ptr<c10d::Backend>& gloo, const std::string& name,
           const std::string& board, bool high) -> c10::intrusive_ptr<c10d::Backend> {
          return c10::make_intrusive<late::Communicator>(gloo, name, board, high);
        });
  m.def("board_bytes", &late::Communicator::board_bytes);
  m.def("communicators", communicators);
}
