// Compiled with AVX-512 F, BW, DQ, VL; empty on other architectures.
#if defined(TRACE_FAST_X86_KERNELS)
#include "cpu/prefix_attention_avx512.h"

namespace trace_fast {
extern const AttentionKernel kAvx512Attention = kernel_of<Avx512Engine>("avx512");
}
#endif
