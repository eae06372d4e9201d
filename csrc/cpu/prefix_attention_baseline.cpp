// What every processor of the architecture runs: 128-bit vectors (SSE2, NEON), or what the compiler makes of them.
#include "cpu/prefix_attention_engine.h"

namespace trace_fast {
extern const AttentionKernel kBaselineAttention = kernel_of<FloatEngine<4, 2>>("baseline");
}
