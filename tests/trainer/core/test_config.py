"""Settings from TOML and ``--set``; what a resumed run must share. Refusals by name: ``test_train_command.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trace_fast.errors import ConfigError
from trace_fast.trainer.config import TrainConfig, read_config

LEAST = """
out = "runs/a"
policy.path = "base"
data.train = "q.jsonl"
search.index = "index"
harness.max_tokens = 600
"""


def read(tmp_path: Path, *changes: str, text: str = LEAST) -> TrainConfig:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return read_config(str(path), changes)


@pytest.mark.parametrize(
    ("change", "place", "value"),
    [
        ("optimizer.lr=2e-3", "optimizer.lr", 2e-3),
        (" training . steps = 7", "training.steps", 7),
        ("policy.path=other/model", "policy.path", "other/model"),  # no TOML: a string as it stands
        ("policy.path='a=b'", "policy.path", "a=b"),
        ("policy.path=two\nlines=2", "policy.path", "two\nlines=2"),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", (0.8, 0.9)),
        ("optimizer.offload=true", "optimizer.offload", True),
        ("optimizer.max_grad_norm=none", "optimizer.max_grad_norm", None),  # TOML has no null
        ("algorithm={name='grpo', loss={tis_cap='none'}}", "algorithm.loss.tis_cap", None),
        ("harness.instructions=none", "harness.instructions", "none"),  # where nothing else is allowed, a text
        ("evaluation.harness.max_turns=3", "evaluation.harness.max_turns", 3),
        ("evaluation.harness.max_turns=3", "evaluation.harness.max_response_tokens", 8_192),  # on top of the paper's
    ],
)
def test_one_value_changes(change: str, place: str, value: Any, tmp_path: Path) -> None:
    found: Any = read(tmp_path, change)
    for name in place.split("."):
        found = getattr(found, name)
    assert found == value


def test_the_last_change_holds(tmp_path: Path) -> None:
    assert read(tmp_path, "training.steps=3", "training.steps=4").training.steps == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("out=", "c.toml: out: String should have at least 1 character, got ''"),
        ("policy=3", "c.toml: policy: expected a section, got 3"),
        ("optimizer.lr=true", "c.toml: optimizer.lr: Input should be a valid number, got True"),
        ("optimizer.betas=[0.9, true]", "c.toml: optimizer.betas.1: Input should be a valid number, got True"),
        ("training.steps=3.0", "c.toml: training.steps: Input should be a valid integer, got 3.0"),
        ("training.steps='3'", "c.toml: training.steps: Input should be a valid integer, got '3'"),
        ("reference.kl=1", "c.toml: reference.kl: Input should be a valid boolean, got 1"),
        ("optimizer.betas=[0.9, 1.0]", "c.toml: optimizer.betas.1: Input should be less than 1, got 1.0"),
        ("optimizer.lr=inf", "c.toml: optimizer.lr: Input should be a finite number, got inf"),
        ("reference.backend=fast", "c.toml: reference.backend: Input should be 'auto', 'triton', 'native' or 'refer"),
        ("training.steps=1.5", "c.toml: training.steps: Input should be a valid integer"),
        ("=3", "--set: expected section.key=value, got '=3'"),
        ("a..b=3", "--set: expected section.key=value, got 'a..b=3'"),
    ],
)
def test_a_wrong_value_is_named(change: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, change)
    assert message in str(caught.value)


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "optimizer.lrr=1", "training.steps=0", "policy.paht=2")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("text", ["a = ", "a = 1\na = 2", "x" * 10, "a = " + "[" * 5000, '\ufeffout = "a"\x00'])
def test_a_file_that_is_no_toml_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.toml: expected TOML"):
        read(tmp_path, text=text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'out = "\xe9"')
    for name in ("nowhere.toml", "latin.toml", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_config(str(tmp_path / name))


@pytest.mark.parametrize(
    "change",
    [
        "out=elsewhere",
        "training.steps=9",
        "checkpoint.every=1",
        "parallel.shard=4",
        "data.validation=v.jsonl",
        "search.index=moved",
        "reference.placement=offload",
        "logging.rollouts=0",
    ],
)
def test_places_times_and_memory_may_change_when_a_run_goes_on(change: str, tmp_path: Path) -> None:
    assert read(tmp_path, change).deciding() == read(tmp_path).deciding()


@pytest.mark.parametrize(
    "change",
    ["training.seed=1", "optimizer.lr=1", "algorithm={name='grpo'}", "harness.max_turns=1", "reference.dtype=float32"],
)
def test_what_decides_numbers_may_not(change: str, tmp_path: Path) -> None:
    assert read(tmp_path, change).deciding() != read(tmp_path).deciding()


def test_a_server_may_move_when_a_run_goes_on(tmp_path: Path) -> None:
    first, moved = (
        read(tmp_path, f"engine={{kind='vllm', url='http://{host}', weights='/{host}', concurrency={n}}}").deciding()
        for host, n in (("one", 64), ("two", 8))
    )
    assert first == moved
    assert first["engine"] == {"kind": "vllm", "dtype": "bfloat16", "slots": 64, "processed_logprobs": False}
