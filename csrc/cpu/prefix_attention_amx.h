// The matrix products of prefix_attention on AMX tiles (`Tiles`: the processor's, or their emulation). They have never
// run on a chip, as none with AMX was at hand: tests run this source on the emulation, and look for the instructions in
// the compiled code.
//
// Packed keys and values are pairs of rows, interleaved: just what the second operand of TDPBF16PS is.
#pragma once

#include "cpu/amx_tiles.h"
#include "cpu/prefix_attention_products.h"

namespace trace_fast {
namespace {

template <class E, class Tiles>
struct TileProducts {
  using Element = typename E::Element;
  static_assert(sizeof(Element) == 2 && E::kStep == 2, "pairs of bfloat16 numbers");
  static constexpr int kGroupRows = 2 * kTileSide;  // two by two tiles of sums: each loaded tile is used twice
  static constexpr int kRowPad = kTileSide, kDimPad = kTileDepth, kColumnPad = 2 * kTileSide;

  template <class Work>
  static void with_rows(std::int64_t rows, const Work& work) {
    work(static_cast<int>(rows));
  }

  static void score(int rows, std::int64_t dims, const Element* queries, const Element* keys, float* scores) {
    if (rows > kTileSide) {
      for (int column = 0; column < kKeyBlock; column += 2 * kTileSide) {
        multiply<2, 2>(queries, dims, keys + 2 * column, kKeyBlock, dims, scores + column, kKeyBlock, false);
      }
    } else {
      multiply<1, 4>(queries, dims, keys, kKeyBlock, dims, scores, kKeyBlock, false);
    }
  }

  // out = out * decay + weights * values, a row each.
  static void weigh(int rows, std::int64_t columns, const Element* weights, const Element* values, const float* decay,
                    float* out) {
    for (int r = 0; r < rows; ++r) fade(columns, decay[r], out + r * columns);
    std::int64_t column = 0;
    if (rows > kTileSide) {
      for (; column < columns; column += 2 * kTileSide) {
        multiply<2, 2>(weights, kKeyBlock, values + 2 * column, columns, kKeyBlock, out + column, columns, true);
      }
    } else {
      for (; column + 4 * kTileSide <= columns; column += 4 * kTileSide) {
        multiply<1, 4>(weights, kKeyBlock, values + 2 * column, columns, kKeyBlock, out + column, columns, true);
      }
      for (; column < columns; column += 2 * kTileSide) {
        multiply<1, 2>(weights, kKeyBlock, values + 2 * column, columns, kKeyBlock, out + column, columns, true);
      }
    }
  }

  // The same of one row, to the bit: it lies in a tile by itself.
  static void weigh_alone(std::int64_t columns, const Element* weights, const Element* values, float decay,
                          float* out) {
    fade(columns, decay, out);
    alignas(64) Element row[kTileSide * kKeyBlock] = {};
    alignas(64) float sums[kTileSide * kColumnPad] = {};
    __builtin_memcpy(row, weights, kKeyBlock * sizeof(Element));
    for (std::int64_t column = 0; column < columns; column += kColumnPad) {
      __builtin_memcpy(sums, out + column, kColumnPad * sizeof(float));
      multiply<1, 2>(row, kKeyBlock, values + 2 * column, columns, kKeyBlock, sums, kColumnPad, true);
      __builtin_memcpy(out + column, sums, kColumnPad * sizeof(float));
    }
  }

  // c = a b, or c + a b, of kRows by kColumns tiles and `depth` numbers a sum; strides in elements, that of b in pairs.
  // An instruction sums its 32 numbers before it adds them to a tile, so chains of additions are short at any depth.
  template <int kRows, int kColumns>
  static void multiply(const Element* a, std::int64_t a_stride, const Element* b, std::int64_t b_stride,
                       std::int64_t depth, float* c, std::int64_t c_stride, bool add) {
    static_assert(kRows <= 2 && kRows * kColumns <= 4, "tiles 0 to 3 are sums, 4 and 5 of a, 6 and 7 of b");
    begin<kRows, kColumns, 0>(c, c_stride, add);
    for (std::int64_t k = 0; k < depth; k += kTileDepth) {
      Tiles::template load<4>(a + k, a_stride * kBytes);
      if constexpr (kRows == 2) Tiles::template load<5>(a + kTileSide * a_stride + k, a_stride * kBytes);
      add_columns<kRows, kColumns, 0>(b + k * b_stride, b_stride * 2 * kBytes);
    }
    end<kRows, kColumns, 0>(c, c_stride);
  }

 private:
  static constexpr std::int64_t kBytes = sizeof(Element);

  static void fade(std::int64_t columns, float decay, float* out) {
    for (std::int64_t i = 0; i < columns; i += E::kLanes) E::store(out + i, E::load(out + i) * E::all(decay));
  }

  // Where the sums of a tile lie.
  template <int kColumns, int kSums>
  static float* place(float* c, std::int64_t stride) {
    return c + kSums / kColumns * kTileSide * stride + kSums % kColumns * kTileSide;
  }

  template <int kRows, int kColumns, int kSums>
  static void begin(float* c, std::int64_t stride, bool add) {
    if constexpr (kSums < kRows * kColumns) {
      if (add) {
        Tiles::template load<kSums>(place<kColumns, kSums>(c, stride), stride * 4);
      } else {
        Tiles::template zero<kSums>();
      }
      begin<kRows, kColumns, kSums + 1>(c, stride, add);
    }
  }

  template <int kRows, int kColumns, int kColumn>
  static void add_columns(const Element* b, std::int64_t stride) {
    if constexpr (kColumn < kColumns) {
      constexpr int kB = 6 + kColumn % 2;
      Tiles::template load<kB>(b + kColumn * 2 * kTileSide, stride);
      Tiles::template dot<kColumn, 4, kB>();
      if constexpr (kRows == 2) Tiles::template dot<kColumns + kColumn, 5, kB>();
      add_columns<kRows, kColumns, kColumn + 1>(b, stride);
    }
  }

  template <int kRows, int kColumns, int kSums>
  static void end(float* c, std::int64_t stride) {
    if constexpr (kSums < kRows * kColumns) {
      Tiles::template store<kSums>(place<kColumns, kSums>(c, stride), stride * 4);
      end<kRows, kColumns, kSums + 1>(c, stride);
    }
  }
};

}  // namespace
}  // namespace trace_fast
