// bfloat16 and float16 to and from float32, to nearest even, with whatever instructions the including file may use.
//
// No standard library here: an inline function compiled with other flags could be linked into code that runs elsewhere.
#pragma once

#include <cstdint>

namespace trace_fast {
namespace {

inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

inline float from_bfloat16(std::uint16_t h) { return float_of(static_cast<std::uint32_t>(h) << 16); }

inline std::uint16_t to_bfloat16(float x) {  // to nearest even; NaN stays NaN
  const std::uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_float16(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));  // Inf, NaN
  // Moved into float32's exponent range as it is, then scaled: exact, also for subnormal numbers.
  return float_of(bits_of(float_of(rest << 13) * 0x1p112f) | sign);
}

inline std::uint16_t to_float16(float x) {  // to nearest even; too large becomes Inf
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (rest < 0x38800000u) {  // subnormal: adding 0.5 leaves multiples of 2^-24 in the low bits, rounded to even
    return static_cast<std::uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
  }
  return static_cast<std::uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

}  // namespace
}  // namespace trace_fast
