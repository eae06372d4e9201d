// The device code of turn_credit compiled for the host: one thread a block, blocks one after the other. Its loops share
// work by strides and wait at barriers, so one thread walks through everything.
#include <cmath>
#include <cstdint>

#define __device__
#define __global__

namespace {
struct Place {
  unsigned x = 0, y = 0;
};
Place blockIdx, threadIdx;
Place blockDim{1, 1}, gridDim{1, 1};
inline void __syncthreads() {}
inline void atomicAdd(unsigned long long* to, unsigned long long value) { *to += value; }
}  // namespace

#include "cuda/turn_credit_kernel.cuh"

namespace {

// Sizes and settings in the order of TurnCreditArgs; see test_turn_credit_emulated.py.
template <class T>
void run(const std::int64_t* sizes, void* const* tensors, const double* numbers, const int* choices,
         const double* weight_R, int shares, std::int64_t* length_R) {
  trace_fast::TurnCreditArgs<T> a{};
  a.n_rollouts = sizes[0], a.n_states = sizes[1], a.n_turns = sizes[2], a.n_tokens = sizes[3], a.horizon = sizes[4];
  a.mean_logprobs_S = static_cast<const T*>(tensors[0]);
  a.cu_states_R1 = static_cast<const std::int32_t*>(tensors[1]);
  a.n_turns_R = static_cast<const std::int64_t*>(tensors[2]);
  a.outcome_advantages_R = static_cast<const T*>(tensors[3]);
  a.boundaries_S = static_cast<const std::int64_t*>(tensors[4]);
  a.loss_mask_N = static_cast<const bool*>(tensors[5]);
  a.cu_tokens_R1 = static_cast<const std::int32_t*>(tensors[6]);
  a.values_S = static_cast<T*>(tensors[7]);
  a.deltas_D = static_cast<T*>(tensors[8]);
  a.rewards_T = static_cast<T*>(tensors[9]);
  a.cu_deltas_R1 = static_cast<std::int32_t*>(tensors[10]);
  a.cu_turns_R1 = static_cast<std::int32_t*>(tensors[11]);
  a.advantages_N = static_cast<T*>(tensors[12]);
  a.discount = numbers[0], a.gap_offset = numbers[1], a.terminal_scale = numbers[2];
  a.alpha_out = numbers[3], a.alpha_turn = numbers[4];
  a.form = static_cast<trace_fast::CreditForm>(choices[0]);
  a.normalize_window = choices[1] != 0;
  a.with_tokens = true;
  for (std::int64_t r = 0; r < a.n_rollouts; ++r) {
    blockIdx = {static_cast<unsigned>(r), 0};
    gridDim = {static_cast<unsigned>(a.n_rollouts), 1};
    if (length_R != nullptr) {
      trace_fast::answer_length_kernel<T>(a, length_R);
      continue;
    }
    gridDim.y = static_cast<unsigned>(shares);
    for (; blockIdx.y < gridDim.y; ++blockIdx.y) trace_fast::turn_credit_kernel<T>(a, weight_R);
  }
}

}  // namespace

extern "C" void run_float32(const std::int64_t* sizes, void* const* tensors, const double* numbers, const int* choices,
                            const double* weight_R, int shares, std::int64_t* length_R) {
  run<float>(sizes, tensors, numbers, choices, weight_R, shares, length_R);
}

extern "C" void run_float64(const std::int64_t* sizes, void* const* tensors, const double* numbers, const int* choices,
                            const double* weight_R, int shares, std::int64_t* length_R) {
  run<double>(sizes, tensors, numbers, choices, weight_R, shares, length_R);
}
