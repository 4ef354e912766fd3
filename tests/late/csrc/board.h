// What the ranks of a communicator know of each other: a piece of memory that their processes share.
//
// Each rank has a page of its own that it alone writes: how many collectives it has issued, which one
// it has entered, and what the last ones are.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace late {

constexpr size_t kKept = 512;     // collectives of a rank that can still be compared
constexpr size_t kText = 216;     // of one of them

class Board {
 public:
  // `path` names a file that holds `bytes_for(ranks)` zeros from `offset` on, a number of pages; it
  // may be unlinked afterwards.
  Board(const std::string& path, size_t offset, int rank, int ranks);
  ~Board();
  static size_t bytes_for(int ranks);

  const int rank, ranks;

  // `place` is its place among all collectives of the process; messages that go at once share one.
  void issue(uint64_t number, const std::string& what, uint64_t place);
  int process(int of) const;        // RANK in the environment of that rank; -1: not there yet
  int rank_of(int process) const;   // -1: it has no part
  void enter(uint64_t number);
  uint64_t issued(int of) const;
  uint64_t entered(int of) const;
  uint64_t wanted() const;                          // the furthest that another rank has entered
  std::vector<int> missing(uint64_t number) const;  // ranks that have not entered it
  std::string what(int of, uint64_t number) const;  // "" where it is no longer kept
  uint64_t place(int of, uint64_t number) const;    // 0 where it is no longer kept
  std::string sequence(int of, uint64_t until) const;

 private:
  struct Page;
  Page* pages_;
  size_t bytes_;
  Page& page(int of) const;
};

}  // namespace late
