// io_uring by its three system calls: requests are prepared here, submitted and waited for
// together. One thread uses a ring.
#pragma once

#include <cstddef>
#include <cstdint>

struct io_uring_cqe;

namespace hfz {

class Ring {
  public:
    // Throws std::system_error if the kernel has no io_uring, refuses one of its calls, or is older
    // than its plain reads (5.6). Nothing else throws: a dedicated thread uses the ring.
    explicit Ring(unsigned entries);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // Requires room for the request among `entries` that have not been popped; the caller keeps
    // count.
    void prepare(bool write, int fd, void* memory, size_t bytes, int64_t offset, uint64_t tag);

    // Submit the prepared requests and wait until `completions` results can be popped. Returns 0,
    // or the errno with which the kernel refuses, which may happen at any time. Requests that it
    // has taken before still end, and are popped.
    int enter(unsigned completions);

    bool pop(uint64_t& tag, int& result);

    // Take back the last request that is prepared and not submitted; false if there is none.
    bool withdraw(uint64_t& tag);

  private:
    void release();

    int fd_ = -1;
    unsigned prepared_ = 0;
    char *rings_ = nullptr, *requests_ = nullptr;
    size_t rings_bytes_ = 0, requests_bytes_ = 0;
    unsigned *request_tail_ = nullptr, *request_mask_ = nullptr, *request_index_ = nullptr;
    unsigned *result_head_ = nullptr, *result_tail_ = nullptr, *result_mask_ = nullptr;
    io_uring_cqe* results_ = nullptr;
};

}  // namespace hfz
