"""Tokenizers of other families than SmolLM2's, built from what is installed; nothing is downloaded."""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_fast.errors import RolloutError
from trace_fast.formats import read_rollouts
from trace_fast.rollout import Rollout

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _folder(package: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"package {package} is not installed")
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


def _merge(piece: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """The parts of a token after all merges of a lower rank than its own: the two that its own merge joins."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        joined = [ranks.get(a + b, below) for a, b in itertools.pairwise(parts)]
        best = min(joined)
        if best >= below:
            break
        at = joined.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


@pytest.fixture(scope="session")
def qwen_tokenizer() -> Any:
    """Qwen's real vocabulary (151,643 byte-pair ranks) as a fast tokenizer with ChatML's special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = _folder("dashscope", "resources", "qwen.tiktoken")
    if not path.is_file():
        pytest.skip(f"the installed dashscope has no {path.name}")
    ranks = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    letters = {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            parts = _merge(token, ranks, rank)
            if len(parts) == 2:
                merges.append((spell(parts[0]), spell(parts[1])))
    raw = Tokenizer(models.BPE(vocab={spell(t): r for t, r in ranks.items()}, merges=merges))
    raw.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_SPECIAL)})
    return tokenizer


@pytest.fixture(scope="session")
def chat_template() -> Callable[[str], str]:
    """``name -> source`` of a published chat template, from the installed package trl."""
    folder = _folder("trl", "chat_templates")

    def read(name: str) -> str:
        path = folder / f"{name}.jinja"
        if not path.is_file():
            pytest.skip(f"the installed trl has no chat template {name}")
        return path.read_text(encoding="utf-8")

    return read


@pytest.fixture
def with_template(smollm2_tokenizer: Any, chat_template: Callable[[str], str]) -> Callable[..., Any]:
    """``(name, *special tokens) -> tokenizer``: SmolLM2's vocabulary with another family's template and specials."""
    import copy

    def make(name: str, *special: str, bos: str | None = None, eos: str | None = None) -> Any:
        tokenizer = copy.deepcopy(smollm2_tokenizer)
        tokenizer.chat_template = chat_template(name)
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        if bos is not None:
            tokenizer.add_special_tokens({"bos_token": bos})
        if eos is not None:
            tokenizer.add_special_tokens({"eos_token": eos})
        return tokenizer

    return make


@pytest.fixture
def read(tmp_path: Path, smollm2_tokenizer: Any) -> Callable[..., Rollout]:
    """``(record, **options) -> rollout`` with SmolLM2's tokenizer."""

    def one(record: dict[str, Any], **options: Any) -> Rollout:
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(record))
        (rollout,) = read_rollouts(path, smollm2_tokenizer, **options)
        return rollout

    return one


@pytest.fixture
def error(read: Callable[..., Rollout]) -> Callable[..., RolloutError]:
    """``(record, **options) -> the error`` that reading it raises."""

    def one(record: dict[str, Any], **options: Any) -> RolloutError:
        with pytest.raises(RolloutError) as caught:
            read(record, **options)
        return caught.value

    return one


@pytest.fixture
def ids(smollm2_tokenizer: Any) -> Callable[[str], list[int]]:
    """``text -> ids`` of SmolLM2, nothing added."""
    return lambda text: smollm2_tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def written() -> Callable[[Rollout, Any], list[str]]:
    """``(rollout, tokenizer) -> texts``: the pieces that the mask says the policy wrote."""

    def pieces(rollout: Rollout, tokenizer: Any) -> list[str]:
        assert rollout.loss_mask is not None
        cuts = np.flatnonzero(np.diff(np.concatenate([[False], rollout.loss_mask, [False]])))
        return [tokenizer.decode(rollout.input_ids[a:b]) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]

    return pieces
