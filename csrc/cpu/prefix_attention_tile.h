// One tile of prefix_attention, for any vector engine E and any matrix products P (P::score, P::weigh): included by one
// file an instruction set, never twice in one.
//
// A tile is a run of query rows of one span, times the query heads of one key head, folded: folded row = token * group
// + head in group. For every block of keys and every few folded rows: scores = q k^T (a small matrix product), running
// softmax in base 2 on them, out += p v (another one). Scores and sums are float32.
//
// Packed layouts, S = Engine::kStep elements that one product step takes:
//   keys    [dim / S][kKeyBlock][S]       values  [kKeyBlock / S][padded value dim][S]       queries [row][dim]
// Dims are padded with zeros to a multiple of P::kDimPad, value dims to one of P::kColumnPad.
//
// No standard library here: an inline function compiled with these flags could be linked into code that runs elsewhere.
#pragma once

#include <cstdint>

#include "cpu/half_floats.h"
#include "cpu/prefix_attention_kernel.h"
#include "cpu/prefix_attention_products.h"

namespace trace_fast {
namespace {

constexpr float kHidden = -0x1p+100f;  // score of a hidden key: finite, so that no difference of two is NaN
constexpr float kNothingSeen = -0x1p+60f;  // a largest exponent below this is of hidden keys only
constexpr double kLog2E = 1.44269504088896340736;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

inline float load_element(AttentionDtype dtype, const void* data, std::int64_t i) {
  switch (dtype) {
    case AttentionDtype::kFloat32: return static_cast<const float*>(data)[i];
    case AttentionDtype::kBfloat16: return from_bfloat16(static_cast<const std::uint16_t*>(data)[i]);
    case AttentionDtype::kFloat16: return from_float16(static_cast<const std::uint16_t*>(data)[i]);
  }
  return 0;
}

inline void store_element(AttentionDtype dtype, void* data, std::int64_t i, float x) {
  switch (dtype) {
    case AttentionDtype::kFloat32: static_cast<float*>(data)[i] = x; break;
    case AttentionDtype::kBfloat16: static_cast<std::uint16_t*>(data)[i] = to_bfloat16(x); break;
    case AttentionDtype::kFloat16: static_cast<std::uint16_t*>(data)[i] = to_float16(x); break;
  }
}

template <class E, class P>
struct TileKernel {
  using Element = typename E::Element;
  using Vec = typename E::Vec;
  static constexpr int kScoreVectors = kKeyBlock / E::kLanes;
  static constexpr int kGroupRows = P::kGroupRows;

  struct Sizes {
    std::int64_t dim, value_dim;       // padded
    std::int64_t key_elements, value_elements;  // of a packed block
    explicit Sizes(const PrefixAttentionArgs& a)
        : dim(round_up(a.dim, P::kDimPad)),
          value_dim(round_up(a.value_dim, P::kColumnPad)),
          key_elements(dim * kKeyBlock),
          value_elements(value_dim * kKeyBlock) {}
  };

  static std::int64_t block_bytes(const PrefixAttentionArgs& a) {
    const Sizes s(a);
    constexpr std::int64_t kBytes = sizeof(Element);
    return round_up(s.key_elements * kBytes, 64) + s.value_elements * kBytes;
  }

  // Pieces of a thread's scratch; `base` null: only their size.
  struct Scratch {
    Element *queries, *weights, *values;
    float *out, *peak, *total, *scores;
    std::int64_t bytes;
    Scratch(const PrefixAttentionArgs& a, char* base) : bytes(0) {
      const Sizes s(a);
      // a tile has at least one token, however many heads fold into it
      const std::int64_t group = a.heads / a.kv_heads;
      const std::int64_t rows = round_up(group > kTileRows ? group : kTileRows, kGroupRows);
      queries = take<Element>(base, rows * s.dim);
      weights = take<Element>(base, kGroupRows * kKeyBlock);
      values = take<Element>(base, s.value_elements);
      out = take<float>(base, rows * s.value_dim);
      peak = take<float>(base, rows);
      total = take<float>(base, rows * E::kLanes);
      scores = take<float>(base, kGroupRows * kKeyBlock);
    }
    template <class T>
    T* take(char* base, std::int64_t count) {
      T* here = reinterpret_cast<T*>(base + bytes);
      bytes += round_up(count * static_cast<std::int64_t>(sizeof(T)), 64);
      return here;
    }
  };

