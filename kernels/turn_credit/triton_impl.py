"""turn_credit in Triton: credit, turn rewards and token advantages of a batch in one launch.

The grid is (rollouts, shares of a rollout's tokens). Every program works out its rollout's credit, a block of turns at
a time (a few loads and logarithms a turn; programs of one rollout store the same bits), then writes its share of the
tokens: the turn of a token is found by bisection of the boundaries, and the turn's reward read back. The answer-tail
rule ``group_mean`` needs all answer lengths of a group, so there a small launch counts them first.

Nothing waits for the device, and every address is held within its tensor, whatever the offsets say; a rollout whose
offsets contradict its number of turns becomes NaN. Registered as ``trace_fast::turn_credit_triton``; no gradient flows.

Suffixes: R rollouts, R1 = R+1, S states, D = S - R transitions, T turns (in total), N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from trace_fast.kernels.common.compile_cases import CompileCase
from trace_fast.kernels.turn_credit.outputs import empty_outputs, fill_offsets, group_mean_weights, shares_a_rollout
from trace_fast.kernels.turn_credit.triton_kernels import answer_length_kernel, credit_kernel

BLOCK_TURNS, BLOCK_TOKENS = 64, 1024
TURN_WARPS, TOKEN_WARPS = 2, 4  # of a launch that writes turns only, and of one that writes tokens
FORMS = {"log_ratio": 0, "raw": 1, "linear": 2}


INTERPRETED = isinstance(credit_kernel, InterpretedFunction)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this implementation cannot run such tensors here; ``None`` when it can."""
    if dtype not in (torch.float32, torch.float64):
        return f"the Triton kernel takes float32 or float64, got {dtype}"
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED):
        return None
    return f"Triton kernels run on CUDA devices (or in Triton's interpreter), got {device}"


@torch.library.custom_op("trace_fast::turn_credit_triton", mutates_args=())
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
    values_S, deltas_D, rewards_T, cu_deltas_R1, cu_turns_R1, advantages_N = outputs
    n_states, n_rollouts = mean_logprobs_S.numel(), n_turns_R.numel()
    fill_offsets(cu_states_R1, n_turns_R, cu_deltas_R1, cu_turns_R1)
    if n_rollouts == 0 or n_states == 0:
        return outputs
    # Without tokens the kernel never reads these three.
    mask, cu_tokens, boundaries = cu_states_R1, cu_states_R1, cu_states_R1
    weight_R, shares, n_tokens = outcome_advantages_R, 1, 0
    if loss_mask_N is not None:
        assert boundaries_S is not None
        assert cu_tokens_R1 is not None
        assert group_ids_R is not None
        mask, cu_tokens, boundaries = loss_mask_N.view(torch.uint8), cu_tokens_R1, boundaries_S
        n_tokens = mask.numel()
        shares = shares_a_rollout(n_tokens, n_rollouts)
        scale = 0.0 if answer_tail == "off" else answer_tail_scale
        weight_R = torch.full((n_rollouts,), scale, dtype=torch.float64, device=mask.device)
        if answer_tail == "group_mean":
            length_R = torch.empty(n_rollouts, dtype=torch.int64, device=mask.device)
            answer_length_kernel[(n_rollouts,)](
                boundaries,
                cu_states_R1,
                n_turns_R,
                mask,
                cu_tokens,
                length_R,
                n_states,
                n_tokens,
                BLOCK=BLOCK_TOKENS,
                num_warps=TOKEN_WARPS,
            )
            weight_R = group_mean_weights(length_R, group_ids_R, scale)
    credit_kernel[(n_rollouts, shares)](
        mean_logprobs_S,
        cu_states_R1,
        n_turns_R,
        cu_turns_R1,
        outcome_advantages_R,
        boundaries,
        mask,
        cu_tokens,
        weight_R,
        values_S,
        deltas_D,
        rewards_T,
        advantages_N,
        n_states,
        n_rollouts,
        total_turns,
        n_tokens,
        horizon,
        DISCOUNT=discount,
        GAP_OFFSET=gap_offset,
        TERMINAL_SCALE=terminal_scale,
        ALPHA_OUT=alpha_out,
        ALPHA_TURN=alpha_turn,
        FORM=FORMS[form],
        NORMALIZE=normalize_window,
        WITH_TOKENS=loss_mask_N is not None,
        BLOCK_TURNS=BLOCK_TURNS,
        BLOCK_TOKENS=BLOCK_TOKENS,
        num_warps=TURN_WARPS if loss_mask_N is None else TOKEN_WARPS,
    )
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


def compile_cases() -> list[CompileCase]:
    """The shipped configurations."""
    constants = {
        "DISCOUNT": 0.8,
        "GAP_OFFSET": 0.1,
        "TERMINAL_SCALE": 2.0,
        "ALPHA_OUT": 1.0,
        "ALPHA_TURN": 0.2,
        "NORMALIZE": True,
        "BLOCK_TURNS": BLOCK_TURNS,
        "BLOCK_TOKENS": BLOCK_TOKENS,
    }
    pointers = {"cu_states_R1": "*i32", "cu_turns_R1": "*i32", "cu_tokens_R1": "*i32", "loss_mask_N": "*u8"}
    whole = dict.fromkeys(("n_states", "n_rollouts", "total_turns", "n_tokens", "horizon"), "i32")
    floats = ("mean_logprobs_S", "outcome_advantages_R", "values_S", "deltas_D", "rewards_T", "advantages_N")
    cases = []
    for element in ("fp32", "fp64"):
        for form, number in FORMS.items():
            for with_tokens in (True, False):
                types: dict[str, str] = {**dict.fromkeys(floats, f"*{element}"), **pointers, **whole}
                types |= {"n_turns_R": "*i64", "boundaries_S": "*i64" if with_tokens else "*i32"}
                types["answer_weight_R"] = "*fp64" if with_tokens else f"*{element}"
                if not with_tokens:
                    types["loss_mask_N"] = "*i32"
                values: dict[str, object] = {**constants, "FORM": number, "WITH_TOKENS": with_tokens}
                name = f"turn_credit credit {element} {form}{' tokens' if with_tokens else ''}"
                cases.append(_case(name, credit_kernel, types, values, TOKEN_WARPS if with_tokens else TURN_WARPS))
    types = {**pointers, "boundaries_S": "*i64", "n_turns_R": "*i64", "answer_length_R": "*i64"}
    types |= {"n_states": "i32", "n_tokens": "i32"}
    cases.append(_case("turn_credit answer_length", answer_length_kernel, types, {"BLOCK": BLOCK_TOKENS}, TOKEN_WARPS))
    return cases


def _case(name: str, kernel: Any, types: dict[str, str], constants: dict[str, object], warps: int) -> CompileCase:
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    pointers = tuple(argument for argument, kind in signature.items() if kind.startswith("*"))
    return CompileCase(name, kernel, signature, constants, warps, 3, wants_wgmma=False, aligned=pointers)
