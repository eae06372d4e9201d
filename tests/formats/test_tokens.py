"""The tokens and segments forms, and the writer's lossless round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trace_fast.errors import OutputError, RolloutError
from trace_fast.formats import read_rollouts, rollouts_of, write_rollouts
from trace_fast.formats.writer import rollout_record
from trace_fast.rollout import Rollout, Segment

RECORD: dict[str, Any] = {
    "id": "a",
    "input_ids": [11, 12, 13, 14, 15, 16],
    "boundaries": [1, 3, 5],
    "answer_ids": [7, 8],
    "opener_ids": [9],
}


def _read(tmp_path: Path, record: dict[str, Any], tokenizer: Any = None, **options: Any) -> Rollout:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record))
    (rollout,) = read_rollouts(path, tokenizer, **options)
    return rollout


def _error(tmp_path: Path, record: dict[str, Any], tokenizer: Any = None, **options: Any) -> RolloutError:
    with pytest.raises(RolloutError) as caught:
        _read(tmp_path, record, tokenizer, **options)
    return caught.value


@pytest.mark.parametrize(
    ("more", "n_turns"),
    [
        ({}, 1),  # nothing says otherwise: finished
        ({"n_turns": 1}, 1),
        ({"n_turns": 2}, 2),
        ({"loss_mask": [0, 1, 0, 1, 1, 0]}, 1),
        ({"loss_mask": [0, 1, 0, 1, 0, 1]}, 2),  # the last span ends in an observation
        ({"loss_mask": [False, True, False, True, False, True]}, 2),
        ({"loss_mask": [0, 1, 0, 1, 1, 0], "n_turns": 2}, 2),  # what is said wins
        ({"boundaries": [6]}, 0),
        ({"boundaries": [1, 6]}, 0),
        ({"boundaries": [1, 3, 3], "loss_mask": [0, 1, 1, 0, 0, 0]}, 2),  # an empty span holds no answer
    ],
)
def test_whether_the_last_boundary_is_an_answer(tmp_path: Path, more: dict[str, Any], n_turns: int) -> None:
    rollout = _read(tmp_path, {**RECORD, **more})
    assert rollout.n_turns == n_turns
    assert rollout.input_ids.tolist() == RECORD["input_ids"]
    assert rollout.boundaries.tolist() == more.get("boundaries", RECORD["boundaries"])
    assert [o.tolist() for o in rollout.openers] == [[9]] * len(rollout.boundaries)


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"input_ids": [1, 2.0, 3]}, "format", "input_ids[1]: expected a token id (an integer >= 0), got float 2.0"),
        ({"input_ids": [1, True]}, "format", "input_ids[1]"),
        ({"input_ids": [1, -2]}, "format", "input_ids[1]"),
        ({"input_ids": [1, 2**63]}, "format", "input_ids[1]"),
        ({"input_ids": [1, [2]]}, "format", "got a list of 1"),
        ({"input_ids": "abc"}, "format", "input_ids: expected a list of token ids, got 'abc'"),
        ({"boundaries": None}, "format", "boundaries: expected a list"),
        ({"boundaries": []}, "boundary", "got an empty list"),
        ({"boundaries": [3, 1]}, "boundary", "must not decrease"),
        ({"boundaries": [1, 7]}, "boundary", "within 0..6"),
        ({"n_turns": 0}, "boundary", "expected 1 or 2 for 3 boundaries"),
        ({"n_turns": True}, "boundary", "got true"),
        ({"n_turns": -1, "boundaries": [1]}, "boundary", "got int -1"),
        ({"loss_mask": [0, 1]}, "format", "loss_mask: expected 6 entries (one a token), got a list of 2"),
        ({"loss_mask": [0, 1, 0, 1, 2, 0]}, "format", "loss_mask[4]: expected 0 or 1, got int 2"),
        ({"loss_mask": [0, 1, 0, 1, "1", 0]}, "format", "loss_mask[4]"),
        ({"logprobs": [-1.0]}, "format", "logprobs: expected 6 entries (one a token), got a list of 1"),
        ({"logprobs": [-1, -1, -1, "x", -1, -1]}, "format", "logprobs[3]: expected a number or null"),
        ({"logprobs": [-1, -1, -1, True, -1, -1]}, "format", "logprobs[3]"),
        ({"logprobs": [-1, -1, -1, -1e300, -1, -1]}, "format", "logprobs[3]"),
        ({"openers": [[1], [2]]}, "format", "openers: expected 3 lists of ids (one a state), got a list of 2"),
        ({"openers": [[1], [2], ["x"]]}, "format", "openers[2][0]"),
        ({"opener_ids": 5}, "format", "opener_ids: expected a list"),
        ({"state_prefixes": [[1]]}, "format", "state_prefixes: expected 3 lists"),
        ({"transcript": [{"role": "x"}]}, "format", "transcript[0]"),
        ({"transcript": [{"role": "x", "text": "", "turn": -2}]}, "format", "transcript[0].turn: expected -1 (prompt)"),
        (
            {"transcript": [{"role": "x", "text": "", "turn": t} for t in (-1, 0, 1, 2)]},
            "format",
            "transcript[3].turn: expected -1 (prompt) to T = 1, got 2",
        ),
        ({"notes": "x"}, "format", "notes"),
        ({"answer_ids": None}, "answer", "expected a gold answer"),
        ({"opener_ids": None}, "config", "the opener is text and needs a tokenizer"),
        ({"answer_ids": None, "answer": "x"}, "config", "the gold answer is text and needs a tokenizer"),
    ],
)
def test_bad_tokens(tmp_path: Path, more: dict[str, Any], kind: str, words: str) -> None:
    caught = _error(tmp_path, {**RECORD, **more})
    assert (caught.kind, words in caught.reason, caught.rollout_id) == (kind, True, "a"), caught.reason


def test_openers_of_tokens(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    def ids(text: str) -> list[int]:
        return smollm2_tokenizer(text, add_special_tokens=False)["input_ids"]

    record = {key: value for key, value in RECORD.items() if key not in ("opener_ids", "answer_ids")}
    rollout = _read(tmp_path, {**record, "answer": ["Orm", "Tal"]}, smollm2_tokenizer)
    assert [o.tolist() for o in rollout.openers] == [ids("<answer>")] * 3
    assert [a.tolist() for a in rollout.answers] == [ids("<answer>" + t)[3:] for t in ("Orm", "Tal")]
    named = _read(tmp_path, {**record, "answer": "Orm"}, smollm2_tokenizer, opener="Answer:")
    assert [o.tolist() for o in named.openers] == [ids("Answer:")] * 3
    given = _read(tmp_path, {**record, "answer_ids": [5]}, None, opener=[1, 2])
    assert [o.tolist() for o in given.openers] == [[1, 2]] * 3
    each = _read(tmp_path, {**RECORD, "openers": [[1], [2], []]})
    assert [o.tolist() for o in each.openers] == [[1], [2], []]
    alone = _read(tmp_path, {**record, "opener_ids": [4], "answer": "Orm"}, smollm2_tokenizer)
    assert [a.tolist() for a in alone.answers] == [ids("Orm")]


# --- segments -----------------------------------------------------------------------------------------------------


def _segments(letters: str) -> list[dict[str, str]]:
    made = {
        "p": {"role": "prompt", "text": "Where is Ula?"},
        "u": {"role": "user", "text": "\nSay."},
        "a": {"role": "assistant", "text": " I think."},
        "t": {"role": "tool", "text": "\nOrm\n"},
        "e": {"role": "tool", "text": ""},
    }
    return [made[letter] for letter in letters]


@pytest.mark.parametrize(
    ("letters", "ends", "n_turns"),
    [
        ("p", [1], 0),
        ("ppu", [3], 0),
        ("pa", [1, 2], 0),
        ("pat", [1, 3], 1),
        ("pata", [1, 3, 4], 1),
        ("patta", [1, 4, 5], 1),
        ("paaat", [1, 5], 1),
        ("patuata", [1, 3, 6, 7], 2),
        ("at", [0, 2], 1),
        ("pt", [1, 2], 1),  # only observations were logged
        ("paea", [1, 3, 4], 1),  # an empty observation
        ("paeae", [1, 3, 5], 2),
    ],
)
def test_segments(tmp_path: Path, smollm2_tokenizer: Any, letters: str, ends: list[int], n_turns: int) -> None:
    segments = _segments(letters)
    rollout = _read(tmp_path, {"segments": segments, "answer": "Orm"}, smollm2_tokenizer)
    tokens = [smollm2_tokenizer(s["text"], add_special_tokens=False)["input_ids"] for s in segments]
    lengths = [0, *np.cumsum([len(t) for t in tokens]).tolist()]
    assert rollout.input_ids.tolist() == [i for t in tokens for i in t]
    assert rollout.boundaries.tolist() == [lengths[end] for end in ends]
    assert rollout.n_turns == n_turns
    assert rollout.loss_mask is not None
    mask = [s["role"] == "assistant" for s, t in zip(segments, tokens, strict=True) for _ in t]
    assert rollout.loss_mask.tolist() == mask


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([], "expected a non-empty list"),
        ("x", "got 'x'"),
        ([{"role": "human", "text": "x"}], "segments[0].role: expected one of prompt, system, user, assistant, tool"),
        ([{"role": "prompt"}], "segments[0].text: expected text, got null"),
        ([{"role": "prompt", "text": "x", "tool": 5}], "segments[0].tool"),
        ([5], "segments[0]: expected a segment object"),
    ],
)
def test_bad_segments(tmp_path: Path, smollm2_tokenizer: Any, segments: Any, words: str) -> None:
    caught = _error(tmp_path, {"segments": segments, "answer": "x"}, smollm2_tokenizer)
    assert (caught.kind, words in caught.reason) == ("format", True)


def test_exactly_one_bos(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    import copy

    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(smollm2_tokenizer)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    assert tokenizer("x")["input_ids"][0] == bos
    segments = _segments("pat")
    bare = _read(tmp_path, {"segments": segments, "answer": "Orm"}, smollm2_tokenizer)
    once = _read(tmp_path, {"segments": segments, "answer": "Orm"}, tokenizer)
    assert once.input_ids.tolist() == [bos, *bare.input_ids.tolist()]
    assert once.boundaries.tolist() == [b + 1 for b in bare.boundaries.tolist()]
    assert once.loss_mask.tolist() == [False, *bare.loss_mask.tolist()]
    assert not any((o == bos).any() for o in (*once.openers, *once.answers))
    segments[0] = {"role": "prompt", "text": "<|im_start|>Where is Ula?"}
    said = _read(tmp_path, {"segments": segments, "answer": "Orm"}, tokenizer)
    assert said.input_ids.tolist() == once.input_ids.tolist()


# --- writer -------------------------------------------------------------------------------------------------------

ids = st.lists(st.integers(0, 2**40), max_size=6)
some_ids = st.lists(st.integers(0, 2**40), min_size=1, max_size=6)
text = st.text(st.characters(codec="utf-8"), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    tokens = draw(some_ids)
    n_turns = draw(st.integers(0, 3))
    states = n_turns + draw(st.integers(1, 2))
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), min_size=states, max_size=states)))
    answers = draw(st.lists(some_ids, min_size=1, max_size=3))
    prefixes = draw(st.none() | st.lists(some_ids, min_size=states, max_size=states))
    same = draw(st.booleans())
    openers = [draw(some_ids)] * states if same else draw(st.lists(some_ids, min_size=states, max_size=states))
    per_token = {"min_size": len(tokens), "max_size": len(tokens)}
    logprobs = st.lists(st.floats(-100, 0, width=32) | st.just(float("nan")), **per_token)
    # Accepted spellings read back stripped and without repeats, as from any other file.
    spelling = text.map(str.strip).filter(bool)
    spellings = st.lists(spelling, unique=True, min_size=len(answers), max_size=len(answers))
    segment = st.builds(
        Segment, st.sampled_from(["prompt", "assistant", "tool"]), text, st.integers(-1, n_turns), st.none() | text
    )
    return Rollout(
        id=draw(text.filter(bool)),
        group=draw(text.filter(bool)),
        input_ids=np.asarray(tokens),
        boundaries=np.asarray([len(p) for p in prefixes] if prefixes else cuts),
        n_turns=n_turns,
        answers=tuple(np.asarray(a) for a in answers),
        openers=tuple(np.asarray(o) for o in openers),
        answer_texts=draw(st.none() | spellings.map(tuple)),
        state_prefixes=None if prefixes is None else tuple(np.asarray(p) for p in prefixes),
        loss_mask=draw(st.none() | st.lists(st.booleans(), **per_token).map(np.asarray)),
        logprobs=draw(st.none() | logprobs.map(lambda v: np.asarray(v, dtype=np.float32))),
        reward=draw(st.none() | st.floats(-1e9, 1e9)),
        transcript=tuple(draw(st.lists(segment, max_size=2))),
        extra=draw(st.dictionaries(text | st.sampled_from(["extra", "messages", "id"]), json_values, max_size=3)),
        notes=tuple(draw(st.lists(text, max_size=2, unique=True))),
    )


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


ARRAYS = ("input_ids", "boundaries", "answers", "openers", "state_prefixes", "loss_mask", "logprobs")
PLAIN = ("id", "group", "n_turns", "answer_texts", "reward", "transcript", "extra", "notes")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(rollouts(), max_size=3), st.sampled_from(["jsonl", "jsonl.gz", "jsonl.zst"]))
def test_round_trip(tmp_path: Path, written: list[Rollout], suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    assert write_rollouts(path, written) == len(written)
    back = list(read_rollouts(path))
    assert len(back) == len(written)
    for a, b in zip(written, back, strict=True):
        for name in ARRAYS:
            assert _same(getattr(a, name), getattr(b, name)), name
        for name in PLAIN:
            assert getattr(a, name) == getattr(b, name), name


def test_round_trip_of_a_rewritten_history(tmp_path: Path, with_template: Any) -> None:
    tokenizer = with_template("qwen3", "<think>", "</think>")
    chat = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "T"},
        {"role": "assistant", "content": "A2"},
    ]
    first = _read(tmp_path, {"messages": chat, "answer": ["Orm", "Tal"], "reward": 0.1, "tag": 1}, tokenizer)
    path = tmp_path / "b.jsonl"
    write_rollouts(path, [first])
    (second,) = read_rollouts(path)
    for name in ARRAYS:
        assert _same(getattr(first, name), getattr(second, name)), name
    for name in ("group", "n_turns", "answer_texts", "reward", "transcript", "extra", "notes"):
        assert getattr(first, name) == getattr(second, name), name


def test_what_cannot_be_written(tmp_path: Path) -> None:
    rollout = _read(tmp_path, RECORD)
    with pytest.raises(OutputError, match="cannot be written"):
        write_rollouts(tmp_path / "no" / "folder.jsonl", [rollout])
    with pytest.raises(OutputError, match="'a' cannot be written as JSON"):
        write_rollouts(tmp_path / "b.jsonl", [_with(rollout, extra={"x": object()})])
    with pytest.raises(OutputError, match="'a' cannot be written as JSON"):
        write_rollouts(tmp_path / "b.jsonl", [_with(rollout, logprobs=np.full(6, -np.inf))])


def _with(rollout: Rollout, **changes: Any) -> Rollout:
    import dataclasses

    return dataclasses.replace(rollout, **changes)


def test_stdout(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    rollout = _read(tmp_path, RECORD)
    assert write_rollouts("-", [rollout]) == 1
    assert json.loads(capfdbinary.readouterr().out) == rollout_record(rollout)


def test_records_that_are_parsed_already() -> None:
    """As from a file; a record's place stands for its line."""
    good = {"id": "g", "input_ids": [5, 6, 7], "boundaries": [3], "opener_ids": [8], "answer_ids": [[9]]}
    failed: list[RolloutError] = []
    built = list(rollouts_of([3, good, good | {"boundaries": [9]}], format="tokens", errors=failed.append))
    assert [(rollout.id, rollout.source, rollout.input_ids.tolist()) for rollout in built] == [("g", "1", [5, 6, 7])]
    assert [(error.source, error.kind) for error in failed] == [("0", "format"), ("2", "boundary")]
    with pytest.raises(RolloutError, match="expected a JSON object"):
        next(rollouts_of([3], format="tokens"))
