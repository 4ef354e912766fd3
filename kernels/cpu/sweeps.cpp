// Norms, casts, sums and blocks as Python calls them: addresses and numbers, checked in hf_zero/ops.
#include <pybind11/pybind11.h>

#include <cstring>
#include <limits>
#include <vector>

#include "dispatch.h"
#include "parts.h"

namespace py = pybind11;

namespace {

using Address = uintptr_t;
using hfz::at;

int64_t parts_of(int64_t numel) { return (numel + hfz::kPart - 1) / hfz::kPart; }

double squared_norm(Address source, int kind, int64_t numel) {
    std::vector<double> sums(parts_of(numel));
    const auto run = hfz::kernels().squares;
    const hfz::Array from{at<void>(source), kind};
    hfz::over_parts(numel, 0, [&](int64_t part, int64_t begin, int64_t end) { sums[part] = run(from, begin, end); });
    double total = 0;  // in the order of the parts, whatever thread took them
    for (const double sum : sums) total += sum;
    return total;
}

void cast(Address out, int out_kind, Address source, int kind, int64_t numel, double scale) {
    const auto run = hfz::kernels().cast;
    const hfz::Array to{at<void>(out), out_kind}, from{at<void>(source), kind};
    hfz::over_parts(numel, 0, [&](int64_t, int64_t begin, int64_t end) {
        run(to, from, static_cast<float>(scale), numel >= hfz::kLarge, begin, end);
    });
}

void accumulate(Address out, Address source, int kind, int64_t numel, double scale) {
    const auto run = hfz::kernels().accumulate;
    const hfz::Array from{at<void>(source), kind};
    hfz::over_parts(numel, 0,
                    [&](int64_t, int64_t begin, int64_t end) { run(at<float>(out), from, static_cast<float>(scale), begin, end); });
}

void round_stochastically(Address out, Address source, int64_t numel, uint64_t key, int64_t first) {
    const auto run = hfz::kernels().round_stochastically;
    hfz::over_parts(numel, first, [&](int64_t, int64_t begin, int64_t end) { run(at<uint16_t>(out), at<const float>(source), key, first, begin, end); });
}

void encode(Address codes, Address scales, int kind, Address source, int64_t numel) {
    const auto run = hfz::kernels().encode;
    const hfz::Moment to{at<void>(codes), kind, at<float>(scales)};
    hfz::over_parts(numel, 0, [&](int64_t, int64_t begin, int64_t end) { run(to, at<const float>(source), begin, end); });
}

void decode(Address out, Address codes, Address scales, int kind, int64_t numel) {
    const auto run = hfz::kernels().decode;
    const hfz::Moment from{at<void>(codes), kind, at<float>(scales)};
    hfz::over_parts(numel, 0, [&](int64_t, int64_t begin, int64_t end) { run(at<float>(out), from, begin, end); });
}

// `values` has 256 numbers, `edges` one for each region but the first, the others one for each.
void set_dynamic_map(bool has_sign, Address values, Address edges, Address slopes, Address shifts, Address tops) {
    hfz::DynamicMap& map = hfz::dynamic_maps[has_sign];
    std::memcpy(map.values, at<const float>(values), sizeof map.values);
    const float* const edge = at<const float>(edges);
    map.regions.smallest = edge[0];
    for (int region = 0; region < hfz::kRegions; ++region) {  // the first line is that of 0
        map.regions.ends[region] = region + 1 < hfz::kRegions ? edge[region + 1] : std::numeric_limits<float>::infinity();
        map.regions.slopes[region] = at<const float>(slopes)[region + 1];
        map.regions.shifts[region] = at<const float>(shifts)[region + 1];
        map.regions.tops[region] = at<const float>(tops)[region + 1];
    }
}

// Messages of `rows` rows, `stride` bytes apart, with `numel` elements each: addresses of the
// scales and codes of the first one.
struct Rows {
    Address scales, codes;
    int64_t stride;
    int bits;
    int64_t block, rows, numel;

