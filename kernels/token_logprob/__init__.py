"""token_logprob: log-probabilities of target tokens from hidden rows and the head, without logits in memory.

``token_logprob(hidden_MH, weight_VH, targets_M, ...) -> (M,) float32``

    logits = softcap(logit_scale * (hidden weight^T + bias)) / temperature;  out = logits[target] - logsumexp(logits)

Shapes: M rows, H hidden size, V vocabulary. Logits are formed, in float32 (float64 for float64 input), for a
block of rows and a chunk of the vocabulary at a time; the log-sum-exp is merged over chunks by running maximum.
Results are <= 0 always: the target's logit is part of the maximum, and a rounding overshoot is clamped to 0.
"""

from __future__ import annotations

import torch

from trace_fast.errors import ConfigError
from trace_fast.kernels.token_logprob.reference import token_logprob_reference
from trace_fast.kernels.token_logprob.torch_impl import token_logprob_torch

IMPLEMENTATIONS = {"reference": token_logprob_reference, "torch": token_logprob_torch}

__all__ = ["IMPLEMENTATIONS", "token_logprob"]


def token_logprob(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    backend: str = "torch",
) -> torch.Tensor:
    """Natural-log probability (nats) of ``targets_M`` under the head.

    Args:
        hidden_MH, weight_VH: float tensors of one device; the head may have another dtype than the hidden rows.
        targets_M: ``int64`` token ids in 0..V-1.
        bias_V: added before ``logit_scale`` and ``softcap``.
        backend: ``"reference"`` (eager, autograd) or ``"torch"`` (chunked; bit-equal in any company of rows).

    Returns:
        ``(M,)`` float32 (float64 for float64 hidden rows), <= 0, or NaN where the hidden row is not finite.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """

    def expect(ok: bool, what: str, expected: str, got: object) -> None:
        if not ok:
            raise ConfigError(f"token_logprob: {what}: expected {expected}, got {got}")

    expect(hidden_MH.ndim == 2, "hidden", "a (rows, hidden) tensor", f"shape {tuple(hidden_MH.shape)}")
    expect(weight_VH.ndim == 2, "weight", "a (vocabulary, hidden) tensor", f"shape {tuple(weight_VH.shape)}")
    expect(hidden_MH.shape[1] == weight_VH.shape[1], "weight", f"hidden size {hidden_MH.shape[1]}", weight_VH.shape[1])
    expect(targets_M.shape == hidden_MH.shape[:1], "targets", f"shape ({len(hidden_MH)},)", tuple(targets_M.shape))
    expect(targets_M.dtype == torch.int64, "targets", "dtype int64", targets_M.dtype)
    if len(targets_M):
        low, high = int(targets_M.min()), int(targets_M.max())
        expect(low >= 0 and high < len(weight_VH), "targets", f"ids in 0..{len(weight_VH) - 1}", f"{low}..{high}")
    if bias_V is not None:
        expect(bias_V.shape == weight_VH.shape[:1], "bias", f"shape ({len(weight_VH)},)", tuple(bias_V.shape))
    expect(softcap is None or softcap > 0, "softcap", "None or a positive number", softcap)
    expect(temperature > 0, "temperature", "a positive number", temperature)
    if backend not in IMPLEMENTATIONS:
        raise ConfigError(f"token_logprob: expected backend in {sorted(IMPLEMENTATIONS)}, got {backend!r}")
    return IMPLEMENTATIONS[backend](
        hidden_MH,
        weight_VH,
        targets_M,
        bias_V=bias_V,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
    )
