#ifdef __linux__

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "files.h"

namespace py = pybind11;
using hfz::File, hfz::FileQueue, hfz::Piece, hfz::Transfer;

namespace {

// A forked child lacks the threads that hold the queue's locks, so the queue is not destroyed
// there.
struct OwnProcessOnly {
    void operator()(FileQueue* queue) const {
        if (queue->in_own_process()) delete queue;
    }
};

using Transfers = std::vector<std::shared_ptr<Transfer>>;

std::shared_ptr<Transfer> submit(FileQueue& queue, bool write, const py::list& described, int priority, Transfers after) {
    std::vector<Piece> pieces;
    pieces.reserve(described.size());
    for (const auto& item : described) {
        const auto [file, offset, address, bytes] = item.cast<std::tuple<std::shared_ptr<File>, int64_t, uintptr_t, int64_t>>();
        pieces.push_back({file, offset, reinterpret_cast<char*>(address), bytes});
    }
    if (priority < 0 || priority >= hfz::kPriorities) throw std::invalid_argument("a priority is 0, 1 or 2");
    py::gil_scoped_release released;
    return queue.submit(write, std::move(pieces), priority, std::move(after));
}

py::object wait(FileQueue& queue, const std::shared_ptr<Transfer>& transfer) {
    while (!transfer->finished) {
        {
            py::gil_scoped_release released;
            queue.wait(transfer, 100);
        }
        if (PyErr_CheckSignals()) throw py::error_already_set();
    }
    if (!transfer->error) return py::none();
    return py::make_tuple(transfer->error, transfer->path, transfer->offset, transfer->bytes, transfer->at_end);
}

void inject(FileQueue& queue, const std::vector<std::tuple<bool, int64_t, int64_t, int, bool, int>>& described) {
    std::vector<hfz::Fault> faults;
    for (const auto& [write, first, last, error, shorten, milliseconds] : described)
        faults.push_back({write, first, last, error, shorten, milliseconds});
    queue.inject(std::move(faults));
}

}  // namespace

void bind_files(py::module_& m) {
    py::class_<File, std::shared_ptr<File>>(m, "File", "An open file; its descriptors are closed with the last transfer that uses it.")
        .def(py::init<std::string, int, int>(), py::arg("path"), py::arg("buffered"), py::arg("direct"))
        .def_property_readonly("direct", [](const File& file) { return file.direct.load(); });
    py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer")
        .def_property_readonly("finished", [](const Transfer& transfer) { return transfer.finished.load(); })
        .def_property_readonly("failed", [](const Transfer& transfer) { return transfer.finished && transfer.error; })
        .def_readonly("write", &Transfer::write);
    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<FileQueue, std::unique_ptr<FileQueue, OwnProcessOnly>>(m, "FileQueue", "See hf_zero.ops.files, which calls it.")
        .def(py::init<int64_t, int, std::string, int>(), py::arg("block_size"), py::arg("depth"), py::arg("engine"), py::arg("threads"))
        .def("submit", &submit, py::arg("write"), py::arg("pieces"), py::arg("priority"), py::arg("after"))
        .def("wait", &wait, py::arg("transfer"), "None, or (errno, path, offset, bytes, at_end) of what failed first.")
        .def("inject", &inject, py::arg("faults"))
        .def("close", &FileQueue::close, py::arg("cancel"), unlocked)
        .def_property_readonly("engine", &FileQueue::engine)
        .def_property_readonly("refusal", &FileQueue::refusal);
}

#else  // O_DIRECT, eventfd and the calls around them are Linux-only; elsewhere Python runs the queue

#include <pybind11/pybind11.h>

void bind_files(pybind11::module_&) {}

#endif
