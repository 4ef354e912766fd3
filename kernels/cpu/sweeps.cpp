// Norms, casts, sums, checksums and segments as Python calls them: addresses and numbers, checked
// in hf_zero/ops/host.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <utility>
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

bool all_finite(Address source, int kind, int64_t numel) {
    std::atomic<bool> so_far{true};
    const auto run = hfz::kernels().finite;
    const hfz::Array from{at<void>(source), kind};
    hfz::over_parts(numel, 0, [&](int64_t, int64_t begin, int64_t end) {
        if (so_far && !run(from, begin, end)) so_far = false;
    });
    return so_far;
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

    hfz::Quantised row(int64_t index) const {
        return {at<void>(scales + index * stride), at<uint8_t>(codes + index * stride), bits, block};
    }
};

hfz::Array row_of(Address data, int kind, int64_t offset) {
    return {data ? at<char>(data) + offset * (kind == hfz::F32 ? 4 : 2) : nullptr, kind};
}

void quantise(Rows to, Address source, int kind, Address minus, int minus_kind) {
    const auto run = hfz::kernels().quantise;
    for (int64_t row = 0; row < to.rows; ++row) {
        const hfz::Quantised out = to.row(row);
        const hfz::Array from = row_of(source, kind, row * to.numel), less = row_of(minus, minus_kind, row * to.numel);
        hfz::over_parts(to.numel, 0, [&](int64_t, int64_t begin, int64_t end) { run(out, from, less, begin, end); });
    }
}

void dequantise(Rows from, Address out, int kind, bool add) {
    const auto run = hfz::kernels().dequantise;
    for (int64_t row = 0; row < from.rows; ++row) {
        const hfz::Array to = row_of(out, kind, row * from.numel);
        hfz::over_parts(from.numel, 0, [&](int64_t, int64_t begin, int64_t end) { run(to, from.row(row), add, begin, end); });
    }
}

// Compute the sum over rows, in their order.
void dequantise_sum(Rows from, Address out) {
    const auto run = hfz::kernels().dequantise;
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

constexpr int64_t kRun = 65536;  // bytes of a checksum's part

// Add up the hashes of runs of kRun bytes, each mixed with its place, so that threads may take them
// in any order.
uint64_t checksum(Address source, int64_t bytes) {
    const auto run = hfz::kernels().checksum;
    const int64_t runs = (bytes + kRun - 1) / kRun;
    std::atomic<uint64_t> sum{static_cast<uint64_t>(bytes) * 0x9e3779b97f4a7c15ull};
    hfz::Pool::shared().run(runs, [&](int64_t part) {
        const int64_t begin = part * kRun;
        uint64_t x = run(at<const uint8_t>(source) + begin, std::min(kRun, bytes - begin)) + static_cast<uint64_t>(part + 1) * 0xd6e8feb86659fd93ull;
        x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
        x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
        sum += x ^ (x >> 32);
    });
    return sum;
}

// Segments (byte offset in the scattered buffer, bytes), in the order of the packed buffer.
using Runs = std::vector<std::pair<int64_t, int64_t>>;

void move_segments(Address packed, Address scattered, const Runs& runs, bool gather) {
    std::vector<int64_t> ends;
    int64_t total = 0;
    for (const auto& segment : runs) ends.push_back(total += segment.second);
    constexpr int64_t turn = 256 * 1024;  // bytes
    hfz::Pool::shared().run((total + turn - 1) / turn, [&](int64_t part) {
        int64_t begin = part * turn;
        const int64_t end = std::min(total, begin + turn);
        size_t index = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
        for (; begin < end; ++index) {
            const int64_t inside = begin - (ends[index] - runs[index].second);
            const int64_t bytes = std::min(end, ends[index]) - begin;
            char* a = at<char>(packed) + begin;
            char* b = at<char>(scattered) + runs[index].first + inside;
            std::memcpy(gather ? a : b, gather ? b : a, bytes);
            begin += bytes;
        }
    });
}

}  // namespace

void bind_sweeps(py::module_& m) {
    using Free = py::call_guard<py::gil_scoped_release>;
    m.attr("BLOCK") = hfz::kBlock;
    m.def("squared_norm", squared_norm, py::arg("source"), py::arg("kind"), py::arg("numel"), Free());
    m.def("all_finite", all_finite, py::arg("source"), py::arg("kind"), py::arg("numel"), Free());
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
    m.def("quantise", quantise, py::arg("to"), py::arg("source"), py::arg("kind"), py::arg("minus"), py::arg("minus_kind"), Free());
    m.def("dequantise", dequantise, py::arg("source"), py::arg("out"), py::arg("kind"), py::arg("add"), Free());
    m.def("dequantise_sum", dequantise_sum, py::arg("source"), py::arg("out"), Free());
    m.def("sign_compress", sign_compress, py::arg("to"), py::arg("momentum"), py::arg("error"), py::arg("grad"), py::arg("kind"),
          py::arg("beta"), py::arg("factor"), py::arg("numel"), Free());
    m.def("sign_combine", sign_combine, py::arg("to"), py::arg("came"), py::arg("momentum"), py::arg("average"), py::arg("beta"),
          py::arg("numel"), Free());
    m.def("sign_apply", sign_apply, py::arg("momentum"), py::arg("weights"), py::arg("exponents"), py::arg("keep"), py::arg("step"),
          py::arg("first"), py::arg("last"), Free());
    m.def("checksum", checksum, py::arg("source"), py::arg("bytes"), Free());
    m.def("move_segments", move_segments, py::arg("packed"), py::arg("scattered"), py::arg("runs"), py::arg("gather"), Free());
}
