// AVX-512 with bfloat16 conversion.
#define HFZ_SET avx512bf16
#define HFZ_WIDTH 16
#include "table.h"
