"""``trace-fast score`` with a scorer that needs no model: outputs, summary, failures, exit codes."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from trace_fast.backends import resolve
from trace_fast.cli import build_app
from trace_fast.errors import RolloutError

# what "auto" is here, down to the code path of this processor
AUTO = resolve("auto", torch.device("cpu"), torch.bfloat16).arithmetic(torch.bfloat16)


def _records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_in_input_order_with_group_advantages(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(n, reward=r) for n, r in enumerate([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.5])])
    out = tmp_path / "s.jsonl"
    result = invoke("score", path, "--model", "fake:pack=3", "--out", out)
    assert result.exit_code == 0, result.stderr
    records = _records(out)
    assert [r["id"] for r in records] == [f"r{n}" for n in range(7)]
    assert [r["source"] for r in records] == [f"{path}:{n}" for n in range(1, 8)]
    assert [r["outcome_advantage"] for r in records[:4]] == [1.0, -1.0, -1.0, 1.0]
    rest = np.array([1.0, 1.0, 0.5])
    expected = (rest - rest.mean()) / rest.std()  # a group that packs of three tear apart
    np.testing.assert_allclose([r["outcome_advantage"] for r in records[4:]], expected, rtol=1e-12)
    assert {r["model"] for r in records} == {"fake@a"}
    lines = result.stderr.splitlines()
    assert lines[0] == "7 records scored, 0 failed"
    assert "tokens: 210 for one pass a state, 84 forwarded (2.5 times fewer)" in lines
    assert lines[-1].startswith("3 packs, 0.8 s in the model, ")
    assert not (tmp_path / "s.errors.jsonl").exists()


def test_packs_do_not_change_the_output(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(n) for n in range(9)] + ["{broken"] + [record(n) for n in range(10, 14)])
    outputs = []
    for pack in (1, 4, 100):
        out = tmp_path / f"s{pack}.jsonl"
        assert invoke("score", path, "--model", f"fake:pack={pack}:fail=r3,r11", "--out", out).exit_code == 1
        outputs.append((out.read_bytes(), out.with_suffix(".errors.jsonl").read_bytes()))
    assert outputs[0] == outputs[1] == outputs[2]
    assert [json.loads(line)["source"] for line in outputs[0][1].splitlines()] == [f"{path}:{n}" for n in (4, 10, 12)]


def test_failed_records_go_to_file_and_stderr_and_stop_nothing(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(0), "{broken", record(2, answer_ids=[]), record(3), record(4)])
    out = tmp_path / "s.jsonl"
    result = invoke("score", path, "--model", "fake:fail=r3", "--out", out)
    assert result.exit_code == 1
    assert [r["id"] for r in _records(out)] == ["r0", "r4"]
    errors = _records(tmp_path / "s.errors.jsonl")
    assert [(e["source"], e["status"], e["error"]["kind"]) for e in errors] == [
        (f"{path}:2", "error", "parse"),
        (f"{path}:3", "error", "answer"),
        (f"{path}:4", "error", "non_finite"),
    ]
    failed = [line for line in result.stderr.splitlines() if line.startswith("failed: ")]
    assert [line.split(": ")[1] for line in failed] == [f"{path}:{n}" for n in (2, 3, 4)]
    assert "2 records scored, 3 failed" in result.stderr
    assert f"failed records: {tmp_path / 's.errors.jsonl'}" in result.stderr


def test_every_record_failing_is_exit_1_with_an_empty_score_file(invoke, write_jsonl, tmp_path):
    result = invoke("score", write_jsonl(["{a", "{b"]), "--model", "fake", "--out", tmp_path / "s.jsonl")
    assert result.exit_code == 1
    assert (tmp_path / "s.jsonl").read_bytes() == b""
    assert len(_records(tmp_path / "s.errors.jsonl")) == 2


def test_many_failed_records_do_not_wait_for_a_pack(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl(["{broken"] * 600 + [record(1)])
    assert invoke("score", path, "--model", "fake", "--out", tmp_path / "s.jsonl").exit_code == 1
    errors = _records(tmp_path / "s.errors.jsonl")
    assert [e["source"] for e in errors] == [f"{path}:{n}" for n in range(1, 601)]


@pytest.mark.parametrize("pack", [1, 1000])
def test_records_that_the_scorer_refuses_do_not_wait_for_a_pack(fake_cli, record, write_jsonl, tmp_path, pack):
    """A kill loses at most the pack in flight: what the scorer refuses before it is on disk, but for the last few."""
    path = write_jsonl([record(n) for n in range(1000)])
    out = tmp_path / "s.jsonl"
    on_disk = []

    class Refusing(fake_cli.FakeScorer):
        def iter_packs(self, rollouts, *, trunk_logprobs=False, errors=None):
            for number, rollout in enumerate(rollouts, start=1):
                errors(RolloutError("length", "too long", rollout_id=rollout.id, source=rollout.source))
                file = out.with_suffix(".errors.jsonl")
                on_disk.append((number, len(file.read_bytes().splitlines()) if file.exists() else 0))
            yield from ()

    app = build_app(open_scorer=lambda settings: Refusing(pack=pack))
    assert CliRunner().invoke(app, ["score", str(path), "--model", "fake", "--out", str(out)]).exit_code == 1
    assert len(on_disk) == 1000
    assert all(number - written < 256 for number, written in on_disk)
    assert [e["source"] for e in _records(tmp_path / "s.errors.jsonl")] == [f"{path}:{n}" for n in range(1, 1001)]


def test_strict_with_a_pack_full_of_failures(invoke, record, write_jsonl, tmp_path):
    """They are written before the pack ends; what the pack still gives after the first of them counts for nothing."""
    path = write_jsonl([record(n) for n in range(600)])
    failing = ",".join(f"r{n}" for n in range(599))
    out = tmp_path / "s.jsonl"
    result = invoke("score", path, "--model", f"fake:pack=600:fail={failing}", "--out", out, "--strict")
    assert result.exit_code == 1
    assert out.read_bytes() == b""
    assert [e["source"] for e in _records(tmp_path / "s.errors.jsonl")] == [f"{path}:1"]


@pytest.mark.parametrize("late", [{"reward": None}, {"reward": 0.25}])
def test_an_input_that_changes_while_it_is_scored_is_named(fake_cli, record, write_jsonl, tmp_path, late):
    """The groups' rewards were read before: a record has none now and had one, or the reverse."""
    first = [record(0), record(1, reward=None if late["reward"] else 1.0)]
    path = write_jsonl(first)

    def open_late(settings):
        write_jsonl([first[0], record(1, **late)])
        return fake_cli.open_fake(settings)

    app = build_app(open_scorer=open_late)
    arguments = ["score", str(path), "--model", "fake:pack=1", "--out", str(tmp_path / "s.jsonl")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 2
    assert f"error: {path}: expected the file to stay as it is while it is scored" in result.stderr
    assert f"the reward of record {path}:2 has changed" in result.stderr
    assert [r["id"] for r in _records(tmp_path / "s.jsonl")] == ["r0"]


def test_a_key_that_is_the_usual_one_is_the_only_place(invoke, record, write_jsonl, tmp_path):
    lines = [record(0, reward=None, score=1.0), record(1)]
    path = write_jsonl(lines)
    result = invoke("score", path, "--model", "fake", "--out", tmp_path / "s.jsonl", "--reward-key", "reward")
    assert result.exit_code == 1
    assert [r["id"] for r in _records(tmp_path / "s.jsonl")] == ["r1"]
    [error] = _records(tmp_path / "s.errors.jsonl")
    assert "expected the reward at 'reward' as configured" in error["error"]["message"]


@pytest.mark.parametrize(
    ("model", "broken_line", "kept"), [("fake", 3, ["r0", "r1"]), ("fake:pack=9:fail=r2", 5, ["r0", "r1"])]
)
def test_strict_stops_at_the_first_failure_in_input_order(
    invoke, record, write_jsonl, tmp_path, model, broken_line, kept
):
    """Also where reading has run ahead of the scorer and met a later failure first."""
    lines = [record(n) for n in range(7)]
    lines[broken_line - 1] = "{broken"
    path = write_jsonl(lines)
    result = invoke("score", path, "--model", model, "--out", tmp_path / "s.jsonl", "--strict")
    assert result.exit_code == 1
    assert [r["id"] for r in _records(tmp_path / "s.jsonl")] == kept
    assert [e["source"] for e in _records(tmp_path / "s.errors.jsonl")] == [f"{path}:3"]
    assert "stopped at the first failure (--strict)" in result.stderr


def test_without_rewards_there_is_no_outcome_advantage(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([{k: v for k, v in record(n).items() if k != "reward"} for n in range(4)])
    assert invoke("score", path, "--model", "fake", "--out", tmp_path / "s.jsonl").exit_code == 0
    assert [(r["reward"], r["outcome_advantage"]) for r in _records(tmp_path / "s.jsonl")] == [(None, None)] * 4


def test_a_failed_records_reward_still_counts_for_its_group(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(0, reward=1.0), record(1, reward=0.0), record(2, reward=0.0, group="g0")])
    assert invoke("score", path, "--model", "fake:fail=r2", "--out", tmp_path / "s.jsonl").exit_code == 1
    rewards = np.array([1.0, 0.0, 0.0])
    expected = ((rewards - rewards.mean()) / rewards.std())[:2]
    np.testing.assert_allclose([r["outcome_advantage"] for r in _records(tmp_path / "s.jsonl")], expected, rtol=1e-12)


def test_settings_reach_the_credit(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(0)])
    plain, raw = tmp_path / "plain.jsonl", tmp_path / "raw.jsonl"
    invoke("score", path, "--model", "fake", "--out", plain, "--gap-offset", "0.5", "--horizon", "1")
    invoke("score", path, "--model", "fake", "--out", raw, "--form", "raw", "--secured-threshold", "-100")
    [plain_record], [raw_record] = _records(plain), _records(raw)
    levels = np.array(plain_record["mean_logprobs"])
    np.testing.assert_allclose(plain_record["deltas"], np.log((0.5 - levels[:-1]) / (0.5 - levels[1:])), rtol=1e-12)
    np.testing.assert_allclose(plain_record["turn_rewards"][:2], plain_record["deltas"][:2], rtol=1e-12)
    np.testing.assert_allclose(raw_record["deltas"], np.diff(levels), rtol=1e-12)
    assert raw_record["secured_at"] == 0


