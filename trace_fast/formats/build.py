"""From a raw record to a ``Rollout``: fields, importer, tokens. One builder serves a whole read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trace_fast.errors import RolloutError
from trace_fast.formats.answers import NOTE_OPENER_IDS, Opener, SeamSplitter, answer_ids, encode
from trace_fast.formats.body import Chat, Parsed, Pieces, Tokens
from trace_fast.formats.detect import IMPORTERS, what_format
from trace_fast.formats.fields import (
    Answers,
    FieldKeys,
    describe,
    extra_fields,
    read_answers,
    read_reward,
    rollout_group,
    rollout_id,
)
from trace_fast.formats.files import RawRecord
from trace_fast.formats.limits import Limits
from trace_fast.formats.pieces import tokenise_pieces
from trace_fast.formats.react import log_record
from trace_fast.formats.render import ChatRenderer, Rendered
from trace_fast.rollout import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class RecordParts:
    """A record understood, before any tokenizer: everything ``Rollout`` needs but the ids of text."""

    source: str
    id: str
    group: str
    reward: float | None
    answers: Answers
    parsed: Parsed
    extra: Mapping[str, object]


def parse_record(raw: RawRecord, format: str, keys: FieldKeys, limits: Limits) -> RecordParts:
    """Reads fields and body of one record.

    Raises:
        RolloutError: placed (id and source), any kind but those that need a tokenizer.
    """
    place = raw.key or raw.source
    try:
        if raw.error is not None:
            raise raw.error
        record = raw.value
        if raw.log:  # a plain-text log; its fields are where its format has them
            record, keys = log_record(record), FieldKeys()
            format = "react" if format == "auto" else format
        if not isinstance(record, Mapping):
            hint = "; a JSON list of records is read from a file named .json" if isinstance(record, list) else ""
            raise RolloutError("format", f"expected a JSON object, got {describe(record)}{hint}")
        # The id first: every later error then names the rollout. The form decides what an integer id means.
        named = rollout_id(record, keys, raw.source, raw.key, numbered=isinstance(record.get("completion"), list))
        place = named
        form = what_format(record, keys) if format == "auto" else format
        parsed = IMPORTERS[form](record, keys, limits)
        answers, answer_keys = read_answers(record, keys)
        reward = read_reward(record, keys)
        consumed = set(parsed.consumed) | answer_keys | _named_keys(record, keys, named)
        return RecordParts(
            raw.source,
            named,
            rollout_group(record, keys, named),
            reward,
            answers,
            parsed,
            extra_fields(record, consumed),
        )
    except RolloutError as error:
        raise error.at(rollout_id=place, source=raw.source) from None


def _named_keys(record: Mapping[str, object], keys: FieldKeys, named: str) -> set[str]:
    """Top-level keys of id, group and reward; an ``id`` that only counts examples stays among the extras."""
    read = {keys.group or "group", keys.reward or "reward"}
    id_key = keys.id or "id"
    if str(record.get(id_key)) == named:
        read.add(id_key)
    return read


class Builder:
    """Makes rollouts with one tokenizer (or none) and one opener.

    The chat template is looked at when the first chat comes, so files of tokens need none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        opener: Opener,
        format: str,
        keys: FieldKeys,
        limits: Limits,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._notes = notes  # of every rollout whose opener is the setting's
        self._opener = opener
        self._format = format
        self._keys = keys
        self._limits = limits
        self._splitter = None if tokenizer is None else SeamSplitter(tokenizer)
        self._renderer: ChatRenderer | None = None

    def build(self, raw: RawRecord) -> Rollout:
        """The rollout of a record.

        Raises:
            RolloutError: placed, of any kind but those of scoring.
        """
        parts = parse_record(raw, self._format, self._keys, self._limits)
        try:
            rendered = self._tokens(parts)
        except RolloutError as error:
            raise error.at(rollout_id=parts.id, source=parts.source) from None
        body = parts.parsed.body
        own_opener = isinstance(body, Tokens) and body.openers is not None
        answers = rendered.answers
        if answers is None:
            assert parts.answers.ids is not None
            answers = tuple(np.asarray(ids, dtype=np.int64) for ids in parts.answers.ids)
        return Rollout(
            id=parts.id,
            group=parts.group,
            input_ids=rendered.input_ids,
            boundaries=rendered.boundaries,
            n_turns=rendered.n_turns,
            answers=answers,
            openers=rendered.openers,
            answer_texts=parts.answers.texts,
            state_prefixes=rendered.state_prefixes,
            loss_mask=rendered.loss_mask,
            logprobs=body.logprobs if isinstance(body, Tokens) else None,
            reward=parts.reward,
            transcript=body.transcript(),
            extra=dict(parts.extra),
            source=parts.source,
            notes=(*rendered.notes, *parts.answers.notes, *(() if own_opener else self._notes)),
        )

    def _tokens(self, parts: RecordParts) -> Rendered:
        body = parts.parsed.body
        texts = parts.answers.texts if parts.answers.ids is None else None
        size = sum(map(len, texts or ()))
        size += 0 if isinstance(body, Tokens) else sum(len(step.text) for step in body.steps)
        if size > self._limits.max_text:
            raise RolloutError(
                "parse", f"expected at most {self._limits.max_text} characters of text, got {size} (Limits.max_text)"
            )
        if isinstance(body, Tokens):
            return self._from_tokens(body, texts)
        if self._tokenizer is None or self._splitter is None:
            raise RolloutError("config", "this record is text and needs a tokenizer; give one, or use the tokens form")
        if isinstance(body, Chat):
            if self._renderer is None:
                self._renderer = ChatRenderer(self._tokenizer, self._opener, self._splitter)
            return self._renderer.render(body, texts)
        assert isinstance(body, Pieces)
        ids, boundaries, n_turns, mask = tokenise_pieces(self._tokenizer, body)
        openers, answers, notes = self._opener_and_answers(len(boundaries), texts)
        return Rendered(ids, boundaries, n_turns, openers, answers, None, mask, (*body.notes, *notes))

    def _from_tokens(self, body: Tokens, texts: tuple[str, ...] | None) -> Rendered:
        notes = body.notes
        openers = body.openers
        answers: tuple[np.ndarray, ...] | None = None
        if openers is None:
            openers, answers, more = self._opener_and_answers(len(body.boundaries), texts)
            notes = (*notes, *more)
        elif texts is not None:
            answers = self._alone(texts)
            notes = (*notes, NOTE_OPENER_IDS)
        return Rendered(
            body.input_ids,
            body.boundaries,
            body.n_turns,
            openers,
            answers,
            body.state_prefixes,
            body.loss_mask,
            tuple(dict.fromkeys(notes)),
        )

    def _opener_and_answers(
        self, states: int, texts: tuple[str, ...] | None
    ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...] | None, tuple[str, ...]]:
        """``(openers, answers, notes)`` where no chat template adds to the opener; answers None when they are ids."""
        if not isinstance(self._opener, str):
            ids = np.asarray(self._opener, dtype=np.int64)
            alone = None if texts is None else self._alone(texts)
            return (ids,) * states, alone, () if texts is None else (NOTE_OPENER_IDS,)
        if self._splitter is None:
            raise RolloutError(
                "config", "the opener is text and needs a tokenizer; give one, or opener_ids in the record"
            )
        opener = self._splitter.opener(self._opener)
        answers = None if texts is None else answer_ids(self._splitter, [self._opener], texts)
        return (opener,) * states, answers, ()

    def _alone(self, texts: tuple[str, ...]) -> tuple[np.ndarray, ...]:
        if self._tokenizer is None:
            raise RolloutError("config", "the gold answer is text and needs a tokenizer; give one, or answer_ids")
        return tuple(encode(self._tokenizer, text) for text in texts)
