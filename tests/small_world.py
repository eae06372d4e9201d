"""A folder to train in: a random policy with the base policy's tokenizer, a tiny docworld, a config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from trace_fast.trainer.base_policy.corpus import Corpus
from trace_fast.trainer.base_policy.settings import SIZES, experiment_world, questions_of
from trace_fast.trainer.base_policy.training import new_model
from trace_fast.trainer.base_policy.vocabulary import INSTRUCTIONS, train_tokenizer
from trace_fast.trainer.docworld import write_world

LIMITS = f"""
max_turns = 3
max_tokens = 600
max_response_tokens = 24
observation_tokens = 96
instructions = "{INSTRUCTIONS}"
"""
CONFIG = f"""
out = "OUT"

[policy]
path = "FOLDER/base"
dtype = "float32"

[reference]
dtype = "float32"

[data]
train = "FOLDER/questions.train.jsonl"
validation = "FOLDER/questions.validation.jsonl"

[search]
index = "FOLDER/index"
corpus = "FOLDER/corpus.jsonl"

[engine]
dtype = "float32"
slots = 16

[optimizer]
lr = 2e-3

[training]
steps = 5
prompts = 4
samples = 4
global_batch = 8
microbatch_tokens = 1200

[checkpoint]
every = 1
keep = 2

[evaluation]
every = 2
questions = 4

[harness]{LIMITS}
[evaluation.harness]{LIMITS}"""


def make_folder(folder: Path) -> None:
    """Everything that ``config`` names. The policy is random: what it writes is noise, but it is trained for real."""
    size = replace(SIZES["tiny"], vocabulary=640)
    tokenizer = train_tokenizer(Corpus(0, size).texts(), size.vocabulary)
    model = new_model(size, len(tokenizer), int(tokenizer.pad_token_id), int(tokenizer.eos_token_id), seed=0)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    world = experiment_world(0, size)
    write_world(world, folder)
    for split in ("train", "validation"):
        lines = [json.dumps(question.to_record()) + "\n" for question in questions_of(world, split)]
        (folder / f"questions.{split}.jsonl").write_text("".join(lines))


def config(folder: Path, out: Path) -> str:
    """The text of a training config."""
    return CONFIG.replace("FOLDER", str(folder)).replace("OUT", str(out))
