"""The world that the policy is to learn in, as tasks and files; nothing of it is in the policy's training text."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trace_fast.atomic_write import write_atomically
from trace_fast.errors import OutputError
from trace_fast.trainer.base_policy.settings import TEMPLATES, BaseSize
from trace_fast.trainer.base_policy.vocabulary import INSTRUCTIONS
from trace_fast.trainer.docworld import SPLITS, Question, Split, World, make_world
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.harness import HarnessConfig, Task

LOOKUP = "lookup"  # the template of a question that one document answers


def harness_config(**changes: object) -> HarnessConfig:
    """Limits that keep an episode at about a thousand tokens."""
    limits: dict[str, object] = {
        "max_turns": 6,
        "max_tokens": 1400,
        "max_response_tokens": 64,
        "observation_tokens": 192,
        "tool_threads": 2,
        "instructions": INSTRUCTIONS,
    }
    return HarnessConfig.model_validate({**limits, **changes})


def experiment_world(seed: int, size: BaseSize) -> World:
    """The world of a seed."""
    return make_world(seed, size.experiment)


def questions_of(world: World, split: Split) -> list[Question]:
    """The questions of a split, of two documents and more, that the experiment asks."""
    return [question for question in world.questions(split) if question.template in TEMPLATES]


def tasks_of(world: World, split: Split) -> list[Task]:
    """What the experiment asks, in random order: ``questions_of``, and half as many that one document answers.

    Without the easy ones a policy this small has hardly a group of rollouts that differ, and nothing to learn from.
    """
    dice = Dice(world.seed, "tasks", split)
    questions = questions_of(world, split)
    lookups = dice.shuffled(list(world.lookups(split)))[: len(questions) // 2]
    tasks = [
        Task(question.id, question.question, question.answers, {"template": question.template, "hops": question.hops})
        for question in questions
    ]
    tasks += [
        Task(f"{split}-{LOOKUP}-{number}", lookup.question, lookup.answers, {"template": LOOKUP, "hops": 1})
        for number, lookup in enumerate(lookups)
    ]
    return dice.shuffled(tasks)


def write_experiment(world: World, folder: str | os.PathLike[str]) -> None:
    """Writes ``corpus.jsonl``, as docworld does, and ``questions.<split>.jsonl`` with ``tasks_of``.

    Raises:
        OutputError: the folder or a file cannot be written.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        documents = (json.dumps(document.to_record(), ensure_ascii=False) for document in world.documents)
        write_atomically(path / "corpus.jsonl", "\n".join(documents) + "\n")
        for split in SPLITS:
            records = (
                {"id": task.id, "question": task.question, "answers": list(task.answers), **task.extra}
                for task in tasks_of(world, split)
            )
            lines = (json.dumps(record, ensure_ascii=False) for record in records)
            write_atomically(path / f"questions.{split}.jsonl", "\n".join(lines) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: expected a folder that can be written: {error}") from error
