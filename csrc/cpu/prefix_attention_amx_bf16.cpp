// Compiled with AVX-512 F, BW, DQ, VL and BF16, and an assembler that knows AMX; empty elsewhere. Products on tiles,
// the rest on vectors.
#if defined(TRACE_FAST_AMX_KERNEL)
#include "cpu/prefix_attention_amx.h"
#include "cpu/prefix_attention_avx512_bf16.h"
#if defined(TRACE_FAST_EMULATE_AMX)
#include "cpu/amx_tiles_emulated.h"
#endif

namespace trace_fast {
namespace {

#if defined(TRACE_FAST_EMULATE_AMX)
using Tiles = EmulatedTiles;
#else
using Tiles = AmxTiles;
#endif
using Products = TileProducts<Bfloat16Engine, Tiles>;
using Kernel = TileKernel<Bfloat16Engine, Products>;

void run(const PrefixAttentionArgs& a, std::int64_t kv_head, const AttentionTile& tile, const PackedKeys& packed,
         char* scratch) {
  Tiles::configure();
  Kernel::run(a, kv_head, tile, packed, scratch);
  Tiles::release();
}

}  // namespace

extern const AttentionKernel kAmxBf16Attention = {
    "amx_bf16", &Kernel::block_bytes, &Kernel::scratch_bytes, &Kernel::pack, &run};

bool amx_multiplies_bf16() {
  constexpr int kSide = 2 * kTileSide, kDepth = 2 * kTileDepth;  // uses all eight tiles
  alignas(64) std::uint16_t a[kSide][kDepth], b[kDepth / 2][kSide][2];
  alignas(64) float sums[kSide][kSide], expected[kSide][kSide];
  // Integers below 16 in steps of primes, so that no two rows or columns are alike; every sum is far below 2^24: exact.
  const auto left = [](int row, int k) { return static_cast<float>((row * 7 + k * 3) % 31 - 15); };
  const auto right = [](int k, int column) { return static_cast<float>((column * 5 + k * 11) % 29 - 14); };
  for (int i = 0; i < kSide; ++i) {
    for (int k = 0; k < kDepth; ++k) {
      a[i][k] = to_bfloat16(left(i, k));
      b[k / 2][i][k % 2] = to_bfloat16(right(k, i));
    }
    for (int j = 0; j < kSide; ++j) {
      sums[i][j] = expected[i][j] = static_cast<float>(i - 2 * j);
      for (int k = 0; k < kDepth; ++k) expected[i][j] += left(i, k) * right(k, j);
    }
  }
  Tiles::configure();
  Products::multiply<2, 2>(&a[0][0], kDepth, &b[0][0][0], kSide, kDepth, &sums[0][0], kSide, true);
  Tiles::release();
  return __builtin_memcmp(sums, expected, sizeof(sums)) == 0;
}

}  // namespace trace_fast
#endif
