"""Ids, groups, gold answers, rewards and extras, and where they are found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trace_fast.credit import group_outcome_advantages
from trace_fast.errors import RolloutError
from trace_fast.formats import FieldKeys, read_rollouts
from trace_fast.formats.fields import ANSWER_PATHS, MAX_REWARD, read_answers, read_reward
from trace_fast.formats.limits import Limits
from trace_fast.formats.strict_json import parse_json
from trace_fast.rollout import Rollout

KEYS = FieldKeys()


def _texts(source: str, keys: FieldKeys = KEYS) -> tuple[str, ...] | None:
    return read_answers(parse_json(source.encode(), Limits()), keys)[0].texts


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('{"answer": "Orm"}', ("Orm",)),
        ('{"answer": " \\n Orm\\u00a0x "}', ("Orm\xa0x",)),
        ('{"answer": ["Orm", "orm", "Orm"]}', ("Orm", "orm")),
        ('{"answer": [["Orm"], ["orm", "ORM"]]}', ("Orm", "orm", "ORM")),
        ('{"answer": 42}', ("42",)),
        ('{"answer": 1.50}', ("1.50",)),
        ('{"answer": 1e3}', ("1e3",)),
        ('{"answer": true}', ("true",)),
        ('{"answer": [1, 2.50, "x"]}', ("1", "2.50", "x")),
        ('{"info": {"task": {"outputs": ["a", "b"]}}}', ("a, b",)),
        ('{"reward_model": {"ground_truth": {"target": ["a", "b"]}}}', ("a", "b")),
        ('{"answer": null, "gt": "x"}', ("x",)),
    ],
)
def test_answers(source: str, texts: tuple[str, ...]) -> None:
    assert _texts(source) == texts


@pytest.mark.parametrize("path", ANSWER_PATHS)
def test_usual_places_of_the_answer(path: str) -> None:
    record: Any = "x"
    for part in reversed(path.split(".")):
        record = {part: record}
    assert _texts(json.dumps(record)) == ("x",)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('{"answer": ""}', "answer: the gold answer is empty"),
        ('{"answer": " \\n"}', "answer: the gold answer is empty"),
        ('{"golden": []}', "golden: expected at least one gold answer, got an empty list"),
        ('{"answer": [[]]}', "got an empty list"),
        ('{"answer": ["a", ""]}', "answer[1]: the gold answer is empty"),
        ('{"answer": {"a": 1}}', "got an object with keys 'a'"),
        ('{"answer": ["a", null]}', "answer[1]: expected text, a number or a list of them, got null"),
        ('{"info": {"task": {"outputs": []}}}', "info.task.outputs: expected at least one gold answer"),
        ('{"other": 1}', "expected a gold answer at one of answer, answers, golden"),
        ('{"answer": "x", "answer_ids": []}', "answer_ids: expected a non-empty list"),
        ('{"answer_ids": [[1], []]}', "answer_ids[1]: the gold answer is empty"),
    ],
)
def test_bad_answers(source: str, words: str) -> None:
    with pytest.raises(RolloutError) as caught:
        _texts(source)
    assert caught.value.kind == "answer"
    assert words in caught.value.reason


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('{"answer_ids": [1, 2.0]}', "answer_ids[1]: expected a token id (an integer >= 0), got float 2.0"),
        ('{"answer_ids": [true]}', "got true"),
        ('{"answer_ids": [-1]}', "got int -1"),
        ('{"answer_ids": [99999999999999999999999999999999]}', "got an integer of more than 100 bits"),
        ('{"answer": ["a", "b"], "answer_ids": [1, 2]}', "expected one list an answer (2), got 1 lists"),
    ],
)
def test_bad_answer_ids(source: str, words: str) -> None:
    with pytest.raises(RolloutError) as caught:
        _texts(source)
    assert caught.value.kind == "format"
    assert words in caught.value.reason


@pytest.mark.parametrize(
    ("source", "reward"),
    [
        ('{"reward": 0.25}', 0.25),
        ('{"reward": 1}', 1.0),
        ('{"reward": true}', 1.0),
        ('{"reward": false, "score": 3}', 0.0),
        ('{"reward": null, "score": 3}', 3.0),
        ('{"score": {"em": 1}, "correct": true}', 1.0),
        ('{"correct": "yes"}', None),
        ("{}", None),
    ],
)
def test_rewards(source: str, reward: float | None) -> None:
    assert read_reward(parse_json(source.encode(), Limits()), KEYS) == reward


def test_the_largest_reward() -> None:
    """A group's advantages are finite up to the bound, and the record is refused beyond it."""
    for value in (MAX_REWARD, -MAX_REWARD):
        assert read_reward({"reward": value}, KEYS) == value
    assert group_outcome_advantages([MAX_REWARD, -MAX_REWARD], ["g", "g"]) == [1.0, -1.0]
    with pytest.raises(RolloutError, match=r"reward: expected a finite number of magnitude up to 1e\+30, got float"):
        read_reward({"reward": MAX_REWARD * 1.01}, KEYS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have(value: float) -> None:
    """Parquet has them: no answer, no reward."""
    with pytest.raises(RolloutError, match="reward: expected a finite number") as caught:
        read_reward({"reward": value}, KEYS)
    assert caught.value.kind == "format"
    for answer, where in ((value, "answer"), ([value], "answer"), (["Orm", value], r"answer\[1\]")):
        with pytest.raises(RolloutError, match=f"{where}: expected text or a finite number, got {value}$") as caught:
            read_answers({"answer": answer}, KEYS)
        assert caught.value.kind == "answer"


@pytest.mark.parametrize("value", ['"1"', "[1]", "{}", "1" + "0" * 400, "1e308", "-1e308", "1e31"])
def test_bad_rewards(value: str) -> None:
    with pytest.raises(RolloutError, match="reward: expected a") as caught:
        read_reward(parse_json(f'{{"reward": {value}}}'.encode(), Limits()), KEYS)
    assert caught.value.kind == "format"


TOKENS = {"input_ids": [1, 2], "boundaries": [1, 2], "opener_ids": [3]}


def _one(tmp_path: Path, record: dict[str, Any], keys: FieldKeys = KEYS) -> Rollout:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**TOKENS, **record}))
    (rollout,) = read_rollouts(path, keys=keys)
    return rollout


