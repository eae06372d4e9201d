"""Questions from files, and the order in which a run takes them.

The order is a function of the seed and the step alone: a permutation an epoch, one behind the other, cut into steps.
So a resumed run needs no state to go on with the question that would have been next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from trace_fast.errors import ConfigError, InputError
from trace_fast.trainer.harness import RESULT_KEYS, Task

KEYS = ("id", "question", "answers")
LONGEST_VALUE = 100
MOST_VALUES = 50  # that an evaluation is split by: each is a metric


def read_tasks(path: str) -> list[Task]:
    """The questions of a JSONL file.

    Raises:
        InputError: the file cannot be read, holds no question, or a line is none; it names file, line and key.
    """
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        task = _task(f"{path}:{number}", line, default_id=str(number))
        if task.id in lines:
            raise InputError(f"{path}:{number}: id: expected another than {task.id!r}, which line {lines[task.id]} has")
        lines[task.id] = number
        tasks.append(task)
    if not tasks:
        raise InputError(f"{path}: expected at least one question, got an empty file")
    return tasks


def step_tasks(tasks: Sequence[Task], step: int, count: int, seed: int) -> list[Task]:
    """The ``count`` questions of step ``step`` (from 0). A question that comes twice in a step is taken once."""
    if count > len(tasks):
        raise ConfigError(f"training.prompts: expected at most the {len(tasks)} training questions, got {count}")
    first, last = step * count, (step + 1) * count
    epochs = range(first // len(tasks), (last - 1) // len(tasks) + 1)
    order = np.concatenate([np.random.default_rng([seed, epoch]).permutation(len(tasks)) for epoch in epochs])
    begin = first - epochs[0] * len(tasks)
    chosen = dict.fromkeys(order[begin : begin + count].tolist())
    return [tasks[i] for i in chosen]


def check_key(tasks: Sequence[Task], key: str | None, path: str) -> None:
    """That every question has a text or an integer under ``key``, with few values in all; ``None`` asks for nothing.

    Raises:
        ConfigError: one has not, or each has its own; it names file and question.
    """
    if key is None:
        return
    if key in RESULT_KEYS or key in KEYS:
        raise ConfigError(f"evaluation.by: expected a key of the questions, got {key!r}, which is not theirs alone")
    values = set()
    for task in tasks:
        value = task.extra.get(key)
        if type(value) is not int and not (_is_text(value) and len(value) <= LONGEST_VALUE):
            raise ConfigError(
                f"evaluation.by: {path}: question {task.id!r}: expected an integer, or a text of at most "
                f"{LONGEST_VALUE} characters, under {key!r}, got {value!r:.200}"
            )
        values.add(str(value))
    if len(values) > MOST_VALUES:
        raise ConfigError(f"evaluation.by: {path}: expected at most {MOST_VALUES} values of {key!r}, got {len(values)}")


def _task(where: str, line: str, default_id: str) -> Task:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected JSON: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected an object, got {type(record).__name__}")
    question, answers = record.get("question"), record.get("answers")
    if not _is_text(question):
        raise InputError(f"{where}: question: expected text, got {question!r}")
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list) or not answers or not all(map(_is_text, answers)):
        raise InputError(f"{where}: answers: expected text or a list of texts, got {answers!r}")
    name = record.get("id", default_id)
    if not _is_text(name) and type(name) is not int:
        raise InputError(f"{where}: id: expected text or an integer, got {name!r}")
    extra = {key: value for key, value in record.items() if key not in KEYS}
    return Task(id=str(name), question=question, answers=tuple(answers), extra=extra)


def _is_text(value: Any) -> TypeGuard[str]:
    """A string that is not blank and can be encoded: JSON may hold half a surrogate pair."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= c <= "\udfff" for c in value)
