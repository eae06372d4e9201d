// Compiled with AVX-512 F, BW, DQ, VL and BF16; empty on other architectures. bfloat16 products, float32 sums.
#if defined(TRACE_FAST_X86_KERNELS)
#include "cpu/prefix_attention_avx512_bf16.h"

namespace trace_fast {
extern const AttentionKernel kAvx512Bf16Attention = kernel_of<Bfloat16Engine>("avx512_bf16");
}
#endif