def test_summary_counts_notes_and_aliases(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(n, answer_ids=[[41], [42, 43]]) for n in range(4)])
    result = invoke("score", path, "--model", "fake", "--out", tmp_path / "s.jsonl")
    others = sum(sum(a != 0 for a in r["alias"]) for r in _records(tmp_path / "s.jsonl"))
    assert 0 < others < 16
    expected = f"4 records with several gold answers; another than the first was the best at {others} of 16 states"
    assert expected in result.stderr.splitlines()


def test_trunk_logprobs_only_when_asked(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(0)])
    invoke("score", path, "--model", "fake", "--out", tmp_path / "a.jsonl")
    invoke("score", path, "--model", "fake", "--out", tmp_path / "b.jsonl", "--trunk-logprobs")
    assert "trunk_logprobs" not in _records(tmp_path / "a.jsonl")[0]
    assert _records(tmp_path / "b.jsonl")[0]["trunk_logprobs"] == [-0.1] * 11


def test_stdin_to_stdout(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(n, id=None) for n in range(4)] + ["{broken"])
    result = invoke("score", "-", "--model", "fake", "--out", "-", input=path.read_bytes())
    assert result.exit_code == 1
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(r["source"], r["id"], r["group"]) for r in records] == [
        (f"stdin:{n}", f"stdin:{n}", "g0") for n in range(1, 5)
    ]
    assert [r["outcome_advantage"] for r in records] == [-1.0, 1.0, -1.0, 1.0]
    assert "failed: stdin:5: rollout 'stdin:5'" in result.stderr
    assert "trace-fast-" not in result.stdout + result.stderr  # the temporary copy's name
    assert sorted(f.name for f in tmp_path.iterdir()) == ["in.jsonl"]


