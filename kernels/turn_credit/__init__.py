"""Turn credit and advantages of TRACE as segmented operations on flat tensors.

All rollouts of a batch lie one behind the other; ``cu_`` tensors hold R+1 int32 or int64 offsets, from 0 to the length
of what they divide (below 2^31); results have int32 ones. Everything stays on the arguments' device; no gradient flows
(credit is a constant of the policy loss). Log-probabilities, values and credit are in nats. Results of one rollout do
not depend on the rest of the batch, bit for bit; outcome advantages and the ``group_mean`` answer weight depend on the
rollout's group, as they must.

``turn_credit_flat`` and ``credit_and_advantages`` have several implementations (``IMPLEMENTATIONS``), chosen by name:
``reference`` (torch, any device), ``native`` (C++, CPU), ``triton`` and ``cuda`` (CUDA C++). The reference checks the
contents of its arguments on every device, which waits for the device. ``native`` checks them as it reads them, and
``triton`` checks those of CPU tensors (in Triton's interpreter). On a CUDA device ``triton`` and ``cuda`` never wait
for it: they read and write inside the tensors whatever the offsets say, and a rollout whose offsets contradict its
number of turns, or that holds a score which is no log-probability, gets NaN there.

Suffixes: R rollouts, R1 = R+1, S states of all rollouts, T turns of all rollouts, N tokens of all rollouts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.kernels.common.checks import check_contiguous, why_not_implementation
from trace_fast.kernels.common.derivatives import refuse_tangents
from trace_fast.kernels.turn_credit.checks import (
    check_advantage_settings,
    check_credit,
    check_credit_form,
    check_outcome_advantages,
    check_token_advantages,
    check_token_turns,
    check_tokens_form,
    int32_offsets,
)
from trace_fast.kernels.turn_credit.reference import (
    CreditAndAdvantages,
    TurnCreditTensors,
    outcome_advantages_reference,
    token_advantages_reference,
    token_turns_reference,
    turn_credit_reference,
)

IMPLEMENTATIONS = ("reference", "native", "triton", "cuda")

__all__ = [
    "IMPLEMENTATIONS",
    "CreditAndAdvantages",
    "TurnCreditTensors",
    "credit_and_advantages",
    "outcome_advantages",
    "token_advantages_flat",
    "token_turns_flat",
    "turn_credit_flat",
    "why_not",
]


@torch.compiler.assume_constant_result  # what a machine can run does not change while a graph is traced
def why_not(name: str, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why implementation ``name`` cannot run tensors of this device and dtype here; ``None`` when it can."""
    return why_not_implementation(__name__, IMPLEMENTATIONS, name, device, dtype)


