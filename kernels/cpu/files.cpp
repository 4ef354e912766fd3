#ifdef __linux__

#include "files.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "ring.h"
#include "signals.h"

namespace hfz {

namespace {

constexpr uint64_t kWoken = ~0ull;

}  // namespace

File::~File() {
    ::close(buffered);
    if (direct_fd >= 0) ::close(direct_fd);
}

Block::~Block() { std::free(bounce); }

FileQueue::FileQueue(int64_t block_size, int depth, const std::string& engine, int threads)
    : block_size_(block_size), depth_(depth), process_(getpid()) {
    if (block_size <= 0 || block_size % kAlignment || block_size > (1 << 30) || depth < 1 || depth > 4096 || threads < 1)
        throw std::invalid_argument("block_size: a multiple of 4096 up to 2^30; depth: 1 to 4096; threads: 1 or more");
    if (engine != "threads") {
        try {
            ring_ = std::make_unique<Ring>(static_cast<unsigned>(depth) + 1);
            event_ = eventfd(0, EFD_CLOEXEC);
            if (event_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
        } catch (const std::system_error& error) {
            if (engine == "io_uring") throw;
            ring_.reset();
            refusal_ = error.what();
        }
    }
    SignalsBlocked blocked;
    if (ring_) {
        workers_.emplace_back([this] { serve_ring(); });
    } else {
        for (int i = 0; i < std::min(threads, depth); ++i) workers_.emplace_back([this] { serve_threads(); });
    }
}

FileQueue::~FileQueue() {
    close(true);
    if (event_ >= 0) ::close(event_);
}

bool FileQueue::in_own_process() const { return getpid() == process_; }

std::shared_ptr<Transfer> FileQueue::submit(bool write, std::vector<Piece> pieces, int priority,
                                            std::vector<std::shared_ptr<Transfer>> after) {
    auto transfer = std::make_shared<Transfer>();
    pieces.erase(std::remove_if(pieces.begin(), pieces.end(), [](const Piece& piece) { return piece.bytes <= 0; }), pieces.end());
    transfer->write = write;
    transfer->priority = priority;
    transfer->pieces = std::move(pieces);
    transfer->after = std::move(after);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stopping_) throw std::runtime_error("the queue is closed");
        if (transfer->pieces.empty()) {
            end(*transfer);
            return transfer;
        }
        transfer->queued = true;
        queued_[priority].push_back(transfer);
        for (const auto& first : transfer->after) raise_priority(first, priority);
    }
    wake();
    return transfer;
}

void FileQueue::wake() {
    if (!ring_) return wake_.notify_all();
    const uint64_t one = 1;
    while (::write(event_, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void FileQueue::raise_priority(const std::shared_ptr<Transfer>& transfer, int priority) {
    if (priority >= transfer->priority || transfer->finished) return;
    if (transfer->queued) {
        auto& from = queued_[transfer->priority];
        from.erase(std::find(from.begin(), from.end(), transfer));
        queued_[priority].push_back(transfer);
    }
    transfer->priority = priority;
    for (const auto& first : transfer->after) raise_priority(first, priority);
}

bool FileQueue::wait(const std::shared_ptr<Transfer>& transfer, int milliseconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    raise_priority(transfer, kNeeded);
    return finished_.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return transfer->finished.load(); });
}

void FileQueue::close(bool cancel) {
    if (!in_own_process()) return;  // only the parent has the threads
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        if (cancel) {
            for (auto& line : queued_) {
                for (auto& transfer : line) {
                    transfer->error = ECANCELED;
                    transfer->path = transfer->pieces[transfer->piece].file->path;
                    transfer->queued = false;
                    if (!transfer->out) end(*transfer);
                }
                line.clear();
            }
        }
    }
    wake();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
}

void FileQueue::inject(std::vector<Fault> faults) {
    std::lock_guard<std::mutex> lock(mutex_);
    faults_ = std::move(faults);
    attempts_[0] = attempts_[1] = 0;
    faulty_ = !faults_.empty();
}

void FileQueue::end(Transfer& transfer) {
    transfer.after.clear();
    transfer.pieces.clear();  // a caller that keeps the ticket does not keep the file
    transfer.finished = true;
    finished_.notify_all();
    if (!ring_) wake_.notify_all();  // transfers that wait for this one
}

