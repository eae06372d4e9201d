"""``trace-fast bench``: bad input is one clear line and exit 2; a run writes rows, plots and a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from typer.testing import CliRunner, Result

from trace_fast.bench.peers import PEERS
from trace_fast.bench.peers.peer import Peer, PeerSetup
from trace_fast.bench.rows import Row, read_rows
from trace_fast.cli import build_app
from trace_fast.cli_bench import BenchSettings, run_bench
from trace_fast.cli_inputs import Inputs
from trace_fast.rollout import Rollout
from trace_fast.scorer import Scorer

SHAPE = "T=12,tokens=150"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["bench", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model: expected a folder, a hub id or a GGUF file (--model), got nothing"),
        (["--model", "./no/such"], "model './no/such': no such folder"),
        (["--model", "m", "no-such.jsonl"], "no-such.jsonl: there is no such file"),
        (["--model", "m", "--peer", "vlm"], "peer: expected one of kv_cache, dense_mask, flex_attention, naive, "),
        (["--model", "m", "--endpoint", "tgi=http://x"], "endpoint: expected sglang or vllm=URL, got 'tgi'"),
        (["--model", "m", "--endpoint", "sglang"], "endpoint: expected sglang=URL or vllm=URL"),
        (["--model", "m", "--endpoint", "vllm=localhost"], "endpoint vllm: expected a URL such as"),
        (["--model", "m", "--shape", "30"], "shape: expected T=TURNS"),
        (["--model", "m", "--dtype", "int8"], "dtype: expected one of float32, bfloat16, float16, got 'int8'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = invoke(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture
def open_scorer() -> Callable[[BenchSettings, str], Scorer]:
    def make(settings: BenchSettings, dtype: str) -> Scorer:
        return Scorer.from_module(tiny_model("llama", getattr(torch, dtype)), None, backend="torch")

    return make


def settings(tmp_path: Path, **changes: Any) -> BenchSettings:
    fields: dict[str, Any] = {"inputs": None, "model": "tiny", "out": str(tmp_path / "out"), "rounds": 1}
    fields |= {"shapes": (SHAPE,), "peers": ("kv_cache", "dense_mask")}
    return BenchSettings(**(fields | changes))


def test_a_run_writes_valid_rows_plots_and_a_table(
    open_scorer: Callable[..., Scorer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_bench(settings(tmp_path, shapes=("T=6/12,tokens=150",)), open_scorer=open_scorer)
    rows = [Row.model_validate(row) for row in read_rows(tmp_path / "out" / "rows.jsonl")]
    assert [(row.turns, row.method) for row in rows] == [
        (turns, method) for turns in (6, 12) for method in ("trace_fast", "kv_cache", "dense_mask")
    ]
    assert {row.model for row in rows} == {rows[0].model}
    for row in rows:
        assert row.tokens_trunk == 150
        assert row.states == row.turns + 2
        assert row.tokens_unique == 150 + (row.turns + 1) * 12  # the last two states are one
        assert (row.seconds is None) == (row.numbers != "right")
        assert 0 < row.mean_abs_error <= row.max_abs_error < 0.1  # bfloat16
    ours = [row for row in rows if row.method == "trace_fast"]
    assert [row.numbers for row in ours] == ["right", "right"]  # float32 tiles: closer than the bfloat16 yardstick
    assert all(row.flops > 0 and row.fraction_of_gemm_roofline > 0 for row in ours)
    assert code == int(any(row.numbers != "right" for row in rows))
    out = capsys.readouterr().out
    assert "trace_fast, bfloat16, 150 trunk tokens: 6 -> 12 turns" in out
    assert "x kv_cache" in out
    assert (tmp_path / "out" / "time_vs_turns.svg").exists()


class Shifted(Peer):
    """A tenth of a nat off."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def score(self, rollout: Rollout) -> np.ndarray:
        return self.peer.score(rollout) - 0.1


def test_a_wrong_peer_is_exit_1_and_numbers_differ(
    open_scorer: Callable[..., Scorer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = PEERS["dense_mask"].open_peer
    monkeypatch.setattr(PEERS["dense_mask"], "open_peer", lambda setup: Shifted(dense(setup)))
    assert run_bench(settings(tmp_path), open_scorer=open_scorer) == 1
    row = next(r for r in read_rows(tmp_path / "out" / "rows.jsonl") if r["method"] == "dense_mask")
    assert row["numbers"] == "differ"
    assert row["mean_abs_error"] == pytest.approx(0.1, abs=0.02)
    assert not {"seconds", "runs", "first_seconds", "peak_extra_bytes", "fraction_of_gemm_roofline"} & row.keys()
    line = next(x for x in capsys.readouterr().out.splitlines() if "dense_mask" in x)
    assert "numbers differ" in line


def test_a_missing_peer_is_listed_with_its_reason(
    open_scorer: Callable[..., Scorer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_here(setup: PeerSetup) -> str:
        return "this peer is not installed"

    monkeypatch.setattr(PEERS["dense_mask"], "why_not", not_here)
    monkeypatch.setattr(PEERS["flex_attention"], "why_not", not_here)
    assert run_bench(settings(tmp_path, peers=()), open_scorer=open_scorer) == 0  # nobody asked for it by name
    assert "not run: dense_mask: this peer is not installed" in capsys.readouterr().err
    row = next(r for r in read_rows(tmp_path / "out" / "rows.jsonl") if r["method"] == "dense_mask")
    assert (row["numbers"], row["reason"]) == ("absent", "this peer is not installed")
    assert run_bench(settings(tmp_path), open_scorer=open_scorer) == 1  # here it was named


def test_rollouts_of_files_up_to_the_limit_with_their_first_answer(
    open_scorer: Callable[..., Scorer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.random.default_rng(0).integers(3, 211, (4, 40)).tolist()
    good = {"boundaries": [10, 20, 30, 40], "answer_ids": [[7, 8, 9], [4]], "opener_ids": [5, 6]}
    records = [{"id": f"r{i}", "input_ids": row} | good for i, row in enumerate(ids)]
    records[0]["input_ids"] = [999] * 40  # not in the vocabulary
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen = settings(tmp_path, inputs=Inputs((str(path),)), shapes=(), limit=2, peers=("kv_cache",))
    assert run_bench(chosen, open_scorer=open_scorer) == 1  # one record failed
    said = capsys.readouterr().err
    assert "failed: " in said
    assert "r0" in said
    assert "measuring the first 2 usable rollouts of the files" in said
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert [row["rollout"] for row in rows] == ["r1", "r1", "r2", "r2"]
    assert {row["tokens_unique"] for row in rows} == {40 + 4 * 4}  # 4 branches: 2 of the opener, 2 of the first answer


def test_nothing_usable_is_exit_2(open_scorer: Callable[..., Scorer], tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    chosen = settings(tmp_path, inputs=Inputs((str(path),)), shapes=())
    assert run_bench(chosen, open_scorer=open_scorer) == 2
