// AVX-512 F, BW, VL and DQ.
#define HFZ_SET avx512
#define HFZ_WIDTH 16
#include "table.h"
