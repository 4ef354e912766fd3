#include "board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace late {
namespace {

// Text that one process writes and others read: odd while it is being written.
template <size_t size>
struct Shared {
  std::atomic<uint32_t> version;
  char text[size];

  void write(const std::string& value) {
    version.fetch_add(1);
    size_t length = std::min(value.size(), size - 1);
    memcpy(text, value.data(), length);
    text[length] = 0;
    version.fetch_add(1);
  }
  std::string read() const {
    for (;;) {
      uint32_t before = version.load();
      std::string value(text, strnlen(text, size));
      if (!(before & 1) && before == version.load()) return value;
    }
  }
};

struct Kept {
  std::atomic<uint64_t> number, place;
  Shared<kText> what;
};

}  // namespace

struct Board::Page {
  std::atomic<int> process;  // + 1
  std::atomic<uint64_t> issued, entered;
  Kept kept[kKept];
};

size_t Board::bytes_for(int ranks) {
  constexpr size_t page = 4096;
  return (size_t(ranks) * sizeof(Page) + page - 1) / page * page;
}

Board::Board(const std::string& path, size_t offset, int rank, int ranks)
    : rank(rank), ranks(ranks), bytes_(bytes_for(ranks)) {
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) throw std::runtime_error("late: cannot open " + path);
  void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, off_t(offset));
  close(file);
  if (at == MAP_FAILED) throw std::runtime_error("late: cannot map " + path);
  pages_ = (Page*)at;
  const char* process = getenv("RANK");
  page(rank).process = 1 + (process ? atoi(process) : rank);
}

Board::~Board() { munmap(pages_, bytes_); }

Board::Page& Board::page(int of) const { return pages_[of]; }

void Board::issue(uint64_t number, const std::string& what, uint64_t place) {
  Kept& kept = page(rank).kept[number % kKept];
  kept.number = 0;
  kept.what.write(what);
  kept.place = place;
  kept.number = number;
  page(rank).issued = number;
}

int Board::process(int of) const { return page(of).process - 1; }
int Board::rank_of(int process) const {
  for (int of = 0; of < ranks; of++)
    if (this->process(of) == process) return of;
  return -1;
}

void Board::enter(uint64_t number) { page(rank).entered = number; }
uint64_t Board::issued(int of) const { return page(of).issued; }
uint64_t Board::entered(int of) const { return page(of).entered; }

uint64_t Board::wanted() const {
  uint64_t furthest = 0;
  for (int of = 0; of < ranks; of++)
    if (of != rank) furthest = std::max(furthest, entered(of));
  return furthest;
}

std::vector<int> Board::missing(uint64_t number) const {
  std::vector<int> found;
  for (int of = 0; of < ranks; of++)
    if (entered(of) < number) found.push_back(of);
  return found;
}

std::string Board::what(int of, uint64_t number) const {
  const Kept& kept = page(of).kept[number % kKept];
  return kept.number == number ? kept.what.read() : "";
}

uint64_t Board::place(int of, uint64_t number) const {
  const Kept& kept = page(of).kept[number % kKept];
  uint64_t place = kept.place;
  return kept.number == number ? place : 0;
}

std::string Board::sequence(int of, uint64_t until) const {
  std::string text;
  for (uint64_t number = until > 5 ? until - 5 : 1; number <= until + 2; number++) {
    std::string one = what(of, number);
    if (!one.empty()) text += (text.empty() ? "#" : "; #") + std::to_string(number) + " " + one;
  }
  return text;
}

}  // namespace late