def test_stdin_resumes_like_a_file(invoke, record, write_jsonl, tmp_path):
    data = write_jsonl([record(n) for n in range(5)]).read_bytes()
    out = tmp_path / "s.jsonl"
    assert invoke("score", "-", "--model", "fake", "--out", out, input=data).exit_code == 0
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    assert invoke("score", "-", "--model", "fake", "--out", out, "--resume", input=data).exit_code == 0
    assert out.read_bytes() == whole


@pytest.mark.parametrize("flag", [[], ["--resume"]])
def test_existing_output_is_not_touched_without_a_word(invoke, record, write_jsonl, tmp_path, flag):
    path = write_jsonl([record(0)])
    out = tmp_path / "s.jsonl"
    out.write_text("precious\n")
    result = invoke("score", path, "--model", "fake", "--out", out, *flag)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert out.read_text() == "precious\n"
    assert invoke("score", path, "--model", "fake", "--out", out, "--overwrite").exit_code == 0
    assert [r["id"] for r in _records(out)] == ["r0"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gap-offset", "0.2"], "settings.credit.gap_offset was 0.1 and is 0.2 now"),
        (["--dtype", "float32"], 'settings.dtype was "bfloat16" and is "float32" now'),
        (["--backend", "reference"], f'settings.backend was "{AUTO}" and is "reference, reference" now'),
        (["--opener", "So: "], 'settings.opener was "auto" and is "So: " now'),
        (["--reward-key", "extra.r"], 'settings.reward_key was null and is "extra.r" now'),
        (["--model", "fake:hash=b"], 'reference was "fake@a" and is "fake@b" now'),
    ],
)
def test_resume_refuses_other_settings_by_name(invoke, record, write_jsonl, tmp_path, options, words):
    path = write_jsonl([record(0)])
    out = tmp_path / "s.jsonl"
    assert invoke("score", path, "--model", "fake", "--out", out).exit_code == 0
    before = out.read_bytes()
    result = invoke("score", path, "--model", "fake", "--out", out, "--resume", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert out.read_bytes() == before


def test_resume_refuses_changed_input_but_not_another_pack_size(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(n) for n in range(5)])
    out = tmp_path / "s.jsonl"
    assert invoke("score", path, "--model", "fake:pack=2", "--out", out).exit_code == 0
    whole = out.read_bytes()
    out.write_bytes(whole[:-30])
    options = ["--model", "fake:pack=5", "--max-tokens-per-pack", "4096", "--out", out, "--resume"]
    result = invoke("score", path, *options)
    assert (result.exit_code, out.read_bytes()) == (0, whole)
    assert result.stderr.splitlines()[0] == "1 record scored, 0 failed (and in earlier runs 4 scored, 0 failed)"
    write_jsonl([record(n) for n in range(6)])
    result = invoke("score", path, *options)
    assert result.exit_code == 2
    assert "inputs.0.bytes was" in result.stderr


