"""Eager oracle of token_logprob: all logits at once, any device, differentiable by autograd."""

from __future__ import annotations

from itertools import pairwise

import torch

from trace_fast.kernels.token_logprob.problem import Problem, RowSums, Scored, accumulation_dtype


def score(problem: Problem, *, starts_S: torch.Tensor | None, ignore_index: int | None, entropy: bool) -> Scored:
    """See ``token_logprob``. Materialises (M, V) logits: for checks, not for speed."""
    logits_MV = _logits(problem)
    logprob_MV = torch.log_softmax(logits_MV, -1)
    targets_M, vocabulary = problem.targets_M, logits_MV.shape[1]
    known_M = (targets_M >= 0) & (targets_M < vocabulary)
    found_M = logprob_MV.gather(1, targets_M.clamp(0, vocabulary - 1)[:, None])[:, 0]
    logprob_M = torch.where(known_M, found_M, float("nan"))
    finite_MV = logprob_MV.clamp(min=torch.finfo(logprob_MV.dtype).min)  # an impossible token: 0, not 0 times -inf
    entropy_M = -(finite_MV.exp() * finite_MV).sum(1) if entropy else None
    scored_M = torch.ones_like(known_M)
    if ignore_index is not None:
        scored_M = targets_M != ignore_index
        logprob_M = torch.where(scored_M, logprob_M, 0)
        entropy_M = None if entropy_M is None else torch.where(scored_M, entropy_M, 0)
    if starts_S is None:
        return Scored(logprob_M, entropy_M, None)
    ranges = [slice(first, last) for first, last in pairwise(starts_S.tolist())]
    means = [logprob_M[rows].double().sum() / scored_M[rows].sum() for rows in ranges]
    return Scored(logprob_M, entropy_M, torch.stack(means) if means else logprob_M.new_empty(0, dtype=torch.float64))


def parts(problem: Problem, *, vocabulary_start: int) -> RowSums:
    """See ``token_logprob_parts``."""
    logits_MV = _logits(problem)
    inside_M = problem.targets_M - vocabulary_start
    here_M = (inside_M >= 0) & (inside_M < logits_MV.shape[1])
    found_M = logits_MV.gather(1, inside_M.clamp(0, logits_MV.shape[1] - 1)[:, None])[:, 0]
    max_M = logits_MV.detach().amax(1)
    shift_M = torch.where(max_M == float("-inf"), 0, max_M)
    return max_M, (logits_MV - shift_M[:, None]).exp().sum(1), torch.where(here_M, found_M, 0)


def _logits(problem: Problem) -> torch.Tensor:
    accumulate = accumulation_dtype(problem.hidden_MH)
    logits_MV = problem.hidden_MH.to(accumulate) @ problem.weight_VH.to(accumulate).T
    if problem.bias_V is not None:
        logits_MV = logits_MV + problem.bias_V.to(accumulate)
    logits_MV = logits_MV * problem.logit_scale
    if problem.softcap is not None:
        logits_MV = problem.softcap * torch.tanh(logits_MV / problem.softcap)
    return logits_MV / problem.temperature
