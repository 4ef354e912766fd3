#include "python.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

namespace late {

namespace {

constexpr int kShown = 4, kSearched = 10;  // frames

bool is_ours(const char* file) {
  return strstr(file, "/torch/") || strstr(file, "tests/late/torch_module.py") || file[0] == '<';
}

struct Drop {
  std::string operation, function;
};
std::mutex drops_mutex;
std::vector<Drop> chosen;
std::atomic<bool> any{false};
std::atomic<uint64_t> count{0};

}  // namespace

std::string frames(int limit) {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return "";
  struct Gil {
    PyGILState_STATE state = PyGILState_Ensure();
    ~Gil() { PyGILState_Release(state); }
  } gil;
  std::string text;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int kept = 0; frame && kept < limit;) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const char* function = PyUnicode_AsUTF8(code->co_name);
    if (file && function && !is_ours(file)) {
      const char* slash = strrchr(file, '/');
      if (kept++) text += " < ";
      text += std::string(slash ? slash + 1 : file) + ":" +
              std::to_string(PyFrame_GetLineNumber(frame)) + " " + function;
    }
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return text;
}

std::string python_site() { return frames(kShown); }

bool dropped(const char* operation) {
  if (!any) return false;
  std::string site = frames(kSearched);
  std::lock_guard<std::mutex> lock(drops_mutex);
  for (const Drop& drop : chosen) {
    if (drop.operation != operation) continue;
    // "unit.py finish_gather" is in "streams.py:40 wait < unit.py:150 finish_gather < ...".
    size_t space = drop.function.find(' ');
    std::string file = drop.function.substr(0, space) + ":", name = drop.function.substr(space);
    for (size_t at = site.find(file); at != std::string::npos; at = site.find(file, at + 1)) {
      size_t end = site.find(" < ", at);
      std::string frame = site.substr(at, end == std::string::npos ? end : end - at);
      if (frame.size() > name.size() && !frame.compare(frame.size() - name.size(), name.size(), name)) {
        count++;
        return true;
      }
    }
  }
  return false;
}

void drop(const std::string& operation, const std::string& function) {
  std::lock_guard<std::mutex> lock(drops_mutex);
  chosen.push_back({operation, function});
  any = true;
}

void drop_nothing() {
  std::lock_guard<std::mutex> lock(drops_mutex);
  chosen.clear();
  any = false;
  count = 0;
}

uint64_t drops() { return count; }

}  // namespace late
