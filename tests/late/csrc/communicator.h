// One rank's end of a communicator: it gives numbers to its collectives, lets each run when all
// ranks have come to it, and looks for what NCCL does not tell.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "board.h"
#include "runtime.h"

namespace late {

class End {
 public:
  End(std::string name, const std::string& board, size_t offset, int rank, int ranks);
  ~End();

  const std::string name;
  Board board;

  // A collective is issued by this thread: its number. Reports threads that take turns.
  uint64_t issue(const std::string& what, uint64_t place);
  void issued(uint64_t number, const Event& done);
  // In the task. `alone`: one after another; else it may be one of several messages that go at once.
  void enter(uint64_t number, bool alone);
  // Waits until all ranks are there. False: do nothing, it is another one elsewhere, or the
  // communicator was aborted.
  bool meet(uint64_t number);
  void over(uint64_t number);
  void abort();
  void release_wanted();  // what other ranks have come to

  struct Outstanding {
    uint64_t number;
    Event done;
  };
  std::vector<Outstanding> outstanding();

 private:
  std::mutex mutex_;
  uint64_t next_ = 1;
  std::atomic<uint64_t> over_{0};
  std::atomic<bool> aborted_{false};
  std::vector<Outstanding> outstanding_;
  std::atomic<long> inside_{0};
  long last_ = 0;
  std::string last_site_;
  std::set<long> left_;  // threads after which another one has issued

  std::vector<std::pair<uint64_t, long>> recent_;  // the last collectives and who issued them

  void check_thread(uint64_t number);
  void check_places(uint64_t number);
  std::vector<std::pair<uint64_t, long>> recent();
  bool check_order(uint64_t number);
};

std::vector<std::shared_ptr<End>> all_ends();
std::shared_ptr<End> make_end(const std::string& name, const std::string& board, size_t offset, int rank,
                              int ranks);
uint64_t next_place();  // among all collectives of this process
long issuer();          // the thread that this one issues for: autograd's, who called backward

}  // namespace late
