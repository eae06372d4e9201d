// Engines on 512-bit registers. Only what the compiler's vector types would do badly is written out.
#pragma once

#include <immintrin.h>

#include "cpu/prefix_attention_engine.h"

namespace trace_fast {
namespace {

struct Avx512Engine : FloatEngine<16, 4> {
  static Vec max(Vec x, Vec y) { return reinterpret_cast<Vec>(_mm512_max_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y))); }
  static float reduce_max(Vec x) { return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x)); }
  static Vec exp2(Vec x) { return power<true>(x); }

  // 2^x for x <= 0 (a little above is fine); gradual below 2^-126, 0 below 2^-150; -Inf and NaN give NaN.
  // Relative error 1e-7 (kPrecise), else 2.9e-6: far below what weights lose when they are rounded to bfloat16.
  template <bool kPrecise>
  static inline __attribute__((always_inline)) Vec power(Vec argument) {
    const __m512 x = reinterpret_cast<__m512>(argument);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 p;
    if constexpr (kPrecise) {
      p = _mm512_set1_ps(0x1.41fbbap-13f);
      p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.5f3e54p-10f));
      p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.3b2d4cp-7f));
      p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6aee8p-5f));
      p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebfbdcp-3f));
      p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e43p-1f));
    } else {
      p = _mm512_set1_ps(0x1.3a02c8p-7f);
      p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c9fc48p-5f));
      p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ec0378p-3f));
      p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e12cp-1f));
    }
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return reinterpret_cast<Vec>(_mm512_scalef_ps(p, whole));
  }
};

}  // namespace
}  // namespace trace_fast
