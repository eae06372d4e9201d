"""Texts to unit vectors, with sentence-transformers or with a plain transformers model.

Embedding models made of decoders (Qwen3-Embedding) read the last real token's hidden state, pad on the left and want
an instruction before queries, never before documents. Where padding lies must not change a vector: positions count
real tokens only, and pooling looks for the last real token instead of taking the last column.

Suffixes: B texts, L tokens (padded), D dimensions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from trace_fast.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Pooling = Literal["last_token", "mean", "first_token"]
SEARCH_TASK = "Given a web search query, retrieve relevant passages that answer the query"


class Encoder(Protocol):
    """Texts to vectors of one dimension. ``name`` tells encoders apart whose vectors do not compare."""

    @property
    def name(self) -> str: ...
    @property
    def dimension(self) -> int: ...
    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """``(B, D) float32`` unit vectors."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """``(B, D) float32`` unit vectors."""
        ...


def instruction_prompt(task: str = SEARCH_TASK) -> str:
    """What Qwen3-Embedding wants before a query."""
    return f"Instruct: {task}\nQuery:"


def unit_vectors(vectors_BD: np.ndarray, what: str) -> np.ndarray:
    """``(B, D) float32`` vectors of length 1.

    Raises:
        ModelError: a vector that is not finite, or is zero: it has no direction.
    """
    wide = np.ascontiguousarray(vectors_BD, dtype=np.float32)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    bad = ~np.isfinite(lengths[:, 0]) | (lengths[:, 0] == 0)
    if bad.any():
        row = int(np.argmax(bad))
        raise ModelError(f"{what} {row}: expected a finite vector that is not zero, got length {lengths[row, 0]}")
    return wide / lengths


def pool(hidden_BLD: Tensor, mask_BL: Tensor, pooling: Pooling) -> Tensor:
    """``(B, D)`` one vector a text, the same wherever the padding (mask 0) lies."""
    lengths_B = mask_BL.sum(dim=1)
    assert bool((lengths_B > 0).all()), "a text without tokens"
    rows_B = torch.arange(len(hidden_BLD), device=hidden_BLD.device)
    if pooling == "mean":
        weights_BL1 = mask_BL.to(hidden_BLD.dtype).unsqueeze(-1)
        return (hidden_BLD * weights_BL1).sum(dim=1) / lengths_B.to(hidden_BLD.dtype).unsqueeze(-1)
    first_B = mask_BL.to(torch.int8).argmax(dim=1)
    if pooling == "first_token":
        return hidden_BLD[rows_B, first_B]
    return hidden_BLD[rows_B, first_B + lengths_B - 1]


class SentenceTransformerEncoder:
    """A sentence-transformers model. ``query_prompt`` is written before queries."""

    def __init__(
        self, model: SentenceTransformer, *, name: str, query_prompt: str = "", batch_size: int = 32
    ) -> None:
        dimension = model.get_embedding_dimension()
        if dimension is None:
            raise ModelError(f"{name}: the model does not say how many dimensions its vectors have")
        self._model = model
        self._query_prompt = query_prompt
        self._batch_size = batch_size
        self._dimension = int(dimension)
        self._name = f"{name}|{query_prompt}" if query_prompt else name
        self._lock = threading.Lock()  # its tokenizer keeps state between calls

    @property
    def name(self) -> str:
        return self._name

    @property
    def dimension(self) -> int:
        return self._dimension

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode([self._query_prompt + text for text in texts])

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode(list(texts))

    def _encode(self, texts: list[str]) -> np.ndarray:
        if not texts:
            return np.empty((0, self._dimension), dtype=np.float32)
        with self._lock:
            vectors_BD = self._model.encode(
                texts, batch_size=self._batch_size, convert_to_numpy=True, show_progress_bar=False
            )
        return unit_vectors(np.asarray(vectors_BD), "vector of text")


class TransformersEncoder:
    """A transformers model without its head.

    Args:
        pooling: ``last_token`` pads on the left, the others on the right.
        query_prompt: written before queries; see ``instruction_prompt``.
        max_tokens: longer texts are cut, the tokens that the tokenizer adds at their end are kept.
        end_id: appended to texts that do not end in it already (Qwen3-Embedding reads ``<|endoftext|>``).
        batch_size: texts in one forward pass; they are sorted by length first.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        pooling: Pooling = "last_token",
        query_prompt: str = "",
        max_tokens: int = 8192,
        end_id: int | None = None,
        batch_size: int = 32,
    ) -> None:
        if max_tokens < 2 or batch_size < 1:
            raise ConfigError(
                f"max_tokens, batch_size: expected at least 2 and 1, got {max_tokens} and {batch_size}"
            )
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._pooling: Pooling = pooling
        self._query_prompt = query_prompt
        self._max_tokens = max_tokens
        self._end_id = end_id
        self._batch_size = batch_size
        self._name = "|".join(filter(None, (name, pooling, query_prompt)))
        self._lock = threading.Lock()  # a fast tokenizer's truncation is state that calls would share

    @property
    def name(self) -> str:
        return self._name

    @property
    def dimension(self) -> int:
        return int(self._model.config.hidden_size)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode([self._query_prompt + text for text in texts])

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode(list(texts))

    def _encode(self, texts: list[str]) -> np.ndarray:
        vectors_BD = np.empty((len(texts), self.dimension), dtype=np.float32)
        with self._lock:
            ids = [self._ids(text) for text in texts]
            order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
            for start in range(0, len(order), self._batch_size):
                rows = order[start : start + self._batch_size]
                vectors_BD[rows] = self._forward([ids[i] for i in rows])
        return unit_vectors(vectors_BD, "vector of text")

    def _ids(self, text: str) -> list[int]:
        room = self._max_tokens - (self._end_id is not None)
        encoded: Any = self._tokenizer(text, truncation=True, max_length=room, verbose=False)
        ids = list(encoded["input_ids"])
        if self._end_id is not None and ids[-1:] != [self._end_id]:
            ids.append(self._end_id)
        if not ids:
            raise ModelError("a text without tokens has no vector; give end_id or a tokenizer that adds special tokens")
        return ids

    @torch.no_grad()
    def _forward(self, ids: list[list[int]]) -> np.ndarray:
        left = self._pooling == "last_token"
        shape = (len(ids), max(map(len, ids)))
        input_ids_BL = torch.zeros(shape, dtype=torch.long)
        mask_BL = torch.zeros(shape, dtype=torch.long)
        for row, tokens in enumerate(ids):
            span = slice(shape[1] - len(tokens), None) if left else slice(0, len(tokens))
            input_ids_BL[row, span] = torch.tensor(tokens)
            mask_BL[row, span] = 1
        device = self._model.device
        inputs: dict[str, Tensor] = {"input_ids": input_ids_BL.to(device), "attention_mask": mask_BL.to(device)}
        if left:  # counted from the first real token; models count columns otherwise
            inputs["position_ids"] = (mask_BL.cumsum(dim=1) - 1).clamp(min=0).to(device)
        forward: Callable[..., Any] = self._model
        hidden_BLD = forward(**inputs).last_hidden_state.float()
        return pool(hidden_BLD, inputs["attention_mask"], self._pooling).cpu().numpy()
