// What one instruction set's code offers to the driver. Kernels are compiled from prefix_attention_tile.h, a file an
// instruction set, each with its own compiler flags; nothing else is compiled with these flags.
#pragma once

#include <cstdint>

#include "cpu/prefix_attention.h"

namespace trace_fast {

constexpr int kTileRows = 192;  // query rows x heads of one key head that share a pass over the keys

struct AttentionTile {
  std::int64_t row, count, depth;    // query rows row..row+count of one span, the first at `depth`
  const std::int64_t* blocks;        // of its path, from depth 0
};

// Packed keys and values of one key head: block b begins at data + b * block_bytes.
struct PackedKeys {
  char* data;
  std::int64_t block_bytes;
  unsigned char* broken;  // (blocks) whether a value of the block is not finite
};

struct AttentionKernel {
  const char* name;
  std::int64_t (*block_bytes)(const PrefixAttentionArgs&);
  std::int64_t (*scratch_bytes)(const PrefixAttentionArgs&);  // a thread
  void (*pack)(const PrefixAttentionArgs&, std::int64_t kv_head, std::int64_t block, const PackedKeys&);
  void (*run)(const PrefixAttentionArgs&, std::int64_t kv_head, const AttentionTile&, const PackedKeys&, char* scratch);
};

extern const AttentionKernel kBaselineAttention;
#if defined(TRACE_FAST_X86_KERNELS)
extern const AttentionKernel kAvx2Attention;
extern const AttentionKernel kAvx512Attention;
extern const AttentionKernel kAvx512Bf16Attention;
#endif
#if defined(TRACE_FAST_AMX_KERNEL)
extern const AttentionKernel kAmxBf16Attention;
// Whether this processor's tiles give a known product exactly. Only with leave to use them (cpu/amx_permission.h).
bool amx_multiplies_bf16();
#endif

}  // namespace trace_fast
