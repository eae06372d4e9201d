"""Score records: their values, their encoding, and how they are read back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trace_fast.config import CreditConfig
from trace_fast.credit import turn_credit
from trace_fast.errors import InputError, RolloutError
from trace_fast.output import encode_record, read_score_records, score_record
from trace_fast.rollout_score import RolloutScore


def _score(**changes):
    fields = {
        "id": "r1",
        "group": "g",
        "n_turns": 2,
        "boundaries": np.array([3, 7, 9, 12]),
        "mean_logprobs": np.array([-5.1187, -1.5712, -1.5712, -0.2]),
        "alias_mean_logprobs": np.array([[-5.1187, -6.0], [-1.5712, -2.0], [-1.5712, -2.0], [-0.3, -0.2]]),
        "alias": np.array([0, 0, 0, 1]),
        "token_logprobs": tuple(np.array([-0.5], dtype=np.float32) for _ in range(4)),
        "answer": "Seven",
        "answer_ids": np.array([70]),
        "reward": 1.0,
        "extra": {"note": "ok"},
        "model": "m@1",
        "source": "in.jsonl:1",
    }
    return RolloutScore(**(fields | changes))


def _record(**changes):
    score = _score(**changes)
    config = CreditConfig.model_validate({"gap_offset": 1e-3, "horizon": 1, "terminal_scale": 0.0})
    return score_record(score, turn_credit([score], config, outcome_advantages=[0.5])[0])


def test_record_holds_the_papers_numbers_and_survives_json():
    record = json.loads(encode_record(_record()))
    assert record["deltas"][0] == pytest.approx(1.1806, abs=5e-5)  # A.2
    assert record["deltas"][1] == 0.0
    assert record["values"] == [0.0, record["deltas"][0], record["deltas"][0], pytest.approx(sum(record["deltas"]))]
    assert record["turn_rewards"] == record["deltas"][:2]  # K = 1, no terminal fill
    assert record["mean_logprobs"] == [-5.1187, -1.5712, -1.5712, -0.2]
    assert record["secured_at"] == 3
    assert (record["outcome_advantage"], record["reward"]) == (0.5, 1.0)
    assert record["alias"] == [0, 0, 0, 1]
    assert record["answer_ids"] == [70]
    assert record["boundaries"] == [3, 7, 9, 12]
    assert (record["id"], record["group"], record["source"]) == ("r1", "g", "in.jsonl:1")
    assert (record["extra"], record["model"], record["status"]) == ({"note": "ok"}, "m@1", "ok")
    assert "trunk_logprobs" not in record


def test_trunk_logprobs_are_the_same_float32_after_json():
    trunk = -np.random.default_rng(0).random(1000, dtype=np.float32) * 20
    record = json.loads(encode_record(_record(trunk_logprobs=trunk)))
    np.testing.assert_array_equal(np.array(record["trunk_logprobs"], dtype=np.float32), trunk)


def test_encoded_record_is_one_printable_ascii_line_whatever_the_data():
    hostile = "\x1b[31m\x9b2J \u202e\u2028\x7f\n\ud800 答"
    line = encode_record(_record(answer=hostile, extra={hostile: hostile}))
    assert line.endswith(b"\n")
    assert all(0x20 <= byte < 0x7F for byte in line[:-1])
    assert json.loads(line)["answer"] == hostile


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}])
def test_what_json_cannot_hold_is_an_error_of_that_record(value):
    with pytest.raises(RolloutError, match="one that JSON cannot hold") as caught:
        encode_record(_record(extra={"x": value}))
    assert (caught.value.kind, caught.value.rollout_id, caught.value.source) == ("format", "r1", "in.jsonl:1")


def test_reading_ends_at_a_torn_last_line(tmp_path):
    path = tmp_path / "s.jsonl"
    line = encode_record(_record())
    path.write_bytes(line + line[:40])
    assert [r["id"] for r in read_score_records(path)] == ["r1"]


@pytest.mark.parametrize("bad", [b"{torn\n", b"[1]\n", b'{"status":"error","id":"x"}\n'])
def test_reading_refuses_a_line_that_is_no_score_record(tmp_path, bad):
    path = tmp_path / "s.jsonl"
    path.write_bytes(encode_record(_record()) + bad + encode_record(_record()))
    with pytest.raises(InputError, match=r"s\.jsonl:2: expected a score record"):
        list(read_score_records(path))


def test_reading_a_missing_file_names_it(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read: No such file"):
        list(read_score_records(tmp_path / "none.jsonl"))
