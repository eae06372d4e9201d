#include "cpu/elementwise.h"
#include "cpu/policy_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/argument_checks.h"
#include "cpu/parallel.h"

namespace trace_fast {
namespace {

using std::int64_t;

constexpr int64_t kBlock = 16384;  // tokens handed out at a time; a block has sums of its own
constexpr int kBatch = 512;        // tokens whose numbers lie in the scratch arrays at a time
constexpr int kLanes = 32;         // running sums, so that the loop over them is vector code

struct Batch {
  double log_ratio[kBatch], log_tis[kBatch], advantage[kBatch], weight[kBatch], trained[kBatch], grad[kBatch];
  double ratio[kBatch];  // of a sequence, where there is one ratio a rollout
};

// Log ratio of a rollout, and its exponential.
struct SequenceRatio {
  double log_ratio, ratio;
};

struct Lanes {
  double loss[kLanes], low[kLanes], high[kLanes], kl[kLanes], ratio[kLanes], tis[kLanes], tis_clipped[kLanes];
  double least[kLanes], most[kLanes], broken[kLanes];
};

// Finds the number that made a sum NaN.
template <class T>
[[noreturn]] void refuse_numbers(const PolicyLossArgs<T>& a) {
  const std::pair<const char*, const T*> named[] = {{"logprobs_N", a.logprobs_N},
                                                    {"old_logprobs_N", a.old_logprobs_N},
                                                    {"sampler_logprobs_N", a.sampler_logprobs_N},
                                                    {"advantages_N", a.advantages_N}};
  for (const auto& [name, data] : named) {
    for (int64_t i = 0; data != nullptr && i < a.n_tokens; ++i) {
      if (a.mask_N[i] && !std::isfinite(data[i])) {
        refuse_argument(name, "finite numbers where mask_N is set",
                        number_text(static_cast<double>(data[i])) + place_text(i));
      }
    }
  }
  refuse_argument("logprobs_N", "numbers whose differences are finite", "an overflow");
}

// x where `mask` is 1, 0.0 where it is 0, whatever x is: by its bits, so that no NaN or infinity is computed with.
TRACE_FAST_INLINE double kept(double x, unsigned char mask) {
  return from_bits(bits_of(x) & (std::uint64_t{0} - static_cast<std::uint64_t>(mask)));
}

// Reads `n` tokens from `begin` on, all of one rollout, to place `at` of the batch. A masked token becomes zeros.
template <class T>
TRACE_FAST_INLINE void gather(const PolicyLossArgs<T>& a, const SequenceRatio* sequence_R, int64_t r, int64_t begin,
                              int n, int at, Batch& b) {
  const auto* mask = reinterpret_cast<const unsigned char*>(a.mask_N + begin);  // 0 or 1
  const T *logprob = a.logprobs_N + begin, *old = a.old_logprobs_N + begin, *advantage = a.advantages_N + begin;
  for (int i = 0; i < n; ++i) {
    b.log_ratio[at + i] = kept(static_cast<double>(logprob[i]) - static_cast<double>(old[i]), mask[i]);
    b.advantage[at + i] = kept(static_cast<double>(advantage[i]), mask[i]);
    b.trained[at + i] = kept(1.0, mask[i]);
    b.weight[at + i] = a.weight_R[r];
  }
  if (a.sampler_logprobs_N != nullptr) {
    const T* sampler = a.sampler_logprobs_N + begin;
    for (int i = 0; i < n; ++i) {
      b.log_tis[at + i] = kept(static_cast<double>(old[i]) - static_cast<double>(sampler[i]), mask[i]);
    }
  }
  if (sequence_R != nullptr) {
    const SequenceRatio sequence = sequence_R[r];
    for (int i = 0; i < n; ++i) {
      // An own number that is not finite must still be found out.
      b.log_ratio[at + i] = b.trained[at + i] * sequence.log_ratio + 0.0 * b.log_ratio[at + i];
      b.ratio[at + i] = sequence.ratio;
    }
  }
}

// One batch of `n` tokens, n a multiple of kLanes: gradient of each, and the running sums.
template <bool with_tis, bool with_ratio>
TRACE_FAST_INLINE void evaluate(Batch& b, int n, double clip_low, double clip_high, double max_log_ratio,
                                double tis_cap, Lanes& sums) {
  const double low = 1.0 - clip_low, high = 1.0 + clip_high;
  for (int from = 0; from < n; from += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int i = from + lane;
      const double trained = b.trained[i], advantage = b.advantage[i], raw = b.log_ratio[i];
      const double log_ratio = raw > max_log_ratio ? max_log_ratio : raw;
      const double ratio = with_ratio ? b.ratio[i] : exp_clamped(log_ratio);
      const double kl = (ratio - 1.0) - log_ratio;
      const double above_low = ratio < low ? low : ratio;
      const double clipped = above_low > high ? high : above_low;
      const double free_gain = ratio * advantage, clipped_gain = clipped * advantage;
      const double gain = free_gain < clipped_gain ? free_gain : clipped_gain;
      double tis = 1.0, tis_clipped = 0.0;
      if (with_tis) {
        const double whole = exp_clamped(b.log_tis[i]);
        tis = whole > tis_cap ? tis_cap : whole;
        tis_clipped = whole > tis_cap ? 1.0 : 0.0;
      }
      const double is_high = (ratio > high) & (advantage > 0.0) ? 1.0 : 0.0;
      const double is_low = (ratio < low) & (advantage < 0.0) ? 1.0 : 0.0;
      const double is_held = raw > max_log_ratio ? 1.0 : 0.0;
      const double factor = tis * b.weight[i] * trained;
      b.grad[i] = (is_high + is_low) + is_held > 0.0 ? 0.0 : 0.0 - factor * free_gain;  // never -0
      sums.loss[lane] -= trained > 0.0 ? factor * gain : 0.0;
      sums.low[lane] += is_low;
      sums.high[lane] += is_high;
      sums.kl[lane] += trained * (kl > 0.0 ? kl : 0.0);
      sums.ratio[lane] += trained * ratio;
      sums.tis[lane] += trained * tis;
      sums.tis_clipped[lane] += trained * tis_clipped;
      const double least = trained > 0.0 ? log_ratio : sums.least[lane];
      const double most = trained > 0.0 ? log_ratio : sums.most[lane];
      sums.least[lane] = least < sums.least[lane] ? least : sums.least[lane];
      sums.most[lane] = most > sums.most[lane] ? most : sums.most[lane];
      sums.broken[lane] += 0.0 * (raw + advantage + (with_tis ? b.log_tis[i] : 0.0));  // NaN or nothing
    }
  }
}

// Direct calls: through a pointer the loop would be compiled for the baseline.
template <bool with_tis, class T>
TRACE_FAST_INLINE void evaluate_tokens(const PolicyLossArgs<T>& a, bool with_ratio, Batch& b, int n, Lanes& sums) {
  if (with_ratio) {
    evaluate<with_tis, true>(b, n, a.clip_low, a.clip_high, a.max_log_ratio, a.tis_cap, sums);
  } else {
    evaluate<with_tis, false>(b, n, a.clip_low, a.clip_high, a.max_log_ratio, a.tis_cap, sums);
  }
}

TRACE_FAST_INLINE int bin_of(double log_ratio) {
  const auto size = static_cast<float>(std::fabs(log_ratio));
  std::uint32_t bits;
  std::memcpy(&bits, &size, sizeof bits);
  constexpr int kBase = (127 + kLogRatioLowestExponent) * kLogRatioBinsPerOctave, kHalf = kLogRatioBins / 2;
  const int step = std::min(std::max(static_cast<int>(bits >> 20) - kBase, 0), kHalf - 1);
  return log_ratio < 0.0 ? kHalf - 1 - step : kHalf + step;
}

// Tokens [begin, end): their gradients, their sums into `out`, their log ratios into `histogram`.
template <class T>
TRACE_FAST_INLINE void token_block(const PolicyLossArgs<T>& a, const SequenceRatio* sequence_R, int64_t begin,
                                   int64_t end, Batch& b, int64_t* histogram, double* out) {
  Lanes sums{};
  std::fill(sums.least, sums.least + kLanes, std::numeric_limits<double>::infinity());
  std::fill(sums.most, sums.most + kLanes, -std::numeric_limits<double>::infinity());
  int64_t r = std::upper_bound(a.cu_tokens_R1, a.cu_tokens_R1 + a.n_rollouts + 1, begin) - a.cu_tokens_R1 - 1;
  for (int64_t batch = begin; batch < end; batch += kBatch) {
    const int n = static_cast<int>(std::min<int64_t>(kBatch, end - batch));
    for (int at = 0; at < n;) {
      while (a.cu_tokens_R1[r + 1] <= batch + at) ++r;
      const int piece = static_cast<int>(std::min<int64_t>(n - at, a.cu_tokens_R1[r + 1] - (batch + at)));
      gather(a, sequence_R, r, batch + at, piece, at, b);
      if (sequence_R != nullptr) {  // all in one bin
        int64_t trained = 0;
        for (int i = 0; i < piece; ++i) trained += a.mask_N[batch + at + i];
        histogram[bin_of(sequence_R[r].log_ratio)] += trained;
      }
      at += piece;
    }
    const int padded = (n + kLanes - 1) / kLanes * kLanes;
    for (int i = n; i < padded; ++i) {
      b.log_ratio[i] = b.log_tis[i] = b.advantage[i] = b.weight[i] = b.trained[i] = 0.0;
      b.ratio[i] = 1.0;
    }
    if (a.sampler_logprobs_N != nullptr) {
      evaluate_tokens<true>(a, sequence_R != nullptr, b, padded, sums);
    } else {
      evaluate_tokens<false>(a, sequence_R != nullptr, b, padded, sums);
    }
    if (sequence_R == nullptr) {
      for (int i = 0; i < n; ++i) histogram[bin_of(b.log_ratio[i])] += b.trained[i] > 0.0;
    }
    for (int i = 0; i < n; ++i) a.grads_N[batch + i] = static_cast<T>(b.grad[i]);
  }
  double broken = 0.0;
  std::fill(out, out + kSums, 0.0);
  out[kMinLogRatio] = std::numeric_limits<double>::infinity();
  out[kMaxLogRatio] = -std::numeric_limits<double>::infinity();
  for (int lane = 0; lane < kLanes; ++lane) {
    broken += sums.broken[lane];
    out[kLoss] += sums.loss[lane];
    out[kClippedLow] += sums.low[lane];
    out[kClippedHigh] += sums.high[lane];
    out[kKl] += sums.kl[lane];
    out[kRatio] += sums.ratio[lane];
    out[kTis] += sums.tis[lane];
    out[kTisClipped] += sums.tis_clipped[lane];
    out[kMinLogRatio] = std::min(out[kMinLogRatio], sums.least[lane]);
    out[kMaxLogRatio] = std::max(out[kMaxLogRatio], sums.most[lane]);
  }
  if (!(broken == 0.0)) out[kLoss] = std::numeric_limits<double>::quiet_NaN();
}

// Mean log ratio over a rollout's trained tokens, summed in eight interleaved parts.
template <class T>
TRACE_FAST_INLINE SequenceRatio sequence_ratio(const PolicyLossArgs<T>& a, int64_t r) {
  constexpr int kParts = 8;
  const int64_t begin = a.cu_tokens_R1[r], n = a.cu_tokens_R1[r + 1] - begin;
  const auto* mask = reinterpret_cast<const unsigned char*>(a.mask_N + begin);
  const T *logprob = a.logprobs_N + begin, *old = a.old_logprobs_N + begin;
  double part[kParts] = {};
  int64_t i = 0;
  for (; i + kParts <= n; i += kParts) {
    for (int p = 0; p < kParts; ++p) {
      part[p] += kept(static_cast<double>(logprob[i + p]) - static_cast<double>(old[i + p]), mask[i + p]);
    }
  }
  for (int p = 0; i + p < n; ++p) {
    part[p] += kept(static_cast<double>(logprob[i + p]) - static_cast<double>(old[i + p]), mask[i + p]);
  }
  double total = 0.0;
  for (double sum : part) total += sum;
  const double log_ratio = total / static_cast<double>(std::max<int64_t>(a.n_tokens_R[r], 1));
  return {log_ratio, exp_clamped(log_ratio > a.max_log_ratio ? a.max_log_ratio : log_ratio)};
}

// What is compiled once an instruction set.
template <class T>
struct Functions {
  void (*block)(const PolicyLossArgs<T>&, const SequenceRatio*, int64_t, int64_t, Batch&, int64_t*, double*);
  SequenceRatio (*sequence)(const PolicyLossArgs<T>&, int64_t);
};

template <class T>
void block_baseline(const PolicyLossArgs<T>& a, const SequenceRatio* sequence_R, int64_t begin, int64_t end, Batch& b,
                    int64_t* histogram, double* out) {
  token_block(a, sequence_R, begin, end, b, histogram, out);
}

template <class T>
SequenceRatio sequence_baseline(const PolicyLossArgs<T>& a, int64_t r) {
  return sequence_ratio(a, r);
}

#if defined(TRACE_FAST_TARGETS)
template <class T>
TRACE_FAST_AVX2 void block_avx2(const PolicyLossArgs<T>& a, const SequenceRatio* sequence_R, int64_t begin, int64_t end,
                                Batch& b, int64_t* histogram, double* out) {
  token_block(a, sequence_R, begin, end, b, histogram, out);
}

template <class T>
TRACE_FAST_AVX2 SequenceRatio sequence_avx2(const PolicyLossArgs<T>& a, int64_t r) {
  return sequence_ratio(a, r);
}

template <class T>
TRACE_FAST_AVX512 void block_avx512(const PolicyLossArgs<T>& a, const SequenceRatio* sequence_R, int64_t begin,
                                    int64_t end, Batch& b, int64_t* histogram, double* out) {
  token_block(a, sequence_R, begin, end, b, histogram, out);
}

template <class T>
TRACE_FAST_AVX512 SequenceRatio sequence_avx512(const PolicyLossArgs<T>& a, int64_t r) {
  return sequence_ratio(a, r);
}
#endif

template <class T>
Functions<T> functions_of(const std::string& kernel) {
#if defined(TRACE_FAST_TARGETS)
  if (kernel == "avx512") return {&block_avx512<T>, &sequence_avx512<T>};
  if (kernel == "avx2") return {&block_avx2<T>, &sequence_avx2<T>};
#endif
  return {&block_baseline<T>, &sequence_baseline<T>};
}

}  // namespace

