// The arguments of kernels, and the table of kernels that each instruction set fills in. Plain
// data: no function here has a body, so the linker cannot substitute code of a wide instruction set
// for that of a narrow one.
#pragma once

#include <cstdint>

namespace hfz {

enum Kind : int { F32 = 0, BF16 = 1, F16 = 2, SIGNED_BLOCKS = 3, UNSIGNED_BLOCKS = 4, SIGNED_DYNAMIC = 5, UNSIGNED_DYNAMIC = 6 };

constexpr int64_t kBlock = 256;   // elements that share a scale
constexpr int64_t kSignBlock = 2048;  // the largest block with a shared scale for one-bit elements
constexpr int64_t kTile = 1024;   // elements processed in the first-level cache at once; whole blocks
constexpr int64_t kPart = 32768;  // elements of one work item of a thread; whole tiles
constexpr int kAhead = 512;  // prefetch distance, in elements
constexpr int64_t kLongPart = 1 << 20;  // the longest work item, where cuts have no effect

// The regions of magnitudes in [0, 1] of a table of 8-bit codes (hf_zero/ops/dynamic_map.py): ranks
// are 0 up to `smallest`, then each region, a decade or 1, has a line that gives the rank of the
// nearest magnitude, up to the rank in `tops`. `ends`: the largest magnitude of each region.
constexpr int kRegions = 8;
struct DynamicRegions {
    float smallest;
    float ends[kRegions], slopes[kRegions], shifts[kRegions], tops[kRegions];
};
struct DynamicMap {
    float values[256];  // of each code
    DynamicRegions regions;
};
extern DynamicMap dynamic_maps[2];  // without and with a sign; set once, at the start

struct Array {
    void* data;  // null: absent
    int kind;
};

struct Moment {
    void* data;
    int kind;
    float* scales;  // of blocks
};

// Elements in blocks of `block` (a power of two, at most kTile), each block with a scale and each
// element with a code of `bits` (4 or 8) in two's complement, as compressed collectives carry them.
// A byte has two codes of four bits, the first in the lower half. With one bit (blocks of at most
// kSignBlock), an element is the scale or minus the scale; the first of eight is the lowest bit of
// its byte.
struct Quantized {
    void* scales;  // bf16; with one bit fp32
    uint8_t* codes;
    int bits;
    int64_t block;
};

// The arguments that all updates share. `first` is the index of element 0 in the whole: tiles and
// stochastic rounding depend on it.
struct Update {
    float* master;
    Array grad;
    float divisor;  // divides the gradient
    bool negate;    // negate the gradient, to ascend
    Array out;
    bool stream;  // write `out` with non-temporal stores
    int64_t first;
    uint64_t key;  // key of stochastic rounding
};

struct Adam {
    Update update;
    Moment mean, square;
    float* largest;  // AMSGrad's, or null
    float keep;      // multiplies the master (decoupled decay)
    float l2;        // times the master, added to the gradient
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float root_scale;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float minus_step_size;
};

struct Lion {
    Update update;
    Moment mean;
    float keep, beta1, one_minus_beta1, beta2, one_minus_beta2, minus_lr;
};

struct Adagrad {
    Update update;
    float* total;
    float l2, eps, minus_step_size;
};

struct Sgd {
    Update update;
    Moment momentum_buffer;  // without data: none
    bool first_step;
    bool nesterov;
    float l2, momentum, one_minus_dampening, minus_lr;
};

// LAMB in two passes: the first updates the moments and adds up squares of the weights and of the update, the second steps.
struct Lamb {
    Update update;
    float *mean, *square;
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay;
    bool eps_inside;  // add eps under the root
    float minus_step_size;  // of the second pass, including the trust ratio
};

struct LambSums {
    double weights, update;
};

// One chunk of momenta in one bit (hf_zero/ops/sign_blocks.py). Elements from `valid` on are
// padding.
struct SignCompress {
    Quantized out, momentum;
    float* error;
    Array grad;
    float beta, factor;
    int64_t valid;
};

struct SignCombine {
    Quantized out, came;  // the first of `rows`, `stride` bytes apart
    int64_t rows, stride;
    Quantized momentum;
    float* average;
    float beta, inverse_beta, share;
    int64_t valid;
};

struct SignApply {
    float* weights;
    Quantized momentum;
    const int8_t* exponents;
    float keep, step;
};

// Each call computes elements [begin, end); the ranges of one call never overlap.
struct Kernels {
    const char* name;
    void (*adam)(const Adam&, int64_t begin, int64_t end);
    void (*lion)(const Lion&, int64_t begin, int64_t end);
    void (*adagrad)(const Adagrad&, int64_t begin, int64_t end);
    void (*sgd)(const Sgd&, int64_t begin, int64_t end);
    LambSums (*lamb_measure)(const Lamb&, int64_t begin, int64_t end);
    void (*lamb_apply)(const Lamb&, int64_t begin, int64_t end);
    double (*squares)(const Array&, int64_t begin, int64_t end);
    void (*cast)(const Array& out, const Array& source, float scale, bool stream, int64_t begin, int64_t end);
    void (*accumulate)(float* out, const Array& source, float scale, int64_t begin, int64_t end);
    // Round to bf16 stochastically: `first` is the index of element 0, on which random bits depend.
    void (*round_stochastically)(uint16_t* out, const float* source, uint64_t key, int64_t first, int64_t begin, int64_t end);
    void (*encode)(const Moment& out, const float* source, int64_t begin, int64_t end);
    void (*decode)(float* out, const Moment& source, int64_t begin, int64_t end);
    // Quantize `source`, or its difference to `minus` if there is one.
    void (*quantize)(const Quantized& out, const Array& source, const Array& minus, int64_t begin, int64_t end);
    // Write into `out`, or add to it.
    void (*dequantize)(const Array& out, const Quantized& source, bool add, int64_t begin, int64_t end);
    void (*sign_compress)(const SignCompress&, int64_t begin, int64_t end);
    void (*sign_combine)(const SignCombine&, int64_t begin, int64_t end);
    void (*sign_apply)(const SignApply&, int64_t begin, int64_t end);
};

}  // namespace hfz
