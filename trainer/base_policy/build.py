"""Makes the base policy: tokenizer, training text, training, validation, files.

Files of the folder: what ``AutoModelForCausalLM`` and ``AutoTokenizer`` load (weights as safetensors, the chat template
with the tokenizer), and ``validation.json``. The corpus and the questions of the experiment go into another folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from trace_fast.atomic_write import write_atomically
from trace_fast.errors import ConfigError, OutputError
from trace_fast.trainer.base_policy.corpus import Corpus, count_tokens
from trace_fast.trainer.base_policy.experiment import experiment_world, harness_config, tasks_of, write_experiment
from trace_fast.trainer.base_policy.library import Library
from trace_fast.trainer.base_policy.settings import SIZES, BaseSize
from trace_fast.trainer.base_policy.training import Report, new_model, train
from trace_fast.trainer.base_policy.validation import engine_of, reading_numbers, rollout_numbers, run_tasks
from trace_fast.trainer.base_policy.vocabulary import frame_of, train_tokenizer
from trace_fast.trainer.docworld import World
from trace_fast.trainer.docworld.dice import Dice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VALIDATION = "validation.json"
_MOST_SEED = 9_999


def make_base(
    out: str | os.PathLike[str],
    *,
    world: str | os.PathLike[str] | None = None,
    seed: int = 0,
    size: str | BaseSize = "small",
    steps: int | None = None,
    threads: int | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """Writes a base policy into ``out`` and returns its validation record.

    Args:
        world: folder for ``write_experiment``; not written by default.
        seed: of everything; with the same number of threads, the same seed gives the same weights.
        size: a name of ``SIZES``, or numbers of one's own. steps: on all but the drills, instead of the size's.
        threads: of torch; as it is set by default.

    Raises:
        ConfigError: an unknown size, or a number out of range. OutputError: the folder cannot be written.
    """
    chosen = _sized(size, steps)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MOST_SEED:
        raise ConfigError(f"seed: expected an integer in 0..{_MOST_SEED}, got {seed!r}")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads: expected at least 1, got {threads}")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: expected a folder that can be written: {error}") from error
    experiment = experiment_world(seed, chosen)
    if world is not None:
        write_experiment(experiment, world)
    with _threads(threads):
        return _make(folder, seed, chosen, experiment, report)


def _make(folder: Path, seed: int, size: BaseSize, world: World, report: Report) -> dict[str, Any]:
    started = time.monotonic()
    corpus = Corpus(seed, size)
    tokenizer = train_tokenizer(corpus.texts(), size.vocabulary)
    frame = frame_of(tokenizer)
    drills, examples = list(corpus.drills(frame)), list(corpus.examples(frame))
    for name, made in (("drills", drills), ("examples", examples)):
        report(f"{len(made):,} {name}, {count_tokens(made):,} tokens ({time.monotonic() - started:.0f} s)")
    assert isinstance(tokenizer.pad_token_id, int)
    assert isinstance(tokenizer.eos_token_id, int)
    model = new_model(size, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, seed)
    report(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    dice = Dice(seed, "batches")
    train(model, drills, steps=size.drill_steps, size=size, dice=dice, report=report)
    losses = train(model, examples, steps=size.steps, size=size, dice=dice, report=report)
    report(f"trained ({time.monotonic() - started:.0f} s)")
    record = {
        "seed": seed,
        "threads": torch.get_num_threads(),
        "weights": weights_hash(model),
        "loss": sum(losses[-50:]) / len(losses[-50:]),
        **validate(model, tokenizer, world, seed=seed, number=size.tasks),
    }
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_atomically(folder / VALIDATION, json.dumps(record, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{folder}: cannot be written: {error}") from error
    report(f"written to {folder} ({time.monotonic() - started:.0f} s)")
    return record


def validate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    *,
    seed: int,
    number: int,
    samples: int = 1,
) -> dict[str, Any]:
    """Numbers on ``number`` validation questions of a world: sampled, greedy, and reading."""
    frame = frame_of(tokenizer)
    library = Library(world)
    tasks = tasks_of(world, "validation")[:number]
    sampled, greedy = harness_config(), harness_config(temperature=0.0)
    engine = engine_of(model, sampled)
    reading = reading_numbers(frame, library, engine, sampled, split="validation", number=number, seed=seed)
    at_random = run_tasks(frame, library, engine, sampled, tasks, seed=seed, samples=samples)
    at_best = run_tasks(frame, library, engine, greedy, tasks, seed=seed)
    return {"sampled": rollout_numbers(at_random), "greedy": rollout_numbers(at_best), "reading": reading}


def weights_hash(model: torch.nn.Module) -> str:
    """SHA-256 over names, shapes and bytes of all parameters, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sized(size: str | BaseSize, steps: int | None) -> BaseSize:
    if isinstance(size, str):
        if size not in SIZES:
            raise ConfigError(f"size: expected one of {', '.join(SIZES)}, got {size!r}")
        size = SIZES[size]
    if steps is None:
        return size
    if steps < 1:
        raise ConfigError(f"steps: expected at least 1, got {steps}")
    return replace(size, steps=steps)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Torch with ``number`` threads inside, and as it was afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
