// AmxTiles in plain C++, for tests of a kernel's own source on a processor without AMX (CMake option
// TRACE_FAST_EMULATE_AMX). Numbers are those that Intel's manual describes for TDPBF16PS: even and odd columns are
// summed apart in float32, one fused multiplication and addition after the other, then added together and to the tile;
// denormal numbers count as zero. What the processor refuses ends the program, as it does there.
#pragma once

#include "cpu/amx_tiles.h"
#include "cpu/half_floats.h"

namespace trace_fast {
namespace {

struct EmulatedTiles {
  static void configure() {
    const TileConfig config;
    need(config.palette == 1 && config.start_row == 0);
    for (int t = 0; t < 16; ++t) {
      need(config.row_bytes[t] == (t < kTiles ? sizeof(State::bytes[0][0]) : 0));
      need(config.rows[t] == (t < kTiles ? kTileSide : 0));
    }
    __builtin_memset(&state(), 0, sizeof(State));
    state().configured = true;
  }
  static void release() { state().configured = false; }

  template <int kTile>
  static void zero() {
    __builtin_memset(tile<kTile>(), 0, sizeof(State::bytes[0]));
  }
  template <int kTile>
  static void load(const void* from, std::int64_t stride) {
    for (int r = 0; r < kTileSide; ++r) {
      __builtin_memcpy(tile<kTile>() + r, static_cast<const char*>(from) + r * stride, sizeof(State::bytes[0][0]));
    }
  }
  template <int kTile>
  static void store(void* to, std::int64_t stride) {
    for (int r = 0; r < kTileSide; ++r) {
      __builtin_memcpy(static_cast<char*>(to) + r * stride, tile<kTile>() + r, sizeof(State::bytes[0][0]));
    }
  }

  template <int kSums, int kA, int kB>
  static void dot() {
    static_assert(kSums != kA && kSums != kB && kA != kB, "the processor takes three different tiles");
    std::uint16_t a[kTileSide][kTileDepth], b[kTileSide][kTileDepth];
    float sums[kTileSide][kTileSide];
    __builtin_memcpy(a, tile<kA>(), sizeof(a));
    __builtin_memcpy(b, tile<kB>(), sizeof(b));
    __builtin_memcpy(sums, tile<kSums>(), sizeof(sums));
    for (int m = 0; m < kTileSide; ++m) {
      float even[kTileSide] = {}, odd[kTileSide] = {};
      for (int k = 0; k < kTileSide; ++k) {
        const float first = number(a[m][2 * k]), second = number(a[m][2 * k + 1]);
        for (int n = 0; n < kTileSide; ++n) {
          even[n] = flushed(__builtin_fmaf(first, number(b[k][2 * n]), even[n]));
          odd[n] = flushed(__builtin_fmaf(second, number(b[k][2 * n + 1]), odd[n]));
        }
      }
      for (int n = 0; n < kTileSide; ++n) {
        sums[m][n] = flushed(flushed(sums[m][n]) + flushed(even[n] + odd[n]));
      }
    }
    __builtin_memcpy(tile<kSums>(), sums, sizeof(sums));
  }

 private:
  static constexpr int kTiles = 8;
  struct State {
    char bytes[kTiles][kTileSide][64];
    bool configured;
  };

  static State& state() {  // registers are a thread's own
    static thread_local State registers;
    return registers;
  }
  static void need(bool allowed) {
    if (!allowed) __builtin_trap();
  }
  template <int kTile>
  static char (*tile())[64] {
    static_assert(kTile >= 0 && kTile < kTiles, "there are eight tiles");
    need(state().configured);
    return state().bytes[kTile];
  }
  static float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
  static float number(std::uint16_t bfloat16) { return flushed(from_bfloat16(bfloat16)); }
};

}  // namespace
}  // namespace trace_fast
