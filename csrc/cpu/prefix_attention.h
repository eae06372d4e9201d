// prefix_attention on the CPU: causal attention of packed rows over lists of key blocks.
//
// Keys of one path of the trie are cut into blocks of kKeyBlock consecutive depths, aligned to depth 0. A block is
// packed once a call and shared by all spans whose paths run through it. A row's arithmetic walks the blocks of its
// path in order of depth and depends on nothing else, so its result is the same, bit for bit, in any pack and with any
// number of threads: rows beside it in a tile, blocks that are hidden from it, and the cut into tiles leave no trace.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/cpu_features.h"

namespace trace_fast {

constexpr int kKeyBlock = 64;

enum class AttentionDtype { kFloat32, kBfloat16, kFloat16 };

// Rows of a (rows, heads, dim) tensor whose last axis is dense; strides in elements.
struct RowsView {
  const void* data;
  std::int64_t row_stride;
  std::int64_t head_stride;
};

struct PrefixAttentionArgs {
  AttentionDtype dtype;
  RowsView query, key, value;
  void* out;  // (rows, heads, value_dim), dense, in `dtype`; rows in no span are left as they are
  float* lse;  // (rows, heads) log-sum-exp of the scores, sink included, or null
  std::int64_t heads, kv_heads, dim, value_dim;

  const std::int64_t* block_rows;   // (blocks, kKeyBlock) row of each key of a block, -1 behind the path's end
  std::int64_t n_blocks;
  const std::int64_t* path_blocks;  // blocks of paths, by depth
  const std::int64_t* spans;        // (spans, 4): first row, rows, depth of the first row, start in path_blocks
  std::int64_t n_spans;

  double scale;
  std::int64_t window;  // depths that a row sees, its own included; 0: all
  double softcap;       // 0: none
  const float* sinks;   // (heads), or null
  int n_threads;
};

struct AttentionKernel;  // one instruction set's code: prefix_attention_kernel.h

// Names of the kernels that this processor can run for a dtype, fastest first.
std::vector<const char*> prefix_attention_kernels(const CpuFeatures& features, AttentionDtype dtype);

// Runs kernel `name`, one of prefix_attention_kernels(). False when memory for the packed keys cannot be had.
bool prefix_attention(const PrefixAttentionArgs& args, const char* name);

}  // namespace trace_fast
