"""``benchmarks/gpu.py`` without a GPU says so in one line; its sections, on the CPU at tiny sizes, never report a speed
for wrong numbers."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from trace_fast.bench.shapes import Shape
from trace_fast.scorer import Scorer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = Qwen3Config(
    vocab_size=199,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.3,
)
SHAPE = Shape(turns=14, tokens=300, opener=3, answer=4)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the folder by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture
def run(script: Any, tmp_path: Path) -> Any:
    return script("gpu_common").GpuRun(torch.device("cpu"), tmp_path / "gpu.jsonl", time.monotonic() + 600)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("name", ["gpu.py", "gpu_checks.py"])
def test_without_a_cuda_device_it_is_one_line_and_exit_2(name: str) -> None:
    result = subprocess.run([sys.executable, BENCHMARKS / name], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "CUDA device" in result.stderr
    assert result.stderr.count("\n") == 1


def test_scoring_reports_speed_targets_and_what_is_extrapolated(run: Any, script: Any) -> None:
    script("gpu_scoring").run(run, TINY, SHAPE)
    written = [json.loads(line) for line in run.path.read_text().splitlines()]
    assert written == run.rows
    timed = {row["implementation"].split(" (")[0]: row for row in written if "seconds" in row}
    assert set(timed) == {"trace_fast", "trunk forward, sdpa", "naive, extrapolated"}
    assert timed["trace_fast"]["fraction_of_gemm_roofline"] >= 0
    assert len(timed["naive, extrapolated"]["extrapolated_from"]) == 3  # states 0, 5 and 10 of 16
    assert [row["target"] for row in written if "target" in row] == [1.0, 20.0]
    assert {row["numbers"] for row in written} == {"right", "absent"}
    assert run.failed == []
    for key in ("date", "machine", "torch", "triton", "commit", "case"):
        assert all(row[key] for row in written)


def test_scoring_reports_no_speed_for_wrong_numbers(run: Any, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Scorer.score

    def shifted(self: Scorer, rollouts: Any, **options: Any) -> Any:
        scores = right(self, rollouts, **options)
        for score in scores:
            object.__setattr__(score, "mean_logprobs", score.mean_logprobs - 0.5)
        return scores

    monkeypatch.setattr(Scorer, "score", shifted)
    script("gpu_scoring").run(run, TINY, SHAPE)
    assert [row["numbers"] for row in run.rows] == ["differ"]
    assert not any("seconds" in row or "target" in row for row in run.rows)
    assert len(run.failed) == 1


def test_numbers_that_are_nan_are_not_right(run: Any) -> None:
    assert not run.check("op", "case", "name", float("nan"), 1.0)
    assert not run.check("op", "case", "name", 1.1, 1.0)
    assert run.check("op", "case", "name", 1.0, 1.0)
    assert [row["numbers"] for row in run.rows] == ["differ", "differ"]


def test_an_implementation_with_wrong_small_cases_is_not_measured(run: Any, script: Any) -> None:
    gpu, checks = script("gpu"), script("gpu_checks")
    found = [
        checks.Check("turn_credit", "triton", "case", error=2.0, allowed=1.0),
        checks.Check("turn_credit", "cuda", "case", absent="not here"),
        checks.Check("token_logprob", "triton", "case", error=0.5, allowed=1.0),
        checks.Check("policy_loss", "triton", "case", failure="RuntimeError: no"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "run_checks", lambda device: found)
        patch.setattr(script("gpu_graphs"), "graph_checks", lambda device: [])
        gpu.checks(run)
    assert run.wrong == {("turn_credit", "triton"), ("policy_loss", "triton")}
    assert [(row["op"], row["numbers"]) for row in run.rows] == [
        ("turn_credit", "differ"),
        ("policy_loss", "failed"),
        ("turn_credit", "absent"),
    ]
    assert not run.may_run("turn_credit", "case", "triton", None)
    assert run.may_run("token_logprob", "case", "triton", None)
    assert len(run.failed) == 3  # two from the checks, one from the refusal to measure


def test_a_failed_graph_is_told_and_takes_no_measurement(
    run: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, checks, graphs = script("gpu"), script("gpu_checks"), script("gpu_graphs")
    monkeypatch.setattr(checks, "run_checks", lambda device: [])
    found = [
        checks.Check("policy_loss", "triton", "graph", error=0.0, allowed=0.0),
        checks.Check("turn_credit", "triton", "graph", failure="RuntimeError: called a synchronizing operation"),
        checks.Check("token_logprob", "triton", "graph", error=1e-9, allowed=0.0),
        checks.Check("prefix_attention", "triton", "graph", absent="not here"),
    ]
    monkeypatch.setattr(graphs, "graph_checks", lambda device: found)
    gpu.checks(run)
    assert [(row["op"], row["numbers"]) for row in run.rows] == [("turn_credit", "failed"), ("token_logprob", "failed")]
    assert "expected the same bits" in run.rows[1]["reason"]
    assert not run.wrong
    assert len(run.failed) == 2


def test_graphs_need_a_gpu_and_their_calls_are_calls(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU all are absent, and each prepared call runs there with the oracle in the kernels' place."""
    graphs = script("gpu_graphs")
    cpu = torch.device("cpu")
    assert [check.op for check in graphs.graph_checks(cpu)] == [
        "prefix_attention",
        "token_logprob",
        "turn_credit",
        "turn_credit",
        "policy_loss",
    ]
    assert all(check.absent for check in graphs.graph_checks(cpu))
    called: dict[str, Any] = {}
    monkeypatch.setattr(graphs, "_check", lambda op, name, call, inputs, reason: called.update({op: (call, inputs)}))
    ops = {"prefix_attention": graphs.attention_op, "token_logprob": graphs.logprob_op}
    ops |= {"turn_credit": graphs.credit_op, "policy_loss": graphs.loss_op}
    for op, entry in (
        ("prefix_attention", "plan_attention"),
        ("token_logprob", "token_logprob"),
        ("turn_credit", "credit_and_advantages"),
        ("policy_loss", "policy_loss"),
    ):
        monkeypatch.setattr(ops[op], "why_not", lambda *a, **k: None)
        monkeypatch.setattr(ops[op], entry, _by_the_oracle(getattr(ops[op], entry)))
    list(graphs.graph_checks(cpu))
    assert called.keys() == ops.keys()
    for op, (call, inputs) in called.items():
        outputs = call(*inputs)
        assert all(bool(output.isfinite().all()) and bool((output != 0).any()) for output in outputs), op


