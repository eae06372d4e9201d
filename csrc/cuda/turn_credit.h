// turn_credit on a CUDA device: raw device pointers in, work put on a stream, nothing waited for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cpu/turn_credit.h"

namespace trace_fast {

// Adds each rollout's policy tokens after its last turn to length_R (R), which the caller has set to 0.
template <class T>
cudaError_t launch_answer_lengths(const TurnCreditArgs<T>& args, std::int64_t* length_R, cudaStream_t stream);

// Values, deltas, rewards and (with_tokens) advantages, in one launch of n_rollouts x shares blocks: each block of a
// rollout writes its share of the tokens. cu_deltas_R1 and cu_turns_R1 are read; n_threads, group_ids_R and the rule of
// the answer tail are not: answer_weight_R (R) says what they say. Every address is held within its tensor, whatever
// the offsets are; a rollout whose offsets contradict its number of turns becomes NaN.
template <class T>
cudaError_t launch_turn_credit(const TurnCreditArgs<T>& args, const double* answer_weight_R, int shares,
                               cudaStream_t stream);

}  // namespace trace_fast
