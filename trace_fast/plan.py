"""How rollouts are cut into packs, and what that will cost; integers only, no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trace_fast.checks import check_rollout
from trace_fast.errors import ConfigError, RolloutError
from trace_fast.layout import PackedLayout, pack_layout, shared_tokens
from trace_fast.model_spec import ModelSpec
from trace_fast.rollout import Rollout

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LARGEST_PACK = 65536  # tokens: a killed run loses one pack, and larger ones are no faster
SMALLEST_PACK = 4096


@dataclass(frozen=True)
class PlanSummary:
    """What scoring a file will take. FLOPs count multiply and add; bytes are predictions, not measurements."""

    n_rollouts: int
    n_states: int
    n_rewritten: int
    n_scored_tokens: int
    tokens_naive: int
    tokens_unique: int
    n_packs: int
    max_tokens_per_pack: int
    largest_pack: int
    weight_bytes: int
    peak_bytes: int
    flops: float
    flops_naive: float

    @property
    def ratio(self) -> float:
        """Tokens that one pass a state would forward, over those forwarded here."""
        return self.tokens_naive / max(self.tokens_unique, 1)


def cut_packs(rollouts: Iterable[Rollout], max_tokens: int) -> Iterator[list[Rollout]]:
    """Consecutive rollouts while their distinct tokens fit ``max_tokens``; a longer rollout gets its own pack.

    Which pack a rollout lands in changes no number, only how much of a prompt is shared.
    """
    pack: list[Rollout] = []
    used = 0
    for rollout in rollouts:
        cost = _own_tokens(rollout)
        same = next((r for r in reversed(pack) if r.group == rollout.group), None)
        shared = shared_tokens(same.input_ids, rollout.input_ids) if same is not None else 0
        if pack and used + cost - shared > max_tokens:
            yield pack
            pack, used, shared = [], 0, 0
        pack.append(rollout)
        used += cost - shared
    if pack:
        yield pack


def _own_tokens(rollout: Rollout) -> int:
    """Upper bound on the distinct tokens of one rollout alone."""
    tokens = len(rollout.input_ids)
    for k in range(rollout.n_states):
        tokens += len(rollout.openers[k]) + sum(len(a) - 1 for a in rollout.answers)
        if not rollout.nested:
            other = rollout.prefix(k - 1) if k else rollout.input_ids
            tokens += len(rollout.prefix(k)) - shared_tokens(rollout.prefix(k), other)
    return tokens


def pack_budget(max_tokens_per_pack: int | None, spec: ModelSpec, dtype: str, device: torch.device) -> int:
    """Tokens a pack: as given, or what half of the free memory holds. Raises ConfigError for a value below 1."""
    if max_tokens_per_pack is not None:
        if max_tokens_per_pack < 1:
            raise ConfigError(f"max_tokens_per_pack: expected at least 1 or auto, got {max_tokens_per_pack}")
        return max_tokens_per_pack
    fitting = free_bytes(device) // 2 // bytes_per_token(spec, dtype)
    return int(min(max(fitting, SMALLEST_PACK), LARGEST_PACK))


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; of the host, what the kernel calls available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 << 30  # no way to ask on this system: plan as for a small laptop


def bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Peak activations of one decoder layer for one row: residual and norms, heads, gated MLP, in and out."""
    heads = (2 * spec.n_heads + 4 * spec.n_kv_heads) * spec.head_dim
    experts = max(spec.experts_per_token, 1)
    return BYTES[dtype] * (6 * spec.hidden_size + heads + 3 * spec.intermediate_size * experts) + 12 * spec.hidden_size


