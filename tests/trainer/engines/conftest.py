"""The truth that engines are held to: a model in float64 that computes every prefix anew, and requests for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY
from transformers import PreTrainedModel

from trace_fast.trainer.engines.engine import Generation, Request


@dataclass
class Oracle:
    """``module`` in its own dtype and in float64, without any cache."""

    module: PreTrainedModel

    def __post_init__(self) -> None:
        self._wide = copy.deepcopy(self.module).double()
        if self._wide._can_set_experts_implementation():
            self._wide.set_experts_implementation("eager")  # the grouped kernels have no float64

    def logits(self, ids: np.ndarray, *, wide: bool = True) -> np.ndarray:
        """``(L, V) float64`` of one sequence."""
        with torch.no_grad():
            model = self._wide if wide else self.module
            return model(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0].double().numpy()

    def greedy_after(self, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """``(n,)`` the most probable id after the prompt and after each of ``ids`` but the last."""
        return self.logits(np.concatenate([prompt, ids]))[len(prompt) - 1 : -1].argmax(axis=-1)

    def logprobs(
        self, prompt: np.ndarray, ids: np.ndarray, *, temperature: float = 1.0, top_p: float = 1.0, wide: bool = True
    ) -> np.ndarray:
        """``(n,) float64`` of a continuation under the distribution that is sampled from."""
        rows = self.logits(np.concatenate([prompt, ids]), wide=wide)[len(prompt) - 1 : -1]
        return np.array([distribution(row, temperature, top_p)[token] for row, token in zip(rows, ids, strict=True)])

    def bound(self, prompt: np.ndarray, ids: np.ndarray) -> float:
        """How far log-probabilities may be off: twice what the model itself is in its own dtype, since a sum of the
        same terms in another order has an error of the same size but not the same error, and eight roundings of the
        largest logit for the softmax."""
        off = np.abs(self.logprobs(prompt, ids, wide=False) - self.logprobs(prompt, ids)).max()
        largest = np.abs(self.logits(np.concatenate([prompt, ids]))).max()
        return float(2 * off + 8 * largest * torch.finfo(torch.float32).eps)


def distribution(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """``(V,)`` log-probabilities after temperature and top-p, -inf for what is cut off."""
    scaled = logits / temperature
    logp = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    order = np.argsort(-logp, kind="stable")
    p = np.exp(logp[order])
    kept = order[: int((np.cumsum(p) - p < top_p).sum())]
    cut = np.full_like(logp, -np.inf)
    cut[kept] = logp[kept] - np.log(np.exp(logp[kept]).sum())
    return cut


@pytest.fixture(scope="session")
def oracle_of() -> Callable[[PreTrainedModel], Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def true_distribution() -> Callable[[np.ndarray, float, float], np.ndarray]:
    return distribution


@pytest.fixture
def prompts() -> list[np.ndarray]:
    """Odd lengths; five that begin alike, one of them twice, and two others."""
    rng = np.random.default_rng(5)
    shared = rng.integers(3, VOCABULARY, 41)
    tails = [rng.integers(3, VOCABULARY, n) for n in (1, 7, 0, 33)]
    alike = [np.concatenate([shared, tail]) for tail in tails]
    return [*alike, alike[1], rng.integers(3, VOCABULARY, 1), rng.integers(3, VOCABULARY, 77)]


@pytest.fixture
def next_turn() -> Callable[[Sequence[np.ndarray], Sequence[Generation], int], list[np.ndarray]]:
    """Prompts of the next turn: what was there, what was written, and an observation of 1 to 9 tokens."""

    def extend(prompts: Sequence[np.ndarray], written: Sequence[Generation], seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [
            np.concatenate([prompt, generation.ids, rng.integers(3, VOCABULARY, rng.integers(1, 10))])
            for prompt, generation in zip(prompts, written, strict=True)
        ]

    return extend


@pytest.fixture
def ask() -> Callable[..., list[Request]]:
    """``ask(prompts, 9, temperature=0.0)``: a request a prompt, seeds 0, 1, ..."""

    def make(
        prompts: Sequence[np.ndarray],
        count: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop_ids: tuple[int, ...] = (),
        seed: int = 0,
    ) -> list[Request]:
        return [
            Request(prompt, count, stop_ids, temperature=temperature, top_p=top_p, seed=seed + number)
            for number, prompt in enumerate(prompts)
        ]

    return make
