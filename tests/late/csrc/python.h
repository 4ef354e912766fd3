// Python's lock, and where in Python a call comes from.
#pragma once
#include <Python.h>

#include <string>

namespace late {

// Lets go of Python's lock, if this thread has it.
struct NoGil {
  PyThreadState* state = nullptr;
  NoGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  ~NoGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// The innermost frames outside torch and this package, "file:line function", innermost first; empty
// in a thread that runs no Python. It takes Python's lock: call it before the runtime's.
std::string python_site();

// Whether a test has this call of `operation` left out, a fault put into what it tests: `function` is
// "unit.py finish_gather", and one of the frames that the call comes from.
bool dropped(const char* operation);
void drop(const std::string& operation, const std::string& function);
void drop_nothing();
uint64_t drops();  // calls left out

}  // namespace late
