// Folders that go when the last of several processes ends with code 0. Python's atexit does not see the code that
// sys.exit was given; libc's on_exit does. And signals that end a process only if its parent sends them: Python's
// handlers do not see the sender.
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

namespace py = pybind11;
namespace fs = std::filesystem;

namespace hfz {

void end_if_parent_sent(int, siginfo_t* sent, void*) {
    if (sent->si_pid == getppid()) _exit(0);
}

void end_by_parent_only(const std::vector<int>& signals) {
    struct sigaction action = {};
    action.sa_sigaction = end_if_parent_sent;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    for (int signal : signals)
        if (sigaction(signal, &action, nullptr) != 0) throw py::value_error("no such signal: " + std::to_string(signal));
}

}  // namespace hfz

#ifdef __GLIBC__
namespace hfz {

struct Removal {
    std::string folder, top, mark, own;
    bool operator<(const Removal& other) const {
        return std::tie(folder, top, mark, own) < std::tie(other.folder, other.top, other.mark, other.own);
    }
};

std::set<Removal>& removals() {
    static auto* made = new std::set<Removal>;  // no destructor runs before the handler
    return *made;
}

pid_t owner = 0;

bool holds_only(const fs::path& folder, const std::string& mark) {
    std::error_code failed;
    for (fs::directory_iterator at(folder, failed), end; !failed && at != end; at.increment(failed))
        if (at->path().filename() != mark) return false;
    return !failed;
}

constexpr const char* kClaim = "claim";  // as in checkpoint/memory/folders.py
constexpr const char* kRemoved = "~";
constexpr int kTries = 10;              // another process that looks whether a folder is empty is done by then
constexpr useconds_t kPause = 20'000;

// An exclusive lock on the file at path, if this process gets it on the file that has this name.
class Lock {
  public:
    Lock(const fs::path& path, int tries) : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
        while (fd_ >= 0 && !held_) {
            if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) {
                held_ = true;
            } else {
                if (--tries <= 0) break;
                ::usleep(kPause);
            }
        }
        struct stat locked, named;
        held_ = held_ && ::fstat(fd_, &locked) == 0 && ::lstat(path.c_str(), &named) == 0 && locked.st_ino == named.st_ino &&
                locked.st_dev == named.st_dev;
    }
    ~Lock() {
        if (fd_ >= 0) ::close(fd_);
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    explicit operator bool() const { return held_; }

  private:
    int fd_;
    bool held_ = false;
};

bool is_kept(const Removal& each) {
    std::error_code ignored;
    const fs::path ranks = fs::path(each.own).parent_path();
    return fs::exists(ranks, ignored) && !holds_only(ranks, "");
}

// The same as release() in checkpoint/memory/folders.py, with its note: what was renamed, also by a killed process, goes.
void at_exit(int code, void*) {
    if (code != 0 || getpid() != owner) return;  // a fork inherits the handler
    std::error_code ignored;
    for (const Removal& each : removals()) {
        fs::remove(each.own, ignored);
        if (fs::exists(each.folder, ignored) && !is_kept(each)) {
            const Lock claim(fs::path(each.folder) / kClaim, 1);
            const std::string own = fs::path(each.own).filename();
            if (claim && !is_kept(each)) fs::rename(each.folder, each.folder + kRemoved + own, ignored);
        }
        const std::string removed = fs::path(each.folder).filename().string() + kRemoved;
        std::error_code failed;
        std::set<fs::path> away;
        for (fs::directory_iterator at(fs::path(each.folder).parent_path(), failed), end; !failed && at != end; at.increment(failed))
            if (at->path().filename().string().rfind(removed, 0) == 0) away.insert(at->path());
        for (const fs::path& path : away) fs::remove_all(path, ignored);
        const Lock mark(fs::path(each.top) / each.mark, kTries);
        if (!mark) continue;
        fs::path parent = fs::path(each.folder).parent_path();
        while (parent != each.top && parent != parent.parent_path() && ::rmdir(parent.c_str()) == 0) parent = parent.parent_path();
        if (holds_only(each.top, each.mark)) {
            fs::remove(fs::path(each.top) / each.mark, ignored);
            ::rmdir(each.top.c_str());
        }
    }
}

void release_at_exit(const std::string& folder, const std::string& top, const std::string& mark, const std::string& own) {
    if (owner != getpid()) {
        removals().clear();  // those of the process that forked this one
        if (owner == 0) on_exit(at_exit, nullptr);
        owner = getpid();
    }
    removals().insert({folder, top, mark, own});
}

}  // namespace hfz
#endif

void bind_exits(py::module_& m) {
    m.def("end_by_parent_only", hfz::end_by_parent_only, py::arg("signals"),
          "Let each of signals end this process, with code 0, if its parent sends it, and do nothing if another does.");
#ifdef __GLIBC__
    m.def("release_at_exit", hfz::release_at_exit, py::arg("folder"), py::arg("top"), py::arg("mark"), py::arg("own"),
          "Remove the file own when this process ends with code 0, and with the last file beside it folder, unless another "
          "process has the lock of its file claim, and its parents up to top that are then empty, under the lock of the file "
          "mark in top.");
#else
    (void)m;
#endif
}
