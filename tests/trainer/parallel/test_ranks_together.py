"""What holds however unevenly work, failures and numbers fall on the ranks; and the float32 masters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import tiny_batch
from ranks import run_ranks
from safetensors.torch import load_file


def test_uneven_gathers_and_ranks_without_work_do_not_hang_trl_3933(tmp_path: Path) -> None:
    """Nothing from one rank and much from the other; one trained rollout for two ranks; no trained token at all."""
    run_ranks(2, "rank_jobs:uneven_work", str(tmp_path))
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"rank{i}.json").read_text()) for i in range(2)]
    batch = tiny_batch()
    longest = int(batch.trained_tokens_R.argmax())
    trained, tokens = int(batch.trained_tokens_R[longest]), int(batch.cu_tokens_R1.diff()[longest])
    for rank in ranks:
        assert rank["gathered"] == [[], ["x" * 1000]]
        assert rank["first"] == 0
        assert rank["one"] == [1, tokens, trained, True, True]
        assert rank["none"] == [0, 0, 0, False, False]
    assert ranks[0]["failure"] == ["PeerError", "process 1 of the run failed: q.jsonl:3: is none"]
    assert ranks[1]["failure"] == ["InputError", "q.jsonl:3: is none"]


def test_nan_on_one_rank_stops_all_of_them_before_the_step(tmp_path: Path) -> None:
    """Its micro-batches are gone through to the end, so that nobody waits; then every rank raises the same."""
    run_ranks(2, "rank_jobs:one_rank_meets_nan", str(tmp_path))
    for rank in range(2):
        assert (tmp_path / f"rank{rank}.txt").read_text().startswith("expected a finite loss and gradient, got")


@pytest.mark.parametrize(("n", "parallel"), [(1, {}), (2, {"tensor": 2})], ids=["one process", "tensor 2"])
def test_weights_of_a_bfloat16_model_are_float32_and_move_by_less_than_bfloat16_can(
    n: int, parallel: dict[str, Any], tmp_path: Path
) -> None:
    """Stored in bfloat16, computed in bfloat16, updated in float32: a step of Adam is 1e-6 for every weight."""
    run_ranks(n, "rank_jobs:masters", str(tmp_path), parallel)
    found = load_file(tmp_path / "found.safetensors")
    before = {k.removeprefix("before."): v for k, v in found.items() if k.startswith("before.")}
    assert len(before) == 24
    large = 0
    for name, weight in before.items():
        assert torch.equal(weight, weight.bfloat16().float()), name  # as it was stored
        step = found[f"after.{name}"] - weight
        assert step.abs().max() <= 2.2e-6, name
        moved = (step != 0) & (weight.abs() > 1e-3)
        large += int(moved.sum())
        assert torch.equal(found[f"after.{name}"].bfloat16()[moved], weight.bfloat16()[moved]), name
    assert large > 5_000
    logprobs, trained = found["logprobs"], tiny_batch().loss_mask_N
    assert (logprobs[trained] < 0).all()


def test_an_engine_that_fails_while_weights_come_leaves_nobody_waiting_trl_6798(tmp_path: Path) -> None:
    """Gathering a weight takes every rank: the rank whose engine failed takes part to the end, then all raise."""
    run_ranks(2, "rank_jobs:weights_for_one_engine", str(tmp_path))
    first, second = (json.loads((tmp_path / f"rank{i}.json").read_text()) for i in range(2))
    assert (first["all"], first["three"]) == (24, 3)
    assert first["three failed"] == "OutputError: the server has gone"
    assert second["three failed"] == "PeerError: process 0 of the run failed: the server has gone"
    assert "all failed" not in first | second
    assert first["after"] == second["after"] == [0, 1]
