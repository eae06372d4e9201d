#include "cpu/elementwise.h"
#include "cpu/turn_credit.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/turn_credit_checks.h"

namespace trace_fast {
namespace {

using std::int64_t;

// Rollouts are handed out in blocks of about this much work, the same for any number of threads.
constexpr int64_t kBlockStates = 2048;
constexpr int64_t kBlockTokens = 1 << 18;

// Discount^n and the sum of the first n discounts, for windows of n turns.
struct Discounts {
  int64_t reach;  // turns of the longest window
  std::vector<double> power, sum;

  Discounts(double discount, int64_t horizon, int64_t longest) {
    reach = std::min(std::max<int64_t>(horizon, 1), std::max<int64_t>(longest, 1));
    power.resize(static_cast<std::size_t>(reach + 1));
    sum.assign(static_cast<std::size_t>(reach + 1), 0.0);
    for (int64_t n = 0; n <= reach; ++n) power[n] = std::pow(discount, static_cast<double>(n));
    for (int64_t n = 0; n < reach; ++n) sum[n + 1] = sum[n] + power[n];
  }
};

// Work space of one thread, for blocks of up to n states.
struct Scratch {
  std::vector<double> score, first, credit, value, window, block, remaining;

  explicit Scratch(int64_t n) {
    for (auto* array : {&score, &first, &credit, &value, &window, &block, &remaining}) {
      array->resize(static_cast<std::size_t>(n + 1));
    }
  }
};

// Credit of going from `before[i]` to `after[i]`. log(d_before / d_after) is written as +-log1p(|gain| / smaller gap):
// a small gain keeps its relative precision, and no gain gives exactly 0.
template <CreditForm form>
TRACE_FAST_INLINE void pair_credit(const double* before, const double* after, int64_t n, double gap_offset,
                                   double* out) {
  for (int64_t i = 0; i < n; ++i) {
    const double gain = after[i] - before[i];
    const double gap_before = gap_offset - before[i];
    if (form == CreditForm::kRaw) {
      out[i] = gain;
    } else if (form == CreditForm::kLinear) {
      out[i] = gain / gap_before;
    } else {
      const double gap_after = gap_offset - after[i];
      const double smaller = gap_before < gap_after ? gap_before : gap_after;
      out[i] = std::copysign(log1p_nonnegative(std::fabs(gain) / smaller), gain);
    }
  }
}

// near[i] += factor * far[i + distance] where that is still the same rollout's. `near` may be `far`.
TRACE_FAST_INLINE void join(double* near, const double* far, const double* remaining, int64_t n, int64_t distance,
                            double factor) {
  const double reach = static_cast<double>(distance);
  for (int64_t i = 0; i < n - distance; ++i) {
    const double term = factor * far[i + distance];
    near[i] += remaining[i] > reach ? term : 0.0;
  }
}

// Discounted sums over windows of `horizon` turns, put together from windows of 1, 2, 4, ... turns (in `block`, which
// begins as the turns' credit): 2 log2(horizon) sweeps for any horizon.
TRACE_FAST_INLINE void window_sums(double* window, double* block, const double* remaining, int64_t n, int64_t longest,
                                   int64_t horizon, double discount) {
  for (int64_t i = 0; i < n; ++i) window[i] = 0.0;
  int64_t reach = 0;
  for (int64_t size = 1; horizon != 0 && reach < longest; size *= 2) {
    if (horizon & 1) {
      join(window, block, remaining, n, reach, std::pow(discount, static_cast<double>(reach)));
      reach += size;
    }
    horizon >>= 1;
    if (horizon != 0 && size < longest) {
      join(block, block, remaining, n, size, std::pow(discount, static_cast<double>(size)));
    }
  }
}

template <class T>
TRACE_FAST_INLINE void fill_tokens(T* out, const bool* mask, int64_t begin, int64_t end, double advantage) {
  const T value = static_cast<T>(advantage);
  for (int64_t i = begin; i < end; ++i) out[i] = mask[i] ? value : T(0);
}

// Advantages of one rollout's tokens; `reward` holds its T rewards.
template <class T>
TRACE_FAST_INLINE void token_advantages(const TurnCreditArgs<T>& a, int64_t r, const double* reward,
                                        double answer_weight) {
  const int64_t* boundary = a.boundaries_S + a.cu_states_R1[r];
  const int64_t begin = a.cu_tokens_R1[r], length = a.cu_tokens_R1[r + 1] - begin;
  T* out = a.advantages_N + begin;
  const bool* mask = a.loss_mask_N + begin;
  const int64_t turns = a.n_turns_R[r];
  const double outcome = a.alpha_out * static_cast<double>(a.outcome_advantages_R[r]);
  for (int64_t i = 0; i < boundary[0]; ++i) out[i] = T(0);  // the prompt is never trained, whatever its mask
  for (int64_t k = 0; k < turns; ++k) {
    fill_tokens(out, mask, boundary[k], boundary[k + 1], outcome + a.alpha_turn * reward[k]);
  }
  fill_tokens(out, mask, boundary[turns], length, outcome * answer_weight);
}

// Rollouts [first, last). Returns whether all their scores lie in [-limit, 0].
template <class T, CreditForm form>
TRACE_FAST_INLINE bool credit_block(const TurnCreditArgs<T>& a, const Discounts& discounts,
                                    const double* answer_weight_R, double limit, int64_t begin, int64_t end,
                                    Scratch& scratch) {
  const int64_t state0 = a.cu_states_R1[begin], n = a.cu_states_R1[end] - state0;
  const int64_t turn0 = a.cu_turns_R1[begin], turns_in_block = a.cu_turns_R1[end] - turn0;
  double *score = scratch.score.data(), *first = scratch.first.data(), *credit = scratch.credit.data();
  double *value = scratch.value.data(), *window = scratch.window.data(), *block = scratch.block.data();
  double* remaining = scratch.remaining.data();

  int64_t outside = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = static_cast<double>(a.mean_logprobs_S[state0 + i]);
    score[i] = x;
    outside += !((x <= 0.0) & (x >= -limit));
  }
  if (outside != 0) return false;
  score[n] = score[n - 1];
  for (int64_t r = begin; r < end; ++r) {
    const int64_t from = a.cu_states_R1[r] - state0, to = a.cu_states_R1[r + 1] - state0;
    for (int64_t i = from; i < to; ++i) first[i] = score[from];
  }

