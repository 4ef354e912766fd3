// The threads that kernels run on: created once, woken for each call. Several callers may run at
// once: each works on its own call, and idle threads help any call with parts left, so that no
// caller waits for another's call to end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>

namespace hfz {

class Pool {
  public:
    static Pool& shared();

    // The number of threads that work on a call, the caller included. The first call with work for
    // them creates the threads.
    void resize(int threads);
    int size();

    // Call work(part) once for each part below `parts`, on all threads, and return when all are
    // done. Parts are taken in order. `work` must not throw, and must not call run.
    void run(int64_t parts, const std::function<void(int64_t)>& work);

  private:
    struct Call {
        const std::function<void(int64_t)>* work;
        int64_t parts;
        std::atomic<int64_t> next{0};
        int helpers = 0;  // guarded by mutex_
    };

    static void take_parts(Call& call);
    void hire();
    void serve();

    std::mutex mutex_;  // guards the members below
    std::condition_variable wake_, through_;
    std::list<Call*> calls_;
    int wanted_ = 1;  // threads, the caller included
    int hired_ = 0;   // threads beside the caller's
};

}  // namespace hfz