  static std::int64_t scratch_bytes(const PrefixAttentionArgs& a) { return Scratch(a, nullptr).bytes; }

  static const Element* keys_of(const PackedKeys& packed, std::int64_t block) {
    return reinterpret_cast<const Element*>(packed.data + block * packed.block_bytes);
  }
  static const Element* values_of(const PackedKeys& packed, const Sizes& s, std::int64_t block) {
    return reinterpret_cast<const Element*>(packed.data + block * packed.block_bytes +
                                            round_up(s.key_elements * sizeof(Element), 64));
  }

  static void pack(const PrefixAttentionArgs& a, std::int64_t kv_head, std::int64_t block, const PackedKeys& packed) {
    const Sizes s(a);
    auto* keys = const_cast<Element*>(keys_of(packed, block));
    auto* values = const_cast<Element*>(values_of(packed, s, block));
    bool finite = true;
    for (int i = 0; i < kKeyBlock; ++i) {
      const std::int64_t row = a.block_rows[block * kKeyBlock + i];
      const std::int64_t key = row * a.key.row_stride + kv_head * a.key.head_stride;
      const std::int64_t value = row * a.value.row_stride + kv_head * a.value.head_stride;
      for (std::int64_t d = 0; d < s.dim; ++d) {
        Element& to = keys[(d / E::kStep * kKeyBlock + i) * E::kStep + d % E::kStep];
        to = row >= 0 && d < a.dim ? E::element(a.dtype, a.key.data, key + d) : Element{};
      }
      for (std::int64_t d = 0; d < s.value_dim; ++d) {
        Element& to = values[(i / E::kStep * s.value_dim + d) * E::kStep + i % E::kStep];
        to = row >= 0 && d < a.value_dim ? E::element(a.dtype, a.value.data, value + d) : Element{};
        finite &= E::finite(to);
      }
    }
    packed.broken[block] = !finite;
  }

  // Running softmax of some rows over one block: `scores` become weights. decay: what earlier sums are multiplied by.
  // Scaling is fused into the exponent, after the largest score was sought, unless a cap or the scale's sign forbids
  // it; never because of what the row's neighbours see: a row's arithmetic is its own.
  template <class Rows>
  static void soften(Rows rows, const PrefixAttentionArgs& a, float* scores, bool whole, const std::int64_t* low,
                     const std::int64_t* high, Element* weights, float* peak, float* total, float* decay) {
    const bool scaled = a.softcap > 0 || a.scale <= 0;
    const Vec factor = E::all(scaled ? 1.0f : static_cast<float>(a.scale * kLog2E));
    constexpr int kPadded = round_up(kGroupRows, 16);  // whole vectors
    float change[kPadded] = {}, base[kPadded] = {};
    for (int r = 0; r < rows; ++r) {
      float* row = scores + r * kKeyBlock;
      if (scaled) scale_scores(a, row);
      if (!whole) hide(row, low[r], high[r]);
      Vec highest = E::load(row);
#pragma GCC unroll 16
      for (int v = 1; v < kScoreVectors; ++v) highest = E::max(highest, E::load(row + v * E::kLanes));
      const float now = E::reduce_max(highest) * E::first(factor);
      base[r] = now > peak[r] ? now : peak[r];
      change[r] = peak[r] - base[r];
      peak[r] = base[r];
      if (base[r] < kNothingSeen) base[r] = 0;
    }
    for (int i = 0; i < kPadded; i += E::kLanes) E::store(change + i, E::exp2(E::load(change + i)));
    for (int r = 0; r < rows; ++r) {
      const float* row = scores + r * kKeyBlock;
      const Vec shift = E::all(base[r]);
      Vec x[kScoreVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kScoreVectors; ++v) x[v] = E::exp2(E::load(row + v * E::kLanes) * factor - shift);
      Vec sum = x[0];
#pragma GCC unroll 16
      for (int v = 1; v < kScoreVectors; ++v) sum = sum + x[v];
      E::store_weights(weights + r * kKeyBlock, x);
      decay[r] = change[r];
      E::store(total + r * E::kLanes, E::load(total + r * E::kLanes) * E::all(change[r]) + sum);
    }
  }

