// What scripts/bench/files.py compares with: a file read or written from end to end in blocks, as many at once as asked for, by nothing
// but a counter. On io_uring or on threads.
#include <errno.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "../../kernels/cpu/ring.h"

namespace {

int on_threads(bool write, int fd, char* memory, int64_t bytes, int64_t block, int depth) {
    std::atomic<int64_t> next{0};
    std::atomic<int> error{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < depth; ++i)
        threads.emplace_back([&] {
            for (int64_t at; (at = next.fetch_add(block)) < bytes;) {
                const ssize_t moved = write ? pwrite(fd, memory + at, block, at) : pread(fd, memory + at, block, at);
                if (moved != block) error = moved < 0 ? errno : EIO;
            }
        });
    for (auto& thread : threads) thread.join();
    return error;
}

int on_io_uring(bool write, int fd, char* memory, int64_t bytes, int64_t block, int depth) {
    hfz::Ring ring(depth);
    int64_t next = 0;
    int under_way = 0;
    while (next < bytes || under_way) {
        for (; under_way < depth && next < bytes; next += block, ++under_way) ring.prepare(write, fd, memory + next, block, next, next);
        ring.enter(1);
        uint64_t tag;
        for (int result; ring.pop(tag, result); --under_way)
            if (result != block) return result < 0 ? -result : EIO;
    }
    return 0;
}

}  // namespace

// bytes: a multiple of block. An errno, or 0.
extern "C" int raw(int io_uring, int write, int fd, char* memory, int64_t bytes, int64_t block, int depth) {
    return (io_uring ? on_io_uring : on_threads)(write, fd, memory, bytes, block, depth);
}
