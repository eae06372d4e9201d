"""The tiny base policy as a whole: what training makes of it, what is written, and that it all comes out again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_fast.errors import ConfigError, OutputError
from trace_fast.formats.answers import encode
from trace_fast.trainer.base_policy import (
    SIZES,
    TEMPLATES,
    experiment_world,
    frame_of,
    harness_config,
    make_base,
    tasks_of,
    weights_hash,
)
from trace_fast.trainer.base_policy.__main__ import main
from trace_fast.trainer.base_policy.examples import Example
from trace_fast.trainer.base_policy.experiment import LOOKUP
from trace_fast.trainer.base_policy.settings import practice_seeds
from trace_fast.trainer.base_policy.training import Batch, batch_loss, batches, new_model
from trace_fast.trainer.data import read_tasks
from trace_fast.trainer.docworld.dice import Dice

TINY = SIZES["tiny"]


def test_the_same_seed_gives_the_same_files(tiny: Any, tmp_path: Path) -> None:
    again = make_base(tmp_path, world=tmp_path / "world", size="tiny", threads=1, report=lambda line: None)
    assert again == tiny.record
    for name in ("model.safetensors", "tokenizer.json", "validation.json", "world/questions.train.jsonl"):
        assert (tmp_path / name).read_bytes() == (tiny.folder / name).read_bytes(), name


def test_the_loss_falls_far_below_that_of_guessing(tiny: Any) -> None:
    assert tiny.record["loss"] < 0.6 * math.log(TINY.vocabulary)


def test_what_is_saved_is_what_was_trained(tiny: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    assert weights_hash(model) == tiny.record["weights"]
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.model_type == "qwen3"


def test_the_saved_tokenizer_makes_the_same_frame(tiny: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder)
    frame = frame_of(tokenizer)
    question = tasks_of(experiment_world(0, TINY), "validation")[0].question
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = frame.prompt(question).ids
    assert np.array_equal(ids[-len(encode(tokenizer, text)) :], encode(tokenizer, text))
    assert np.array_equal(ids, encode(tokenizer, tokenizer.decode(ids)))
    assert len(tokenizer) <= TINY.vocabulary
    assert frame.stop_ids == (tokenizer.eos_token_id,)


def test_validation_json_holds_the_record(tiny: Any) -> None:
    record = json.loads((tiny.folder / "validation.json").read_text(encoding="utf-8"))
    assert record == tiny.record
    for kind in ("sampled", "greedy"):
        assert record[kind]["rollouts"] == TINY.tasks
        assert 0 <= record[kind]["success"] <= record[kind]["success_any"] <= 1
        assert record[kind]["most_tokens"] <= harness_config().max_tokens
        assert sum(record[kind]["stops"].values()) == TINY.tasks
    assert record["reading"]["questions"] == TINY.tasks


def test_the_world_is_written_with_half_as_many_questions_of_one_document_as_of_several(tiny: Any) -> None:
    world = experiment_world(0, TINY)
    for split in ("train", "validation", "test"):
        tasks = read_tasks(str(tiny.folder / "world" / f"questions.{split}.jsonl"))
        assert [(task.question, task.answers) for task in tasks] == [
            (task.question, task.answers) for task in tasks_of(world, split)
        ]
        assert {task.extra["template"] for task in tasks} == {*TEMPLATES, LOOKUP}
        easy = [task for task in tasks if task.extra["hops"] == 1]
        assert [task for task in tasks if task.extra["template"] == LOOKUP] == easy
        assert len(easy) == (len(tasks) - len(easy)) // 2
        assert len({task.id for task in tasks}) == len(tasks)
        known = {lookup.question: lookup.answers for lookup in world.lookups(split)}
        assert all(known[task.question] == task.answers for task in easy)
        assert 0 < sum(task.extra["hops"] == 1 for task in tasks[: len(easy)]) < len(easy)  # mixed
    lines = (tiny.folder / "world" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == [document.text for document in world.documents]


@pytest.mark.parametrize("seed", [0, 1, 9_999])
def test_practice_worlds_are_never_the_experiments(seed: int) -> None:
    for size in SIZES.values():
        first = practice_seeds(seed, size)
        used = range(first.start, first.stop + size.naming_worlds + size.drill_worlds)
        assert len(used) < 100_000
        assert used.start > 9_999  # the highest seed of an experiment


def test_batches_hold_every_example_once_padded_with_weight_0() -> None:
    lengths = [3, 17, 5, 29, 64, 8, 8, 120, 2]
    examples = [Example(np.arange(10, 10 + n), np.full(n, 0.5, np.float32)) for n in lengths]
    made = list(batches(examples, 64, 0, Dice(1)))
    rows = [(ids, weights) for batch in made for ids, weights in zip(batch.ids_BL, batch.weights_BL, strict=True)]
    assert sorted(int((weights > 0).sum()) for _, weights in rows) == sorted(lengths)
    for ids, weights in rows:
        assert torch.equal(ids > 0, weights > 0)
        assert torch.equal(ids[ids > 0], torch.arange(10, 10 + int((ids > 0).sum())))
    assert all(batch.ids_BL.numel() <= 64 or len(batch.ids_BL) == 1 for batch in made)


def test_the_loss_is_the_weighted_mean_and_padding_does_not_count() -> None:
    model = new_model(TINY, 64, 0, 2, seed=3).eval()
    ids = torch.tensor([[5, 9, 9, 4, 7, 3], [6, 8, 5, 0, 0, 0]])
    weights = torch.tensor([[0, 1.0, 0.1, 0, 1.0, 0.5], [0.7, 0.1, 1.0, 0, 0, 0]])
    with torch.no_grad():
        logprobs = model.double()(ids, use_cache=False).logits.log_softmax(-1)
        picked = logprobs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        expected = -(picked * weights[:, 1:]).sum() / weights[:, 1:].sum()
        model.float()
        loss = batch_loss(model, Batch(ids, weights))
        poisoned = ids.clone()
        poisoned[1, 3:] = 61
        again = batch_loss(model, Batch(poisoned, weights))
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)  # products in bfloat16: 2**-8 each
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize(("heads", "matched"), [(2, 0.8), (4, 0.3)])
def test_the_draft_of_copying_looks_back_and_matches(heads: int, matched: float) -> None:
    """In a random string that comes twice, layer 0 reads the token before and layer 1 what followed the same token; the
    more random heads write beside the drafted one, the less clearly (by chance: 1 in 60)."""
    model = new_model(replace(SIZES["small"], heads=heads), 512, 0, 2, seed=0)
    model.set_attn_implementation("eager")
    string = np.random.default_rng(0).permutation(np.arange(10, 500))[:30]
    ids = torch.from_numpy(np.concatenate([string, string]))[None]
    with torch.no_grad():
        back, match = (layer[0, 0] for layer in model(ids, output_attentions=True).attentions[:2])
    places = torch.arange(1, 60)
    assert back[places, places - 1].min() > 0.9
    second = torch.arange(31, 59)
    assert (match[second].argmax(dim=1) == second - 29).float().mean() > matched


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "huge"}, "size: expected one of tiny, small, got 'huge'"),
        ({"seed": -1}, "seed: expected an integer in 0..9999, got -1"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"threads": 0}, "threads: expected at least 1, got 0"),
    ],
)
def test_wrong_numbers_are_refused_before_any_work(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_base(tmp_path / "base", **{"size": "tiny", **changes})
    assert not (tmp_path / "base").exists()


def test_a_folder_that_cannot_be_is_an_error_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="file"):
        make_base(tmp_path / "file", size=replace(TINY, steps=1))
    assert main(["--size", "tiny", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