def test_resume_with_earlier_failures_is_exit_1_and_repeats_none(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(0), "{broken", record(2)])
    out = tmp_path / "s.jsonl"
    assert invoke("score", path, "--model", "fake", "--out", out).exit_code == 1
    result = invoke("score", path, "--model", "fake", "--out", out, "--resume")
    assert result.exit_code == 1
    assert len(_records(tmp_path / "s.errors.jsonl")) == 1
    assert "0 records scored, 0 failed (and in earlier runs 2 scored, 1 failed)" in result.stderr


def test_a_file_that_breaks_off_does_not_stop_the_next(invoke, record, write_jsonl, tmp_path):
    good = write_jsonl([record(9)], "good.jsonl")
    lines = "".join(json.dumps(record(n)) + "\n" for n in range(3000)).encode()
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(lines)[:-2000])
    result = invoke("score", torn, good, "--model", "fake:pack=500", "--out", tmp_path / "s.jsonl")
    assert result.exit_code == 1
    ids = [r["id"] for r in _records(tmp_path / "s.jsonl")]
    assert ids[-1] == "r9"
    assert ids[:-1] == [f"r{n}" for n in range(len(ids) - 1)]
    assert len(ids) > 100
    assert sum(line.startswith(f"error: {torn}: cannot be read") for line in result.stderr.splitlines()) == 1


def test_nothing_readable_is_exit_2(invoke, tmp_path):
    (tmp_path / "torn.jsonl.gz").write_bytes(b"\x1f\x8b")
    result = invoke("score", tmp_path / "torn.jsonl.gz", "--model", "fake", "--out", tmp_path / "s.jsonl")
    assert result.exit_code == 2


