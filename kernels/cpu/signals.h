// Signals in the native core's own threads.
#pragma once
#include <pthread.h>
#include <signal.h>

namespace hfz {

// Threads made while this lives leave signals to Python's own thread. Not those of a fault: they belong to the thread that
// made it, and where they are blocked the system ends the process without asking a handler (faulthandler's, a test's).
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
