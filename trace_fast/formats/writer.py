"""Rollouts to files: the tokens form, one JSON object a line, lossless through ``read_rollouts``."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from trace_fast.errors import OutputError
from trace_fast.rollout import Rollout


def write_rollouts(path: str | os.PathLike[str], rollouts: Iterable[Rollout]) -> int:
    """Writes rollouts in tokens form (JSONL; compressed where the name ends in .gz or .zst; ``-`` is stdout).

    Ids, boundaries, turns, answers (ids, and texts where known), openers, state prefixes, mask, log-probabilities
    (nats; float32 values survive exactly, NaN is null), reward, group, extra, transcript and notes come back the
    same; ``source`` becomes the new place.

    Returns:
        The number of rollouts written.

    Raises:
        OutputError: the file cannot be written, or a rollout holds what JSON cannot (infinite log-probabilities,
            values in ``extra`` that are not JSON).
    """
    name = os.fspath(path)
    count = 0
    with ExitStack() as stack:
        try:
            stream = _open(name, stack)
            for rollout in rollouts:
                stream.write(_line(rollout))
                count += 1
            stream.flush()
        except OSError as error:
            raise OutputError(f"{name}: cannot be written: {error}") from error
    return count


def _open(name: str, stack: ExitStack) -> Any:
    if name == "-":
        return sys.stdout.buffer
    file = stack.enter_context(open(name, "wb"))  # noqa: SIM115 - the stack closes it
    suffix = Path(name).suffix.lower()
    if suffix == ".gz":
        return stack.enter_context(gzip.GzipFile(filename="", fileobj=file, mode="wb"))
    if suffix in (".zst", ".zstd"):
        return stack.enter_context(zstandard.ZstdCompressor().stream_writer(file))
    return file


def _line(rollout: Rollout) -> bytes:
    try:
        text = json.dumps(rollout_record(rollout), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8") + b"\n"
    except (ValueError, TypeError) as error:
        raise OutputError(f"rollout {rollout.id!r} cannot be written as JSON: {error}") from error


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """The tokens-form record of a rollout."""
    record: dict[str, Any] = {
        "id": rollout.id,
        "group": rollout.group,
        "input_ids": rollout.input_ids.tolist(),
        "boundaries": rollout.boundaries.tolist(),
        "n_turns": rollout.n_turns,
    }
    if rollout.answer_texts is not None:
        record["answer"] = list(rollout.answer_texts)
    record["answer_ids"] = [answer.tolist() for answer in rollout.answers]
    first = rollout.openers[0]
    if all(np.array_equal(opener, first) for opener in rollout.openers):
        record["opener_ids"] = first.tolist()
    else:
        record["openers"] = [opener.tolist() for opener in rollout.openers]
    if rollout.state_prefixes is not None:
        record["state_prefixes"] = [prefix.tolist() for prefix in rollout.state_prefixes]
    if rollout.loss_mask is not None:
        record["loss_mask"] = rollout.loss_mask.astype(int).tolist()
    if rollout.logprobs is not None:
        record["logprobs"] = [None if math.isnan(value) else value for value in rollout.logprobs.tolist()]
    if rollout.reward is not None:
        record["reward"] = rollout.reward
    if rollout.transcript:
        record["transcript"] = [
            {"role": s.role, "text": s.text, "turn": s.turn, **({} if s.tool is None else {"tool": s.tool})}
            for s in rollout.transcript
        ]
    if rollout.notes:
        record["notes"] = list(rollout.notes)
    if rollout.extra:
        record["extra"] = rollout.extra
    return record