@torch.no_grad()
def turn_credit_flat(
    mean_logprobs_S: Tensor,
    cu_states_R1: Tensor,
    n_turns_R: Tensor,
    outcome_advantages_R: Tensor,
    config: CreditConfig,
    *,
    backend: str = "reference",
    total_turns: int | None = None,
) -> TurnCreditTensors:
    """Values, one-step credit and K-step turn rewards from the scores of the states (Eqs. 6-10, Algorithm 1).

    With d_k = -mean_logprob_k + ``gap_offset``, k counting within a rollout:

    ========== ================================= ===============================
    form       delta_k                           V_k
    ========== ================================= ===============================
    log_ratio  log(d_k / d_{k+1})                log(d_0 / d_k)
    raw        l_{k+1} - l_k                     l_k - l_0
    linear     (l_{k+1} - l_k) / d_k             delta_0 + ... + delta_{k-1}
    ========== ================================= ===============================

    r_k = c_k + [h = T-1] · ``terminal_scale`` · discount^(T-k) · A_out, where h = min(k+K-1, T-1) and c_k is the
    discounted sum of delta_k..delta_h, divided by the sum of its discounts unless ``normalize_window`` is off. K = 0:
    c_k = 0 and h = k, so that only the last turn gets the terminal term. K beyond T ends with the rollout.

    Args:
        mean_logprobs_S: ``(S,)`` float32 or float64, finite, <= 0.
        cu_states_R1: ``(R+1,)`` int32 or int64; a rollout of T turns has T+1 states (cut off) or T+2 (finished).
        n_turns_R: ``(R,)`` int32 or int64, T of each rollout; 0 is allowed.
        outcome_advantages_R: ``(R,)`` dtype of ``mean_logprobs_S``, A_out; 0 leaves the terminal term out.
        config: ``std`` and ``secured_threshold`` are not used here.
        backend: a name of ``IMPLEMENTATIONS``; the compiled ones take contiguous tensors only.
        total_turns: the sum of ``n_turns_R``, for the compiled implementations: knowing it saves the one look at a
            CUDA device that they would need to size their result, and makes the call traceable.

    Raises:
        TraceFastError: (a ``ValueError``) a wrong dtype, device or length, offsets that do not increase, a number of
            states that does not fit T, a log-probability that is NaN, infinite or positive, an outcome advantage beyond
            1e9; it names the tensor.
        ConfigError: (a ``TraceFastError``) the implementation cannot run here, or a setting is beyond 1e9 or vanishes
            in this dtype, so that a result might not be finite; the message says why.
    """
    states = (mean_logprobs_S, cu_states_R1, n_turns_R, outcome_advantages_R)
    if backend == "reference":
        n_turns, longest = check_credit(*states, config)
        cu_states_R1 = int32_offsets("cu_states_R1", cu_states_R1, mean_logprobs_S.shape[0])
        return turn_credit_reference(
            mean_logprobs_S, cu_states_R1, n_turns_R, outcome_advantages_R, config, n_turns, longest
        )
    check_credit_form(*states, config)
    return _run(backend, states, None, config, AdvantageConfig(), total_turns).credit


@torch.no_grad()
def credit_and_advantages(
    mean_logprobs_S: Tensor,
    boundaries_S: Tensor,
    cu_states_R1: Tensor,
    n_turns_R: Tensor,
    outcome_advantages_R: Tensor,
    loss_mask_N: Tensor,
    cu_tokens_R1: Tensor,
    group_ids_R: Tensor,
    credit: CreditConfig,
    advantage: AdvantageConfig,
    *,
    backend: str = "reference",
    total_turns: int | None = None,
) -> CreditAndAdvantages:
    """Turn credit and the advantage of every token in one call: Eqs. 6-11 from the scores to the policy loss.

    The same numbers as ``turn_credit_flat``, ``token_turns_flat`` and ``token_advantages_flat`` one after the other,
    to rounding; the compiled implementations read each token's mask once and keep no turn number a token.

    Args:
        boundaries_S: ``(S,)`` int32 or int64 token counts, as in ``token_turns_flat``.
        loss_mask_N, cu_tokens_R1, group_ids_R: as in ``token_advantages_flat``.
        mean_logprobs_S, cu_states_R1, n_turns_R, outcome_advantages_R, backend, total_turns: as in
            ``turn_credit_flat``.

    Raises:
        TraceFastError, ConfigError: as the three calls.
    """
    states = (mean_logprobs_S, cu_states_R1, n_turns_R, outcome_advantages_R)
    if backend == "reference":
        turns_N = token_turns_flat(boundaries_S, cu_states_R1, n_turns_R, cu_tokens_R1)
        result = turn_credit_flat(*states, credit)
        spans = (turns_N, loss_mask_N, cu_tokens_R1, result.rewards_T, result.cu_turns_R1)
        return CreditAndAdvantages(
            result, token_advantages_flat(*spans, outcome_advantages_R, group_ids_R, advantage)
        )
    check_credit_form(*states, credit)
    check_tokens_form(boundaries_S, loss_mask_N, cu_tokens_R1, group_ids_R, mean_logprobs_S)
    check_advantage_settings(advantage)
    return _run(
        backend, states, (boundaries_S, loss_mask_N, cu_tokens_R1, group_ids_R), credit, advantage, total_turns
    )


