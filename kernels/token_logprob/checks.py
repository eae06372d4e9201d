"""One validator of token_logprob's calls: every error names the tensor, what was expected and what came."""

from __future__ import annotations

import torch

from trace_fast.kernels.common.checks import FACTORS, check_factor, expect
from trace_fast.kernels.token_logprob.problem import Parts, Problem


def readable(tensor: torch.Tensor) -> bool:
    """Whether values can be looked at without waiting for a device or breaking a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_problem(op: str, problem: Problem) -> None:
    """Shapes, dtypes, devices and scalars; no values of tensors."""
    hidden, weight, targets, bias, softcap, logit_scale, temperature = problem
    expect(hidden.ndim == 2, op, "hidden", "a (rows, hidden) tensor", f"shape {tuple(hidden.shape)}")
    expect(weight.ndim == 2, op, "weight", "a (vocabulary, hidden) tensor", f"shape {tuple(weight.shape)}")
    expect(hidden.is_floating_point(), op, "hidden", "a floating dtype", hidden.dtype)
    expect(weight.is_floating_point(), op, "weight", "a floating dtype", weight.dtype)
    expect(hidden.shape[1] == weight.shape[1], op, "weight", f"hidden size {hidden.shape[1]}", weight.shape[1])
    expect(weight.numel() > 0, op, "weight", "at least one entry and one column", f"shape {tuple(weight.shape)}")
    expect(targets.shape == hidden.shape[:1], op, "targets", f"shape ({len(hidden)},)", tuple(targets.shape))
    expect(targets.dtype == torch.int64, op, "targets", "dtype int64", targets.dtype)
    if bias is not None:
        expect(bias.shape == weight.shape[:1], op, "bias", f"shape ({len(weight)},)", tuple(bias.shape))
        expect(bias.is_floating_point(), op, "bias", "a floating dtype", bias.dtype)
    for name, tensor in (("weight", weight), ("targets", targets), ("bias", bias)):
        if tensor is not None:
            expect(tensor.device == hidden.device, op, name, f"device {hidden.device}", tensor.device)
    check_factor(op, "softcap", softcap, optional=True)
    check_factor(op, "temperature", temperature, optional=False)
    largest = FACTORS[1]
    expect(abs(logit_scale) <= largest, op, "logit_scale", f"a number of size up to {largest:.0e}", logit_scale)


def check_targets(op: str, problem: Problem, ignore_index: int | None) -> None:
    """Ids within the vocabulary, where they can be read."""
    targets, vocabulary = problem.targets_M, len(problem.weight_VH)
    if not readable(targets):
        return
    if ignore_index is not None:
        targets = targets[targets != ignore_index]
    if len(targets):
        low, high = int(targets.min()), int(targets.max())
        besides = "" if ignore_index is None else f" or {ignore_index}"
        expect(low >= 0 and high < vocabulary, op, "targets", f"ids in 0..{vocabulary - 1}{besides}", f"{low}..{high}")


def check_segments(op: str, cu_targets_S: torch.Tensor, rows: int, device: torch.device) -> None:
    """Offsets of segments: 0, increasing, rows. Values where they can be read."""
    what = "cu_targets"
    shape = f"shape {tuple(cu_targets_S.shape)}"
    expect(cu_targets_S.ndim == 1 and len(cu_targets_S) > 0, op, what, "a (segments + 1,) tensor", shape)
    expect(cu_targets_S.dtype in (torch.int32, torch.int64), op, what, "dtype int32 or int64", cu_targets_S.dtype)
    expect(cu_targets_S.device == device, op, what, f"device {device}", cu_targets_S.device)
    if readable(cu_targets_S):
        first, last = int(cu_targets_S[0]), int(cu_targets_S[-1])
        expect(first == 0 and last == rows, op, what, f"offsets from 0 to {rows}", f"{first} to {last}")
        falls = (cu_targets_S.diff() <= 0).nonzero()[:, 0]
        if len(falls):
            place = int(falls[0])
            pair = f"{int(cu_targets_S[place])} then {int(cu_targets_S[place + 1])} at segment {place}"
            expect(False, op, what, "increasing offsets", pair)


def check_shards(op: str, parts: Parts) -> None:
    """Stacked parts: four floating (shards, rows) tensors of one shape and device."""
    shape = parts.max_M.shape
    expect(len(shape) == 2 and shape[0] > 0, op, "max", "a (shards, rows) tensor", f"shape {tuple(shape)}")
    for name, tensor in zip(("max", "sum", "target", "held"), parts, strict=True):
        expect(tensor.is_floating_point(), op, name, "a floating dtype", tensor.dtype)
        expect(tensor.shape == shape, op, name, f"shape {tuple(shape)}", tuple(tensor.shape))
        expect(tensor.device == parts.max_M.device, op, name, f"device {parts.max_M.device}", tensor.device)