  // Over all neighbours, the last state of a rollout and the first of the next among them: long loops, few wasted.
  pair_credit<form>(score, score + 1, n, a.gap_offset, credit);
  if (form != CreditForm::kLinear) pair_credit<form>(first, score, n, a.gap_offset, value);

  int64_t longest = 0;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t from = a.cu_states_R1[r] - state0, to = a.cu_states_R1[r + 1] - state0;
    T* delta = a.deltas_D + a.cu_deltas_R1[r];
    for (int64_t i = from; i + 1 < to; ++i) delta[i - from] = static_cast<T>(credit[i]);
    if (form == CreditForm::kLinear) {
      value[from] = 0.0;
      for (int64_t i = from + 1; i < to; ++i) value[i] = value[i - 1] + credit[i - 1];
    }
    const int64_t turns = a.n_turns_R[r], place = a.cu_turns_R1[r] - turn0;
    longest = std::max(longest, turns);
    for (int64_t k = 0; k < turns; ++k) {
      block[place + k] = credit[from + k];
      remaining[place + k] = static_cast<double>(turns - k);
    }
  }
  for (int64_t i = 0; i < n; ++i) a.values_S[state0 + i] = static_cast<T>(value[i]);

  window_sums(window, block, remaining, turns_in_block, longest, a.horizon, a.discount);
  const int64_t reach = discounts.reach;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t turns = a.n_turns_R[r];
    double* reward = window + (a.cu_turns_R1[r] - turn0);
    const double terminal = a.terminal_scale * static_cast<double>(a.outcome_advantages_R[r]);
    if (a.normalize_window && a.horizon > 0) {
      const double whole = discounts.sum[reach];
      const int64_t cut = std::max<int64_t>(turns - reach, 0);
      for (int64_t k = 0; k < cut; ++k) reward[k] /= whole;
      for (int64_t k = cut; k < turns; ++k) reward[k] /= discounts.sum[turns - k];
    }
    for (int64_t k = std::max<int64_t>(turns - reach, 0); k < turns; ++k) {
      reward[k] += terminal * discounts.power[turns - k];
    }
    T* out = a.rewards_T + a.cu_turns_R1[r];
    for (int64_t k = 0; k < turns; ++k) out[k] = static_cast<T>(reward[k]);
    if (a.with_tokens) token_advantages(a, r, reward, answer_weight_R[r]);
  }
  return true;
}

template <class T>
TRACE_FAST_INLINE bool credit_block_of_form(const TurnCreditArgs<T>& a, const Discounts& d, const double* weight_R,
                                            double limit, int64_t begin, int64_t end, Scratch& scratch) {
  switch (a.form) {
    case CreditForm::kLogRatio:
      return credit_block<T, CreditForm::kLogRatio>(a, d, weight_R, limit, begin, end, scratch);
    case CreditForm::kRaw:
      return credit_block<T, CreditForm::kRaw>(a, d, weight_R, limit, begin, end, scratch);
    case CreditForm::kLinear:
      break;
  }
  return credit_block<T, CreditForm::kLinear>(a, d, weight_R, limit, begin, end, scratch);
}

template <class T>
using BlockFunction = bool (*)(const TurnCreditArgs<T>&, const Discounts&, const double*, double, int64_t, int64_t,
                               Scratch&);

template <class T>
bool block_baseline(const TurnCreditArgs<T>& a, const Discounts& d, const double* w, double limit, int64_t begin,
                    int64_t end, Scratch& s) {
  return credit_block_of_form(a, d, w, limit, begin, end, s);
}

#if defined(TRACE_FAST_TARGETS)
template <class T>
TRACE_FAST_AVX2 bool block_avx2(const TurnCreditArgs<T>& a, const Discounts& d, const double* w, double limit,
                                int64_t begin, int64_t end, Scratch& s) {
  return credit_block_of_form(a, d, w, limit, begin, end, s);
}