def _run(
    backend: str,
    states: tuple[Tensor, Tensor, Tensor, Tensor],
    tokens: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    credit: CreditConfig,
    advantage: AdvantageConfig,
    total_turns: int | None,
) -> CreditAndAdvantages:
    """A compiled implementation on arguments whose form was checked."""
    mean_logprobs_S, cu_states_R1, n_turns_R, outcome_advantages_R = states
    reason = why_not(backend, device=mean_logprobs_S.device, dtype=mean_logprobs_S.dtype)
    if reason is not None:
        raise ConfigError(f"turn_credit: backend {backend!r} cannot run: {reason}")
    refuse_tangents(
        "turn_credit", backend, mean_logprobs_S=mean_logprobs_S, outcome_advantages_R=outcome_advantages_R
    )
    check_contiguous(
        mean_logprobs_S=mean_logprobs_S,
        cu_states_R1=cu_states_R1,
        n_turns_R=n_turns_R,
        outcome_advantages_R=outcome_advantages_R,
    )
    if tokens is not None:
        check_contiguous(boundaries_S=tokens[0], loss_mask_N=tokens[1], cu_tokens_R1=tokens[2], group_ids_R=tokens[3])
    if backend == "triton" and mean_logprobs_S.device.type == "cpu":  # the interpreter follows offsets unprotected
        check_credit(*states, credit, 0.0 if tokens is None else advantage.alpha_turn)
        if tokens is not None:
            check_token_turns(tokens[0], cu_states_R1, n_turns_R, tokens[2])
    cu_states_R1 = int32_offsets("cu_states_R1", cu_states_R1, mean_logprobs_S.numel())
    if tokens is not None:
        boundaries_S, loss_mask_N, cu_tokens_R1, group_ids_R = tokens
        cu_tokens_R1 = int32_offsets("cu_tokens_R1", cu_tokens_R1, loss_mask_N.numel())
        tokens = (boundaries_S, loss_mask_N, cu_tokens_R1, group_ids_R)
    largest = mean_logprobs_S.numel() - n_turns_R.numel()  # a rollout has a state more than turns, at least
    turns = int(n_turns_R.sum()) if total_turns is None else total_turns
    if not isinstance(turns, int) or not 0 <= turns <= max(largest, 0):
        name = "n_turns_R" if total_turns is None else "total_turns"
        raise TraceFastError(f"{name}: expected 0..{largest} turns in total for these states, got {turns}")
    if largest < 0:
        raise TraceFastError(f"mean_logprobs_S: expected a state a rollout at least, got {mean_logprobs_S.numel()}")
    *fields, advantages_N = getattr(torch.ops.trace_fast, f"turn_credit_{backend}")(
        mean_logprobs_S,
        cu_states_R1,
        n_turns_R,
        outcome_advantages_R,
        *(tokens or (None, None, None, None)),
        turns,
        min(credit.horizon, 2**31),  # a 64-bit argument; no rollout has more turns
        credit.discount,
        credit.gap_offset,
        credit.terminal_scale,
        credit.form,
        credit.normalize_window,
        advantage.alpha_out,
        advantage.alpha_turn,
        advantage.answer_tail,
        advantage.answer_tail_scale,
    )
    return CreditAndAdvantages(TurnCreditTensors(*fields), advantages_N)


@torch.no_grad()
def outcome_advantages(
    rewards_R: Tensor, group_ids_R: Tensor, std: Literal["population", "sample"] = "population"
) -> Tensor:
    """A_out = (R - mean) / std over the rollouts of a group (Section 3.3), ``(R,)`` in the dtype of the rewards.

    A group of one, and a group whose rewards are all equal, gets 0. Rewards are equal when the group's largest and
    smallest differ by at most 8 float32 epsilons (9.5e-7) of its largest magnitude: rewards are sums of a few terms
    and pass through float32 in trainers and dumps, eight roundings there move them that far, and normalising such a
    residue would turn rounding into advantages of order 1. No epsilon is added to the std, so population advantages
    lie within ±sqrt(G-1).

    Args:
        rewards_R: ``(R,)`` float32 or float64, finite.
        group_ids_R: ``(R,)`` int32 or int64; equal numbers are one group, in any order.
        std: ``population`` divides the squares by G (the paper), ``sample`` by G-1.

    Raises:
        TraceFastError: (a ``ValueError``) a wrong dtype, device or length, a reward that is not finite, another std.
    """
    check_outcome_advantages(rewards_R, group_ids_R, std)
    return outcome_advantages_reference(rewards_R, group_ids_R, std)