def weight_count(spec: ModelSpec, *, active: bool = False) -> int:
    """Weights of the decoder layers; ``active`` counts only the experts that one token uses."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.n_heads + 2 * spec.n_kv_heads)
    experts = max(spec.experts_per_token if active else spec.n_experts, 1)
    return spec.n_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size * experts)


def estimate(
    rollouts: Iterable[Rollout],
    spec: ModelSpec,
    *,
    dtype: str = "bfloat16",
    max_tokens_per_pack: int | None = None,
    device: torch.device | None = None,
    errors: Callable[[RolloutError], None] | None = None,
) -> PlanSummary:
    """Plans all packs of a file without loading weights; memory grows with one pack only.

    Rollouts that this model would refuse go to ``errors`` and are not counted; ``None`` raises the first.
    """

    def usable() -> Iterator[Rollout]:
        for rollout in rollouts:
            try:
                check_rollout(rollout, spec, spec.vocab_size)
            except RolloutError as error:
                if errors is None:
                    raise
                errors(error)
            else:
                yield rollout

    budget = pack_budget(max_tokens_per_pack, spec, dtype, device or torch.device("cpu"))
    totals = dict.fromkeys(("rollouts", "states", "rewritten", "scored", "naive", "unique", "packs", "largest"), 0)
    flops = flops_naive = 0.0
    for pack in cut_packs(usable(), budget):
        layout = pack_layout(pack)
        totals["packs"] += 1
        totals["rollouts"] += len(pack)
        totals["states"] += sum(r.n_states for r in pack)
        totals["rewritten"] += sum(not r.nested for r in pack)
        totals["scored"] += len(layout.target_ids)
        totals["naive"] += layout.tokens_naive
        totals["unique"] += len(layout)
        totals["largest"] = max(totals["largest"], len(layout))
        flops += forward_flops(spec, len(layout), attended_keys(spec, layout.positions), len(layout.target_ids))
        lengths = _naive_lengths(pack)
        naive_keys = sum(attended_keys(spec, np.arange(n)) for n in lengths)
        flops_naive += forward_flops(spec, int(lengths.sum()), naive_keys, len(layout.target_ids))
    weights = (weight_count(spec) + spec.vocab_size * spec.hidden_size * (1 if spec.tied_head else 2)) * BYTES[dtype]
    return PlanSummary(
        n_rollouts=totals["rollouts"],
        n_states=totals["states"],
        n_rewritten=totals["rewritten"],
        n_scored_tokens=totals["scored"],
        tokens_naive=totals["naive"],
        tokens_unique=totals["unique"],
        n_packs=totals["packs"],
        max_tokens_per_pack=budget,
        largest_pack=totals["largest"],
        weight_bytes=weights,
        peak_bytes=weights + totals["largest"] * bytes_per_token(spec, dtype),
        flops=flops,
        flops_naive=flops_naive,
    )


def layout_flops(spec: ModelSpec, layout: PackedLayout) -> float:
    """FLOPs of one pack."""
    return forward_flops(spec, len(layout), attended_keys(spec, layout.positions), len(layout.target_ids))


def forward_flops(spec: ModelSpec, tokens: int, keys: float, scored: int) -> float:
    """Weights once a token, ``keys`` query-key pairs over all layers, the head once a scored token."""
    linear = 2.0 * weight_count(spec, active=True) * tokens
    attention = 4.0 * spec.n_heads * spec.head_dim * keys
    return linear + attention + 2.0 * spec.hidden_size * spec.vocab_size * scored


def attended_keys(spec: ModelSpec, positions: np.ndarray) -> float:
    """Query-key pairs of rows at these depths, summed over layers (sliding layers see their window)."""
    full = float((positions + 1).sum())
    sums: dict[int | None, float] = {None: full}
    for window in {w for w in spec.layer_windows if w is not None}:
        sums[window] = float(np.minimum(positions + 1, window).sum())
    return sum(sums[window] for window in spec.layer_windows)


def _naive_lengths(pack: list[Rollout]) -> np.ndarray:
    return np.array(
        [
            len(r.prefix(k)) + len(r.openers[k]) + len(answer) - 1
            for r in pack
            for k in range(r.n_states)
            for answer in r.answers
        ],
        dtype=np.int64,
    )
