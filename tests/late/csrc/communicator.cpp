#include "communicator.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace torch::autograd {
int get_current_graph_task_id();  // its header takes seconds to compile
}

namespace late {
namespace {

// Never destroyed: threads look at them until the process is gone.
std::mutex& mutex = *new std::mutex();
auto& ends = *new std::vector<std::weak_ptr<End>>();
std::atomic<uint64_t> places{0};
constexpr size_t kRecent = 64;

// In mode lazy nothing runs before somebody waits for it; a rank elsewhere may be who waits.
void release_for_others() {
  for (;;) {
    bool lazy = rt().mode == Mode::lazy;
    if (lazy)
      for (const auto& end : all_ends()) end->release_wanted();
    std::this_thread::sleep_for(std::chrono::microseconds(lazy ? 300 : 50000));
  }
}

struct Pause {  // between two looks at what another process writes
  int us = 10;
  void operator()() {
    std::this_thread::sleep_for(std::chrono::microseconds(us));
    us = std::min(us * 2, 500);
  }
};

// It issues while the thread that called backward waits for it. What autograd's thread starts
// inherits its name, but is in no backward.
bool is_autograd() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return !strncmp(name, "pt_autograd", 11) && torch::autograd::get_current_graph_task_id() != -1;
}

}  // namespace

std::vector<std::shared_ptr<End>> all_ends() {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::shared_ptr<End>> found;
  for (const auto& end : ends)
    if (auto here = end.lock()) found.push_back(here);
  return found;
}

uint64_t next_place() { return ++places; }

// autograd's thread stands for the one that called backward, the first of the process
long issuer() { return is_autograd() ? getpid() : syscall(SYS_gettid); }

std::shared_ptr<End> make_end(const std::string& name, const std::string& board, size_t offset, int rank,
                              int ranks) {
  static std::once_flag once;
  std::call_once(once, [] { std::thread(release_for_others).detach(); });
  auto end = std::make_shared<End>(name, board, offset, rank, ranks);
  std::lock_guard<std::mutex> lock(mutex);
  ends.erase(std::remove_if(ends.begin(), ends.end(), [](auto& end) { return end.expired(); }),
             ends.end());
  ends.push_back(end);
  return end;
}

End::End(std::string name, const std::string& board, size_t offset, int rank, int ranks)
    : name(std::move(name)), board(board, offset, rank, ranks) {}
End::~End() = default;

void End::check_thread(uint64_t number) {
  long me = syscall(SYS_gettid), other = inside_.exchange(me);
  if (other && other != me)
    rt().tell("threads", name + ": two threads issue on it at the same time, collective #" +
                             std::to_string(number) + " [" + site + "]", name + site);
  if (is_autograd()) return;
  if (last_ && me != last_) {
    left_.insert(last_);
    if (left_.count(me))
      rt().tell("threads", name + ": two threads take turns on it, and timing decides their order: #" +
                               std::to_string(number) + " [" + site + "] after [" + last_site_ +
                               "] of another thread", name + site + last_site_);
  }
  last_ = me;
  last_site_ = site;
}

uint64_t End::issue(const std::string& what, uint64_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t number = next_++;
  check_thread(number);
  board.issue(number, what, place);
  if (recent_.size() == kRecent) recent_.erase(recent_.begin());
  recent_.push_back({number, issuer()});
  return number;
}

std::vector<std::pair<uint64_t, long>> End::recent() {
  std::lock_guard<std::mutex> lock(mutex_);
  return recent_;
}

// Communicators share the device, which may hold but one of two collectives: where two ranks are in
// both, they must issue them in one order. Those of one thread are ordered by its program, and are told
// apart: a rank that has left out a part of it may issue them in another order.
void End::check_places(uint64_t number) {
  uint64_t mine = board.place(board.rank, number);
  if (!mine) return;
  long me = -1;
  for (const auto& [one, thread] : recent())
    if (one == number) me = thread;
  for (const auto& other : all_ends()) {
    if (other.get() == this) continue;
    for (int of = 0; of < board.ranks; of++) {
      int process = board.process(of), far = of == board.rank ? -1 : other->board.rank_of(process);
      uint64_t theirs = board.place(of, number);
      if (far < 0 || !theirs) continue;
      for (const auto& [one, thread] : other->recent()) {
        uint64_t here = other->board.place(other->board.rank, one);
        uint64_t there = other->board.place(far, one);
        if (!here || !there || here == mine || there == theirs) continue;
        if ((mine < here) == (theirs < there)) continue;
        rt().tell(thread == me ? "interleaved" : "order",
                  name + ", collective #" + std::to_string(number) + ", and " + other->name + ", #" +
                      std::to_string(one) + ": rank " + std::to_string(board.process(board.rank)) +
                      " issues the one " + (mine < here ? "before" : "after") + " the other, rank " +
                      std::to_string(process) + (mine < here ? " after" : " before") + " it\n  " +
                      board.what(board.rank, number) + "\n  " + other->board.what(other->board.rank, one),
                  name + other->name);
        return;
      }
    }
  }
}

void End::issued(uint64_t number, const Event& done) {
  std::lock_guard<std::mutex> lock(mutex_);
  outstanding_.push_back({number, done});
  inside_ = 0;
}

void End::over(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  over_ = std::max<uint64_t>(over_, number);
  outstanding_.erase(std::remove_if(outstanding_.begin(), outstanding_.end(),
                                    [&](const Outstanding& one) { return one.number <= over_; }),
                     outstanding_.end());
}

std::vector<End::Outstanding> End::outstanding() {
  std::lock_guard<std::mutex> lock(mutex_);
  return outstanding_;
}

void End::abort() { aborted_ = true; }

void End::release_wanted() {
  uint64_t wanted = board.wanted();
  if (wanted <= board.entered(board.rank)) return;
  for (const Outstanding& one : outstanding())
    if (one.number <= wanted) rt().want(one.done);
}

void End::enter(uint64_t number, bool alone) {
  Pause pause;
  // One communicator runs its collectives one after another, on whichever streams they are.
  for (const Outstanding& one : outstanding())
    if (one.number < number) rt().want(one.done);
  while (alone && over_ + 1 < number && !aborted_) pause();
  if (!aborted_) board.enter(number);
}

bool End::meet(uint64_t number) {
  Pause pause;
  while (!aborted_ && !board.missing(number).empty()) pause();
  if (!aborted_) check_places(number);
  return !aborted_ && check_order(number);
}

bool End::check_order(uint64_t number) {
  auto kind = [](const std::string& what) { return what.substr(0, what.find(" [")); };
  std::string mine = board.what(board.rank, number);
  bool same = true;
  for (int of = 0; of < board.ranks; of++) {
    std::string theirs = board.what(of, number);
    if (mine.empty() || theirs.empty() || kind(theirs) == kind(mine)) continue;
    same = false;
    rt().tell("order", name + ": collective #" + std::to_string(number) + " is " + kind(mine) +
                           " on rank " + std::to_string(board.rank) + " and " + kind(theirs) +
                           " on rank " + std::to_string(of) + "\n  rank " +
                           std::to_string(board.rank) + ": " + board.sequence(board.rank, number) +
                           "\n  rank " + std::to_string(of) + ": " + board.sequence(of, number),
              name);
  }
  return same;
}

}  // namespace late