  // Scores of one row as exponents of 2, capped where there is a cap.
  static void scale_scores(const PrefixAttentionArgs& a, float* scores) {
    const bool capped = a.softcap > 0;
    const Vec factor = E::all(static_cast<float>(capped ? a.scale / a.softcap : a.scale * kLog2E));
    const Vec back = E::all(static_cast<float>(a.softcap * kLog2E));
    for (int v = 0; v < kScoreVectors; ++v) {
      const Vec x = E::load(scores + v * E::kLanes) * factor;
      E::store(scores + v * E::kLanes, capped ? E::tanh(x) * back : x);
    }
  }

  // Removes all keys of the block but low..high.
  static void hide(float* scores, std::int64_t low, std::int64_t high) {
    const Vec lowest = E::all(static_cast<float>(low)), highest = E::all(static_cast<float>(high));
    for (int v = 0; v < kScoreVectors; ++v) {
      const Vec place = E::places() + E::all(static_cast<float>(v * E::kLanes));
      const Vec x = E::load(scores + v * E::kLanes);
      E::store(scores + v * E::kLanes, E::within(place, lowest, highest, x, E::all(kHidden)));
    }
  }

  // The rows of `weights` see different keys, and a value that is not finite would reach those that do not see it.
  static void weigh_broken(const Sizes& s, int rows, const std::int64_t* low, const std::int64_t* high,
                           const Element* weights, const Element* values, const float* decay, Element* copy,
                           float* out) {
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < kKeyBlock; ++i) {
        const bool seen = i >= low[r] && i <= high[r];
        for (std::int64_t d = 0; d < s.value_dim; ++d) {
          const std::int64_t at = (i / E::kStep * s.value_dim + d) * E::kStep + i % E::kStep;
          copy[at] = seen ? values[at] : Element{};
        }
      }
      P::weigh_alone(s.value_dim, weights + r * kKeyBlock, copy, decay[r], out + r * s.value_dim);
    }
  }

  template <class Rows>
  static void step(Rows rows, const PrefixAttentionArgs& a, const Sizes& s, const Scratch& w, std::int64_t first_row,
                   std::int64_t first_key, const std::int64_t* depths, const Element* keys, const Element* values,
                   bool broken) {
    std::int64_t low[kGroupRows], high[kGroupRows];
    bool any = false, whole = true;
    for (int r = 0; r < rows; ++r) {
      low[r] = a.window > 0 ? depths[r] - a.window + 1 - first_key : 0;
      if (low[r] < 0) low[r] = 0;
      high[r] = depths[r] - first_key;
      if (high[r] > kKeyBlock - 1) high[r] = kKeyBlock - 1;
      any |= low[r] <= high[r];
      whole &= low[r] == 0 && high[r] == kKeyBlock - 1;
    }
    if (!any) return;
    P::score(rows, s.dim, w.queries + first_row * s.dim, keys, w.scores);
    float decay[kGroupRows];
    soften(rows, a, w.scores, whole, low, high, w.weights, w.peak + first_row, w.total + first_row * E::kLanes, decay);
    float* out = w.out + first_row * s.value_dim;
    if (broken) {
      weigh_broken(s, rows, low, high, w.weights, values, decay, w.values, out);
    } else {
      P::weigh(rows, s.value_dim, w.weights, values, decay, out);
    }
  }

