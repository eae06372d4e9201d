// turn_credit on the CPU: scores of the states of a batch to values, one-step credit, K-step turn rewards and, in the
// same call, token advantages (the formulas are in kernels/turn_credit/__init__.py).
//
// Everything is computed in double and rounded once. A rollout's results depend on its own entries (and its group's
// answer lengths), not on its place in the batch nor on the number of threads, bit for bit.
#pragma once

#include <cstdint>
#include <string>

namespace trace_fast {

// Of settings and outcome advantages: products of three of them and a number of tokens stay within float.
constexpr double kLargestCreditSetting = 1e9;

enum class CreditForm { kLogRatio, kRaw, kLinear };
enum class AnswerTail { kGroupMean, kConstant, kOff };

// T is float or double. S states, R rollouts, N tokens, n_turns turns; deltas has S - R entries.
template <class T>
struct TurnCreditArgs {
  std::int64_t n_rollouts, n_states, n_turns, n_tokens;
  const T* mean_logprobs_S;
  const std::int32_t* cu_states_R1;
  const std::int64_t* n_turns_R;
  const T* outcome_advantages_R;
  T* values_S;
  T* deltas_D;
  T* rewards_T;
  std::int32_t* cu_deltas_R1;
  std::int32_t* cu_turns_R1;

  std::int64_t horizon;
  double discount, gap_offset, terminal_scale;
  CreditForm form;
  bool normalize_window;

  bool with_tokens;  // whether token advantages are asked for; what follows is not read otherwise
  const std::int64_t* boundaries_S;
  const bool* loss_mask_N;
  const std::int32_t* cu_tokens_R1;
  const std::int64_t* group_ids_R;
  T* advantages_N;
  double alpha_out, alpha_turn;
  AnswerTail answer_tail;
  double answer_tail_scale;

  int n_threads;
};

// `kernel`: one of elementwise_kernels(). Throws std::invalid_argument, which names the tensor, what was expected and
// what came, when offsets, boundaries or numbers are not what the op takes; no tensor is read or written out of bounds.
template <class T>
void turn_credit(const TurnCreditArgs<T>& args, const std::string& kernel);

}  // namespace trace_fast
