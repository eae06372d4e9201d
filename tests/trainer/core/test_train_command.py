"""``trace-fast train`` as people start it: two processes, resume, signals, numbers that are none, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_world import config

from trace_fast.cli_train import run_eval, run_rollout
from trace_fast.errors import ConfigError, InputError, OutputError, TraceFastError
from trace_fast.formats import read_rollouts
from trace_fast.model import load_tokenizer
from trace_fast.rollout import Rollout
from trace_fast.trainer.checkpoint import read_progress
from trace_fast.trainer.config import read_config
from trace_fast.trainer.engines.engine import Generation, Request
from trace_fast.trainer.loop import train
from trace_fast.trainer.policy import NonFiniteError
from trace_fast.trainer.reference import Scored
from trace_fast.trainer.setup import open_run, read_inputs

COMMAND = [sys.executable, "-m", "trace_fast"]


def started(arguments: list[str], *, processes: int = 1) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m"]
    command = [*launcher, "trace_fast", *arguments] if processes > 1 else [*COMMAND, *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ran(arguments: list[str], *, processes: int = 1) -> tuple[int, str]:
    process = started(arguments, processes=processes)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def settings(small_world: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(config(small_world, tmp_path / "out"))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "{config}"],
        ["rollout", "{config}", "--questions", "{config}", "--out", "{config}.jsonl"],
        ["eval", "{config}"],
        ["export", "{config}", "--out", "{config}.model"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_without_the_extra_the_missing_packages_are_named(arguments: list[str], settings: Path) -> None:
    """As on a machine where only what ``make demo`` needs is installed; seen as a traceback before."""
    hidden = "import sys; sys.modules.update(bm25s=None, faiss=None); from trace_fast.cli import app; app()"
    command = [sys.executable, "-c", hidden, *(part.format(config=settings) for part in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: training and sampling need packages of the extra train, and these are not installed: faiss, bm25s; "
        "pip install 'trace-fast[train]'\n"
    )


def test_two_processes_train_resume_and_report(settings: Path, small_world: Path, tmp_path: Path) -> None:
    """The smoke run: TRACE in two processes, stopped by its step count and resumed, with everything that is written."""
    out = tmp_path / "out"
    run = ["train", str(settings), "--set", "parallel.shard=2", "--set", "logging.tensorboard=true"]
    run += ["--set", "evaluation.by=hops"]
    code, output = ran([*run, "--set", "training.steps=2"], processes=2)
    assert code == 0, output
    code, output = ran([*run, "--set", "training.steps=3", "--resume"], processes=2)
    assert code == 0, output
    assert "continuing after step 2" in output
    steps = [line for line in metrics(out) if "reward" in line]
    assert [line["step"] for line in steps] == [0, 1, 2]
    for line in steps:
        assert 0 <= line["reward"] <= 1.1
        assert line["lost_rollouts"] == 0
        assert line["optimizer_steps"] == 2 * (line["step"] + 1)
        assert line["trained_tokens"] > 0
        assert line["entropy"] > 0
        assert sum(v for k, v in line.items() if k.startswith("stop/")) == pytest.approx(1)
        assert line["seconds/step"] == pytest.approx(
            sum(v for k, v in line.items() if k.startswith("seconds/") and k != "seconds/step")
        )
    assert max(line["grad_norm"] for line in steps) > 0
    assert max(line["turn_credit"] for line in steps) > 0
    assert abs(steps[0]["kl_to_reference"]) < 1e-6  # the policy is the reference still
    assert steps[2]["kl_to_reference"] > 1e-4
    validated = [line["step"] for line in metrics(out) if "validation/reward" in line]
    assert validated == [0, 2, 3]
    by_hops = {key for line in metrics(out) for key in line if key.startswith("validation/success/hops=")}
    assert by_hops == {"validation/success/hops=2", "validation/success/hops=3"}
    assert read_progress(out / "checkpoints" / "step-000003").step == 3
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))

    dumped = out / "rollouts" / "step-000002.jsonl"
    rollouts = list(read_rollouts(dumped, tokenizer=load_tokenizer(str(small_world / "base"))))
    assert len(rollouts) == 16
    assert sum(r.reward or 0 for r in rollouts) / 16 == pytest.approx(steps[2]["reward"])
    page = tmp_path / "report.html"
    scores = dumped.with_suffix(".scores.jsonl")
    code, output = ran(["report", str(scores), "--out", str(page), "--rollouts", str(dumped)])
    assert code == 0, output
    text = page.read_text()
    assert all(rollout.id in text for rollout in rollouts)


def test_a_signal_saves_and_the_run_can_be_continued(settings: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--set", "training.steps=500", "--set", "checkpoint.every=400", "--set", "evaluation.every=0"]
    process = started(["train", str(settings), *options])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ((out / "metrics.jsonl").exists() and len(metrics(out)) >= 2):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    done = len(metrics(out))
    assert f"stopping after {done} steps, as a signal asked" in output
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    more = ["--set", f"training.steps={done + 1}", "--set", "evaluation.every=0", "--resume"]
    code, output = ran(["train", str(settings), *more])
    assert code == 0, output
    assert [line["step"] for line in metrics(out)] == list(range(done + 1))


def test_a_signal_during_the_rollouts_gives_up_their_step(settings: Path, tmp_path: Path) -> None:
    """No further turn is generated, and the last whole step is saved."""
    config = read_config(str(settings), ["evaluation.every=0", "checkpoint.every=400"])
    with open_run(config, read_inputs(config, resume=False)) as (run, begin):
        generate, score, scored, after = run.engine.generate, run.reference.score, [], []

        def generate_and_ask(requests: Sequence[Request]) -> list[Generation]:
            if len(scored) == 1:
                after.append(len(requests))
                signal.raise_signal(signal.SIGTERM)
            return generate(requests)

        def count(rollouts: list[Rollout]) -> Scored:
            scored.append(len(rollouts))
            return score(rollouts)

        run.engine.generate, run.reference.score = generate_and_ask, count  # type: ignore[method-assign]
        assert train(run, begin=begin) is False
    assert (scored, after) == ([16], [16])
    assert [line["step"] for line in metrics(tmp_path / "out")] == [0]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-000001"]


def test_one_ctrl_c_reaches_two_tensor_ranks_twice_and_one_process_goes_on(settings: Path, tmp_path: Path) -> None:
    """The terminal's signal goes to the launcher and to its children, and the launcher passes it on. One question a
    step: a rank has none to sample."""
    out = tmp_path / "out"
    changes = ["training.steps=500", "checkpoint.every=400", "evaluation.every=0", "training.prompts=1"]
    options = ["train", str(settings), *(part for change in changes for part in ("--set", change))]
    process = started([*options, "--set", "parallel.tensor=2"], processes=2)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ((out / "metrics.jsonl").exists() and len(metrics(out)) >= 2):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    done = len(metrics(out))
    assert f"stopping after {done} steps, as a signal asked" in output
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    code, output = ran([*options, "--set", f"training.steps={done + 1}", "--resume"])
    assert code == 0, output
    assert [line["step"] for line in metrics(out)] == list(range(done + 1))
    assert all(sum(v for k, v in line.items() if k.startswith("stop/")) == pytest.approx(1) for line in metrics(out))
    code, output = ran([*options, "--set", "training.steps=1", "--resume"])  # fewer than are done
    assert code == 0, output
    assert "training.steps = 1: nothing is left to train" in output
    assert len(metrics(out)) == done + 1


def test_a_loss_that_is_no_number_stops_the_run_and_saves_its_rollouts(settings: Path, tmp_path: Path) -> None:
    changes = ["logging.rollouts=0", "evaluation.every=0", "checkpoint.every=1"]
    config = read_config(str(settings), changes)
    with open_run(config, read_inputs(config, resume=False)) as (run, begin):
        score, scorings = run.reference.score, []

        def score_and_break_the_policy(rollouts: list[Rollout]) -> Scored:
            scorings.append(rollouts)
            if len(scorings) == 2:
                next(iter(run.policy.parameters.values())).detach().fill_(float("inf"))
            return score(rollouts)

        run.reference.score = score_and_break_the_policy  # type: ignore[method-assign]
        with pytest.raises(NonFiniteError, match=r"^step 1: expected finite log-probabilities .* rollouts/step-000001"):
            train(run, begin=begin)
        run.checkpoints.wait()
        assert run.optimizer.steps == 2  # those of step 0
    assert [line["step"] for line in metrics(tmp_path / "out")] == [0]
    saved = list(read_rollouts(tmp_path / "out" / "rollouts" / "step-000001.jsonl", tokenizer=None))
    assert [rollout.id for rollout in saved] == [rollout.id for rollout in scorings[1]]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-000001"]


def test_an_engine_that_fails_everything_says_why(settings: Path) -> None:
    """A learning rate that breaks the weights: the engine gets them, and its next step has nothing to train on."""
    changes = ["optimizer.lr=1e30", "evaluation.every=0", "training.global_batch=16"]  # one optimiser step a step
    code, output = ran(["train", str(settings), *(part for change in changes for part in ("--set", change))])
    assert code == 2
    assert "expected rollouts to train on, but all were lost; the first: train-" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.lrr=1", "config.toml: optimizer.lrr: unknown key; did you mean 'lr'?"),
        ("harness.max_turn=1", "config.toml: harness.max_turn: unknown key; did you mean 'max_turns'?"),
        ("evaluation.harness.max_turn=1", "config.toml: evaluation.harness.max_turn: unknown key; did you mean"),
        ("polcy.x=1", "config.toml: polcy: unknown key; did you mean 'policy'?"),
        ("algorithm={name='trace', loss={clip_hig=1}}", "algorithm.loss.clip_hig: unknown key; did you mean 'clip_h"),
        ("algorithm={name='grppo'}", "algorithm.name: expected one of 'grpo', 'gspo', 'gigpo', 'trace', got 'grppo'"),
        ("algorithm={}", "config.toml: algorithm.name: is required"),
        ("optimizer.lr=-1", "config.toml: optimizer.lr: Input should be greater than 0, got -1"),
        ("lr", "--set: expected section.key=value, got 'lr'"),
        ("out.x=1", "--set out.x=1: out is a value, not a section"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl: cannot be read"),
        ("policy.path=./nowhere", "model './nowhere': no such folder"),
        ("training.prompts=1000", "training.prompts: expected at most the "),
        ("training.microbatch_tokens=10", "training.microbatch_tokens: expected at least harness.max_tokens = 600"),
        ("parallel.shard=3", "expected replicate x shard x tensor to be the number of processes, 1; got 1 x 3 x 1 = 3"),
        ("harness.top_p=0.9", "top_p: expected 1 for rollouts that are trained on, got 0.9"),
        ("harness.temperature=0", "temperature: expected a positive number, got 0.0"),
        ("evaluation.harness.max_tokens=5000", "evaluation.harness.max_tokens: expected at most the 2048 positions of"),
        ("reference.path=./nowhere", "model './nowhere': no such folder"),
        ("search={index='nowhere'}", "search.corpus: is required, since search.index = 'nowhere' holds no index yet"),
        ("search={index='nowhere', corpus='no.jsonl'}", "no.jsonl"),
        ("engine={kind='vllm'}", "engine: url: expected one for a server and none with hf, got None"),
    ],
)
def test_what_is_wrong_is_named_before_any_process_group_starts(change: str, message: str, settings: Path) -> None:
    with pytest.raises(TraceFastError) as caught:
        read_inputs(read_config(str(settings), [change]), resume=False)
    assert message in str(caught.value)


def test_a_wrong_setting_is_one_line_and_exit_code_2(settings: Path, tmp_path: Path) -> None:
    code, output = ran(["train", str(settings), "--set", "optimizer.lrr=1"])
    assert code == 2
    assert output == f"error: {settings}: optimizer.lrr: unknown key; did you mean 'lr'?\n"
    assert not (tmp_path / "out").exists()


def test_a_corpus_is_read_through_before_any_process_group_starts(settings: Path, tmp_path: Path) -> None:
    row = {"docid": "1", "url": "u", "title": "t", "text": "words"}
    cases = [([row, row | {"text": 3}], "corpus.jsonl:2: text: expected text, got 3"), ([], "corpus.jsonl")]
    for lines, message in cases:
        (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        change = f"search={{index='{tmp_path / 'index'}', corpus='{tmp_path / 'corpus.jsonl'}'}}"
        with pytest.raises(InputError, match=message):
            read_inputs(read_config(str(settings), [change]), resume=False)
    assert not (tmp_path / "index").exists()


def test_a_reference_that_reads_the_ids_otherwise_is_refused(settings: Path, small_world: Path, tmp_path: Path) -> None:
    shutil.copytree(small_world / "base", other := tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    vocabulary = json.loads(text)["model"]["vocab"]
    first, second = (token for token in sorted(vocabulary, key=len)[-2:])
    record = json.loads(text)
    record["model"]["vocab"] |= {first: vocabulary[second], second: vocabulary[first]}
    (other / "tokenizer.json").write_text(json.dumps(record))
    read_inputs(read_config(str(settings), [f"reference.path={small_world / 'base'}"]), resume=False)
    with pytest.raises(ConfigError, match=r"reference\.path: expected a model with the vocabulary of .* 2 tokens have"):
        read_inputs(read_config(str(settings), [f"reference.path={other}"]), resume=False)


def test_a_folder_that_cannot_be_made_is_named(settings: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = read_config(str(settings), [f"out={tmp_path / 'file' / 'out'}"])
    inputs = read_inputs(config, resume=False)
    with pytest.raises(OutputError, match=r"out: .*file/out': cannot be made"), open_run(config, inputs):
        pass


def test_a_place_that_cannot_be_written_is_named_before_anything_is_sampled(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for out in (tmp_path / "nowhere" / "o.jsonl", tmp_path):
        with pytest.raises(OutputError, match="expected the name of a file in a folder that exists"):
            run_rollout(str(settings), [], questions="none.jsonl", out=str(out), samples=1, overwrite=True)
        with pytest.raises(OutputError, match="expected the name of a file in a folder that exists"):
            run_eval(str(settings), [], questions="none.jsonl", out=str(out), overwrite=True)
    with pytest.raises(OutputError, match="the metrics go to the standard output"):
        run_eval(str(settings), [], questions="none.jsonl", out="-", overwrite=True)
    there = tmp_path / "there.jsonl"
    there.write_text("kept")
    with pytest.raises(OutputError, match=r"there.jsonl exists; replace it with --overwrite"):
        run_rollout(str(settings), [], questions="none.jsonl", out=str(there), samples=1, overwrite=False)
    with pytest.raises(OutputError, match=r"there.jsonl exists; replace it with --overwrite"):
        run_eval(str(settings), [], questions="none.jsonl", out=str(there), overwrite=False)
    assert there.read_text() == "kept"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="expected one process, since this command does not divide its work"):
        run_rollout(str(settings), [], questions="none.jsonl", out=str(tmp_path / "o"), samples=1, overwrite=False)


def test_the_plan_needs_no_data(settings: Path, tmp_path: Path) -> None:
    changes = ["data.train=nowhere.jsonl", "search.index=nowhere", "parallel.shard=2"]
    options = [part for change in changes for part in ("--set", change)]
    code, output = ran(["train", str(settings), "--dry-run", *options])
    assert code == 0, output
    assert "processes            2 = replicate 1 x shard 2 x tensor 1" in output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_a_run_is_not_written_into(settings: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("")
    with pytest.raises(OutputError, match="holds a run; continue it with --resume, or give another folder"):
        read_inputs(read_config(str(settings)), resume=False)


def test_rollout_and_eval(settings: Path, small_world: Path, tmp_path: Path) -> None:
    questions, out = small_world / "questions.validation.jsonl", tmp_path / "rollouts.jsonl"
    arguments = ["--questions", str(questions), "--out", str(out), "--samples", "2"]
    code, output = ran(["rollout", str(settings), *arguments])
    assert code == 0, output
    rollouts = list(read_rollouts(out, tokenizer=load_tokenizer(str(small_world / "base"))))
    n = len(questions.read_text().splitlines())
    assert len(rollouts) == 2 * n
    assert len({rollout.group for rollout in rollouts}) == n
    code, output = ran(["rollout", str(settings), *arguments])
    assert code == 2
    assert "exists; replace it with --overwrite" in output
    code, output = ran(["eval", str(settings)])
    assert code == 0, output
    found = json.loads(output[output.index("{") :])
    assert sum(v for k, v in found.items() if k.startswith("stop/")) == pytest.approx(1)
    assert 0 <= found["reward"] <= 1.1
