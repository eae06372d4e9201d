// The engine of bfloat16 products with float32 sums, on 512-bit registers.
#pragma once

#include "cpu/prefix_attention_avx512.h"

namespace trace_fast {
namespace {

struct Bfloat16Engine : Avx512Engine {
  using Element = std::uint16_t;
  static constexpr int kStep = 2;
  using Operand = __m512bh;

  static Element element(AttentionDtype, const void* data, std::int64_t i) {
    return static_cast<const Element*>(data)[i];
  }
  static bool finite(Element x) { return (x & 0x7f80u) != 0x7f80u; }
  static Operand load_operand(const Element* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }
  static Operand broadcast_operand(const Element* from) {
    std::int32_t pair;
    __builtin_memcpy(&pair, from, 4);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
  }
  static Vec multiply_add(Vec acc, Operand a, Operand b) {
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), a, b));
  }
  static Vec exp2(Vec x) { return power<false>(x); }
  static void store_weights(Element* to, const Vec* x) {
    for (int v = 0; v < kKeyBlock / kLanes; v += 2) {
      const __m512bh pair = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(x[v + 1]), reinterpret_cast<__m512>(x[v]));
      _mm512_storeu_si512(to + v * kLanes, reinterpret_cast<__m512i>(pair));
    }
  }
};

}  // namespace
}  // namespace trace_fast
