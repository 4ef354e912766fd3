#include "ring.h"

#include <cerrno>
#include <system_error>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#ifdef IORING_FEAT_RW_CUR_POS  // introduced together with plain reads and writes

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace hfz {

namespace {

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

char* map(int fd, size_t bytes, off_t what) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

}  // namespace

Ring::Ring(unsigned entries) {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, entries, &params));
    if (fd_ < 0) fail(errno, "io_uring_setup");
    if (!(params.features & IORING_FEAT_RW_CUR_POS) || !(params.features & IORING_FEAT_SINGLE_MMAP)) {
        release();
        fail(ENOSYS, "io_uring of this kernel");
    }
    if (syscall(SYS_io_uring_enter, fd_, 0, 0, 0, nullptr, 0) < 0) {
        const int error = errno;
        release();
        fail(error, "io_uring_enter");
    }
    rings_bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                    params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    requests_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    rings_ = map(fd_, rings_bytes_, IORING_OFF_SQ_RING);
    requests_ = map(fd_, requests_bytes_, IORING_OFF_SQES);
    if (!rings_ || !requests_) {
        const int error = errno;
        release();
        fail(error, "mapping io_uring");
    }
    const auto at = [this](unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
    request_tail_ = at(params.sq_off.tail);
    request_mask_ = at(params.sq_off.ring_mask);
    request_index_ = at(params.sq_off.array);
    result_head_ = at(params.cq_off.head);
    result_tail_ = at(params.cq_off.tail);
    result_mask_ = at(params.cq_off.ring_mask);
    results_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
}

Ring::~Ring() { release(); }

void Ring::release() {
    if (requests_) munmap(requests_, requests_bytes_);
    if (rings_) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
}

void Ring::prepare(bool write, int fd, void* memory, size_t bytes, int64_t offset, uint64_t tag) {
    const unsigned tail = *request_tail_, index = tail & *request_mask_;
    auto* request = reinterpret_cast<io_uring_sqe*>(requests_) + index;
    std::memset(request, 0, sizeof *request);
    request->opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
    request->fd = fd;
    request->addr = reinterpret_cast<uint64_t>(memory);
    request->len = static_cast<uint32_t>(bytes);
    request->off = static_cast<uint64_t>(offset);
    request->user_data = tag;
    request_index_[index] = index;
    __atomic_store_n(request_tail_, tail + 1, __ATOMIC_RELEASE);
    ++prepared_;
}

int Ring::enter(unsigned completions) {
    for (;;) {
        const long taken = syscall(SYS_io_uring_enter, fd_, prepared_, completions, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (taken >= 0) {
            prepared_ -= static_cast<unsigned>(taken);
            if (!prepared_) return 0;
        } else if (errno == EAGAIN || errno == EBUSY) {
            return 0;  // short of memory, or of room for results: pop the results, then enter again
        } else if (errno != EINTR) {
            return errno;
        }
    }
}

bool Ring::withdraw(uint64_t& tag) {
    if (!prepared_) return false;
    const unsigned tail = *request_tail_ - 1;
    tag = (reinterpret_cast<io_uring_sqe*>(requests_) + (tail & *request_mask_))->user_data;
    __atomic_store_n(request_tail_, tail, __ATOMIC_RELEASE);
    --prepared_;
    return true;
}

bool Ring::pop(uint64_t& tag, int& result) {
    const unsigned head = *result_head_;
    if (head == __atomic_load_n(result_tail_, __ATOMIC_ACQUIRE)) return false;
    const io_uring_cqe& completion = results_[head & *result_mask_];
    tag = completion.user_data;
    result = completion.res;
    __atomic_store_n(result_head_, head + 1, __ATOMIC_RELEASE);
    return true;
}

}  // namespace hfz

#else  // headers without io_uring

namespace hfz {

Ring::Ring(unsigned) { throw std::system_error(ENOSYS, std::generic_category(), "io_uring was not there when this was built"); }
Ring::~Ring() = default;
void Ring::prepare(bool, int, void*, size_t, int64_t, uint64_t) {}
int Ring::enter(unsigned) { return ENOSYS; }
bool Ring::withdraw(uint64_t&) { return false; }
bool Ring::pop(uint64_t&, int&) { return false; }

}  // namespace hfz

#endif
