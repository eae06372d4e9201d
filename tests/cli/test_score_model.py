"""The commands with a tiny random model: files hold the scorer's numbers, plans come true, kills lose nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig
from typer.testing import CliRunner

import trace_fast
from trace_fast.cli import app
from trace_fast.cli_terminal import plural

N_ROLLOUTS = 80


def _rollout(number):
    """A question about a made-up place; a search that finds the founder, or (odd numbers) no search at all."""
    place, founder = f"Vant Ridge {number // 2}", f"Ilka Perrin {number // 2}"
    question = {"role": "user", "content": f"Who founded {place}?"}
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": json.dumps({"query": place})}}
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": f"{place} was founded by {founder}, a ship builder."},
        {"role": "assistant", "content": f"<answer>{founder}</answer>"},
    ]
    guess = [{"role": "assistant", "content": "I do not know."}]
    messages = [question, *(guess if number % 2 else turn)]
    reward = 1 - number % 2
    return {"id": f"r{number}", "group": place, "messages": messages, "answer": founder, "reward": reward}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "rollouts.jsonl"
    path.write_text("".join(json.dumps(_rollout(n)) + "\n" for n in range(N_ROLLOUTS)), "utf-8")
    return path


@pytest.fixture(scope="module")
def model(smollm2_tokenizer, tmp_path_factory):
    """A folder with a random Llama that loads in no time and SmolLM2's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(smollm2_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    smollm2_tokenizer.save_pretrained(folder)
    return folder


def _invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def scored(examples, model, tmp_path_factory):
    """(score file, stderr) of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("scored") / "s.jsonl"
    result = _invoke("score", examples, "--model", model, "--dtype", "float32", "--out", out)
    assert result.exit_code == 0, result.stderr
    return out, result.stderr


def test_records_are_the_scorers_numbers(examples, model, scored):
    scorer = trace_fast.Scorer.from_pretrained(str(model), dtype="float32")
    scores = scorer.score(list(trace_fast.read_rollouts(examples, tokenizer=scorer.tokenizer)))
    credit = trace_fast.turn_credit(scores)
    records = [json.loads(line) for line in scored[0].read_text().splitlines()]
    assert len(records) == N_ROLLOUTS
    assert [r["outcome_advantage"] for r in records] == [1.0, -1.0] * (N_ROLLOUTS // 2)
    for record, score, turns in zip(records, scores, credit, strict=True):
        assert record["id"] == score.id
        assert record["model"] == scorer.reference
        assert record["mean_logprobs"] == score.mean_logprobs.tolist()
        assert record["deltas"] == turns.deltas.tolist()
        assert record["turn_rewards"] == turns.rewards.tolist()


def test_the_plan_is_what_happens(examples, model, scored):
    result = _invoke("plan", examples, "--model", model, "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    line = next(line for line in scored[1].splitlines() if line.startswith("tokens: "))
    assert line == (
        f"tokens: {plan['tokens_naive']:,} for one pass a state, {plan['tokens_unique']:,} forwarded "
        f"({plan['tokens_naive'] / plan['tokens_unique']:.1f} times fewer)"
    )
    records = [json.loads(line) for line in scored[0].read_text().splitlines()]
    assert plan["n_rollouts"] == len(records)
    assert plan["n_states"] == sum(len(r["mean_logprobs"]) for r in records)
    assert plan["n_failed"] == 0
    table = _invoke("plan", examples, "--model", model, "--dtype", "float32").stdout
    assert f"{plan['tokens_unique']:,}" in table
    assert f"{plan['ratio']:.2f}" in table


def test_plan_refuses_the_models_that_score_refuses(examples, tmp_path):
    """A hybrid model: by its config alone, in the same words; there is no tokenizer and are no weights."""
    folder = tmp_path / "hybrid"
    Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]).save_pretrained(folder)
    plan = _invoke("plan", examples, "--model", folder)
    score = _invoke("score", examples, "--model", folder, "--out", tmp_path / "s.jsonl")
    assert (plan.exit_code, score.exit_code) == (2, 2)
    assert plan.stderr.startswith(f"error: {folder} (qwen3_next) has linear_attention layers: their state runs through")
    assert plan.stderr == score.stderr
    assert plan.stdout == ""


def test_plan_reports_failed_records(examples, model, tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text(examples.read_text("utf-8").splitlines()[0] + "\n{broken\n", "utf-8")
    result = _invoke("plan", path, "--model", model, "--json")
    assert result.exit_code == 1
    assert (json.loads(result.stdout)["n_rollouts"], json.loads(result.stdout)["n_failed"]) == (1, 1)
    assert f"failed: {path}:2" in result.stderr
    path.write_text("{broken\n")
    assert _invoke("plan", path, "--model", model, "--json").exit_code == 2


def test_killed_and_resumed_equals_undisturbed(examples, model, scored, tmp_path):
    """With small packs, killed after the first one is on disk; resumed with the packs of the undisturbed run."""
    out = tmp_path / "s.jsonl"
    options = ["score", examples, "--model", model, "--dtype", "float32", "--out", out, "--resume"]
    line = [sys.executable, "-c", "from trace_fast.cli import app; app()", *map(str, options)]
    line += ["--max-tokens-per-pack", "1"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    done = len(out.read_bytes().splitlines())
    assert 0 < done < N_ROLLOUTS
    result = _invoke(*options)
    assert result.exit_code == 0, result.stderr
    assert f"{plural(N_ROLLOUTS - done, 'record')} scored" in result.stderr.splitlines()[0]
    assert out.read_bytes() == scored[0].read_bytes()


def test_a_missing_model_is_one_clear_line(command, examples, tmp_path):
    result = command("score", examples, "--model", tmp_path / "none.gguf", "--out", tmp_path / "s.jsonl")
    assert result.returncode == 2
    assert result.stderr == f"error: model {str(tmp_path / 'none.gguf')!r}: no such GGUF file\n"
    assert not (tmp_path / "s.jsonl").exists()


def test_real_rollouts_of_two_dumps_in_one_run(model, shared_data, tmp_path):
    """Tagged text and a plain-text log, format detected; every record is a number."""
    dump = sorted((shared_data / "search_r1_text").glob("*.jsonl"))[0]
    short = tmp_path / "a.jsonl"
    short.write_text("\n".join(sorted(dump.read_text("utf-8").splitlines(), key=len)[:2]) + "\n", "utf-8")
    log = shared_data / "reflexion_react_log" / "base_block0000.txt"
    out = tmp_path / "s.jsonl"
    result = _invoke("score", short, log, "--model", model, "--out", out)
    assert result.exit_code == 0, result.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["source"].rsplit(":", 1)[0] for r in records[:2]] == [str(short)] * 2
    assert {r["source"].rsplit(":", 1)[0] for r in records[2:]} == {str(log)}
    for record in records:
        assert all(value <= 0 for value in record["mean_logprobs"])
        assert len(record["deltas"]) == len(record["mean_logprobs"]) - 1
