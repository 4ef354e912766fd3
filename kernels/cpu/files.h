// Reads and writes of files under way: cut into blocks, a bounded number of them at once, in the order of their priorities.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace hfz {

constexpr int64_t kAlignment = 4096;  // of offsets, lengths and addresses, for transfers that go past the page cache

// An open file: through the page cache, and past it where the file system lets one. Closes its descriptors with the last transfer.
struct File {
    File(std::string path, int buffered, int direct) : path(std::move(path)), buffered(buffered), direct_fd(direct), direct(direct >= 0) {}
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    const std::string path;
    const int buffered, direct_fd;
    std::atomic<bool> direct;  // goes off for good where the file system takes O_DIRECT at open and refuses it in a transfer
};

struct Piece {
    std::shared_ptr<File> file;
    int64_t offset;
    char* memory;
    int64_t bytes;
};

// Needed: somebody waits. Ahead: will be needed. Behind: nobody waits.
enum Priority { kNeeded, kAhead, kBehind, kPriorities };

// What one call asked for; done when all its pieces are. Guarded by the queue's mutex, `finished` excepted.
struct Transfer {
    bool write = false;
    int priority = kBehind;
    std::vector<Piece> pieces;
    std::vector<std::shared_ptr<Transfer>> after;  // these first
    size_t piece = 0;                              // the next block begins here,
    int64_t within = 0;                            // so far into it
    int out = 0;                                   // blocks under way
    bool queued = false;
    std::atomic<bool> finished{false};
    int error = 0;
    bool at_end = false;  // the file ended inside a read
    std::string path;     // of the block that failed
    int64_t offset = 0, bytes = 0;
};

// One block of a transfer under way, on a place it holds from its start to its end.
struct Block {
    ~Block();
    std::shared_ptr<Transfer> transfer;
    const Piece* piece = nullptr;
    char* memory = nullptr;
    int64_t offset = 0, bytes = 0, got = 0;
    bool direct = false, bounced = false;
    int error = 0;
    bool at_end = false;
    char* bounce = nullptr;  // kept from block to block

    char* target() const { return bounced ? bounce : memory; }
};

// For tests: what befalls the first-th to last-th attempt to read or to write.
struct Fault {
    bool write;
    int64_t first, last;
    int error;         // fail with this, unless 0
    bool shorten;      // transfer less than asked
    int milliseconds;  // sleep first
};

class FileQueue {
  public:
    // engine: "io_uring", "threads", or "auto", which is the first where the kernel grants it.
    FileQueue(int64_t block_size, int depth, const std::string& engine, int threads);
    ~FileQueue();

    std::shared_ptr<Transfer> submit(bool write, std::vector<Piece> pieces, int priority, std::vector<std::shared_ptr<Transfer>> after);

    // Let what is still queued of it go before what is less urgent.
    void promote(const std::shared_ptr<Transfer>& transfer, int priority);

    bool wait(const std::shared_ptr<Transfer>& transfer, int milliseconds);

    // Ends the threads when all is done; what has not begun is given up with ECANCELED if `cancel`.
    void close(bool cancel);

    void inject(std::vector<Fault> faults);

    const char* engine() const { return ring_ ? "io_uring" : "threads"; }
    const std::string& refusal() const { return refusal_; }
    bool in_own_process() const;

  private:
    struct Attempt {
        int fd;
        char* memory;
        int64_t bytes, offset;
        int error;
    };

    bool next(Block& block);                  // mutex held
    void end(Transfer& transfer);             // mutex held
    void raise_priority(const std::shared_ptr<Transfer>& transfer, int priority);  // mutex held
    void begin(Block& block);
    Attempt attempt(Block& block);
    bool settle(Block& block, int64_t result);  // false: attempt it again
    void finish(Block& block);
    void run(Block& block);        // by plain calls
    bool is_over() const;          // mutex held
    void serve_threads();
    void serve_ring();
    void leave_ring(std::vector<Block>& blocks, size_t under_way, bool armed);
    void wake();

    const int64_t block_size_;
    const int depth_;
    const pid_t process_;
    std::string refusal_;
    std::unique_ptr<class Ring> ring_;
    int event_ = -1;
    uint64_t event_value_ = 0;

    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::deque<std::shared_ptr<Transfer>> queued_[kPriorities];
    bool stopping_ = false;
    std::atomic<bool> faulty_{false};
    std::vector<Fault> faults_;
    int64_t attempts_[2] = {0, 0};
    std::vector<std::thread> workers_;
};

}  // namespace hfz
