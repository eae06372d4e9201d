"""A folder to train in: a policy that has just learned the format, a tiny docworld, a config.

The policy has the base policy's tokenizer and architecture, and a hundred steps on actions that are made up: searches
for words of the question, and answers that are capitalised words of it. So it writes calls and answers, all wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from trace_fast.formats.answers import encode
from trace_fast.trainer.base_policy.vocabulary import INSTRUCTIONS, frame_of, train_tokenizer
from trace_fast.trainer.docworld import WorldSize, make_world, write_world
from trace_fast.trainer.harness.frame import ChatFrame
from trace_fast.trainer.search import tool_schemas

LIMITS = f"""
max_turns = 3
max_tokens = 600
max_response_tokens = 48
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
    """Everything that ``config`` names."""
    world = make_world(0, WorldSize((1, 1, 1), (40, 20, 20), (0.6, 0.4, 0, 0, 0)))
    texts = [f"{document.title} {document.text} {document.url}" for document in world.documents]
    texts += [question.question for question in world.questions("train")]
    tokenizer = train_tokenizer([*texts, *map(json.dumps, tool_schemas())], 640)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    _teach(model, frame_of(tokenizer), [question.question for question in world.questions("train")])
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    write_world(world, folder)
    for split in ("train", "validation"):
        lines = [json.dumps(question.to_record()) + "\n" for question in world.questions(split)]
        (folder / f"questions.{split}.jsonl").write_text("".join(lines))


def _teach(model: Qwen3ForCausalLM, frame: ChatFrame, questions: list[str], *, steps: int = 100) -> None:
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(steps):
        loss = torch.zeros(())
        for question in rng.choice(questions, 4):
            words = str(question).split()
            query = " ".join(rng.choice(words, 2)).replace('"', "")
            call = json.dumps({"name": "browser.search", "arguments": {"query": query}})
            name = str(rng.choice([word.strip(",.?'") for word in words if word[:1].isupper()]))
            written = f"<tool_call>\n{call}\n</tool_call>" if rng.random() < 0.6 else f"<answer>{name}</answer>"
            prompt = frame.prompt(str(question)).ids
            action = encode(frame.tokenizer, written + frame.end_text)
            ids = torch.from_numpy(np.concatenate([prompt, action]))
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
            loss = loss + F.cross_entropy(logits.float(), torch.from_numpy(action)) / 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def config(folder: Path, out: Path) -> str:
    """The text of a training config."""
    return CONFIG.replace("FOLDER", str(folder)).replace("OUT", str(out))
