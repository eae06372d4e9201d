// AMX tile registers: eight of 16 rows of 64 bytes, a thread each. TDPBF16PS adds to a tile of 16 x 16 float32 the
// product of 16 x 32 and 32 x 16 bfloat16 numbers, the second one with its rows interleaved in pairs.
#pragma once

#include <cstdint>

namespace trace_fast {
namespace {

constexpr int kTileSide = 16;   // rows of every tile, and columns of float32
constexpr int kTileDepth = 32;  // bfloat16 numbers of a row, which one instruction sums

// What LDTILECFG reads.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the processor reads 64 bytes");

// The processor's tiles. Instructions are written out: GCC's own functions paste the number of a tile as text, which a
// template's number is not, and do not tell the compiler that a load reads memory.
struct AmxTiles {
  // Before the first use in a thread; all tiles become zero.
  static void configure() {
    const TileConfig config;
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  // After the last use: the operating system then has no tiles of this thread to save.
  static void release() { __asm__ volatile("tilerelease" : : : "memory"); }

  template <int kTile>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  // Rows lie `stride` bytes apart.
  template <int kTile>
  static void load(const void* from, std::int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(void* to, std::int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  // sums += a b, of tiles of these numbers.
  template <int kSums, int kA, int kB>
  static void dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
  }
};

}  // namespace
}  // namespace trace_fast
