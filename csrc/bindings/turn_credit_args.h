// The arguments of turn_credit from dictionaries of tensors and settings, alike for the CPU and CUDA.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "bindings/named_arguments.h"
#include "bindings/tensor_view.h"
#include "cpu/turn_credit.h"

namespace trace_fast {

inline CreditForm credit_form(const std::string& name) {
  if (name == "log_ratio") return CreditForm::kLogRatio;
  if (name == "raw") return CreditForm::kRaw;
  if (name != "linear") refuse("form", "log_ratio, raw or linear", name);
  return CreditForm::kLinear;
}

inline AnswerTail answer_tail(const std::string& name) {
  if (name == "group_mean") return AnswerTail::kGroupMean;
  if (name == "constant") return AnswerTail::kConstant;
  if (name != "off") refuse("answer_tail", "group_mean, constant or off", name);
  return AnswerTail::kOff;
}

// Token advantages are asked for by the entry "advantages_N".
template <class T>
TurnCreditArgs<T> turn_credit_args(const py::dict& tensors, const py::dict& settings, int n_threads, Dtype dtype,
                                   const std::string& device) {
  TurnCreditArgs<T> a{};
  a.n_threads = n_threads;
  a.horizon = setting<std::int64_t>(settings, "horizon", "an integer below 2^63");
  a.discount = setting<double>(settings, "discount", "a number");
  a.gap_offset = setting<double>(settings, "gap_offset", "a number");
  a.terminal_scale = setting<double>(settings, "terminal_scale", "a number");
  a.form = credit_form(setting<std::string>(settings, "form", "a name"));
  a.normalize_window = setting<bool>(settings, "normalize_window", "a bool");

  const TensorView scores = flat(item(tensors, "mean_logprobs_S"), "mean_logprobs_S", {dtype}, device);
  a.mean_logprobs_S = scores.as<T>();
  a.n_states = scores.size(0);
  const TensorView turns = flat(item(tensors, "n_turns_R"), "n_turns_R", {Dtype::kInt64}, device);
  a.n_turns_R = turns.as<std::int64_t>();
  a.n_rollouts = turns.size(0);
  const auto get = [&](const char* name, Dtype type, std::int64_t length) {
    return dense(item(tensors, name), name, {type}, {length}, device);
  };
  a.cu_states_R1 = get("cu_states_R1", Dtype::kInt32, a.n_rollouts + 1).template as<std::int32_t>();
  a.outcome_advantages_R = get("outcome_advantages_R", dtype, a.n_rollouts).template as<T>();
  if (a.n_states < a.n_rollouts) {
    refuse("mean_logprobs_S", "a state or more for each of " + std::to_string(a.n_rollouts) + " rollouts",
           shape_text(scores.shape));
  }
  a.values_S = get("values_S", dtype, a.n_states).template as<T>();
  a.deltas_D = get("deltas_D", dtype, a.n_states - a.n_rollouts).template as<T>();
  a.cu_deltas_R1 = get("cu_deltas_R1", Dtype::kInt32, a.n_rollouts + 1).template as<std::int32_t>();
  a.cu_turns_R1 = get("cu_turns_R1", Dtype::kInt32, a.n_rollouts + 1).template as<std::int32_t>();
  const TensorView rewards = flat(item(tensors, "rewards_T"), "rewards_T", {dtype}, device);
  a.rewards_T = rewards.as<T>();
  a.n_turns = rewards.size(0);
  a.with_tokens = tensors.contains("advantages_N");
  if (!a.with_tokens) return a;

  const TensorView mask = flat(item(tensors, "loss_mask_N"), "loss_mask_N", {Dtype::kBool}, device);
  a.loss_mask_N = mask.as<bool>();
  a.n_tokens = mask.size(0);
  a.advantages_N = get("advantages_N", dtype, a.n_tokens).template as<T>();
  a.boundaries_S = get("boundaries_S", Dtype::kInt64, a.n_states).template as<std::int64_t>();
  a.cu_tokens_R1 = get("cu_tokens_R1", Dtype::kInt32, a.n_rollouts + 1).template as<std::int32_t>();
  a.group_ids_R = get("group_ids_R", Dtype::kInt64, a.n_rollouts).template as<std::int64_t>();
  a.alpha_out = setting<double>(settings, "alpha_out", "a number");
  a.alpha_turn = setting<double>(settings, "alpha_turn", "a number");
  a.answer_tail = answer_tail(setting<std::string>(settings, "answer_tail", "a name"));
  a.answer_tail_scale = setting<double>(settings, "answer_tail_scale", "a number");
  return a;
}

}  // namespace trace_fast
