#include "dispatch.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace hfz {

#if defined(__aarch64__)
extern const Kernels kernels_neon;
#else
extern const Kernels kernels_plain;
#endif
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512bf16;
#endif

DynamicMap dynamic_maps[2];

namespace {

// The kernel sets that this machine runs, the widest last.
std::vector<const Kernels*> here() {
#if defined(__aarch64__)
    std::vector<const Kernels*> found{&kernels_neon};
#else
    std::vector<const Kernels*> found{&kernels_plain};
#endif
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {  // every CPU with both has F16C
        found.push_back(&kernels_avx2);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512dq")) {
            found.push_back(&kernels_avx512);
            if (__builtin_cpu_supports("avx512bf16")) found.push_back(&kernels_avx512bf16);
        }
    }
#endif
    return found;
}

std::atomic<const Kernels*> in_use{nullptr};

void choose(const std::string& name) {
    for (const Kernels* each : here())
        if (name == each->name) {
            in_use = each;
            return;
        }
    throw std::invalid_argument(name);
}

std::vector<std::string> names() {
    std::vector<std::string> found;
    for (const Kernels* each : here()) found.emplace_back(each->name);
    return found;
}

}  // namespace

const Kernels& kernels() {
    const Kernels* chosen = in_use;
    if (chosen == nullptr) in_use = chosen = here().back();
    return *chosen;
}

}  // namespace hfz

namespace py = pybind11;

void bind_dispatch(py::module_& m) {
    m.def("instruction_set", [] { return std::string(hfz::kernels().name); }, "The instruction set that kernels run with.");
    m.def("instruction_sets", hfz::names, "Those that this machine runs, the widest last.");
    m.def("set_instruction_set", hfz::choose, py::arg("name"), "Run kernels with this one from now on; ValueError if the machine cannot.");
}
