// The device code of turn_credit: loops that a block's threads share by strides, with barriers between them, so that
// any number of threads a block, one too, gives the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/turn_credit.h"

namespace trace_fast {

// A rollout's places, held within the tensors. `sound`: nothing had to be held, and nothing contradicts itself.
struct RolloutPlaces {
  std::int64_t state0, states, turn0, turns;
  bool sound;
};

__device__ inline std::int64_t held(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}

template <class T>
__device__ RolloutPlaces places_of(const TurnCreditArgs<T>& a, std::int64_t r) {
  RolloutPlaces p;
  p.state0 = a.cu_states_R1[r];
  p.states = a.cu_states_R1[r + 1] - p.state0;
  p.turn0 = a.cu_turns_R1[r];
  p.turns = a.n_turns_R[r];
  p.sound = p.state0 >= 0 && p.states >= 1 && p.state0 + p.states <= a.n_states && p.turns >= 0 && p.turn0 >= 0 &&
            p.turn0 + p.turns <= a.n_turns && (p.states - p.turns == 1 || p.states - p.turns == 2);
  p.state0 = held(p.state0, 0, a.n_states);
  p.states = held(p.states, 0, a.n_states - p.state0);
  p.turn0 = held(p.turn0, 0, a.n_turns);
  p.turns = held(p.turns, 0, held(p.states - 1, 0, a.n_turns - p.turn0));
  return p;
}

// A score, or NaN where it is no log-probability or the rollout is not sound.
template <class T>
__device__ T score_of(const TurnCreditArgs<T>& a, std::int64_t place, bool sound) {
  const T score = a.mean_logprobs_S[place];
  return sound && score <= T(0) && score > -T(INFINITY) ? score : T(NAN);
}

// log(d_before / d_after) as +-log1p(|gain| / smaller gap), which keeps the digits of a small gain.
template <class T>
__device__ T pair_credit(T before, T after, T gap_offset, CreditForm form) {
  const T gain = after - before, gap_before = gap_offset - before;
  if (form == CreditForm::kRaw) return gain;
  if (form == CreditForm::kLinear) return gain / gap_before;
  const T gap_after = gap_offset - after;
  const T size = log1p((gain < T(0) ? -gain : gain) / (gap_before < gap_after ? gap_before : gap_after));
  return gain < T(0) ? -size : size;
}

// K-step reward of turn k (Eqs. 8-10). delta: the rollout's first delta.
template <class T>
__device__ T turn_reward(const TurnCreditArgs<T>& a, const T* delta, std::int64_t k, std::int64_t turns, T outcome) {
  const std::int64_t remaining = turns - k;
  const std::int64_t window = held(a.horizon, 1, remaining);
  double power = 1.0;  // discount^j
  T sum = T(0), total = T(0);
  for (std::int64_t j = 0; j < window; ++j) {
    if (a.horizon > 0) {
      sum += T(power) * delta[k + j];
      total += T(power);
    }
    power *= a.discount;
  }
  if (a.normalize_window && a.horizon > 0) sum /= total;
  return window == remaining ? sum + T(a.terminal_scale) * T(power) * outcome : sum;
}

// Boundaries b_0..b_T at or before the token: the token's turn, plus 1.
__device__ inline std::int64_t boundaries_before(const std::int64_t* boundary, std::int64_t count, std::int64_t token) {
  std::int64_t low = 0, high = count;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (boundary[middle] <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class T>
__device__ void write_tokens(const TurnCreditArgs<T>& a, const RolloutPlaces& p, std::int64_t r, T answer_weight) {
  std::int64_t token0 = a.cu_tokens_R1[r];
  std::int64_t length = a.cu_tokens_R1[r + 1] - token0;
  const bool sound = p.sound && token0 >= 0 && length >= 0 && token0 + length <= a.n_tokens;
  token0 = held(token0, 0, a.n_tokens);
  length = held(length, 0, a.n_tokens - token0);
  const T outcome = sound ? T(a.alpha_out) * a.outcome_advantages_R[r] : T(NAN);
  const std::int64_t* boundary = a.boundaries_S + p.state0;
  const std::int64_t count = p.turns + 1 < p.states ? p.turns + 1 : p.states;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.y) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; i < length; i += stride) {
    T advantage = T(0);
    if (a.loss_mask_N[token0 + i]) {
      const std::int64_t turn = boundaries_before(boundary, count, i) - 1;
      if (turn >= p.turns) {
        advantage = outcome * answer_weight;
      } else if (turn >= 0) {
        advantage = outcome + T(a.alpha_turn) * a.rewards_T[p.turn0 + turn];
      }
    }
    a.advantages_N[token0 + i] = advantage;
  }
}

// Grid (rollouts, shares). Blocks of one rollout store the same bits in values, deltas and rewards.
template <class T>
__global__ void turn_credit_kernel(const TurnCreditArgs<T> a, const double* answer_weight_R) {
  const std::int64_t r = blockIdx.x;
  const RolloutPlaces p = places_of(a, r);
  const T gap_offset = T(a.gap_offset);
  const std::int64_t delta0 = p.state0 - r;
  const std::int64_t n_deltas = a.n_states - a.n_rollouts;
  const T first = p.states > 0 ? score_of(a, p.state0, p.sound) : T(NAN);
  for (std::int64_t k = threadIdx.x; k < p.states; k += blockDim.x) {
    const T here = score_of(a, p.state0 + k, p.sound);
    if (a.form != CreditForm::kLinear) a.values_S[p.state0 + k] = pair_credit(first, here, gap_offset, a.form);
    if (k + 1 < p.states && delta0 + k >= 0 && delta0 + k < n_deltas) {
      a.deltas_D[delta0 + k] = pair_credit(here, score_of(a, p.state0 + k + 1, p.sound), gap_offset, a.form);
    }
  }
  __syncthreads();
  if (a.form == CreditForm::kLinear && threadIdx.x == 0 && p.states > 0) {  // running sums, in order
    T value = first == first ? T(0) : T(NAN);
    a.values_S[p.state0] = value;
    for (std::int64_t k = 1; k < p.states; ++k) {
      value += p.sound ? a.deltas_D[delta0 + k - 1] : T(NAN);
      a.values_S[p.state0 + k] = value;
    }
  }
  const T outcome = a.outcome_advantages_R[r];
  for (std::int64_t k = threadIdx.x; k < p.turns; k += blockDim.x) {
    a.rewards_T[p.turn0 + k] = p.sound ? turn_reward(a, a.deltas_D + delta0, k, p.turns, outcome) : T(NAN);
  }
  if (!a.with_tokens) return;
  __syncthreads();
  write_tokens(a, p, r, T(answer_weight_R[r]));
}

// Grid (rollouts).
template <class T>
__global__ void answer_length_kernel(const TurnCreditArgs<T> a, std::int64_t* length_R) {
  const std::int64_t r = blockIdx.x;
  const RolloutPlaces p = places_of(a, r);
  if (!p.sound) return;
  const std::int64_t token0 = a.cu_tokens_R1[r];
  const std::int64_t begin = held(token0 + a.boundaries_S[p.state0 + p.turns], 0, a.n_tokens);
  const std::int64_t end = held(a.cu_tokens_R1[r + 1], 0, a.n_tokens);
  unsigned long long count = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) count += a.loss_mask_N[i] ? 1 : 0;
  if (count != 0) atomicAdd(reinterpret_cast<unsigned long long*>(length_R + r), count);  // integers: any order
}

}  // namespace trace_fast