@torch.no_grad()
def token_turns_flat(boundaries_S: Tensor, cu_states_R1: Tensor, n_turns_R: Tensor, cu_tokens_R1: Tensor) -> Tensor:
    """``(N,) int64`` turn of each token: -1 in the prompt, k from b_k up to b_{k+1}, T from b_T on.

    Args:
        boundaries_S: ``(S,)`` int32 or int64 token counts within the rollout (not the batch), never decreasing.
        cu_states_R1: ``(R+1,)`` int32 or int64; T+1 or T+2 boundaries a rollout.
        n_turns_R: ``(R,)`` int32 or int64, T.
        cu_tokens_R1: ``(R+1,)`` int32 or int64 offsets of the rollouts' tokens.

    Raises:
        TraceFastError: (a ``ValueError``) a wrong dtype, device or length, offsets or boundaries out of order or range.
    """
    n_tokens, n_turns = check_token_turns(boundaries_S, cu_states_R1, n_turns_R, cu_tokens_R1)
    return token_turns_reference(boundaries_S, cu_states_R1, n_turns_R, cu_tokens_R1, n_tokens, n_turns)


@torch.no_grad()
def token_advantages_flat(
    token_turns_N: Tensor,
    loss_mask_N: Tensor,
    cu_tokens_R1: Tensor,
    turn_rewards_T: Tensor,
    cu_turns_R1: Tensor,
    outcome_advantages_R: Tensor,
    group_ids_R: Tensor,
    config: AdvantageConfig,
) -> Tensor:
    """Advantage of every token (Eq. 11), ``(N,)`` in the dtype of ``turn_rewards_T``; never normalised or clipped.

    - A policy token of turn k (``loss_mask_N`` set): alpha_out · A_out + alpha_turn · r_k.
    - A policy token after the last turn (the final answer, or what a cut-off rollout wrote instead): w · alpha_out ·
      A_out. ``group_mean``: w = scale × mean answer length over the group's rollouts that have an answer / own answer
      length, so that every answer has the same total weight; ``constant``: w = scale; ``off``: w = 0. The length of an
      answer counts its policy tokens only.
    - Every other token, and every prompt token whatever its mask: exactly 0.

    Args:
        token_turns_N: ``(N,)`` int32 or int64: -1 prompt, 0..T-1 turns, T answer; see ``token_turns_flat``.
        loss_mask_N: ``(N,)`` bool, True where the policy wrote the token.
        cu_tokens_R1: ``(R+1,)`` int32 or int64.
        turn_rewards_T: ``(T,)`` float32 or float64, r_k.
        cu_turns_R1: ``(R+1,)`` int32 or int64; both as in ``TurnCreditTensors``.
        outcome_advantages_R: ``(R,)`` A_out, dtype of ``turn_rewards_T``.
        group_ids_R: ``(R,)`` int32 or int64, in any order.

    Raises:
        TraceFastError: (a ``ValueError``) a wrong dtype, device or length, offsets out of order, a turn the rollout
            does not have, a value that is not finite.
    """
    check_token_advantages(
        token_turns_N, loss_mask_N, cu_tokens_R1, turn_rewards_T, cu_turns_R1, outcome_advantages_R, group_ids_R, config
    )
    return token_advantages_reference(
        token_turns_N, loss_mask_N, cu_tokens_R1, turn_rewards_T, cu_turns_R1, outcome_advantages_R, group_ids_R, config
    )
