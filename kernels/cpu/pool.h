// The threads that kernels run on: created once, woken for each call. Several callers may run at
// once: each works on its own call, and idle threads help any call with parts left, so that no
// caller waits for another's call to end.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <vector>

namespace hfz {

class Pool {
  public:
    static Pool& shared();

    // The number of threads that work on a call, the caller included. The first call with work for
    // them creates the threads.
    void resize(int threads);
    int size();

    // Call work(part) once for each part below `parts`, on all threads, and return when all are
    // done. Each thread begins with its share of the parts, the same in each call until resize, as
    // its caches may still hold that memory, and then takes what others have left, in order. `work`
    // must not throw, and must not call run.
    void run(int64_t parts, const std::function<void(int64_t)>& work);

  private:
    // The parts [next, end) of one thread's share that are left.
    struct alignas(64) Share {
        std::atomic<int64_t> next;
        int64_t end;
    };
    struct Call {
        const std::function<void(int64_t)>* work;
        std::vector<Share> shares;
        pthread_t caller;
        int cpu;                      // where the caller ran
        std::atomic<int> helpers{0};  // written with mutex_ held

        bool has_parts() const;
        void take_parts(size_t thread);
    };

    void hire();
    void serve(int thread);

    std::mutex mutex_;  // guards the members below
    std::condition_variable wake_, through_;
    std::atomic<int64_t> posted_{0};  // calls so far
    std::list<Call*> calls_;
    int wanted_ = 1;  // threads, the caller included
    int hired_ = 0;   // threads beside the caller's
};

}  // namespace hfz
