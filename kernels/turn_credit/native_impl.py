"""turn_credit in C++ on the CPU (``csrc/cpu/turn_credit.h``), on ``torch.get_num_threads()`` threads.

Computed in float64 and rounded once, also for float32 tensors. Contents are checked by the C++ code while it reads
them. Registered as ``trace_fast::turn_credit_native``; no gradient flows.

Suffixes: R rollouts, R1 = R+1, S states, D = S - R transitions, T turns (in total), N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_fast import native
from trace_fast.errors import TraceFastError
from trace_fast.kernels.common.checks import why_not_native
from trace_fast.kernels.turn_credit.outputs import empty_outputs, named_states, named_tokens

why_not = why_not_native


@torch.library.custom_op("trace_fast::turn_credit_native", mutates_args=(), device_types="cpu")
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
    tensors = named_states(mean_logprobs_S, cu_states_R1, n_turns_R, outcome_advantages_R, outputs)
    if loss_mask_N is not None:
        tensors |= named_tokens(boundaries_S, loss_mask_N, cu_tokens_R1, group_ids_R, outputs)
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
    try:
        native.module().turn_credit(tensors, settings, torch.get_num_threads(), native.elementwise_kernel())
    except ValueError as error:
        raise TraceFastError(str(error)) from None
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
