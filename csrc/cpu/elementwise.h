// Logarithm and exponential as straight-line code that compilers turn into vector code inside a loop, and the choice of
// the instruction set for such loops. All in double: both functions are good to about one unit in the last place, so a
// float32 caller that rounds its result once is off by half a unit.
//
// Include this header first. What follows it is compiled
// - without fused multiply-adds: a compiler fuses the vector part of a loop and its remainder differently, and a
//   number's bits would depend on its place in a batch. They are the same on every instruction set, too;
// - under the assumption that floating-point operations raise no traps (nothing here enables them), without which GCC
//   does not turn a choice between two numbers into vector code.
#pragma once

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("no-trapping-math", "fp-contract=off")
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#endif

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/cpu_features.h"

#if defined(__GNUC__)
#define TRACE_FAST_INLINE inline __attribute__((always_inline))
#else
#define TRACE_FAST_INLINE inline
#endif

// A loop is written once, as an always-inlined body, and called from one function an instruction set.
#if defined(__GNUC__) && defined(__x86_64__)
#define TRACE_FAST_TARGETS 1
#define TRACE_FAST_AVX2 __attribute__((target("avx2,fma")))
#define TRACE_FAST_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#endif

namespace trace_fast {

enum class ElementwiseKernel { kBaseline, kAvx2, kAvx512 };

// Names of the instruction sets that such loops can use on this processor, fastest first; the last is the baseline.
inline std::vector<std::string> elementwise_kernels() {
  std::vector<std::string> names;
#if defined(TRACE_FAST_TARGETS)
  const CpuFeatures f = detect_cpu_features();
  const bool avx2 = f.avx2 && f.fma;
  if (avx2 && f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl) names.push_back("avx512");
  if (avx2) names.push_back("avx2");
#endif
  names.push_back("baseline");
  return names;
}

TRACE_FAST_INLINE std::uint64_t bits_of(double x) {
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

TRACE_FAST_INLINE double from_bits(std::uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// ln 2 in two parts: a multiple of the first by an exponent is exact.
constexpr double kLn2High = 6.93147180369123816490e-01;
constexpr double kLn2Low = 1.90821492927058770002e-10;

// log(1 + x) for finite x >= 0. 1 + x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); log(1 + f) is the series of
// 2 atanh(s), s = f / (2 + f), s^2 < 0.0295, whose first neglected term is below 2^-57 of the sum.
TRACE_FAST_INLINE double log1p_nonnegative(double x) {
  const double u = 1.0 + x;
  const double lost_large = 1.0 - (u - x), lost_small = x - (u - 1.0);  // what rounding u lost, exactly
  const double lost = x >= 1.0 ? lost_large : lost_small;
  const std::uint64_t e = (bits_of(u) - 0x3fe6a09e667f3bcdULL) >> 52;  // bits of sqrt(1/2)
  const double exponent = from_bits(0x4330000000000000ULL | e) - 4503599627370496.0;  // 2^52 + e, less 2^52
  const double f = (from_bits(bits_of(u) - (e << 52)) - 1.0) + lost * from_bits((1023 - e) << 52);
  const double s = f / (2.0 + f), z = s * s;
  double series = 2.0 / 23;
  series = series * z + 2.0 / 21;
  series = series * z + 2.0 / 19;
  series = series * z + 2.0 / 17;
  series = series * z + 2.0 / 15;
  series = series * z + 2.0 / 13;
  series = series * z + 2.0 / 11;
  series = series * z + 2.0 / 9;
  series = series * z + 2.0 / 7;
  series = series * z + 2.0 / 5;
  series = series * z + 2.0 / 3;
  return exponent * kLn2High + ((f - s * (f - series * z)) + exponent * kLn2Low);
}

// exp(x), x clamped to [-708, 709], where the result is a normal number. x = n ln 2 + r, |r| <= ln(2) / 2; the series'
// first neglected term is below 2^-57.
TRACE_FAST_INLINE double exp_clamped(double x) {
  x = x < -708.0 ? -708.0 : x;
  x = x > 709.0 ? 709.0 : x;
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, kept in the low bits
  const double shifted = x * 1.44269504088896338700 + kShift;
  const double n = shifted - kShift;
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double series = 1.0 / 6227020800.0;
  series = series * r + 1.0 / 479001600.0;
  series = series * r + 1.0 / 39916800.0;
  series = series * r + 1.0 / 3628800.0;
  series = series * r + 1.0 / 362880.0;
  series = series * r + 1.0 / 40320.0;
  series = series * r + 1.0 / 5040.0;
  series = series * r + 1.0 / 720.0;
  series = series * r + 1.0 / 120.0;
  series = series * r + 1.0 / 24.0;
  series = series * r + 1.0 / 6.0;
  series = series * r + 0.5;
  const double mantissa = 1.0 + (r + r * r * series);
  return from_bits(bits_of(mantissa) + (bits_of(shifted) << 52));
}

}  // namespace trace_fast
