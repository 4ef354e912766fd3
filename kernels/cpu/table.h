// The end of each instruction set's file: its row of the table.
#pragma once

#include "quantized.h"
#include "signs.h"
#include "sweeps.h"
#include "updates.h"

namespace hfz {

#define HFZ_TEXT_OF(x) #x
#define HFZ_TEXT(x) HFZ_TEXT_OF(x)
#define HFZ_ROW_OF(set) kernels_##set
#define HFZ_ROW(set) HFZ_ROW_OF(set)

extern const Kernels HFZ_ROW(HFZ_SET);
const Kernels HFZ_ROW(HFZ_SET) = {
    HFZ_TEXT(HFZ_SET),   HFZ_SET::adam,       HFZ_SET::lion,   HFZ_SET::adagrad, HFZ_SET::sgd,      HFZ_SET::lamb_measure, HFZ_SET::lamb_apply,
    HFZ_SET::squares,
    HFZ_SET::cast,       HFZ_SET::accumulate, HFZ_SET::round_stochastically, HFZ_SET::encode, HFZ_SET::decode,  HFZ_SET::quantize, HFZ_SET::dequantize,
    HFZ_SET::sign_compress, HFZ_SET::sign_combine, HFZ_SET::sign_apply,
};

}  // namespace hfz
