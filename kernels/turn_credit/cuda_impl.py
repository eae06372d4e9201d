"""turn_credit in CUDA C++ (``csrc/cuda/turn_credit.h``): credit, turn rewards and token advantages in one launch.

Built into the native module where nvcc is at hand. Nothing waits for the device; with the answer-tail rule
``group_mean`` a small launch counts the answers first. Registered as ``trace_fast::turn_credit_cuda``; no gradient
flows.

Suffixes: R rollouts, R1 = R+1, S states, D = S - R transitions, T turns (in total), N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_fast import native
from trace_fast.kernels.turn_credit.outputs import (
    empty_outputs,
    fill_offsets,
    group_mean_weights,
    named_states,
    named_tokens,
    shares_a_rollout,
)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this implementation cannot run such tensors here; ``None`` when it can."""
    if device.type != "cuda":
        return f"the CUDA kernel runs on CUDA devices, got {device}"
    if dtype not in (torch.float32, torch.float64):
        return f"the CUDA kernel takes float32 or float64, got {dtype}"
    state = native.status()
    if not state.available:
        return f"the native module is {state.reason}"
    if not hasattr(native.module(), "turn_credit_cuda"):
        return "the native module was built without CUDA (nvcc was not found)"
    return None


@torch.library.custom_op("trace_fast::turn_credit_cuda", mutates_args=(), device_types="cuda")
def turn_credit(
    mean_logprobs_S: Tensor,
    cu_states_R1: Tensor,
    n_turns_R: Tensor,
    outcome_advantages_R: Tensor,
    boundaries_S: Tensor | None,
    loss_mask_N: Tensor | None,
    cu_tokens_R1: Tensor | None,
    group_ids_R: Tensor | None,
    total_turns: int,
    horizon: int,
    discount: float,
    gap_offset: float,
    terminal_scale: float,
    form: str,
    normalize_window: bool,
    alpha_out: float,
    alpha_turn: float,
    answer_tail: str,
    answer_tail_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``outputs.Outputs``; token advantages where the token tensors are given."""
    outputs = empty_outputs(mean_logprobs_S, n_turns_R, loss_mask_N, total_turns)
    fill_offsets(cu_states_R1, n_turns_R, outputs[3], outputs[4])
    tensors = named_states(mean_logprobs_S, cu_states_R1, n_turns_R, outcome_advantages_R, outputs)
    settings = {
        "horizon": horizon,
        "discount": discount,
        "gap_offset": gap_offset,
        "terminal_scale": terminal_scale,
        "form": form,
        "normalize_window": normalize_window,
        "alpha_out": alpha_out,
        "alpha_turn": alpha_turn,
        "answer_tail": answer_tail,
        "answer_tail_scale": answer_tail_scale,
    }
    launch = native.module().turn_credit_cuda
    with torch.cuda.device(mean_logprobs_S.device):
        stream = torch.cuda.current_stream().cuda_stream
        shares = 1
        if loss_mask_N is not None:
            assert group_ids_R is not None
            shares = shares_a_rollout(loss_mask_N.shape[0], max(n_turns_R.shape[0], 1))
            tensors |= named_tokens(boundaries_S, loss_mask_N, cu_tokens_R1, group_ids_R, outputs)
            if answer_tail == "group_mean":
                lengths = {"answer_length_R": torch.zeros_like(tensors["n_turns_R"])}
                launch(tensors | lengths, settings, shares, True, stream)
                weight_R = group_mean_weights(lengths["answer_length_R"], group_ids_R, answer_tail_scale)
            else:
                scale = 0.0 if answer_tail == "off" else answer_tail_scale
                weight_R = torch.full(n_turns_R.shape, scale, dtype=torch.float64, device=n_turns_R.device)
            tensors["answer_weight_R"] = weight_R
        launch(tensors, settings, shares, False, stream)
    return outputs


@turn_credit.register_fake
def _(
    mean_logprobs_S: Tensor,
    cu_states_R1: Tensor,
    n_turns_R: Tensor,
    outcome_advantages_R: Tensor,
    boundaries_S: Tensor | None,
    loss_mask_N: Tensor | None,
    cu_tokens_R1: Tensor | None,
    group_ids_R: Tensor | None,
    total_turns: int,
    *settings: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return empty_outputs(mean_logprobs_S, n_turns_R, loss_mask_N, total_turns)