def test_ids_and_groups(tmp_path: Path) -> None:
    bare = _one(tmp_path, {"answer_ids": [1]})
    assert (bare.id, bare.group) == (f"{tmp_path / 'a.jsonl'}:1",) * 2
    assert (bare.source, bare.extra) == (bare.id, {})
    named = _one(tmp_path, {"answer_ids": [1], "id": 5, "group": 0})
    assert (named.id, named.group) == ("5", "0")
    alone = _one(tmp_path, {"answer_ids": [1], "id": "漢"})
    assert (alone.id, alone.group) == ("漢", "漢")
    for bad in (1.5, True, "", [1], {"a": 1}):
        for key in ("id", "group"):
            with pytest.raises(RolloutError, match=f"{key}: expected a non-empty string or an integer") as caught:
                _one(tmp_path, {"answer_ids": [1], key: bad})
            assert caught.value.kind == "format"


def test_user_paths_win_and_must_exist(tmp_path: Path) -> None:
    record = {
        "answer_ids": [1],
        "answer": "wrong",
        "meta": {"ids": ["x", "y"], "gold": ["right"], "r": 0.5, "task.id": 9},
        "group": "wrong",
    }
    keys = FieldKeys(id="meta.ids.1", group="meta.task.id", answer="meta.gold", reward="meta.r")
    with pytest.raises(RolloutError, match=r"expected the group at 'meta.task.id' as configured"):
        _one(tmp_path, record, keys)
    record["meta.task.id"] = 9  # a key that contains the dots itself
    rollout = _one(tmp_path, record, keys)
    assert (rollout.id, rollout.group, rollout.reward, rollout.answer_texts) == ("y", "9", 0.5, ("right",))
    assert rollout.extra["answer"] == "wrong"
    for name, kind in (("id", "format"), ("group", "format"), ("reward", "format"), ("answer", "answer")):
        with pytest.raises(RolloutError, match=f"expected the {name} at 'no.where'") as caught:
            _one(tmp_path, record, FieldKeys(**{name: "no.where"}))
        assert caught.value.kind == kind


@pytest.mark.parametrize("name", ["id", "group", "reward"])
def test_the_usual_place_by_name_must_exist_too(tmp_path: Path, name: str) -> None:
    assert _one(tmp_path, {"answer_ids": [1], "score": 2.0}).reward == 2.0
    with pytest.raises(RolloutError, match=f"expected the {name} at '{name}' as configured"):
        _one(tmp_path, {"answer_ids": [1], "score": 2.0}, FieldKeys(**{name: name}))


def test_an_answer_key_that_is_the_usual_one_is_the_only_one() -> None:
    assert _texts('{"gt": "x"}') == ("x",)
    with pytest.raises(RolloutError, match="expected the answer at 'answer' as configured") as caught:
        _texts('{"gt": "x"}', FieldKeys(answer="answer"))
    assert caught.value.kind == "answer"
    assert _texts('{"gt": "x", "answer": "y"}', FieldKeys(answer="gt")) == ("x",)


def test_an_id_key_that_is_the_usual_one_names_rollouts_of_the_verifiers_form_too(
    tmp_path: Path, smollm2_tokenizer: Any
) -> None:
    """Its integer ``id`` counts examples, unless the user says that it is the id."""
    chat = [{"role": "user", "content": "Q"}], [{"role": "assistant", "content": "A"}]
    path = tmp_path / "v.jsonl"
    path.write_text(json.dumps({"id": 7, "prompt": chat[0], "completion": chat[1], "answer": "Orm"}))
    (usual,) = read_rollouts(path, smollm2_tokenizer)
    (named,) = read_rollouts(path, smollm2_tokenizer, keys=FieldKeys(id="id"))
    assert (usual.id, named.id) == (f"{path}:1", "7")


def test_extra_is_what_nothing_read(tmp_path: Path) -> None:
    record = {"answer_ids": [1], "id": "a", "reward": 1, "note": {"x": [1.50, None]}, "extra": {"note": 0, "more": 2}}
    rollout = _one(tmp_path, record)
    assert rollout.extra == {"note": {"x": [1.5, None]}, "more": 2}
    assert type(rollout.extra["note"]["x"][0]) is float
    assert _one(tmp_path, {"answer_ids": [1], "extra": "text"}).extra == {"extra": "text"}


def test_errors_name_the_rollout_once_it_is_known(tmp_path: Path) -> None:
    with pytest.raises(RolloutError) as caught:
        _one(tmp_path, {"id": "mine", "answer": ""})
    assert (caught.value.rollout_id, caught.value.source) == ("mine", f"{tmp_path / 'a.jsonl'}:1")
