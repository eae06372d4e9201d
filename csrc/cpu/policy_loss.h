// policy_loss on the CPU: clipped objective, its gradient and its metrics in one pass over the tokens (the formulas are
// in kernels/policy_loss/__init__.py). Computed in double and rounded once. Sums are made a block of tokens at a time
// and added in order: the same bits for any number of threads. A masked token's numbers are never computed with.
#pragma once

#include <cstdint>
#include <string>

namespace trace_fast {

// Log ratios are counted in bins by sign, power of two and the next three bits of their size, from -2^5 up to 2^5.
constexpr int kLogRatioBins = 512;
constexpr int kLogRatioBinsPerOctave = 8;
constexpr int kLogRatioLowestExponent = -27;  // smaller ones share the bins next to 0

// Places in PolicyLossArgs::sums.
enum PolicyLossSum {
  kLoss,
  kTokens,
  kClippedLow,
  kClippedHigh,
  kKl,
  kRatio,
  kTis,
  kTisClipped,
  kMinLogRatio,
  kMaxLogRatio,
  kSums
};

// T is float or double; N tokens, R rollouts.
template <class T>
struct PolicyLossArgs {
  std::int64_t n_tokens, n_rollouts;
  const T* logprobs_N;
  const T* old_logprobs_N;
  const T* sampler_logprobs_N;  // null: no importance weights
  const T* advantages_N;
  const bool* mask_N;
  const std::int64_t* cu_tokens_R1;
  const std::int64_t* n_tokens_R;  // trained tokens of each rollout, from count_tokens
  const double* weight_R;          // factor of each rollout's tokens in the loss
  bool sequence_ratio;             // one ratio a rollout (GSPO)
  double clip_low, clip_high, max_log_ratio;
  double tis_cap;
  int n_threads;

  T* grads_N;
  double* sums;               // kSums of them; the log ratios' extremes are +-inf where no token is trained
  std::int64_t* histogram;    // kLogRatioBins counts of trained tokens
};

// Checks the offsets, then counts each rollout's tokens that the mask keeps. Throws std::invalid_argument.
void count_tokens(const bool* mask_N, std::int64_t n_tokens, const std::int64_t* cu_tokens_R1, std::int64_t n_rollouts,
                  int n_threads, std::int64_t* n_tokens_R);

// `kernel`: one of elementwise_kernels(). Throws std::invalid_argument where offsets are out of order or range, or a
// trained token has a number that is not finite.
template <class T>
void policy_loss(const PolicyLossArgs<T>& args, const std::string& kernel);

}  // namespace trace_fast
