// Folders that go when the last of several processes ends with code 0. Python's atexit does not see the code that
// sys.exit was given; libc's on_exit does.
#include <pybind11/pybind11.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <tuple>

namespace py = pybind11;
namespace fs = std::filesystem;

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

void at_exit(int code, void*) {
    if (code != 0 || getpid() != owner) return;  // a fork inherits the handler
    std::error_code ignored;
    for (const Removal& each : removals()) {
        fs::remove(each.own, ignored);
        const fs::path others = fs::path(each.own).parent_path();
        if (fs::exists(others, ignored) && !holds_only(others, "")) continue;
        fs::remove_all(each.folder, ignored);
        fs::path parent = fs::path(each.folder).parent_path();
        while (holds_only(parent, each.mark)) {
            fs::remove_all(parent, ignored);
            if (parent == each.top || parent == parent.parent_path()) break;
            parent = parent.parent_path();
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
#ifdef __GLIBC__
    m.def("release_at_exit", hfz::release_at_exit, py::arg("folder"), py::arg("top"), py::arg("mark"), py::arg("own"),
          "Remove the file own when this process ends with code 0, and with the last file beside it folder, and its "
          "parents up to top that then hold at most a file called mark.");
#else
    (void)m;
#endif
}
