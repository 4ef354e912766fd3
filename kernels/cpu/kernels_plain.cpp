// The baseline of every machine of the platform: SSE2 on x86-64, NEON on aarch64.
#if defined(__aarch64__)
#define HFZ_SET neon
#else
#define HFZ_SET plain
#endif
#define HFZ_WIDTH 4
#include "table.h"
