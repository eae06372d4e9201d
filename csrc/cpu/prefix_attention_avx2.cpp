// Compiled with AVX2, FMA and F16C; empty on other architectures.
#if defined(TRACE_FAST_X86_KERNELS)
#include "cpu/prefix_attention_engine.h"

namespace trace_fast {
extern const AttentionKernel kAvx2Attention = kernel_of<FloatEngine<8, 2>>("avx2");
}
#endif
