// What turn_credit takes: every index that it will follow, and every number, is looked at here first (the scores while
// they are read). The wording is that of kernels/turn_credit/checks.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "cpu/argument_checks.h"
#include "cpu/turn_credit.h"

namespace trace_fast {

// Below it, a quotient of gaps, a sum over the turns or an advantage made of it could overflow; no model comes anywhere
// near it.
template <class T>
double score_limit(const TurnCreditArgs<T>& a) {
  const double factor = std::max(a.with_tokens ? a.alpha_turn : 0.0, 1.0);
  const double largest = static_cast<double>(std::numeric_limits<T>::max()) / factor;
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

inline void check_setting(const char* name, double x) {
  if (!(x >= 0.0 && x <= kLargestCreditSetting)) {
    refuse_argument(name, "a number from 0 to " + number_text(kLargestCreditSetting), number_text(x));
  }
}

template <class T>
void check_tokens(const TurnCreditArgs<T>& a) {
  check_setting("alpha_out", a.alpha_out);
  check_setting("alpha_turn", a.alpha_turn);
  check_setting("answer_tail_scale", a.answer_tail_scale);
  check_offsets("cu_tokens_R1", a.cu_tokens_R1, a.n_rollouts, a.n_tokens, "loss_mask_N");
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
  check_setting("gap_offset", a.gap_offset);
  check_setting("terminal_scale", a.terminal_scale);
  if (a.horizon < 0) refuse_argument("horizon", "0 or more", std::to_string(a.horizon));
  if (!(a.discount > 0.0 && a.discount <= 1.0)) {
    refuse_argument("discount", "a number above 0 and up to 1", number_text(a.discount));
  }
  check_offsets("cu_states_R1", a.cu_states_R1, a.n_rollouts, a.n_states, "mean_logprobs_S", std::int32_t{1});
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
    if (std::fabs(static_cast<double>(a.outcome_advantages_R[r])) > kLargestCreditSetting) {
      refuse_argument("outcome_advantages_R", "numbers of magnitude up to " + number_text(kLargestCreditSetting),
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
