"""Two thousand broken records through ``trace-fast score``: each ends as one score or as one error."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from fuzzed_records import fuzzed_lines
from typer.testing import CliRunner

from trace_fast.cli import build_app

HUGE = {"input_ids": [1, 2, 3], "boundaries": [1, 2, 3], "answer_ids": [4], "opener_ids": [5], "reward": 1e308}


@pytest.mark.parametrize("seed", range(4))
def test_scored_and_failed_are_the_input_each_once(fake_cli, smollm2_tokenizer, tmp_path, seed):
    lines = fuzzed_lines(seed, 500)
    lines[250:250] = [json.dumps(HUGE | {"reward": reward}).encode() for reward in (1e308, -1e308, 1e30)]
    path, out = tmp_path / "fuzz.jsonl", tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join(lines))

    def open_scorer(settings):
        scorer = fake_cli.open_fake(settings)
        scorer.tokenizer = smollm2_tokenizer
        return scorer

    arguments = ["score", str(path), "--model", "fake:pack=7", "--out", str(out)]
    result = CliRunner().invoke(build_app(open_scorer=open_scorer), arguments, catch_exceptions=False)
    assert result.exit_code == 1, result.stderr
    scored = [json.loads(line) for line in out.read_bytes().splitlines()]
    failed = [json.loads(line) for line in out.with_suffix(".errors.jsonl").read_bytes().splitlines()]
    sources = Counter(record["source"] for record in [*scored, *failed])
    assert sources == Counter(f"{path}:{n}" for n, line in enumerate(lines, start=1) if line.strip())
    assert len(scored) > 100
    assert len(failed) > 100
    errors = {record["source"]: record["error"] for record in failed}
    for number in (251, 252):
        assert errors[f"{path}:{number}"]["kind"] == "format"
        assert errors[f"{path}:{number}"]["message"].startswith("reward: expected a finite number of magnitude up to")
    assert f"{path}:253" in {record["source"] for record in scored}
