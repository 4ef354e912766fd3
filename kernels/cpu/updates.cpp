// Optimizer updates as Python calls them: addresses and numbers, checked in hf_zero/ops/host.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "dispatch.h"
#include "parts.h"

namespace py = pybind11;

namespace {

using Address = uintptr_t;
using hfz::at;

hfz::Update update(Address master, Address grad, int grad_kind, double divisor, bool negate, Address out, int out_kind, int64_t numel,
                   int64_t first, uint64_t key) {
    return {at<float>(master), {at<void>(grad), grad_kind}, static_cast<float>(divisor), negate, {at<void>(out), out_kind}, numel >= hfz::kLarge,
            first,             key};
}

void adam(Address master, Address grad, int grad_kind, double divisor, bool negate, Address out, int out_kind, int64_t numel, int64_t first,
          uint64_t key, Address mean, int mean_kind, Address mean_scales, Address square, int square_kind, Address square_scales,
          Address largest, double keep, double l2, double beta1, double beta2, double root_scale, double eps, double step_size) {
    const hfz::Adam job{update(master, grad, grad_kind, divisor, negate, out, out_kind, numel, first, key),
                        {at<void>(mean), mean_kind, at<float>(mean_scales)},
                        {at<void>(square), square_kind, at<float>(square_scales)},
                        at<float>(largest),
                        static_cast<float>(keep),
                        static_cast<float>(l2),
                        static_cast<float>(beta1),
                        static_cast<float>(1 - beta1),
                        static_cast<float>(beta2),
                        static_cast<float>(1 - beta2),
                        static_cast<float>(root_scale),
                        static_cast<float>(eps),
                        static_cast<float>(-step_size)};
    const auto run = hfz::kernels().adam;
    hfz::over_long_parts(numel, first, [&](int64_t, int64_t begin, int64_t end) { run(job, begin, end); });
}

void lion(Address master, Address grad, int grad_kind, double divisor, bool negate, Address out, int out_kind, int64_t numel, int64_t first,
          uint64_t key, Address mean, int mean_kind, Address mean_scales, double keep, double beta1, double beta2, double lr) {
    const hfz::Lion job{update(master, grad, grad_kind, divisor, negate, out, out_kind, numel, first, key),
                        {at<void>(mean), mean_kind, at<float>(mean_scales)},
                        static_cast<float>(keep),
                        static_cast<float>(beta1),
                        static_cast<float>(1 - beta1),
                        static_cast<float>(beta2),
                        static_cast<float>(1 - beta2),
                        static_cast<float>(-lr)};
    const auto run = hfz::kernels().lion;
    hfz::over_long_parts(numel, first, [&](int64_t, int64_t begin, int64_t end) { run(job, begin, end); });
}

void adagrad(Address master, Address grad, int grad_kind, double divisor, bool negate, Address out, int out_kind, int64_t numel, int64_t first,
             uint64_t key, Address total, double l2, double eps, double step_size) {
    const hfz::Adagrad job{update(master, grad, grad_kind, divisor, negate, out, out_kind, numel, first, key), at<float>(total),
                           static_cast<float>(l2), static_cast<float>(eps), static_cast<float>(-step_size)};
    const auto run = hfz::kernels().adagrad;
    hfz::over_long_parts(numel, first, [&](int64_t, int64_t begin, int64_t end) { run(job, begin, end); });
}

void sgd(Address master, Address grad, int grad_kind, double divisor, bool negate, Address out, int out_kind, int64_t numel, int64_t first,
         uint64_t key, Address momentum_buffer, int momentum_buffer_kind, Address momentum_buffer_scales, bool first_step, bool nesterov, double l2, double momentum, double dampening, double lr) {
    const hfz::Sgd job{update(master, grad, grad_kind, divisor, negate, out, out_kind, numel, first, key),
                       {at<void>(momentum_buffer), momentum_buffer_kind, at<float>(momentum_buffer_scales)},
                       first_step,
                       nesterov,
                       static_cast<float>(l2),
                       static_cast<float>(momentum),
                       static_cast<float>(1 - dampening),
                       static_cast<float>(-lr)};
    const auto run = hfz::kernels().sgd;
    hfz::over_long_parts(numel, first, [&](int64_t, int64_t begin, int64_t end) { run(job, begin, end); });
}

hfz::Lamb lamb(const hfz::Update& update, Address mean, Address square, double beta1, double beta2, double eps, double decay, bool eps_inside,
               double step_size) {
    return {update,
            at<float>(mean),
            at<float>(square),
            static_cast<float>(beta1),
            static_cast<float>(1 - beta1),
            static_cast<float>(beta2),
            static_cast<float>(1 - beta2),
            static_cast<float>(eps),
            static_cast<float>(decay),
            eps_inside,
            static_cast<float>(-step_size)};
}

std::pair<double, double> lamb_measure(Address master, Address grad, int grad_kind, double divisor, bool negate, Address out, int out_kind,
                                       int64_t numel, int64_t first, uint64_t key, Address mean, Address square, double beta1,
                                       double beta2, double eps, double decay, bool eps_inside) {
    const hfz::Lamb job = lamb(update(master, grad, grad_kind, divisor, negate, out, out_kind, numel, first, key), mean, square, beta1, beta2,
                               eps, decay, eps_inside, 0);
    constexpr int64_t size = 4 * hfz::kPart;  // as long as possible with a few parts per thread of a usual tensor
    std::vector<hfz::LambSums> sums((numel + size - 1) / size);
    const auto run = hfz::kernels().lamb_measure;
    hfz::over_parts(
        numel, 0, [&](int64_t part, int64_t begin, int64_t end) { sums[part] = run(job, begin, end); }, size);
    std::pair<double, double> total{0, 0};
    for (const hfz::LambSums& each : sums) {  // in the order of the parts, on any threads
        total.first += each.weights;
        total.second += each.update;
    }
    return total;
}

void lamb_apply(Address master, Address grad, int grad_kind, double divisor, bool negate, Address out, int out_kind, int64_t numel,
                int64_t first, uint64_t key, Address mean, Address square, double beta1, double beta2, double eps, double decay,
                bool eps_inside, double step_size) {
    const hfz::Lamb job = lamb(update(master, grad, grad_kind, divisor, negate, out, out_kind, numel, first, key), mean, square, beta1, beta2,
                               eps, decay, eps_inside, step_size);
    const auto run = hfz::kernels().lamb_apply;
    hfz::over_long_parts(numel, first, [&](int64_t, int64_t begin, int64_t end) { run(job, begin, end); });
}

}  // namespace

