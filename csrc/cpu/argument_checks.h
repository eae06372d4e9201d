// Refusals of arguments, in the wording of kernels/common/checks.py: what was expected, what came and where.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace trace_fast {

[[noreturn]] inline void refuse_argument(const std::string& name, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(name + ": expected " + expected + ", got " + got);
}

inline std::string number_text(double x, const char* format = "%.9g") {
  if (std::isnan(x)) return "nan";
  char text[48];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

inline std::string place_text(std::int64_t i) { return " at [" + std::to_string(i) + "]"; }

// R+1 offsets from 0 to `total`, the length of tensor `of`, each at least `least` above the one before.
template <class Offset>
void check_offsets(const char* name, const Offset* cu, std::int64_t n_segments, std::int64_t total, const char* of,
                   Offset least = 0) {
  if (cu[0] != 0) refuse_argument(name, "0 as first offset", std::to_string(cu[0]));
  for (std::int64_t r = 0; r < n_segments; ++r) {
    if (cu[r + 1] < cu[r] || cu[r + 1] - cu[r] < least) {
      refuse_argument(name, least ? "offsets that increase (no segment is empty)" : "offsets that never decrease",
                      std::to_string(cu[r]) + " then " + std::to_string(cu[r + 1]) + place_text(r) + ", [" +
                          std::to_string(r + 1) + "]");
    }
  }
  if (cu[n_segments] != total) {
    refuse_argument(name, std::to_string(total) + " as last offset (the length of " + of + ")",
                    std::to_string(cu[n_segments]));
  }
}

}  // namespace trace_fast