bool FileQueue::next(Block& block) {
    for (auto& line : queued_) {
        for (auto place = line.begin(); place != line.end();) {
            const std::shared_ptr<Transfer> transfer = *place;
            const auto& after = transfer->after;
            const auto failed = std::find_if(after.begin(), after.end(), [](auto& first) { return first->finished && first->error; });
            if (failed != after.end()) {
                transfer->error = (*failed)->error;
                transfer->at_end = (*failed)->at_end;
                transfer->path = (*failed)->path;
                transfer->offset = (*failed)->offset;
                transfer->bytes = (*failed)->bytes;
                transfer->queued = false;
                place = line.erase(place);
                end(*transfer);
                place = line.begin();
                continue;
            }
            if (!std::all_of(after.begin(), after.end(), [](auto& first) { return first->finished.load(); })) {
                ++place;
                continue;
            }
            const Piece& piece = transfer->pieces[transfer->piece];
            const int64_t left = piece.bytes - transfer->within;
            block.transfer = transfer;
            block.piece = &piece;
            block.memory = piece.memory + transfer->within;
            block.offset = piece.offset + transfer->within;
            block.got = 0;
            block.error = 0;
            block.at_end = false;
            // The unaligned ends of a piece go through the page cache, which the kernel keeps
            // coherent with O_DIRECT.
            block.direct = piece.file->direct && block.offset % kAlignment == 0 && left >= kAlignment;
            if (block.direct) {
                block.bytes = std::min(left - left % kAlignment, block_size_);
            } else if (piece.file->direct) {
                block.bytes = std::min(left, kAlignment - block.offset % kAlignment);
            } else {
                block.bytes = std::min(left, block_size_);
            }
            block.bounced = block.direct && reinterpret_cast<uintptr_t>(block.memory) % kAlignment;
            transfer->within += block.bytes;
            ++transfer->out;
            if (transfer->within == piece.bytes) {
                transfer->within = 0;
                if (++transfer->piece == transfer->pieces.size()) {
                    transfer->queued = false;
                    line.erase(place);
                }
            }
            return true;
        }
    }
    return false;
}

void FileQueue::begin(Block& block) {
    if (!block.bounced) return;
    if (!block.bounce) block.bounce = static_cast<char*>(std::aligned_alloc(kAlignment, block_size_));
    if (!block.bounce) {
        block.bounced = block.direct = false;  // the page cache takes any address
    } else if (block.transfer->write) {
        std::memcpy(block.bounce, block.memory, block.bytes);
    }
}

FileQueue::Attempt FileQueue::attempt(Block& block) {
    const File& file = *block.piece->file;
    Attempt attempt{block.direct ? file.direct_fd : file.buffered, block.target() + block.got, block.bytes - block.got,
                    block.offset + block.got, 0};
    if (!faulty_) return attempt;
    int milliseconds = 0;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const bool write = block.transfer->write;
        const int64_t number = ++attempts_[write];
        for (const Fault& fault : faults_) {
            if (fault.write != write || number < fault.first || number > fault.last) continue;
            milliseconds += fault.milliseconds;
            attempt.error = fault.error;
            if (fault.shorten && attempt.bytes > 1) {
                attempt.bytes = (attempt.bytes / 2) | 1;
                attempt.fd = file.buffered;
            }
        }
    }
    if (milliseconds) std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    return attempt;
}

bool FileQueue::settle(Block& block, int64_t result) {
    if (result == -EINTR || result == -EAGAIN) return false;
    if (result == -EINVAL && block.direct) {
        block.piece->file->direct = false;
        block.direct = false;
        return false;
    }
    if (result <= 0) {
        block.error = result ? static_cast<int>(-result) : EIO;
        block.at_end = result == 0 && !block.transfer->write;
        return true;
    }
    block.got += result;
    if (block.got % kAlignment) block.direct = false;
    return block.got == block.bytes;
}