template <class T>
TRACE_FAST_AVX512 bool block_avx512(const TurnCreditArgs<T>& a, const Discounts& d, const double* w, double limit,
                                    int64_t begin, int64_t end, Scratch& s) {
  return credit_block_of_form(a, d, w, limit, begin, end, s);
}
#endif

template <class T>
BlockFunction<T> block_function(const std::string& kernel) {
#if defined(TRACE_FAST_TARGETS)
  if (kernel == "avx512") return &block_avx512<T>;
  if (kernel == "avx2") return &block_avx2<T>;
#endif
  return &block_baseline<T>;
}

// Answer-tail weight of each rollout: the group's mean answer length over its own, times the scale.
template <class T>
std::vector<double> answer_weights(const TurnCreditArgs<T>& a) {
  std::vector<double> weight_R(static_cast<std::size_t>(a.n_rollouts), 0.0);
  if (a.answer_tail == AnswerTail::kOff) return weight_R;
  std::fill(weight_R.begin(), weight_R.end(), a.answer_tail_scale);
  if (a.answer_tail == AnswerTail::kConstant) return weight_R;

  std::vector<int64_t> length_R(static_cast<std::size_t>(a.n_rollouts), 0);
  constexpr int64_t kRollouts = 64;
  parallel_for((a.n_rollouts + kRollouts - 1) / kRollouts, a.n_threads, [&](int64_t chunk, int) {
    const int64_t end = std::min(a.n_rollouts, (chunk + 1) * kRollouts);
    for (int64_t r = chunk * kRollouts; r < end; ++r) {
      const int64_t answer = a.cu_tokens_R1[r] + a.boundaries_S[a.cu_states_R1[r] + a.n_turns_R[r]];
      int64_t length = 0;
      for (int64_t i = answer; i < a.cu_tokens_R1[r + 1]; ++i) length += a.loss_mask_N[i];
      length_R[r] = length;
    }
  });
  struct Group {
    int64_t total = 0, answers = 0;
  };
  std::unordered_map<int64_t, Group> groups;
  for (int64_t r = 0; r < a.n_rollouts; ++r) {
    Group& group = groups[a.group_ids_R[r]];
    group.total += length_R[r];
    group.answers += length_R[r] > 0;
  }
  for (int64_t r = 0; r < a.n_rollouts; ++r) {
    if (length_R[r] == 0) continue;  // no token reads its weight
    const Group& group = groups[a.group_ids_R[r]];
    const double mean = static_cast<double>(group.total) / static_cast<double>(group.answers);
    weight_R[r] = a.answer_tail_scale * mean / static_cast<double>(length_R[r]);
  }
  return weight_R;
}

}  // namespace

template <class T>
void turn_credit(const TurnCreditArgs<T>& a, const std::string& kernel) {
  const int64_t longest = check_turn_credit(a);
  int64_t turns = 0;
  for (int64_t r = 0; r <= a.n_rollouts; ++r) {
    a.cu_deltas_R1[r] = a.cu_states_R1[r] - static_cast<std::int32_t>(r);
    a.cu_turns_R1[r] = static_cast<std::int32_t>(turns);
    if (r < a.n_rollouts) turns += a.n_turns_R[r];
  }
  if (a.n_rollouts == 0) return;

  std::vector<int64_t> start{0};  // first rollout of each block
  int64_t largest = 0;
  for (int64_t r = 0, from = 0; r < a.n_rollouts; ++r) {
    const int64_t states = a.cu_states_R1[r + 1] - a.cu_states_R1[from];
    const int64_t tokens = a.with_tokens ? a.cu_tokens_R1[r + 1] - a.cu_tokens_R1[from] : 0;
    if (states >= kBlockStates || tokens >= kBlockTokens || r + 1 == a.n_rollouts) {
      start.push_back(r + 1);
      from = r + 1;
      largest = std::max(largest, states);
    }
  }
  const auto n_blocks = static_cast<int64_t>(start.size()) - 1;
  const int n_threads = static_cast<int>(std::min<int64_t>(std::max(a.n_threads, 1), n_blocks));
  std::vector<Scratch> scratch(static_cast<std::size_t>(n_threads), Scratch(largest));
  const std::vector<double> weight_R = a.with_tokens ? answer_weights(a) : std::vector<double>();
  const Discounts discounts(a.discount, a.horizon, longest);
  const BlockFunction<T> run = block_function<T>(kernel);
  const double limit = score_limit(a);
  std::vector<char> ok(static_cast<std::size_t>(n_blocks), 1);
  parallel_for(n_blocks, n_threads, [&](int64_t b, int thread) {
    ok[b] = run(a, discounts, weight_R.data(), limit, start[b], start[b + 1], scratch[thread]);
  });
  if (std::find(ok.begin(), ok.end(), 0) != ok.end()) refuse_scores(a);
}

template void turn_credit<float>(const TurnCreditArgs<float>&, const std::string&);
template void turn_credit<double>(const TurnCreditArgs<double>&, const std::string&);

}  // namespace trace_fast
