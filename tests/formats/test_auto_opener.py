"""The opener that ``auto`` chooses for a tokenizer: whole tags where they survive, a line break where they merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import trace_fast as tf
from trace_fast.formats.answers import NOTE_NEWLINE, auto_opener

RECORD = {"segments": [{"role": "prompt", "text": "Who? "}, {"role": "assistant", "text": "Fred"}], "answer": "Fred"}


def read(tmp_path: Path, tokenizer: Any, **settings: Any) -> tf.Rollout:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(RECORD))
    return next(tf.read_rollouts(path, tokenizer, **settings))


def test_smollm2_keeps_the_bare_tag(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    assert auto_opener(smollm2_tokenizer) == "<answer>"
    rollout = read(tmp_path, smollm2_tokenizer)
    assert smollm2_tokenizer.decode(rollout.openers[0]) == "<answer>"
    assert NOTE_NEWLINE not in rollout.notes


def test_qwen_gets_a_line_break_and_a_note(tmp_path: Path, qwen_tokenizer: Any) -> None:
    """Qwen has one token for '>F': '<answer>Fred' has no seam, '<answer>\\nFred' has."""
    assert qwen_tokenizer.tokenize("<answer>Fred")[-2:] == [">F", "red"]
    assert auto_opener(qwen_tokenizer) == "<answer>\n"
    rollout = read(tmp_path, qwen_tokenizer)
    assert qwen_tokenizer.decode(rollout.openers[0]) == "<answer>\n"
    assert qwen_tokenizer.decode(rollout.answers[0]) == "Fred"
    assert NOTE_NEWLINE in rollout.notes


def test_an_opener_may_be_an_array_of_ids(tmp_path: Path, qwen_tokenizer: Any) -> None:
    rollout = read(tmp_path, qwen_tokenizer, opener=np.array([27, 9217, 29]))
    assert [opener.tolist() for opener in rollout.openers] == [[27, 9217, 29]] * rollout.n_states
    assert NOTE_NEWLINE not in rollout.notes


def test_an_opener_that_was_asked_for_is_taken_as_it_is(tmp_path: Path, qwen_tokenizer: Any) -> None:
    failed: list[tf.RolloutError] = []
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(RECORD))
    assert list(tf.read_rollouts(path, qwen_tokenizer, opener="<answer>", errors=failed.append)) == []
    assert failed[0].kind == "seam"
    assert "'>F'" in failed[0].reason