void FileQueue::finish(Block& block) {
    const File& file = *block.piece->file;
    const std::shared_ptr<Transfer> transfer = std::move(block.transfer);
    if (!block.error && !transfer->write && block.bounced) std::memcpy(block.memory, block.bounce, block.bytes);
    if (!file.direct) posix_fadvise(file.buffered, block.offset, block.bytes, POSIX_FADV_DONTNEED);
    std::lock_guard<std::mutex> lock(mutex_);
    if (block.error && !transfer->error) {
        transfer->error = block.error;
        transfer->at_end = block.at_end;
        transfer->path = file.path;
        transfer->offset = block.offset + block.got;
        transfer->bytes = block.bytes - block.got;
        if (transfer->queued) {
            auto& line = queued_[transfer->priority];
            line.erase(std::find(line.begin(), line.end(), transfer));
            transfer->queued = false;
        }
    }
    if (!--transfer->out && !transfer->queued) end(*transfer);
}

void FileQueue::run(Block& block) {
    for (;;) {
        const Attempt attempt = this->attempt(block);
        int64_t result = -attempt.error;
        if (!attempt.error) {
            result = block.transfer->write ? pwrite(attempt.fd, attempt.memory, attempt.bytes, attempt.offset)
                                           : pread(attempt.fd, attempt.memory, attempt.bytes, attempt.offset);
            if (result < 0) result = -errno;
        }
        if (settle(block, result)) break;
    }
    finish(block);
}

bool FileQueue::is_over() const {
    return stopping_ && std::all_of(queued_, queued_ + kPriorities, [](auto& line) { return line.empty(); });
}

void FileQueue::serve_threads() {
    Block block;
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            bool taken = false;
            wake_.wait(lock, [&] {
                taken = next(block);
                return taken || is_over();
            });
            if (!taken) return;
        }
        begin(block);
        run(block);
    }
}

// The kernel has refused the ring in the middle of transfers. Requests that it has taken end by
// themselves, and their memory must last until then; all others are made by plain calls.
void FileQueue::leave_ring(std::vector<Block>& blocks, size_t under_way, bool armed) {
    uint64_t tag;
    int result;
    while (ring_->withdraw(tag)) {
        if (tag == kWoken) {
            armed = false;
        } else {
            run(blocks[tag]);
            --under_way;
        }
    }
    if (armed) wake();
    while (armed || under_way) {
        if (!ring_->pop(tag, result)) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        } else if (tag == kWoken) {
            armed = false;
        } else {
            settle(blocks[tag], result) ? finish(blocks[tag]) : run(blocks[tag]);
            --under_way;
        }
    }
    for (;;) {
        bool taken, over;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            taken = next(blocks[0]);
            over = is_over();
        }
        if (taken) {
            begin(blocks[0]);
            run(blocks[0]);
        } else if (over) {
            return;
        } else if (::read(event_, &event_value_, sizeof event_value_) < 0 && errno != EINTR) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
}

void FileQueue::serve_ring() {
    std::vector<Block> blocks(depth_);
    std::vector<int> idle(depth_), fresh;
    for (int i = 0; i < depth_; ++i) idle[i] = i;
    bool armed = false, immediate = false;
    const auto start = [&](int place) {
        Block& block = blocks[place];
        for (;;) {
            const Attempt attempt = this->attempt(block);
            if (!attempt.error)
                return ring_->prepare(block.transfer->write, attempt.fd, attempt.memory, attempt.bytes, attempt.offset,
                                      static_cast<uint64_t>(place));
            if (settle(block, -attempt.error)) break;
        }
        finish(block);
        idle.push_back(place);
        immediate = true;
    };
    for (;;) {
        bool stopping;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (!idle.empty() && next(blocks[idle.back()])) {
                fresh.push_back(idle.back());
                idle.pop_back();
            }
            stopping = stopping_;
        }
        if (stopping && !armed && fresh.empty() && static_cast<int>(idle.size()) == depth_) return;
        immediate = false;
        for (const int place : fresh) {
            begin(blocks[place]);
            start(place);
        }
        fresh.clear();
        if (!armed && !stopping) {
            ring_->prepare(false, event_, &event_value_, sizeof event_value_, 0, kWoken);
            armed = true;
        }
        if (ring_->enter(immediate ? 0 : 1)) return leave_ring(blocks, depth_ - idle.size(), armed);
        uint64_t tag;
        int result;
        while (ring_->pop(tag, result)) {
            if (tag == kWoken) {
                armed = false;
            } else if (settle(blocks[tag], result)) {
                finish(blocks[tag]);
                idle.push_back(static_cast<int>(tag));
            } else {
                start(static_cast<int>(tag));
            }
        }
    }
}

}  // namespace hfz

#endif  // __linux__
