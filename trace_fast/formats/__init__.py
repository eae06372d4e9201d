"""Files of agent rollouts in, ``Rollout``s out.

Everything streams: one record (one small batch for Parquet) is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trace_fast.errors import RolloutError
from trace_fast.formats.answers import ANSWER_TAG, NOTE_NEWLINE, auto_opener, check_opener
from trace_fast.formats.build import Builder, RecordParts, parse_record
from trace_fast.formats.detect import FORMATS, check_format, record_key_test, what_format
from trace_fast.formats.fields import FieldKeys
from trace_fast.formats.files import Paths, RawRecord, read_records
from trace_fast.formats.limits import Limits
from trace_fast.formats.writer import rollout_record, write_rollouts
from trace_fast.rollout import Rollout, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "FORMATS",
    "FieldKeys",
    "Limits",
    "read_outcomes",
    "read_rollouts",
    "read_transcripts",
    "rollout_record",
    "rollouts_of",
    "what_format",
    "write_rollouts",
]


def read_rollouts(
    paths: Paths,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    format: str = "auto",
    opener: str | Sequence[int] = "auto",
    keys: FieldKeys = FieldKeys(),  # noqa: B008 - frozen
    errors: Callable[[RolloutError], None] | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> Iterator[Rollout]:
    """Reads rollouts from files, one after the other, in order.

    Files are JSONL, JSON (a list of records, a dict id -> record, one record), Parquet or plain-text ReAct logs;
    gzip and zstd are seen by their first bytes; ``-`` is stdin. Every record gives exactly one rollout or one error.

    Args:
        paths: a path or several.
        tokenizer: the reference model's own (transformers); needed for everything that is text.
        format: one of ``FORMATS``; ``auto`` looks at each record (``what_format``).
        opener: ``auto`` is ``<answer>``, with a line break where the tokenizer would join ``>`` to the answer (Qwen;
            noted on the rollout); other text takes its place. Chats put the generation prompt, thinking
            closed, before it. Token ids are the whole opener.
        keys: where the fields sit.
        errors: gets each record's error, and reading goes on; None raises the first one.
        limits: bounds on one record.

    Raises:
        ConfigError: unknown format, unusable opener; at once.
        InputError: a file cannot be read, or not to its end; when reading gets there.
        RolloutError: the first bad record, when ``errors`` is None.
    """
    builder = _builder(tokenizer, format, opener, keys, limits)
    return _build(builder, read_records(paths, limits, record_key_test(keys)), errors)


def rollouts_of(
    records: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    format: str = "auto",
    opener: str | Sequence[int] = "auto",
    keys: FieldKeys = FieldKeys(),  # noqa: B008 - frozen
    errors: Callable[[RolloutError], None] | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> Iterator[Rollout]:
    """Rollouts of records that are parsed JSON already; ``source`` of a rollout and of an error is the record's place,
    from 0. Arguments and errors as in ``read_rollouts``."""
    builder = _builder(tokenizer, format, opener, keys, limits)
    return _build(builder, (RawRecord(str(place), record) for place, record in enumerate(records)), errors)


def _builder(
    tokenizer: PreTrainedTokenizerBase | None, format: str, opener: str | Sequence[int], keys: FieldKeys, limits: Limits
) -> Builder:
    check_format(format)
    auto = isinstance(opener, str) and opener == "auto"  # an array of ids has no truth value when compared with text
    notes = (NOTE_NEWLINE,) if auto and auto_opener(tokenizer) != ANSWER_TAG else ()
    return Builder(tokenizer, check_opener(opener, tokenizer), format, keys, limits, notes)


def _build(
    builder: Builder, records: Iterable[RawRecord], errors: Callable[[RolloutError], None] | None
) -> Iterator[Rollout]:
    for raw in records:
        try:
            rollout = builder.build(raw)
        except RolloutError as error:
            if errors is None:
                raise
            errors(error)
            continue
        yield rollout


def read_outcomes(
    paths: Paths,
    *,
    keys: FieldKeys = FieldKeys(),  # noqa: B008 - frozen
    format: str = "auto",
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> Iterator[tuple[str, str, str, float | None]]:
    """``(source, id, group, reward)`` of each readable record, without a tokenizer: the first pass of group statistics.

    Names are those that ``read_rollouts`` gives. Records that cannot be read are passed over here; the main pass
    reports them.

    Raises:
        ConfigError, InputError: as in ``read_rollouts``.
    """
    check_format(format)
    parts = _parts(paths, keys, format, limits)
    return ((part.source, part.id, part.group, part.reward) for part in parts)


def read_transcripts(
    paths: Paths,
    *,
    keys: FieldKeys = FieldKeys(),  # noqa: B008 - frozen
    format: str = "auto",
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> Iterator[tuple[str, str, tuple[Segment, ...]]]:
    """``(source, id, transcript)`` of each readable record, without a tokenizer; for reports.

    The transcript is that of ``read_rollouts``; it is empty for tokens that came without one.

    Raises:
        ConfigError, InputError: as in ``read_rollouts``.
    """
    check_format(format)
    parts = _parts(paths, keys, format, limits)
    return ((part.source, part.id, part.parsed.body.transcript()) for part in parts)


def _parts(paths: Paths, keys: FieldKeys, format: str, limits: Limits) -> Iterator[RecordParts]:
    for raw in read_records(paths, limits, record_key_test(keys)):
        try:
            yield parse_record(raw, format, keys, limits)
        except RolloutError:
            continue  # the main pass reports it
