#include "cpu/prefix_attention.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "cpu/amx_permission.h"
#include "cpu/parallel.h"
#include "cpu/prefix_attention_kernel.h"

namespace trace_fast {
namespace {

constexpr std::int64_t kPackedBytes = std::int64_t{64} << 20;  // key heads are packed together up to this much
constexpr std::size_t kAlignment = 64;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + static_cast<std::int64_t>(kAlignment) - 1) / static_cast<std::int64_t>(kAlignment) *
         static_cast<std::int64_t>(kAlignment);
}

Memory allocate(std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(aligned(std::max<std::int64_t>(bytes, 1)));
  return Memory(static_cast<char*>(std::aligned_alloc(kAlignment, size)));
}

#if defined(TRACE_FAST_EMULATE_AMX)
bool has_amx(const CpuFeatures&) {
  static const bool works = amx_multiplies_bf16();
  return works;
}
#elif defined(TRACE_FAST_AMX_KERNEL)
// Leave for the tiles is asked for once a process, and a chip that does not multiply as expected is not used.
bool has_amx(const CpuFeatures& f) {
  if (!f.amx_tile || !f.amx_bf16) return false;
  static const bool works = request_amx_tiles() && amx_multiplies_bf16();
  return works;
}
#endif

bool runs(const AttentionKernel& kernel, const CpuFeatures& f, AttentionDtype dtype) {
#if defined(TRACE_FAST_X86_KERNELS)
  const bool avx512 = f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl;
  const bool avx512_bf16 = avx512 && f.avx512_bf16 && dtype == AttentionDtype::kBfloat16;
#if defined(TRACE_FAST_AMX_KERNEL)
  if (&kernel == &kAmxBf16Attention) return avx512_bf16 && has_amx(f);
#endif
  if (&kernel == &kAvx512Bf16Attention) return avx512_bf16;
  if (&kernel == &kAvx512Attention) return avx512;
  if (&kernel == &kAvx2Attention) return f.avx2 && f.fma && f.f16c;
#else
  (void)f;
  (void)dtype;
#endif
  return &kernel == &kBaselineAttention;
}

std::vector<const AttentionKernel*> all_kernels() {
  return {
#if defined(TRACE_FAST_AMX_KERNEL)
      &kAmxBf16Attention,
#endif
#if defined(TRACE_FAST_X86_KERNELS)
      &kAvx512Bf16Attention, &kAvx512Attention, &kAvx2Attention,
#endif
      &kBaselineAttention};
}

// Tiles of all spans, those with the longest paths first, so that threads finish together.
std::vector<AttentionTile> cut_tiles(const PrefixAttentionArgs& a) {
  const std::int64_t rows = std::max<std::int64_t>(1, kTileRows / (a.heads / a.kv_heads));
  std::vector<AttentionTile> tiles;
  for (std::int64_t p = 0; p < a.n_spans; ++p) {
    const std::int64_t* span = a.spans + 4 * p;
    for (std::int64_t first = 0; first < span[1]; first += rows) {
      tiles.push_back({span[0] + first, std::min(rows, span[1] - first), span[2] + first, a.path_blocks + span[3]});
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const AttentionTile& x, const AttentionTile& y) {
    return x.count * (x.depth + x.count) > y.count * (y.depth + y.count);
  });
  return tiles;
}

}  // namespace

std::vector<const char*> prefix_attention_kernels(const CpuFeatures& features, AttentionDtype dtype) {
  std::vector<const char*> names;
  for (const AttentionKernel* kernel : all_kernels()) {
    if (runs(*kernel, features, dtype)) names.push_back(kernel->name);
  }
  return names;
}

bool prefix_attention(const PrefixAttentionArgs& a, const char* name) {
  const AttentionKernel* kernel = nullptr;
  for (const AttentionKernel* candidate : all_kernels()) {
    if (std::strcmp(candidate->name, name) == 0) kernel = candidate;
  }
  if (kernel == nullptr) return false;
  const std::vector<AttentionTile> tiles = cut_tiles(a);
  const auto n_tiles = static_cast<std::int64_t>(tiles.size());

  const std::int64_t block_bytes = aligned(kernel->block_bytes(a));
  const std::int64_t head_bytes = std::max<std::int64_t>(block_bytes * a.n_blocks, 1);
  const std::int64_t heads_at_once = std::clamp<std::int64_t>(kPackedBytes / head_bytes, 1, a.kv_heads);
  const std::int64_t scratch_bytes = aligned(kernel->scratch_bytes(a));
  const Memory packed = allocate(head_bytes * heads_at_once);
  const Memory scratch = allocate(scratch_bytes * std::max(a.n_threads, 1));
  const Memory broken = allocate(a.n_blocks * heads_at_once);
  if (!packed || !scratch || !broken) return false;

  const auto keys_of = [&](std::int64_t head) {
    return PackedKeys{packed.get() + head * head_bytes, block_bytes,
                      reinterpret_cast<unsigned char*>(broken.get()) + head * a.n_blocks};
  };
  for (std::int64_t first = 0; first < a.kv_heads; first += heads_at_once) {
    const std::int64_t heads = std::min(heads_at_once, a.kv_heads - first);
    parallel_for(heads * a.n_blocks, a.n_threads, [&](std::int64_t item, int) {
      kernel->pack(a, first + item / a.n_blocks, item % a.n_blocks, keys_of(item / a.n_blocks));
    });
    parallel_for(heads * n_tiles, a.n_threads, [&](std::int64_t item, int thread) {
      const std::int64_t head = item % heads;  // tiles of the same cost follow each other
      kernel->run(a, first + head, tiles[static_cast<std::size_t>(item / heads)], keys_of(head),
                  scratch.get() + thread * scratch_bytes);
    });
  }
  return true;
}

}  // namespace trace_fast
