// What turn_credit takes: every index that it will follow, and every number, is looked at here first (the scores while
// they are read). The wording is that of kernels/turn_credit/checks.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>

#include "cpu/turn_credit.h"

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

// R+1 offsets from 0 to `total`, each at least `least` above the one before.
inline void check_offsets(const char* name, const std::int32_t* cu, std::int64_t n_segments, std::int64_t total,
                          const char* of, std::int32_t least) {
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

// Below it, a quotient of gaps or a sum over the turns could overflow; no model comes anywhere near it.
template <class T>
double score_limit(const TurnCreditArgs<T>& a) {
  const double largest = static_cast<double>(std::numeric_limits<T>::max());
  return largest * std::min(a.gap_offset, 1.0) / (2.0 * static_cast<double>(std::max<std::int64_t>(a.n_states, 1)));
}

template <class T>
[[noreturn]] void refuse_scores(const TurnCreditArgs<T>& a) {
  const double limit = score_limit(a);
  std::int64_t i = 0;
  for (; i + 1 < a.n_states; ++i) {
    const auto x = static_cast<double>(a.mean_logprobs_S[i]);
    if (!(x <= 0.0 && x >= -limit)) break;
  }
  refuse_argument("mean_logprobs_S", "log-probabilities between " + number_text(-limit, "%.3g") + " and 0",
                  number_text(static_cast<double>(a.mean_logprobs_S[i])) + place_text(i));
}

template <class T>
void check_tokens(const TurnCreditArgs<T>& a) {
  check_offsets("cu_tokens_R1", a.cu_tokens_R1, a.n_rollouts, a.n_tokens, "loss_mask_N", 0);
  for (std::int64_t r = 0; r < a.n_rollouts; ++r) {
    const std::int64_t length = a.cu_tokens_R1[r + 1] - a.cu_tokens_R1[r];
    std::int64_t previous = 0;
    for (std::int64_t s = a.cu_states_R1[r]; s < a.cu_states_R1[r + 1]; ++s) {
      const std::int64_t boundary = a.boundaries_S[s];
      if (boundary < 0 || boundary > length) {
        refuse_argument("boundaries_S", "token counts from 0 to the rollout's length",
                        std::to_string(boundary) + place_text(s) + ", where the rollout has " + std::to_string(length) +
                            " tokens");
      }
      if (boundary < previous) {
        refuse_argument("boundaries_S", "token counts that never decrease within a rollout",
                        std::to_string(previous) + " then " + std::to_string(boundary) + place_text(s - 1) + ", [" +
                            std::to_string(s) + "]");
      }
      previous = boundary;
    }
  }
}

// Everything but the scores' values. Returns the turns of the longest rollout.
template <class T>
std::int64_t check_turn_credit(const TurnCreditArgs<T>& a) {
  const auto smallest = static_cast<double>(std::numeric_limits<T>::min());
  if (!(a.gap_offset >= smallest)) {
    refuse_argument("gap_offset", "at least " + number_text(smallest), number_text(a.gap_offset));
  }
  if (a.horizon < 0) refuse_argument("horizon", "0 or more", std::to_string(a.horizon));
  if (!(a.discount > 0.0 && a.discount <= 1.0)) {
    refuse_argument("discount", "a number above 0 and up to 1", number_text(a.discount));
  }
  check_offsets("cu_states_R1", a.cu_states_R1, a.n_rollouts, a.n_states, "mean_logprobs_S", 1);
  std::int64_t longest = 0, total = 0;
  for (std::int64_t r = 0; r < a.n_rollouts; ++r) {
    const std::int64_t turns = a.n_turns_R[r], states = a.cu_states_R1[r + 1] - a.cu_states_R1[r];
    if (turns < 0) refuse_argument("n_turns_R", "T >= 0", std::to_string(turns) + place_text(r));
    if (turns != states - 1 && turns != states - 2) {
      refuse_argument("cu_states_R1", "T+1 or T+2 states for each rollout",
                      std::to_string(states) + " states" + place_text(r) + ", where n_turns_R is " +
                          std::to_string(turns));
    }
    if (!std::isfinite(a.outcome_advantages_R[r])) {
      refuse_argument("outcome_advantages_R", "finite numbers",
                      number_text(static_cast<double>(a.outcome_advantages_R[r])) + place_text(r));
    }
    longest = std::max(longest, turns);
    total += turns;
  }
  if (total != a.n_turns) {
    refuse_argument("total_turns", std::to_string(total) + " (the sum of n_turns_R)", std::to_string(a.n_turns));
  }
  if (a.with_tokens) check_tokens(a);
  return longest;
}

}  // namespace trace_fast
