"""The checks of policy_loss's arguments. Contents are looked at on the CPU only, where that waits for nothing.

Suffixes: N tokens of all rollouts, R rollouts, R1 = R+1 offsets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.kernels.common.checks import FLOATS, INTEGERS, check_contiguous, check_form
from trace_fast.kernels.policy_loss.config import PolicyLossConfig


def check_arguments(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    cu_tokens_R1: Tensor,
    sampler_logprobs_N: Tensor | None,
    tokens_per_rollout_R: Tensor | None,
    config: PolicyLossConfig,
) -> None:
    """Types, devices and lengths; never waits for a device."""
    check_form("logprobs_N", logprobs_N, FLOATS, logprobs_N)
    length, same = logprobs_N.shape[0], (logprobs_N.dtype,)
    check_form("old_logprobs_N", old_logprobs_N, same, logprobs_N, length)
    check_form("advantages_N", advantages_N, same, logprobs_N, length)
    check_form("mask_N", mask_N, (torch.bool,), logprobs_N, length)
    check_form("cu_tokens_R1", cu_tokens_R1, INTEGERS, logprobs_N)
    if not cu_tokens_R1.shape[0]:
        raise TraceFastError("cu_tokens_R1: expected R+1 offsets beginning with 0, got an empty tensor")
    if tokens_per_rollout_R is not None:
        check_form("tokens_per_rollout_R", tokens_per_rollout_R, INTEGERS, logprobs_N, cu_tokens_R1.shape[0] - 1)
    if (sampler_logprobs_N is None) != (config.tis_cap is None):
        given = "none" if sampler_logprobs_N is None else "some"
        raise ConfigError(
            "sampler_logprobs_N: expected the sampler's log-probabilities with a tis_cap and none without, "
            f"got {given} with tis_cap {config.tis_cap}"
        )
    if sampler_logprobs_N is not None:
        check_form("sampler_logprobs_N", sampler_logprobs_N, same, logprobs_N, length)
    check_contiguous(
        logprobs_N=logprobs_N,
        old_logprobs_N=old_logprobs_N,
        advantages_N=advantages_N,
        mask_N=mask_N,
        cu_tokens_R1=cu_tokens_R1,
        tokens_per_rollout_R=tokens_per_rollout_R,
        sampler_logprobs_N=sampler_logprobs_N,
    )


def check_contents(mask_N: Tensor, cu_tokens_R1: Tensor, **values_N: Tensor | None) -> None:
    """Offsets in order and range, and finite numbers at the trained tokens."""
    if cu_tokens_R1[0] != 0:
        raise TraceFastError(f"cu_tokens_R1: expected 0 as first offset, got {cu_tokens_R1[0]}")
    falls = cu_tokens_R1.diff() < 0
    if falls.any():
        r = int(falls.to(torch.uint8).argmax())
        raise TraceFastError(
            f"cu_tokens_R1: expected offsets that never decrease, got {cu_tokens_R1[r]} then {cu_tokens_R1[r + 1]} "
            f"at [{r}], [{r + 1}]"
        )
    if cu_tokens_R1[-1] != mask_N.numel():
        raise TraceFastError(
            f"cu_tokens_R1: expected {mask_N.numel()} as last offset (the length of mask_N), got {cu_tokens_R1[-1]}"
        )
    for name, values in values_N.items():
        broken = mask_N & ~values.isfinite() if values is not None else mask_N[:0]
        if values is not None and broken.any():
            i = int(broken.to(torch.uint8).argmax())
            raise TraceFastError(f"{name}: expected finite numbers where mask_N is set, got {values[i]} at [{i}]")
