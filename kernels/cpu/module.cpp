// hf_zero._cpu: the parts of the engine that run on the host, on raw pointers. Each bind_* is at
// the end of its own file.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_files(py::module_&);
void bind_dispatch(py::module_&);
void bind_exits(py::module_&);
void bind_heartbeats(py::module_&);
void bind_pool(py::module_&);
void bind_sweeps(py::module_&);
void bind_updates(py::module_&);

PYBIND11_MODULE(_cpu, m) {
    m.doc() = "Host kernels of hf-zero. Call them through hf_zero.ops, which checks sizes and dtypes.";
    bind_files(m);
    bind_dispatch(m);
    bind_exits(m);
    bind_heartbeats(m);
    bind_pool(m);
    bind_sweeps(m);
    bind_updates(m);
}
