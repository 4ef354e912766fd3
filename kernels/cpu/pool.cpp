#include "pool.h"

#include <pthread.h>
#include <pybind11/pybind11.h>

#include <algorithm>
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
#elif defined(__aarch64__)
constexpr unsigned long kDefaultControl = 0;
unsigned long control() {
    unsigned long value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}
void set_control(unsigned long value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#else
constexpr int kDefaultControl = 0;
int control() { return 0; }
void set_control(int) {}
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

void Pool::take_parts(Call& call) {
    for (int64_t part; (part = call.next.fetch_add(1, std::memory_order_relaxed)) < call.parts;) (*call.work)(part);
}

// Called with mutex_ held. Signals are left to Python's threads.
void Pool::hire() {
    if (hired_ >= wanted_ - 1) return;
    SignalsBlocked blocked;
    try {
        for (; hired_ < wanted_ - 1; ++hired_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
        wanted_ = hired_ + 1;  // the system refuses more threads; size() shows it
    }
}

void Pool::serve() {
    set_control(kDefaultControl);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        Call* call = nullptr;
        wake_.wait(lock, [&] {
            if (hired_ > wanted_ - 1) return true;
            for (Call* each : calls_)
                if (each->next.load(std::memory_order_relaxed) < each->parts) {
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
            if (each->helpers < call->helpers && each->next.load(std::memory_order_relaxed) < each->parts) call = each;
        ++call->helpers;
        lock.unlock();
        take_parts(*call);
        lock.lock();
        if (--call->helpers == 0) through_.notify_all();
    }
}

void Pool::run(int64_t parts, const std::function<void(int64_t)>& work) {
    if (parts <= 0) return;
    Call call;
    call.work = &work;
    call.parts = parts;
    const auto before = control();
    set_control(kDefaultControl);
    if (parts == 1) {
        work(0);
    } else {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            hire();
            calls_.push_back(&call);
        }
        wake_.notify_all();
        take_parts(call);
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
