// The float32 vector engine of prefix_attention tiles, written with the compiler's vector types: any instruction set.
#pragma once

#include "cpu/prefix_attention_tile.h"

namespace trace_fast {
namespace {

template <int kWidth>
struct Vectors;
template <>
struct Vectors<4> {
  typedef float Floats __attribute__((vector_size(16)));
  typedef std::int32_t Integers __attribute__((vector_size(16)));
};
template <>
struct Vectors<8> {
  typedef float Floats __attribute__((vector_size(32)));
  typedef std::int32_t Integers __attribute__((vector_size(32)));
};
template <>
struct Vectors<16> {
  typedef float Floats __attribute__((vector_size(64)));
  typedef std::int32_t Integers __attribute__((vector_size(64)));
};

// float32 arithmetic on vectors of kWidth floats, through the compiler's vector types: any instruction set.
template <int kWidth, int kColumnVectors>
struct FloatEngine {
  using Element = float;
  static constexpr int kStep = 1, kLanes = kWidth, kColumns = kColumnVectors;
  using Vec = typename Vectors<kWidth>::Floats;
  using Integers = typename Vectors<kWidth>::Integers;
  using Operand = Vec;

  static float element(AttentionDtype dtype, const void* data, std::int64_t i) { return load_element(dtype, data, i); }
  static bool finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

  static Vec load(const float* from) {
    Vec x;
    __builtin_memcpy(&x, from, sizeof(x));
    return x;
  }
  static void store(float* to, Vec x) { __builtin_memcpy(to, &x, sizeof(x)); }
  static Vec all(float x) { return Vec{} + x; }
  static Operand load_operand(const float* from) { return load(from); }
  static Operand broadcast_operand(const float* from) { return all(*from); }
  static Vec multiply_add(Vec acc, Operand a, Operand b) { return acc + a * b; }
  static float first(Vec x) { return x[0]; }
  static Vec max(Vec x, Vec y) { return x > y ? x : y; }
  static float reduce_max(Vec x) {
    float highest = x[0];
    for (int i = 1; i < kLanes; ++i) highest = x[i] > highest ? x[i] : highest;
    return highest;
  }
  static Vec places() {
    Vec x;
    for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(i);
    return x;
  }
  static Vec within(Vec place, Vec low, Vec high, Vec x, Vec otherwise) {
    return (place >= low) & (place <= high) ? x : otherwise;
  }
  static void store_weights(float* to, const Vec* x) {
    for (int v = 0; v < kKeyBlock / kLanes; ++v) store(to + v * kLanes, x[v]);
  }
  // For x <= 0 (a little above is fine): relative error 1e-7; 0 below 2^-126; NaN stays NaN.
  static Vec exp2(Vec x) {
    const Vec clamped = x < all(-126.0f) ? all(-126.0f) : x;
    const Vec whole = __builtin_convertvector(__builtin_convertvector(clamped - all(0.5f), Integers), Vec);
    const Vec f = clamped - whole;
    Vec p = all(0x1.41fbbap-13f);
    p = p * f + all(0x1.5f3e54p-10f);
    p = p * f + all(0x1.3b2d4cp-7f);
    p = p * f + all(0x1.c6aee8p-5f);
    p = p * f + all(0x1.ebfbdcp-3f);
    p = p * f + all(0x1.62e43p-1f);
    p = p * f + all(1.0f);
    const Vec power = reinterpret_cast<Vec>((__builtin_convertvector(whole, Integers) + 127) << 23);
    const Vec result = p * power;
    return x < all(-126.0f) ? all(0.0f) : (x == x ? result : x);
  }
  static Vec tanh(Vec x) {  // error below 1.3e-7 of the result
    const Vec size = x < all(0.0f) ? -x : x;
    const Vec e = exp2(size * all(-2.88539008177792681472f));
    const Vec large = (all(1.0f) - e) / (all(1.0f) + e);
    const Vec z = x * x;
    Vec p = all(-0.0057049785f);
    p = p * z + all(0.020639079f);
    p = p * z + all(-0.05373971f);
    p = p * z + all(0.13331442f);
    p = p * z + all(-0.3333328f);
    const Vec small = x + x * (z * p);
    return size < all(0.625f) ? small : (x < all(0.0f) ? -large : large);
  }
};

}  // namespace
}  // namespace trace_fast