    hfz::Quantized row(int64_t index) const {
        return {at<void>(scales + index * stride), at<uint8_t>(codes + index * stride), bits, block};
    }
};

hfz::Array row_of(Address data, int kind, int64_t offset) {
    return {data ? at<char>(data) + offset * (kind == hfz::F32 ? 4 : 2) : nullptr, kind};
}

void quantize(Rows to, Address source, int kind, Address minus, int minus_kind) {
    const auto run = hfz::kernels().quantize;
    for (int64_t row = 0; row < to.rows; ++row) {
        const hfz::Quantized out = to.row(row);
        const hfz::Array from = row_of(source, kind, row * to.numel), less = row_of(minus, minus_kind, row * to.numel);
        hfz::over_parts(to.numel, 0, [&](int64_t, int64_t begin, int64_t end) { run(out, from, less, begin, end); });
    }
}

void dequantize(Rows from, Address out, int kind, bool add) {
    const auto run = hfz::kernels().dequantize;
    for (int64_t row = 0; row < from.rows; ++row) {
        const hfz::Array to = row_of(out, kind, row * from.numel);
        hfz::over_parts(from.numel, 0, [&](int64_t, int64_t begin, int64_t end) { run(to, from.row(row), add, begin, end); });
    }
}

// Compute the sum over rows, in their order.
void dequantize_sum(Rows from, Address out) {
    const auto run = hfz::kernels().dequantize;
    hfz::over_parts(from.numel, 0, [&](int64_t, int64_t begin, int64_t end) {
        for (int64_t row = 0; row < from.rows; ++row) run({at<void>(out), hfz::F32}, from.row(row), row > 0, begin, end);
    });
}

// Return the number of elements of row `index` that are no padding, given `numel` in all rows.
int64_t valid_of(const Rows& rows, int64_t index, int64_t numel) { return std::clamp<int64_t>(numel - index * rows.numel, 0, rows.numel); }

void sign_compress(Rows to, Rows momentum, Address error, Address grad, int kind, double beta, double factor, int64_t numel) {
    const auto run = hfz::kernels().sign_compress;
    for (int64_t row = 0; row < to.rows; ++row) {
        const hfz::SignCompress call{to.row(row),
                                     momentum.row(row),
                                     at<float>(error) + row * to.numel,
                                     row_of(grad, kind, row * to.numel),
                                     static_cast<float>(beta),
                                     static_cast<float>(factor),
                                     valid_of(to, row, numel)};
        hfz::over_parts(to.numel, 0, [&](int64_t, int64_t begin, int64_t end) { run(call, begin, end); });
    }
}

void sign_combine(Rows to, Rows came, Rows momentum, Address average, double beta, int64_t numel) {
    const auto run = hfz::kernels().sign_combine;
    const hfz::SignCombine call{to.row(0),
                                came.row(0),
                                came.rows,
                                came.stride,
                                momentum.row(0),
                                at<float>(average),
                                static_cast<float>(beta),
                                static_cast<float>(1.0 / beta),
                                static_cast<float>(1.0 / static_cast<double>(came.rows)),
                                valid_of(to, 0, numel)};
    hfz::over_parts(to.numel, 0, [&](int64_t, int64_t begin, int64_t end) { run(call, begin, end); });
}

void sign_apply(Rows momentum, Address weights, Address exponents, double keep, double step, int64_t first, int64_t last) {
    const auto run = hfz::kernels().sign_apply;
    for (int64_t row = 0; row < momentum.rows; ++row) {
        const int64_t here = row * momentum.numel;
        const int64_t from = std::clamp<int64_t>(first - here, 0, momentum.numel), to = std::clamp<int64_t>(last - here, 0, momentum.numel);
        const hfz::SignApply call{at<float>(weights) + here, momentum.row(row), at<const int8_t>(exponents) + here, static_cast<float>(keep),
                                  static_cast<float>(step)};
        hfz::over_parts(to - from, from, [&](int64_t, int64_t begin, int64_t end) { run(call, from + begin, from + end); });
    }
}

}  // namespace

void bind_sweeps(py::module_& m) {
    using Free = py::call_guard<py::gil_scoped_release>;
    m.attr("BLOCK") = hfz::kBlock;
    m.def("squared_norm", squared_norm, py::arg("source"), py::arg("kind"), py::arg("numel"), Free());
    m.def("cast", cast, py::arg("out"), py::arg("out_kind"), py::arg("source"), py::arg("kind"), py::arg("numel"), py::arg("scale"), Free());
    m.def("accumulate", accumulate, py::arg("out"), py::arg("source"), py::arg("kind"), py::arg("numel"), py::arg("scale"), Free());
    m.def("round_stochastically", round_stochastically, py::arg("out"), py::arg("source"), py::arg("numel"), py::arg("key"), py::arg("first"), Free());
    m.def("encode", encode, py::arg("codes"), py::arg("scales"), py::arg("kind"), py::arg("source"), py::arg("numel"), Free());
    m.def("set_dynamic_map", set_dynamic_map, py::arg("has_sign"), py::arg("values"), py::arg("edges"), py::arg("slopes"), py::arg("shifts"),
          py::arg("tops"));
    m.def("decode", decode, py::arg("out"), py::arg("codes"), py::arg("scales"), py::arg("kind"), py::arg("numel"), Free());
    py::class_<Rows>(m, "Rows")
        .def(py::init([](Address scales, Address codes, int64_t stride, int bits, int64_t block, int64_t rows, int64_t numel) {
                 return Rows{scales, codes, stride, bits, block, rows, numel};
             }),
             py::arg("scales"), py::arg("codes"), py::arg("stride"), py::arg("bits"), py::arg("block"), py::arg("rows"), py::arg("numel"));
    m.def("quantize", quantize, py::arg("to"), py::arg("source"), py::arg("kind"), py::arg("minus"), py::arg("minus_kind"), Free());
    m.def("dequantize", dequantize, py::arg("source"), py::arg("out"), py::arg("kind"), py::arg("add"), Free());
    m.def("dequantize_sum", dequantize_sum, py::arg("source"), py::arg("out"), Free());
    m.def("sign_compress", sign_compress, py::arg("to"), py::arg("momentum"), py::arg("error"), py::arg("grad"), py::arg("kind"),
          py::arg("beta"), py::arg("factor"), py::arg("numel"), Free());
    m.def("sign_combine", sign_combine, py::arg("to"), py::arg("came"), py::arg("momentum"), py::arg("average"), py::arg("beta"),
          py::arg("numel"), Free());
    m.def("sign_apply", sign_apply, py::arg("momentum"), py::arg("weights"), py::arg("exponents"), py::arg("keep"), py::arg("step"),
          py::arg("first"), py::arg("last"), Free());
}
