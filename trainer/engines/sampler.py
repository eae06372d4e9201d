"""From logits to sampled ids and their log-probabilities.

    log p = log_softmax(logits / temperature);  top-p keeps the smallest set of most probable ids whose mass reaches p
    id = first id whose cumulative probability exceeds u * mass, u uniform in [0, 1)
    logprob = log p(id) - log(mass of the ids kept)

Temperature 0 takes the most probable id; its log-probability is then that at temperature 1, since "the distribution it
was sampled from" has one point. Rows do not see one another. Log-probabilities are float32 (nats) and <= 0; cumulative
sums are float64, so that no id of a large vocabulary is rounded out of them.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """``(B,)`` ids int64 and log-probabilities float32 on the host; ``good`` is False where the logits were no numbers
    (NaN, +Inf, or all -Inf): the other two mean nothing there."""

    ids: np.ndarray
    logprobs: np.ndarray
    good: np.ndarray


def draw(logits_BV: Tensor, temperature_B: np.ndarray, top_p_B: np.ndarray, uniform_B: np.ndarray) -> Drawn:
    """One id a row.

    Args:
        logits_BV: float, any device.
        temperature_B: >= 0, 0 is greedy. top_p_B: in (0, 1]. uniform_B: float64 in [0, 1).
    """
    device = logits_BV.device
    greedy_B = temperature_B == 0
    divisor_B = np.where(greedy_B, 1.0, temperature_B)
    scaled_BV = logits_BV.float()
    if (divisor_B != 1.0).any():
        scaled_BV = scaled_BV / torch.as_tensor(divisor_B, dtype=torch.float32).to(device)[:, None]
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    good_B = torch.isfinite(logprobs_BV.amax(dim=-1))
    if greedy_B.all():
        ids_B = logprobs_BV.argmax(dim=-1)
        chosen_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
    else:
        uniform = torch.as_tensor(uniform_B, dtype=torch.float64).to(device)
        kept_BV = None
        if (top_p_B < 1.0).any():
            kept_BV = _nucleus(logprobs_BV, torch.as_tensor(top_p_B, dtype=torch.float64).to(device))
        ids_B, chosen_B = _inverse_cdf(logprobs_BV, kept_BV, uniform)
        if greedy_B.any():
            greedy = torch.as_tensor(greedy_B).to(device)
            ids_B = torch.where(greedy, logprobs_BV.argmax(dim=-1), ids_B)
            plain_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
            chosen_B = torch.where(greedy, plain_B, chosen_B)
    return Drawn(ids_B.cpu().numpy(), chosen_B.clamp(max=0.0).cpu().numpy(), good_B.cpu().numpy())


def _inverse_cdf(logprobs_BV: Tensor, kept_BV: Tensor | None, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    p_BV = logprobs_BV.exp()
    if kept_BV is not None:
        p_BV = p_BV.masked_fill(~kept_BV, 0.0)
    cumulative_BV = p_BV.cumsum(dim=-1, dtype=torch.float64)
    mass_B = cumulative_BV[:, -1]
    # u * mass may round up to mass; below it, the first sum that exceeds it is one that its id has raised.
    limit_B = torch.nextafter(mass_B, torch.zeros_like(mass_B))
    aim_B = torch.minimum(uniform_B * mass_B, limit_B)
    ids_B = torch.searchsorted(cumulative_BV, aim_B[:, None], right=True)[:, 0]
    ids_B = ids_B.clamp(max=logprobs_BV.shape[1] - 1)  # rows of NaN only
    chosen_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
    if kept_BV is not None:
        chosen_B = torch.where(kept_BV.all(dim=-1), chosen_B, chosen_B - mass_B.log().float())
    return ids_B, chosen_B


def _nucleus(logprobs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """``(B, V) bool``: ids before which, from the most probable on, less than ``top_p`` of the mass lies."""
    sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    p_BV = sorted_BV.double().exp()
    before_BV = p_BV.cumsum(dim=-1) - p_BV
    keep_BV = (before_BV < top_p_B[:, None]) | (top_p_B == 1.0)[:, None]
    keep_BV[:, 0] = True
    return torch.zeros_like(keep_BV).scatter(1, order_BV, keep_BV)
