// Signals in the native core's own threads.
#pragma once
#include <pthread.h>
#include <signal.h>

namespace hfz {

// Threads created during its lifetime leave asynchronous signals to Python's own threads. Signals
// of faults stay unblocked: they go to the thread that caused them, and if they are blocked the
// system ends the process without calling a handler (faulthandler's, a test's).
struct SignalsBlocked {
    SignalsBlocked() {
        sigset_t asynchronous;
        sigfillset(&asynchronous);
        for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&asynchronous, fault);
        pthread_sigmask(SIG_SETMASK, &asynchronous, &before);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
};

}  // namespace hfz