void count_tokens(const bool* mask_N, int64_t n_tokens, const int64_t* cu_tokens_R1, int64_t n_rollouts, int n_threads,
                  int64_t* n_tokens_R) {
  check_offsets("cu_tokens_R1", cu_tokens_R1, n_rollouts, n_tokens, "mask_N");
  constexpr int64_t kRollouts = 64;
  parallel_for((n_rollouts + kRollouts - 1) / kRollouts, n_threads, [&](int64_t chunk, int) {
    const int64_t last = std::min(n_rollouts, (chunk + 1) * kRollouts);
    for (int64_t r = chunk * kRollouts; r < last; ++r) {
      int64_t count = 0;
      for (int64_t i = cu_tokens_R1[r]; i < cu_tokens_R1[r + 1]; ++i) count += mask_N[i];
      n_tokens_R[r] = count;
    }
  });
}

template <class T>
void policy_loss(const PolicyLossArgs<T>& a, const std::string& kernel) {
  check_offsets("cu_tokens_R1", a.cu_tokens_R1, a.n_rollouts, a.n_tokens, "mask_N");
  const Functions<T> functions = functions_of<T>(kernel);
  std::vector<SequenceRatio> sequence_R(a.sequence_ratio ? static_cast<std::size_t>(a.n_rollouts) : 0);
  parallel_for(static_cast<int64_t>(sequence_R.size()), a.n_threads, [&](int64_t r, int) {
    sequence_R[static_cast<std::size_t>(r)] = functions.sequence(a, r);
  });
  const int64_t n_blocks = (a.n_tokens + kBlock - 1) / kBlock;
  const int n_threads = static_cast<int>(std::min<int64_t>(std::max(a.n_threads, 1), std::max<int64_t>(n_blocks, 1)));
  std::vector<Batch> batches(static_cast<std::size_t>(n_threads));
  std::vector<int64_t> histograms(static_cast<std::size_t>(n_threads) * kLogRatioBins, 0);
  std::vector<double> parts(static_cast<std::size_t>(n_blocks) * kSums);
  parallel_for(n_blocks, n_threads, [&](int64_t block, int thread) {
    functions.block(a, a.sequence_ratio ? sequence_R.data() : nullptr, block * kBlock,
                    std::min(a.n_tokens, (block + 1) * kBlock), batches[thread],
                    histograms.data() + thread * kLogRatioBins, parts.data() + block * kSums);
  });

  std::fill(a.sums, a.sums + kSums, 0.0);
  a.sums[kMinLogRatio] = std::numeric_limits<double>::infinity();
  a.sums[kMaxLogRatio] = -std::numeric_limits<double>::infinity();
  for (int64_t block = 0; block < n_blocks; ++block) {
    const double* part = parts.data() + block * kSums;
    if (std::isnan(part[kLoss])) refuse_numbers(a);
    for (int sum = 0; sum < kMinLogRatio; ++sum) a.sums[sum] += part[sum];
    a.sums[kMinLogRatio] = std::min(a.sums[kMinLogRatio], part[kMinLogRatio]);
    a.sums[kMaxLogRatio] = std::max(a.sums[kMaxLogRatio], part[kMaxLogRatio]);
  }
  std::fill(a.histogram, a.histogram + kLogRatioBins, 0);
  for (std::size_t i = 0; i < histograms.size(); ++i) a.histogram[i % kLogRatioBins] += histograms[i];
  for (int bin = 0; bin < kLogRatioBins; ++bin) a.sums[kTokens] += static_cast<double>(a.histogram[bin]);
}

template void policy_loss<float>(const PolicyLossArgs<float>&, const std::string&);
template void policy_loss<double>(const PolicyLossArgs<double>&, const std::string&);

}  // namespace trace_fast