#define HFZ_UPDATE_ARGUMENTS                                                                                                       \
    py::kw_only(), py::arg("master"), py::arg("grad"), py::arg("grad_kind"), py::arg("divisor"), py::arg("negate"), py::arg("out"), \
        py::arg("out_kind"), py::arg("numel"), py::arg("first"), py::arg("key")

void bind_updates(py::module_& m) {
    using Free = py::call_guard<py::gil_scoped_release>;
    m.def("adam", adam, HFZ_UPDATE_ARGUMENTS, py::arg("mean"), py::arg("mean_kind"), py::arg("mean_scales"), py::arg("square"),
          py::arg("square_kind"), py::arg("square_scales"), py::arg("largest"), py::arg("keep"), py::arg("l2"), py::arg("beta1"),
          py::arg("beta2"), py::arg("root_scale"), py::arg("eps"), py::arg("step_size"), Free());
    m.def("lion", lion, HFZ_UPDATE_ARGUMENTS, py::arg("mean"), py::arg("mean_kind"), py::arg("mean_scales"), py::arg("keep"),
          py::arg("beta1"), py::arg("beta2"), py::arg("lr"), Free());
    m.def("adagrad", adagrad, HFZ_UPDATE_ARGUMENTS, py::arg("total"), py::arg("l2"), py::arg("eps"), py::arg("step_size"), Free());
    m.def("sgd", sgd, HFZ_UPDATE_ARGUMENTS, py::arg("momentum_buffer"), py::arg("momentum_buffer_kind"),
          py::arg("momentum_buffer_scales"), py::arg("first_step"), py::arg("nesterov"), py::arg("l2"),
          py::arg("momentum"), py::arg("dampening"), py::arg("lr"), Free());
    m.def("lamb_measure", lamb_measure, HFZ_UPDATE_ARGUMENTS, py::arg("mean"), py::arg("square"), py::arg("beta1"), py::arg("beta2"),
          py::arg("eps"), py::arg("decay"), py::arg("eps_inside"), Free());
    m.def("lamb_apply", lamb_apply, HFZ_UPDATE_ARGUMENTS, py::arg("mean"), py::arg("square"), py::arg("beta1"), py::arg("beta2"),
          py::arg("eps"), py::arg("decay"), py::arg("eps_inside"), py::arg("step_size"), Free());
}
