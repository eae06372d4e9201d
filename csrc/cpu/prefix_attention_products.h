// The two matrix products of prefix_attention on vectors: every engine but those with matrix instructions of their own.
//
// No standard library here: see prefix_attention_tile.h.
#pragma once

#include <cstdint>

#include "cpu/prefix_attention_kernel.h"

namespace trace_fast {
namespace {

constexpr std::int64_t kDimPart = 128;

// A number that the compiler knows: what takes rows as a Count<> or an int is written once for both.
template <int kNumber>
struct Count {
  constexpr operator int() const { return kNumber; }
};

template <class E>
struct VectorProducts {
  using Element = typename E::Element;
  using Vec = typename E::Vec;
  static constexpr int kGroupRows = 6;  // folded rows that go through scores, softmax and product together
  static constexpr int kRowPad = 1, kDimPad = E::kStep, kColumnPad = 16;  // multiples that sizes are padded to
  static constexpr int kScoreVectors = kKeyBlock / E::kLanes;

  template <class Work>
  static inline __attribute__((always_inline)) void with_rows(std::int64_t rows, const Work& work) {
    switch (rows) {
      case 6: work(Count<6>{}); break;
      case 5: work(Count<5>{}); break;
      case 4: work(Count<4>{}); break;
      case 3: work(Count<3>{}); break;
      case 2: work(Count<2>{}); break;
      case 1: work(Count<1>{}); break;
      default: break;
    }
  }

  // acc[r][v] += sum over steps of a[r] b[v]: kRows rows of a (`a_stride` elements apart), kVectors vectors of b.
  template <int kRows, int kVectors>
  static inline __attribute__((always_inline)) void product(Vec (&acc)[kRows][kVectors], const Element* a,
                                                            std::int64_t a_stride, const Element* b,
                                                            std::int64_t b_stride, std::int64_t steps) {
    for (std::int64_t i = 0; i < steps; ++i) {
      typename E::Operand columns[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) columns[v] = E::load_operand(b + i * b_stride + v * E::kLanes * E::kStep);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const typename E::Operand row = E::broadcast_operand(a + r * a_stride + i * E::kStep);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] = E::multiply_add(acc[r][v], row, columns[v]);
      }
    }
  }

  // Dims are summed in parts of kDimPart: shorter chains of additions lose less.
  template <int kRows>
  static void score(Count<kRows>, std::int64_t dims, const Element* queries, const Element* keys, float* scores) {
    for (std::int64_t dim = 0; dim < dims; dim += kDimPart) {
      const std::int64_t steps = (dims - dim < kDimPart ? dims - dim : kDimPart) / E::kStep;
      for (int first = 0; first < kScoreVectors; first += E::kColumns) {
        Vec acc[kRows][E::kColumns] = {};
        product<kRows, E::kColumns>(acc, queries + dim, dims, keys + dim * kKeyBlock + first * E::kLanes * E::kStep,
                                    kKeyBlock * E::kStep, steps);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
          for (int v = 0; v < E::kColumns; ++v) {
            float* to = scores + r * kKeyBlock + (first + v) * E::kLanes;
            E::store(to, dim == 0 ? acc[r][v] : E::load(to) + acc[r][v]);
          }
        }
      }
    }
  }

  template <int kRows, int kVectors>
  static void weigh_columns(std::int64_t columns, const Element* weights, const Element* values, const float* decay,
                            float* out, std::int64_t column) {
    Vec acc[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = E::load(out + r * columns + column + v * E::kLanes) * E::all(decay[r]);
      }
    }
    product<kRows, kVectors>(acc, weights, kKeyBlock, values + column * E::kStep, columns * E::kStep,
                             kKeyBlock / E::kStep);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) E::store(out + r * columns + column + v * E::kLanes, acc[r][v]);
    }
  }

  // out = out * decay + weights * values, a row each.
  template <int kRows>
  static void weigh(Count<kRows>, std::int64_t columns, const Element* weights, const Element* values,
                    const float* decay, float* out) {
    constexpr int kWide = E::kColumns * E::kLanes;
    std::int64_t column = 0;
    for (; column + kWide <= columns; column += kWide) {
      weigh_columns<kRows, E::kColumns>(columns, weights, values, decay, out, column);
    }
    for (; column < columns; column += E::kLanes) {
      weigh_columns<kRows, 1>(columns, weights, values, decay, out, column);
    }
  }

  // The same of one row, to the bit.
  static void weigh_alone(std::int64_t columns, const Element* weights, const Element* values, float decay,
                          float* out) {
    weigh(Count<1>{}, columns, weights, values, &decay, out);
  }
};

}  // namespace
}  // namespace trace_fast