def _by_the_oracle(entry: Any) -> Any:
    def called(*arguments: Any, **options: Any) -> Any:
        if "backend" in options:
            return entry(*arguments, **options | {"backend": "reference"})
        return entry(arguments[0], "reference")  # plan_attention(spans, backend)

    return called


def test_a_section_that_fails_leaves_the_others(run: Any, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = script("gpu")

    def broken(run: Any) -> None:
        raise torch.OutOfMemoryError("too\nlarge")

    monkeypatch.setattr(gpu, "_section", lambda name: broken)
    gpu.run_section("scoring", run)
    assert run.rows[-1]["reason"] == "OutOfMemoryError: too large"
    assert run.failed


def test_the_judge_of_small_cases(script: Any) -> None:
    checks = script("gpu_checks")
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    noise = torch.from_numpy(np.random.default_rng(0).normal(0, 1e-3, 100))

    def judge(found: torch.Tensor) -> Any:
        truth = (exact, exact)
        return checks.judge("op", "name", "case", lambda: (found, exact), (exact + noise, exact), truth, 1e-6)

    assert not judge(exact - noise).wrong
    assert judge(exact + 2 * noise).wrong
    assert judge(exact.clone().fill_(float("nan"))).wrong


def test_the_small_cases_of_ops_that_run_on_any_device_are_absent_on_the_cpu(script: Any) -> None:
    """Without a GPU and outside Triton's interpreter every check is absent, not right."""
    checks = script("gpu_checks")
    found = [*checks.credit_checks(torch.device("cpu")), *checks.loss_checks(torch.device("cpu"))]
    assert found
    assert all(check.absent and not check.wrong for check in found)
