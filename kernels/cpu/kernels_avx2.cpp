// AVX2 with F16C.
#define HFZ_SET avx2
#define HFZ_WIDTH 8
#include "table.h"