def test_the_errors_file_of_the_run_is_no_input(invoke, record, write_jsonl, tmp_path):
    path = write_jsonl([record(0)], "s.errors.jsonl")
    before = path.read_bytes()
    result = invoke("score", path, "--model", "fake", "--out", tmp_path / "s.jsonl", "--overwrite")
    assert result.exit_code == 2
    assert "s.errors.jsonl is both input and output" in result.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl", "--model", "fake", "--out", "s.jsonl"], "none.jsonl: there is no such file"),
        ([".", "--model", "fake", "--out", "s.jsonl"], ".: expected a regular file"),
        (["in.jsonl", "in.jsonl", "--model", "fake", "--out", "s.jsonl"], "in.jsonl is given twice"),
        (["in.jsonl", "./in.jsonl", "--model", "fake", "--out", "s.jsonl"], "./in.jsonl is given twice (as in.jsonl"),
        (["in.jsonl", "--model", "fake", "--out", "in.jsonl", "--overwrite"], "in.jsonl is both input and output"),
        (["in.jsonl", "--model", "nope", "--out", "s.jsonl"], "there is no such model"),
        (["in.jsonl", "--model", "fake", "--out", "none/s.jsonl"], "the folder 'none' does not exist"),
        (["in.jsonl", "--model", "fake", "--out", "s.parquet"], "expected a name ending in .jsonl"),
        (["in.jsonl", "--model", "fake", "--out", "s.jsonl", "--gap-offset", "0"], "--gap-offset"),
        (["in.jsonl", "--model", "fake", "--out", "s.jsonl", "--format", "nope"], "nope"),
        (["in.jsonl", "--model", "fake", "--out", "s.jsonl", "--report", "none/r.html"], "'none' does not exist"),
        (["in.jsonl", "--model", "fake", "--out", "s.jsonl", "--report", "./s.jsonl"], "got s.jsonl of the run itself"),
        (["in.jsonl", "--model", "fake", "--out", "s.jsonl", "--report", "in.jsonl"], "is both input and output"),
        (["in.jsonl", "--model", "fake", "--out", "s.jsonl", "--dtype", "int8"], "int8"),
        (["in.jsonl", "--model", "fake", "--out", "s.jsonl", "--device", "gpu"], "device: expected auto, cpu, cuda"),
        (
            ["in.jsonl", "--model", "fake", "--out", "s.jsonl", "--backend", "nope"],
            "backend: expected auto, triton, native, torch, reference, got 'nope'",
        ),
        (["in.jsonl", "--out", "s.jsonl"], "--model"),
        (["in.jsonl", "--model", "fake", "--out", "s.jsonl", "--nope"], "--nope"),
    ],
)
def test_nothing_could_be_done_is_exit_2_and_leaves_nothing(
    invoke, record, write_jsonl, tmp_path, arguments, words, monkeypatch
):
    content = write_jsonl([record(0)]).read_bytes()
    monkeypatch.chdir(tmp_path)
    result = invoke("score", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""
    assert [f.name for f in tmp_path.iterdir()] == ["in.jsonl"]
    assert (tmp_path / "in.jsonl").read_bytes() == content


def test_control_characters_of_the_data_never_reach_the_terminal(invoke, record, write_jsonl, tmp_path):
    hostile = "\x1b]0;owned\x07\x1b[31m\x9b2J\u202e"
    path = write_jsonl([record(0, id=hostile, answer_ids=[]), record(1, id=hostile + "2", extra={"x": hostile})])
    result = invoke("score", path, "--model", f"fake:fail={hostile}2", "--out", "-")
    assert result.exit_code == 1
    shown = result.stdout + result.stderr
    assert not {c for c in shown if not c.isprintable()} - {"\n"}
    assert "\\x1b]0;owned\\x07" in result.stderr


def test_report_option_writes_the_report_of_all_records(invoke, record, write_jsonl, tmp_path):
    pytest.importorskip("plotly", reason="the report needs plotly (extra report)")
    path = write_jsonl([record(n) for n in range(4)])
    report = tmp_path / "r.html"
    arguments = ["score", path, "--model", "fake", "--out", tmp_path / "s.jsonl", "--report", report]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    page = report.read_text()
    assert page.startswith("<!")
    assert all(f'"r{n}"' in page for n in range(4))
    # an existing report is not replaced without a word, and the scores are not touched either
    report.write_text("precious")
    again = invoke(*arguments[:5], tmp_path / "t.jsonl", *arguments[6:])
    assert again.exit_code == 2
    assert report.read_text() == "precious"
    assert not (tmp_path / "t.jsonl").exists()
