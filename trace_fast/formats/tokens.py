"""The tokens form: token ids and boundaries, as a sampler recorded them or as this project writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trace_fast.errors import RolloutError
from trace_fast.formats.body import Parsed, Tokens
from trace_fast.formats.fields import FieldKeys, describe, token_ids
from trace_fast.formats.limits import Limits
from trace_fast.rollout import PROMPT_TURN, Segment

KEYS = (
    "input_ids", "boundaries", "n_turns", "opener_ids", "openers", "state_prefixes", "loss_mask", "logprobs",
    "transcript", "notes",
)  # fmt: skip


def import_tokens(record: Mapping[str, Any], keys: FieldKeys, limits: Limits) -> Parsed:
    """``input_ids`` and ``boundaries`` (T+1 or T+2 token counts), with what else is known about the tokens.

    Whether the last boundary ends an answer: ``n_turns`` says it; else ``loss_mask`` does (the last token of the
    last span was written by the policy); else the rollout counts as finished.

    ``logprobs`` are nats, null where none was recorded. ``opener_ids`` is one opener for every state, ``openers``
    one a state. Lists of the wrong length are errors, never padded. Turns of ``transcript`` are -1 (prompt) to T.
    """
    ids = np.asarray(token_ids(record.get("input_ids"), "input_ids"), dtype=np.int64)
    boundaries = np.asarray(token_ids(record.get("boundaries"), "boundaries"), dtype=np.int64)
    if not len(boundaries):
        raise RolloutError("boundary", "boundaries: expected T+1 or T+2 token counts, got an empty list")
    mask = _mask(record.get("loss_mask"), len(ids))
    n_turns = _n_turns(record.get("n_turns"), boundaries, mask)
    prefixes = record.get("state_prefixes")
    body = Tokens(
        ids,
        boundaries,
        n_turns,
        openers=_openers(record, len(boundaries)),
        state_prefixes=None if prefixes is None else _id_lists(prefixes, "state_prefixes", len(boundaries)),
        loss_mask=mask,
        logprobs=_logprobs(record.get("logprobs"), len(ids)),
        segments=_transcript(record.get("transcript"), n_turns),
        notes=_notes(record.get("notes")),
    )
    return Parsed(body, frozenset(key for key in KEYS if key in record))


def _n_turns(value: Any, boundaries: np.ndarray, mask: np.ndarray | None) -> int:
    states = len(boundaries)
    if value is not None:
        if type(value) is not int or value not in (states - 1, states - 2) or value < 0:
            raise RolloutError(
                "boundary",
                f"n_turns: expected {max(states - 2, 0)} or {states - 1} for {states} boundaries (T+2 or T+1), got "
                f"{describe(value)}",
            )
        return value
    if states == 1:
        return 0
    if mask is None:
        return states - 2
    end, start = int(boundaries[-1]), int(boundaries[-2])
    finished = start < end <= len(mask) and bool(mask[end - 1])
    return states - 2 if finished else states - 1


def _mask(value: Any, n: int) -> np.ndarray | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != n:
        raise RolloutError("format", f"loss_mask: expected {n} entries (one a token), got {describe(value)}")
    bad = next((i for i, v in enumerate(value) if not (isinstance(v, int) and v in (0, 1))), None)
    if bad is not None:
        raise RolloutError("format", f"loss_mask[{bad}]: expected 0 or 1, got {describe(value[bad])}")
    return np.asarray(value, dtype=bool)


def _logprobs(value: Any, n: int) -> np.ndarray | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != n:
        raise RolloutError("format", f"logprobs: expected {n} entries (one a token), got {describe(value)}")
    numbers = np.empty(n, dtype=np.float32)
    for i, item in enumerate(value):
        if item is None:
            numbers[i] = np.nan
        elif isinstance(item, float) or type(item) is int:
            if not abs(item) <= 1e30:
                raise RolloutError("format", f"logprobs[{i}]: expected a log-probability in nats, got {describe(item)}")
            numbers[i] = item
        else:
            raise RolloutError("format", f"logprobs[{i}]: expected a number or null, got {describe(item)}")
    return numbers


def _openers(record: Mapping[str, Any], states: int) -> tuple[np.ndarray, ...] | None:
    if record.get("openers") is not None:
        return _id_lists(record["openers"], "openers", states)
    if record.get("opener_ids") is not None:
        opener = np.asarray(token_ids(record["opener_ids"], "opener_ids"), dtype=np.int64)
        return (opener,) * states
    return None


def _id_lists(value: Any, name: str, states: int) -> tuple[np.ndarray, ...]:
    if not isinstance(value, list) or len(value) != states:
        raise RolloutError("format", f"{name}: expected {states} lists of ids (one a state), got {describe(value)}")
    return tuple(np.asarray(token_ids(ids, f"{name}[{k}]"), dtype=np.int64) for k, ids in enumerate(value))


def _transcript(value: Any, n_turns: int) -> tuple[Segment, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RolloutError("format", f"transcript: expected a list of segments, got {describe(value)}")
    segments: list[Segment] = []
    for i, item in enumerate(value):
        given = item if isinstance(item, Mapping) else {}
        role, text, turn, tool = given.get("role"), given.get("text"), given.get("turn"), given.get("tool")
        well_formed = isinstance(role, str) and isinstance(text, str) and type(turn) is int
        if not well_formed or not (tool is None or isinstance(tool, str)):
            raise RolloutError("format", f"transcript[{i}]: expected role, text, turn and tool, got {describe(item)}")
        assert isinstance(role, str)
        assert isinstance(text, str)
        assert isinstance(turn, int)
        if not PROMPT_TURN <= turn <= n_turns:
            where = f"transcript[{i}].turn"
            raise RolloutError("format", f"{where}: expected {PROMPT_TURN} (prompt) to T = {n_turns}, got {turn}")
        segments.append(Segment(role, text, turn, tool))
    return tuple(segments)


def _notes(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(note, str) for note in value):
        raise RolloutError("format", f"notes: expected a list of texts, got {describe(value)}")
    return tuple(value)
