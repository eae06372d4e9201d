"""What the compiled implementations of this op share: outputs, the group pre-pass, and names of arguments.

Suffixes: R rollouts, R1 = R+1, S states, D = S - R transitions, T turns (in total), N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# values_S, deltas_D, rewards_T, cu_deltas_R1, cu_turns_R1, advantages_N (empty where no tokens are given)
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def empty_outputs(
    mean_logprobs_S: Tensor, n_turns_R: Tensor, loss_mask_N: Tensor | None, total_turns: int
) -> Outputs:
    """Outputs before a kernel wrote them: NaN where offsets that do not cover a tensor would leave old memory.

    Also the shapes that fake tensors get.
    """
    n_states, n_rollouts = mean_logprobs_S.shape[0], n_turns_R.shape[0]
    nan = float("nan")
    return (
        mean_logprobs_S.new_full((n_states,), nan),
        mean_logprobs_S.new_full((n_states - n_rollouts,), nan),
        mean_logprobs_S.new_full((total_turns,), nan),
        mean_logprobs_S.new_empty(n_rollouts + 1, dtype=torch.int32),
        mean_logprobs_S.new_empty(n_rollouts + 1, dtype=torch.int32),
        mean_logprobs_S.new_full((0 if loss_mask_N is None else loss_mask_N.shape[0],), nan),
    )


def named_states(
    mean_logprobs_S: Tensor, cu_states_R1: Tensor, n_turns_R: Tensor, outcome_advantages_R: Tensor, outputs: Outputs
) -> dict[str, Tensor]:
    """Arguments and outputs of the credit by the names that the C++ and CUDA code asks for."""
    values_S, deltas_D, rewards_T, cu_deltas_R1, cu_turns_R1, _ = outputs
    return {
        "mean_logprobs_S": mean_logprobs_S.detach(),
        "cu_states_R1": cu_states_R1,
        "n_turns_R": n_turns_R.long(),
        "outcome_advantages_R": outcome_advantages_R.detach(),
        "values_S": values_S,
        "deltas_D": deltas_D,
        "rewards_T": rewards_T,
        "cu_deltas_R1": cu_deltas_R1,
        "cu_turns_R1": cu_turns_R1,
    }


def named_tokens(
    boundaries_S: Tensor | None,
    loss_mask_N: Tensor,
    cu_tokens_R1: Tensor | None,
    group_ids_R: Tensor | None,
    outputs: Outputs,
) -> dict[str, Tensor]:
    """The same for token advantages; the four tensors come together or not at all."""
    assert boundaries_S is not None
    assert cu_tokens_R1 is not None
    assert group_ids_R is not None
    return {
        "boundaries_S": boundaries_S.long(),
        "loss_mask_N": loss_mask_N,
        "cu_tokens_R1": cu_tokens_R1,
        "group_ids_R": group_ids_R.long(),
        "advantages_N": outputs[-1],
    }


def fill_offsets(cu_states_R1: Tensor, n_turns_R: Tensor, cu_deltas_R1: Tensor, cu_turns_R1: Tensor) -> None:
    """The two offsets of a result, on the tensors' device, without waiting for it."""
    rows_R1 = torch.arange(cu_states_R1.shape[0], dtype=torch.int32, device=cu_states_R1.device)
    torch.sub(cu_states_R1, rows_R1, out=cu_deltas_R1)
    cu_turns_R1[:1].zero_()
    torch.cumsum(n_turns_R, 0, dtype=torch.int32, out=cu_turns_R1[1:])


def shares_a_rollout(n_tokens: int, n_rollouts: int) -> int:
    """How many programs write a rollout's tokens: each repeats the rollout's credit, and none should write long."""
    return min(max(-(-n_tokens // (n_rollouts * 8192)), 1), 1024)


def group_mean_weights(answer_length_R: Tensor, group_ids_R: Tensor, scale: float) -> Tensor:
    """``(R,) float64``: scale × mean answer length of the group / own length; ``scale`` where there is no answer.

    Lengths are integers, so sums over sorted groups are exact in any order, and nothing waits for the device.
    """
    sorted_R, order_R = torch.sort(group_ids_R, stable=True)
    first_R = torch.searchsorted(sorted_R, group_ids_R)
    behind_R = torch.searchsorted(sorted_R, group_ids_R, right=True)
    sorted_length_R = answer_length_R[order_R].long()
    running_R1 = torch.nn.functional.pad(sorted_length_R.cumsum(0), (1, 0))
    answers_R1 = torch.nn.functional.pad((sorted_length_R > 0).long().cumsum(0), (1, 0))
    mean_R = (running_R1[behind_R] - running_R1[first_R]) / (answers_R1[behind_R] - answers_R1[first_R]).clamp(
        min=1
    ).double()
    return torch.where(answer_length_R > 0, scale * mean_R / answer_length_R.clamp(min=1), scale)
