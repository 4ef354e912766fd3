// The threads that kernels run on: made once, woken for each call. Several callers may run at once: each works on its own
// call, and idle threads help whichever has parts left, so that nobody waits for a stranger's call to end.
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

    // Threads that work on a call, the caller included. Threads are made by the first call that has work for them.
    void resize(int threads);
    int size();

    // Call work(part) once for each part below `parts`, on as many threads as there are, and return when all are through.
    // Parts are taken in order. `work` must not throw, and must not call run.
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

    std::mutex mutex_;  // guards what follows
    std::condition_variable wake_, through_;
    std::list<Call*> calls_;
    int wanted_ = 1;  // threads, the caller included
    int hired_ = 0;   // threads beside the caller's
};

}  // namespace hfz
