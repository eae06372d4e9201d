"""Correctness first: a method whose numbers are off gets no speed; one that fails or is absent says why."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from trace_fast.bench import rule
from trace_fast.bench.compare import compare, method_fields
from trace_fast.bench.peers import Peer
from trace_fast.bench.rows import Row
from trace_fast.bench.table import growth_lines, table_of
from trace_fast.rollout import Rollout

STATES = 6
CPU = torch.device("cpu")
SPEEDS = ("seconds", "runs", "first_seconds", "speedup_over_kv_cache", "peak_extra_bytes", "fraction_of_gemm_roofline")


class Fixed(Peer):
    """Gives the same numbers at every call and counts the calls."""

    def __init__(self, scores: np.ndarray, seconds: float = 0.0) -> None:
        self.scores, self.seconds, self.calls, self.prepared = scores, seconds, 0, 0

    def prepare(self) -> None:
        self.prepared += 1

    def score(self, rollout: Rollout) -> np.ndarray:
        self.calls += 1
        time.sleep(self.seconds)
        return self.scores


class Broken(Peer):
    def score(self, rollout: Rollout) -> np.ndarray:
        raise RuntimeError("no kernel\nfor this shape")


@pytest.fixture
def noise() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1e-3, STATES)


def measure(rollout: Rollout, methods: dict[str, Peer], truth: np.ndarray, rounds: int = 2) -> dict[str, dict]:
    found = compare(rollout, methods, truth, rounds=rounds, device=CPU, say=lambda line: None)
    return {name: method_fields(name, found, truth, roof_seconds=0.5) for name in found}


def test_a_wrong_peer_gets_no_speed_and_no_second_call(
    rollout: Rollout, truth_S: np.ndarray, noise: np.ndarray
) -> None:
    wrong = Fixed(truth_S + 0.1)
    right = {"trace_fast": Fixed(truth_S - noise, 0.01), "kv_cache": Fixed(truth_S + noise, 0.02)}
    fields = measure(rollout, {**right, "dense_mask": wrong}, truth_S)
    assert fields["dense_mask"] == {
        "method": "dense_mask",
        "numbers": "differ",
        "yardstick": "kv_cache",
        "mean_abs_error": pytest.approx(0.1),
        "max_abs_error": pytest.approx(0.1),
    }
    assert wrong.calls == 1  # the one that showed it
    ours = fields["trace_fast"]
    assert ours["numbers"] == "right"
    assert len(ours["runs"]) == 2
    assert ours["seconds"] >= 0.01
    assert ours["fraction_of_gemm_roofline"] == pytest.approx(0.5 / ours["seconds"])
    assert ours["speedup_over_kv_cache"] == pytest.approx(fields["kv_cache"]["seconds"] / ours["seconds"])


def test_we_get_no_speed_for_wrong_numbers_either(rollout: Rollout, truth_S: np.ndarray, noise: np.ndarray) -> None:
    for ours in (truth_S + 3 * noise, np.full(STATES, np.nan)):
        fields = measure(rollout, {"trace_fast": Fixed(ours), "kv_cache": Fixed(truth_S + noise)}, truth_S)
        assert fields["trace_fast"]["numbers"] == "differ"
        assert "seconds" not in fields["trace_fast"]
        assert "peak_extra_bytes" not in fields["trace_fast"]


def test_the_bound_is_the_yardsticks_mean_error_and_its_scatter() -> None:
    errors = np.full(32, 1e-3)
    bound = 1e-3 * (1 + 2 * 2**0.5 * 0.76 / 32**0.5)
    assert rule.allowed_mean_error(errors) == pytest.approx(bound, rel=1e-12)
    assert rule.right(np.full(32, bound * 0.999), errors)
    assert not rule.right(np.full(32, bound * 1.001), errors)
    assert rule.yardstick_of(["kv_cache", "naive"]) == "naive"
    assert rule.yardstick_of(["trace_fast", "kv_cache"]) == "kv_cache"


def test_a_failing_peer_says_why_and_the_others_are_measured(
    rollout: Rollout, truth_S: np.ndarray, noise: np.ndarray
) -> None:
    fields = measure(rollout, {"kv_cache": Fixed(truth_S + noise), "flex_attention": Broken()}, truth_S)
    assert fields["flex_attention"] == {
        "method": "flex_attention",
        "numbers": "failed",
        "reason": "RuntimeError: no kernel for this shape",
    }
    assert fields["kv_cache"]["numbers"] == "right"


def test_our_own_failure_is_not_hidden(rollout: Rollout, truth_S: np.ndarray) -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        measure(rollout, {"trace_fast": Broken(), "kv_cache": Fixed(truth_S)}, truth_S)


def test_the_naive_pass_is_the_yardstick_and_runs_once(
    rollout: Rollout, truth_S: np.ndarray, noise: np.ndarray
) -> None:
    naive = Fixed(truth_S + noise)
    fields = measure(rollout, {"kv_cache": Fixed(truth_S + noise), "naive": naive}, truth_S)
    assert naive.calls == 1
    assert fields["naive"]["runs"] == [fields["naive"]["first_seconds"]]
    assert fields["kv_cache"]["yardstick"] == "naive"
    assert "peak_extra_bytes" in fields["kv_cache"]


def test_every_timed_call_is_prepared(rollout: Rollout, truth_S: np.ndarray) -> None:
    peer = Fixed(truth_S)
    measure(rollout, {"kv_cache": peer}, truth_S, rounds=3)
    assert peer.prepared == peer.calls == 1 + 3 + 1  # numbers, rounds, memory


# --- rows and what is printed of them ---------------------------------------------------------------------------------


def test_a_row_cannot_hold_a_speed_for_wrong_numbers(row: Callable[..., Row]) -> None:
    with pytest.raises(ValidationError, match="no speed may be reported"):
        row(numbers="differ")
    with pytest.raises(ValidationError, match="surprise"):
        row(surprise=1)


def test_the_schema_of_a_row(row: Callable[..., Row]) -> None:
    line = row(reason=None).to_json()
    assert '"reason"' not in line  # keys without a value are left out
    read = Row.model_validate_json(line)
    assert read == row()
    without = row(numbers="differ", **dict.fromkeys(SPEEDS))
    assert not set(SPEEDS) & set(without.model_dump(exclude_none=True))


def test_the_table_has_no_speed_for_wrong_numbers(row: Callable[..., Row]) -> None:
    wrong = row(method="dense_mask", numbers="differ", **dict.fromkeys(SPEEDS))
    cells = [list(column.cells) for column in table_of([row(), wrong]).columns]
    assert cells[2] == ["trace_fast", "dense_mask"]
    assert cells[3] == ["2", "numbers differ"]
    assert [column[1] for column in cells[4:7]] == ["", "", ""]


def test_growth_compares_doubled_turns_at_equal_tokens(row: Callable[..., Row]) -> None:
    rows = [
        row(turns=15, seconds=2.0),
        row(turns=30, seconds=2.1),
        row(turns=60, seconds=2.205),
        row(turns=60, tokens_trunk=8030, seconds=9.0),  # other tokens: no part of it
        row(turns=30, dtype="bfloat16", seconds=1.0),
    ]
    assert growth_lines(rows) == [
        "trace_fast, float32, 3,820 trunk tokens: 15 -> 30 turns +5.0% time",
        "trace_fast, float32, 3,820 trunk tokens: 30 -> 60 turns +5.0% time",
    ]
