"""Two thousand broken records: none crashes the reader, none is lost, none is counted twice."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzed_records import fuzzed_lines

from trace_fast.errors import RolloutError
from trace_fast.formats import Limits, read_outcomes, read_rollouts, read_transcripts
from trace_fast.rollout import Rollout


def _read(path: Path, tokenizer: Any, **options: Any) -> tuple[list[Rollout], list[RolloutError]]:
    errors: list[RolloutError] = []
    return list(read_rollouts(path, tokenizer, errors=errors.append, **options)), errors


@pytest.mark.parametrize("seed", range(4))
def test_every_mutated_record_is_a_rollout_or_an_error(tmp_path: Path, smollm2_tokenizer: Any, seed: int) -> None:
    lines = fuzzed_lines(seed, 500)
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(b"\n".join(lines))
    expected = [f"{path}:{n}" for n, line in enumerate(lines, start=1) if line.strip()]
    rollouts, errors = _read(path, smollm2_tokenizer)
    assert sorted([r.source for r in rollouts] + [e.source for e in errors]) == sorted(expected)
    assert len(rollouts) > 100
    assert len(errors) > 100
    assert {e.kind for e in errors} >= {"parse", "format", "answer"}
    assert all(e.reason and len(e.reason) < 1000 for e in errors)
    for rollout in rollouts:
        assert all(len(a) for a in rollout.answers)
        assert all(np.all(rollout.prefix(k) >= 0) for k in range(rollout.n_states))
        json.dumps(rollout.extra, allow_nan=False)
        "".join(s.text for s in rollout.transcript).encode("utf-8")
    readable = {r.source for r in rollouts}
    outcomes = {source: (name, group, reward) for source, name, group, reward in read_outcomes(path)}
    assert readable <= set(outcomes)
    assert all(outcomes[r.source] == (r.id, r.group, r.reward) for r in rollouts)
    assert readable <= {source for source, *_ in read_transcripts(path)}


def test_mutated_records_in_a_json_list(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    """Records that are whole JSON, however wrong inside, do not cost each other."""
    lines = []
    for line in fuzzed_lines(9, 300):
        try:
            json.loads(line)
        except ValueError:
            continue
        lines.append(line)
    assert len(lines) > 200
    document, flat = tmp_path / "fuzz.json", tmp_path / "fuzz.jsonl"
    document.write_bytes(b"[" + b",\n".join(lines) + b"]")
    flat.write_bytes(b"\n".join(lines))
    (a, a_errors), (b, b_errors) = (_read(path, smollm2_tokenizer) for path in (document, flat))
    number = [int(r.source.rsplit(":", 1)[1]) for r in a]
    assert number == [int(r.source.rsplit(":", 1)[1]) for r in b]
    assert [r.input_ids.tolist() for r in a] == [r.input_ids.tolist() for r in b]
    assert [(e.kind, e.reason) for e in a_errors] == [(e.kind, e.reason) for e in b_errors]
    assert len(a) + len(a_errors) == len(lines)


def test_ten_megabyte_strings(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    big = "x" * 10_000_000
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": big}], "answer": "Orm"},
        {"messages": [{"role": "user", "content": "Q"}], "answer": big},
        {"messages": [{"role": "user", "content": "Q"}], "answer": "Orm", "note": big},
        {"messages": [{"role": big, "content": "Q"}], "answer": "Orm"},
        {big: 1},
        {"id": big, "segments": [{"role": "prompt", "text": "Q"}], "answer": ""},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in records))
    rollouts, errors = _read(path, smollm2_tokenizer)
    assert [(r.source[-1], len(r.extra["note"])) for r in rollouts] == [("3", 10_000_000)]
    assert [(e.kind, e.source[-1]) for e in errors] == [
        ("parse", "1"), ("parse", "2"), ("format", "4"), ("format", "5"), ("answer", "6"),
    ]  # fmt: skip
    assert all(len(e.reason) < 1000 for e in errors)
    _, small = _read(path, smollm2_tokenizer, limits=Limits(max_record_bytes=1_000_000))
    assert [e.kind for e in small] == ["parse"] * 6


def test_random_bytes(tmp_path: Path) -> None:
    r = random.Random(1)
    lines = [bytes(b for b in r.randbytes(r.randrange(1, 60)) if b != 10) for _ in range(300)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"\n".join(lines))
    rollouts, errors = _read(path, None)
    assert rollouts == []
    assert len(errors) == 1 + sum(bool(line.strip()) for line in lines)
