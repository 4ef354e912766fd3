#include "pool.h"

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "signals.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hfz {

namespace {

// Kernels round to nearest and keep denormals, whatever torch.set_flush_denormal has set on the
// caller's thread: results must not depend on the thread that took a part.
#if defined(__SSE2__)
constexpr unsigned kDefaultControl = 0x1f80;
unsigned control() { return _mm_getcsr(); }
void set_control(unsigned value) { _mm_setcsr(value); }
void relax() { _mm_pause(); }
#elif defined(__aarch64__)
constexpr unsigned long kDefaultControl = 0;
unsigned long control() {
    unsigned long value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}
void set_control(unsigned long value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
void relax() { __asm__ volatile("yield"); }
#else
constexpr int kDefaultControl = 0;
int control() { return 0; }
void set_control(int) {}
void relax() {}
#endif

// Poll `ready` for at most kPolled before a wait that sleeps: the last part of a call, and the next
// call of an update, mostly come sooner than the system wakes a thread.
constexpr std::chrono::microseconds kPolled{50};

template <class Ready>
void poll(const Ready& ready) {
    const auto end = std::chrono::steady_clock::now() + kPolled;
    while (!ready() && std::chrono::steady_clock::now() < end) relax();
}

constexpr int kCallsApart = 256;

#if defined(__linux__)
int current_cpu() { return sched_getcpu(); }

// Move this thread away from `cpu`, where its caller was running, and keep it away from there for
// some calls: `left` counts them. Linux often wakes a thread on the CPU that woke it, above all in
// virtual machines, whose idle CPUs it takes for occupied ones; the two would share that CPU until
// a later tick. Afterwards all CPUs of the caller are allowed again: others may have become busy.
void keep_apart(int cpu, pthread_t caller, int& left) {
    const bool together = sched_getcpu() == cpu;
    if (!together && (left == 0 || --left > 0)) return;
    cpu_set_t allowed;
    if (pthread_getaffinity_np(caller, sizeof allowed, &allowed) != 0) return;
    if (together) CPU_CLR(cpu, &allowed);
    if (CPU_COUNT(&allowed) == 0) return;
    pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
    left = together ? kCallsApart : 0;
}
#else
int current_cpu() { return -1; }
void keep_apart(int, pthread_t, int&) {}
#endif

// Never destroyed: threads may outlive main. A child of fork() has none of its parent's threads, so
// it gets a new pool.
Pool* the_pool = nullptr;
std::once_flag made;

void after_fork_in_child() {
    const int threads = the_pool == nullptr ? 1 : the_pool->size();
    the_pool = new Pool;
    the_pool->resize(threads);
}

}  // namespace

Pool& Pool::shared() {
    std::call_once(made, [] {
        the_pool = new Pool;
        // The handlers before and after hold the pool's lock across the fork, so that the child
        // reads a consistent number of threads.
        pthread_atfork([] { the_pool->mutex_.lock(); }, [] { the_pool->mutex_.unlock(); },
                       [] {
                           the_pool->mutex_.unlock();
                           after_fork_in_child();
                       });
    });
    return *the_pool;
}

void Pool::resize(int threads) {
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_ = std::max(1, threads);
    wake_.notify_all();  // surplus threads exit
}

int Pool::size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return wanted_;
}

bool Pool::Call::has_parts() const {
    return std::any_of(shares.begin(), shares.end(),
                       [](const Share& share) { return share.next.load(std::memory_order_relaxed) < share.end; });
}

void Pool::Call::take_parts(size_t thread) {
    for (size_t i = 0; i < shares.size(); ++i) {
        Share& share = shares[(thread + i) % shares.size()];
        if (share.next.load(std::memory_order_relaxed) >= share.end) continue;  // without a write
        for (int64_t part; (part = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) (*work)(part);
    }
}

// Called with mutex_ held. Signals are left to Python's threads.
void Pool::hire() {
    if (hired_ >= wanted_ - 1) return;
    SignalsBlocked blocked;
    try {
        for (; hired_ < wanted_ - 1; ++hired_) std::thread([this, thread = hired_ + 1] { serve(thread); }).detach();
    } catch (const std::system_error&) {
        wanted_ = hired_ + 1;  // the system refuses more threads; size() shows it
    }
}

void Pool::serve(int thread) {
    set_control(kDefaultControl);
    int left = 0;  // calls for which this thread is kept off a CPU
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        Call* call = nullptr;
        wake_.wait(lock, [&] {
            if (hired_ > wanted_ - 1) return true;
            for (Call* each : calls_)
                if (each->has_parts()) {
                    call = each;
                    return true;
                }
            return false;
        });
        if (call == nullptr) {
            --hired_;
            return;
        }
        // Help the call with the fewest helpers.
        for (Call* each : calls_)
            if (each->helpers < call->helpers && each->has_parts()) call = each;
        ++call->helpers;
        lock.unlock();
        keep_apart(call->cpu, call->caller, left);
        call->take_parts(thread);
        lock.lock();
        if (--call->helpers == 0) through_.notify_all();
        if (std::any_of(calls_.begin(), calls_.end(), [](const Call* each) { return each->has_parts(); })) continue;
        const int64_t posted = posted_.load(std::memory_order_relaxed);
        lock.unlock();
        poll([&] { return posted_.load(std::memory_order_relaxed) != posted; });
        lock.lock();
    }
}

void Pool::run(int64_t parts, const std::function<void(int64_t)>& work) {
    if (parts <= 0) return;
    Call call;
    call.work = &work;
    const auto before = control();
    set_control(kDefaultControl);
    if (parts == 1) {
        work(0);
    } else {
        call.caller = pthread_self();
        call.cpu = current_cpu();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            hire();
            const int64_t threads = std::min<int64_t>(wanted_, parts);
            call.shares = std::vector<Share>(threads);
            for (int64_t i = 0; i < threads; ++i) {
                call.shares[i].next = i * parts / threads;
                call.shares[i].end = (i + 1) * parts / threads;
            }
            calls_.push_back(&call);
            posted_.fetch_add(1, std::memory_order_relaxed);
        }
        wake_.notify_all();
        call.take_parts(0);
        poll([&] { return call.helpers.load(std::memory_order_relaxed) == 0; });
        std::unique_lock<std::mutex> lock(mutex_);
        calls_.remove(&call);
        through_.wait(lock, [&] { return call.helpers == 0; });
    }
    set_control(before);
}

}  // namespace hfz

namespace py = pybind11;

void bind_pool(py::module_& m) {
    m.def("threads", [] { return hfz::Pool::shared().size(); }, "Threads that a kernel runs on, the caller's included.");
    m.def(
        "set_threads", [](int threads) { hfz::Pool::shared().resize(threads); }, py::arg("threads"),
        py::call_guard<py::gil_scoped_release>(), "Run kernels on this many threads from now on.");
}
