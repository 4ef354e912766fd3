// Asynchronous reads and writes of files: cut into blocks, a bounded number of them at once, in the
// order of their priorities.
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

constexpr int64_t kAlignment = 4096;  // of offsets, lengths and addresses of O_DIRECT transfers

// An open file: buffered, and with O_DIRECT if the file system supports it. The last transfer that
// uses it closes its descriptors.
struct File {
    File(std::string path, int buffered, int direct) : path(std::move(path)), buffered(buffered), direct_fd(direct), direct(direct >= 0) {}
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    const std::string path;
    const int buffered, direct_fd;
    std::atomic<bool> direct;  // cleared for good if the file system accepts O_DIRECT at open and refuses it in a transfer
};

struct Piece {
    std::shared_ptr<File> file;
    int64_t offset;
    char* memory;
    int64_t bytes;
};

// Needed: a thread waits. Ahead: will be needed. Behind: no thread waits.
enum Priority { kNeeded, kAhead, kBehind, kPriorities };

// The transfer of one call; done when all its pieces are. Guarded by the queue's mutex, except
// `finished`.
struct Transfer {
    bool write = false;
    int priority = kBehind;
    std::vector<Piece> pieces;
    std::vector<std::shared_ptr<Transfer>> after;  // transfers that must finish first
    size_t piece = 0;                              // the piece of the next block,
    int64_t within = 0;                            // and the offset of the block in it
    int out = 0;                                   // blocks in flight
    bool queued = false;
    std::atomic<bool> finished{false};
    int error = 0;
    bool at_end = false;  // the file ended inside a read
    std::string path;     // of the failed block
    int64_t offset = 0, bytes = 0;
};

// One block of a transfer in flight; it keeps its slot from start to end.
struct Block {
    ~Block();
    std::shared_ptr<Transfer> transfer;
    const Piece* piece = nullptr;
    char* memory = nullptr;
    int64_t offset = 0, bytes = 0, got = 0;
    bool direct = false, bounced = false;
    int error = 0;
    bool at_end = false;
    char* bounce = nullptr;  // reused from block to block

    char* target() const { return bounced ? bounce : memory; }
};

// A fault of the first-th to last-th attempt to read or to write, for tests.
struct Fault {
    bool write;
    int64_t first, last;
    int error;         // fail with this, unless 0
    bool shorten;      // transfer less than asked
    int milliseconds;  // sleep first
};

class FileQueue {
  public:
    // engine: "io_uring", "threads", or "auto": io_uring if the kernel permits it, else threads.
    FileQueue(int64_t block_size, int depth, const std::string& engine, int threads);
    ~FileQueue();

    std::shared_ptr<Transfer> submit(bool write, std::vector<Piece> pieces, int priority, std::vector<std::shared_ptr<Transfer>> after);

    bool wait(const std::shared_ptr<Transfer>& transfer, int milliseconds);

    // End the threads when all transfers are done; with `cancel`, fail those that have not begun
    // with ECANCELED.
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
