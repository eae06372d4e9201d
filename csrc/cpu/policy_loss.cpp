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
TRACE_FAST_INLINE void gather(const PolicyLossArgs<T>& a, const double* log_ratio_R, int64_t r, int64_t begin, int n,
                              int at, Batch& b) {
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
  if (log_ratio_R != nullptr) {
    // An own number that is not finite must still be found out.
    for (int i = 0; i < n; ++i) b.log_ratio[at + i] = b.trained[at + i] * log_ratio_R[r] + 0.0 * b.log_ratio[at + i];
  }
}

// One batch of `n` tokens, n a multiple of kLanes: gradient of each, and the running sums.
template <bool with_tis>
TRACE_FAST_INLINE void evaluate(Batch& b, int n, double clip_low, double clip_high, double max_log_ratio,
                                double tis_cap, Lanes& sums) {
  const double low = 1.0 - clip_low, high = 1.0 + clip_high;
  for (int from = 0; from < n; from += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int i = from + lane;
      const double trained = b.trained[i], advantage = b.advantage[i], raw = b.log_ratio[i];
      const double log_ratio = raw > max_log_ratio ? max_log_ratio : raw;
      const double ratio = exp_clamped(log_ratio);
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
TRACE_FAST_INLINE void token_block(const PolicyLossArgs<T>& a, const double* log_ratio_R, int64_t begin, int64_t end,
                                   Batch& b, int64_t* histogram, double* out) {
  Lanes sums{};
  std::fill(sums.least, sums.least + kLanes, std::numeric_limits<double>::infinity());
  std::fill(sums.most, sums.most + kLanes, -std::numeric_limits<double>::infinity());
  int64_t r = std::upper_bound(a.cu_tokens_R1, a.cu_tokens_R1 + a.n_rollouts + 1, begin) - a.cu_tokens_R1 - 1;
  for (int64_t batch = begin; batch < end; batch += kBatch) {
    const int n = static_cast<int>(std::min<int64_t>(kBatch, end - batch));
    for (int at = 0; at < n;) {
      while (a.cu_tokens_R1[r + 1] <= batch + at) ++r;
      const int piece = static_cast<int>(std::min<int64_t>(n - at, a.cu_tokens_R1[r + 1] - (batch + at)));
      gather(a, log_ratio_R, r, batch + at, piece, at, b);
      at += piece;
    }
    const int padded = (n + kLanes - 1) / kLanes * kLanes;
    for (int i = n; i < padded; ++i) {
      b.log_ratio[i] = b.log_tis[i] = b.advantage[i] = b.weight[i] = b.trained[i] = 0.0;
    }
    if (a.sampler_logprobs_N != nullptr) {
      evaluate<true>(b, padded, a.clip_low, a.clip_high, a.max_log_ratio, a.tis_cap, sums);
    } else {
      evaluate<false>(b, padded, a.clip_low, a.clip_high, a.max_log_ratio, a.tis_cap, sums);
    }
    for (int i = 0; i < n; ++i) a.grads_N[batch + i] = static_cast<T>(b.grad[i]);
    for (int i = 0; i < n; ++i) histogram[bin_of(b.log_ratio[i])] += b.trained[i] > 0.0;
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

template <class T>
using BlockFunction = void (*)(const PolicyLossArgs<T>&, const double*, int64_t, int64_t, Batch&, int64_t*, double*);

template <class T>
void block_baseline(const PolicyLossArgs<T>& a, const double* log_ratio_R, int64_t begin, int64_t end, Batch& b,
                    int64_t* histogram, double* out) {
  token_block(a, log_ratio_R, begin, end, b, histogram, out);
}

#if defined(TRACE_FAST_TARGETS)
template <class T>
TRACE_FAST_AVX2 void block_avx2(const PolicyLossArgs<T>& a, const double* log_ratio_R, int64_t begin, int64_t end,
                                Batch& b, int64_t* histogram, double* out) {
  token_block(a, log_ratio_R, begin, end, b, histogram, out);
}

template <class T>
TRACE_FAST_AVX512 void block_avx512(const PolicyLossArgs<T>& a, const double* log_ratio_R, int64_t begin, int64_t end,
                                    Batch& b, int64_t* histogram, double* out) {
  token_block(a, log_ratio_R, begin, end, b, histogram, out);
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

// Mean log ratio over each rollout's trained tokens, summed in eight interleaved parts.
template <class T>
std::vector<double> sequence_log_ratios(const PolicyLossArgs<T>& a) {
  std::vector<double> log_ratio_R(static_cast<std::size_t>(a.n_rollouts), 0.0);
  parallel_for(a.n_rollouts, a.n_threads, [&](int64_t r, int) {
    double part[8] = {};
    for (int64_t i = a.cu_tokens_R1[r]; i < a.cu_tokens_R1[r + 1]; ++i) {
      const double difference = static_cast<double>(a.logprobs_N[i]) - static_cast<double>(a.old_logprobs_N[i]);
      part[(i - a.cu_tokens_R1[r]) % 8] += a.mask_N[i] ? difference : 0.0;
    }
    double total = 0.0;
    for (double sum : part) total += sum;
    log_ratio_R[r] = total / static_cast<double>(std::max<int64_t>(a.n_tokens_R[r], 1));
  });
  return log_ratio_R;
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
  const std::vector<double> log_ratio_R = a.sequence_ratio ? sequence_log_ratios(a) : std::vector<double>();
  const int64_t n_blocks = (a.n_tokens + kBlock - 1) / kBlock;
  const int n_threads = static_cast<int>(std::min<int64_t>(std::max(a.n_threads, 1), std::max<int64_t>(n_blocks, 1)));
  std::vector<Batch> batches(static_cast<std::size_t>(n_threads));
  std::vector<int64_t> histograms(static_cast<std::size_t>(n_threads) * kLogRatioBins, 0);
  std::vector<double> parts(static_cast<std::size_t>(n_blocks) * kSums);
  const BlockFunction<T> run = block_function<T>(kernel);
  parallel_for(n_blocks, n_threads, [&](int64_t block, int thread) {
    run(a, a.sequence_ratio ? log_ratio_R.data() : nullptr, block * kBlock, std::min(a.n_tokens, (block + 1) * kBlock),
        batches[thread], histograms.data() + thread * kLogRatioBins, parts.data() + block * kSums);
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