  template <class T>
  static void clear(T* numbers, std::int64_t count) {
    __builtin_memset(numbers, 0, static_cast<std::size_t>(count) * sizeof(T));
  }

  static void run(const PrefixAttentionArgs& a, std::int64_t kv_head, const AttentionTile& tile,
                  const PackedKeys& packed, char* scratch) {
    const Sizes s(a);
    const Scratch w(a, scratch);
    const std::int64_t group = a.heads / a.kv_heads;
    const std::int64_t rows = tile.count * group;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t head = kv_head * group + r % group;
      const std::int64_t from = (tile.row + r / group) * a.query.row_stride + head * a.query.head_stride;
      for (std::int64_t d = 0; d < s.dim; ++d) {
        w.queries[r * s.dim + d] = d < a.dim ? E::element(a.dtype, a.query.data, from + d) : Element{};
      }
      w.peak[r] = kHidden;
    }
    // Rows that fill the last ones up take part in the products alone, where no row touches another.
    const std::int64_t padded = round_up(rows, P::kRowPad);
    if (padded > rows) {
      clear(w.queries + rows * s.dim, (padded - rows) * s.dim);
      clear(w.weights, kGroupRows * kKeyBlock);
    }
    clear(w.out, padded * s.value_dim);
    clear(w.total, rows * E::kLanes);

    const std::int64_t last = (tile.depth + tile.count - 1) / kKeyBlock;
    const std::int64_t lowest = a.window > 0 ? tile.depth - a.window + 1 : 0;
    for (std::int64_t j = lowest > 0 ? lowest / kKeyBlock : 0; j <= last; ++j) {
      const std::int64_t block = tile.blocks[j];
      const Element* keys = keys_of(packed, block);
      const Element* values = values_of(packed, s, block);
      const bool broken = packed.broken[block] != 0;
      for (std::int64_t first = 0; first < rows; first += kGroupRows) {
        std::int64_t depths[kGroupRows];
        const std::int64_t count = rows - first < kGroupRows ? rows - first : kGroupRows;
        for (std::int64_t r = 0; r < count; ++r) depths[r] = tile.depth + (first + r) / group;
        P::with_rows(count, [&](auto known) {
          step(known, a, s, w, first, j * kKeyBlock, depths, keys, values, broken);
        });
      }
    }
    finish(a, s, w, kv_head, tile, rows, group);
  }

  static void finish(const PrefixAttentionArgs& a, const Sizes& s, const Scratch& w, std::int64_t kv_head,
                     const AttentionTile& tile, std::int64_t rows, std::int64_t group) {
    constexpr float kLn2 = 0.693147180559945309417f;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t head = kv_head * group + r % group;
      const std::int64_t at = (tile.row + r / group) * a.heads + head;
      float total = 0, peak = w.peak[r], decay = 1;
      for (int i = 0; i < E::kLanes; ++i) total += w.total[r * E::kLanes + i];
      if (a.sinks != nullptr) {
        const float sink = static_cast<float>(a.sinks[head] * kLog2E);
        const float higher = sink > peak ? sink : peak;
        decay = __builtin_exp2f(peak - higher);
        total = total * decay + __builtin_exp2f(sink - higher);
        peak = higher;
      }
      const float factor = decay / total;
      for (std::int64_t d = 0; d < a.value_dim; ++d) {
        store_element(a.dtype, a.out, at * a.value_dim + d, w.out[r * s.value_dim + d] * factor);
      }
      if (a.lse != nullptr) a.lse[at] = (peak + __builtin_log2f(total)) * kLn2;
    }
  }
};

template <class E>
constexpr AttentionKernel kernel_of(const char* name) {
  using Kernel = TileKernel<E, VectorProducts<E>>;
  return {name, &Kernel::block_bytes, &Kernel::scratch_bytes, &Kernel::pack, &Kernel::run};
}

}  // namespace
}  // namespace trace_fast
