"""The peers that need CUDA packages, on stand-ins with the packages' documented calls: form of the calls, values."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import oracle
import pytest
import torch
from tiny_models import VOCABULARY, random_rollout, tiny_model
from transformers import PreTrainedModel

from trace_fast.bench.peers import PEERS, PeerError, PeerSetup, flash_attn
from trace_fast.model_spec import ModelSpec
from trace_fast.rollout import Rollout

FUSED = {"liger": ("liger_kernel", "liger-kernel"), "cut_cross_entropy": ("cut_cross_entropy", "cut-cross-entropy")}
FLOAT32 = 1e-5  # float32 models


def row_losses(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: Any, softcap: float | None
) -> torch.Tensor:
    assert hidden.is_contiguous()
    assert targets.dtype == torch.int64
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


class LigerLoss:
    """``LigerFusedLinearCrossEntropyLoss``: settings by name, then (weight, input, target, bias)."""

    rows: list[int]

    def __init__(self, *, reduction: str = "mean", softcap: float | None = None) -> None:
        assert reduction == "none"
        self.softcap = softcap

    def __call__(self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: Any) -> torch.Tensor:
        self.rows.append(len(_input))
        assert len(lin_weight) == VOCABULARY
        return row_losses(_input, lin_weight, target, bias, self.softcap)


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """A stand-in for the peer's package; the rows of each call are noted in the list."""
    rows: list[int] = []

    def linear_cross_entropy(
        e: torch.Tensor,
        c: torch.Tensor,
        targets: torch.Tensor,
        bias: Any = None,
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        assert reduction == "none"
        assert len(c) == VOCABULARY
        rows.append(len(e))
        return row_losses(e, c, targets, bias, softcap)

    loss = type("Loss", (LigerLoss,), {"rows": rows})
    stand_ins = {
        "liger": ("liger_kernel.transformers", {"LigerFusedLinearCrossEntropyLoss": loss}),
        "cut_cross_entropy": ("cut_cross_entropy", {"linear_cross_entropy": linear_cross_entropy}),
    }
    path, contents = stand_ins[name]
    package = ModuleType(path)
    package.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, path, package)
    return rows


class OnCuda(PeerSetup):
    """Says that the model is on a CUDA device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def setup_of(module: PreTrainedModel, kind: type[PeerSetup] = PeerSetup) -> PeerSetup:
    return kind(module, ModelSpec.from_config(module.config, "tiny"), "tiny")


@pytest.mark.parametrize("architecture", ["llama", "llama-tied-biased", "gemma2", "mistral-window"])
@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_fused_head_gives_the_oracles_numbers(
    name: str, architecture: str, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny_model(architecture)  # gemma2 has a cap on its logits
    rows = install(monkeypatch, name)
    found = PEERS[name].open_peer(setup_of(module)).score(rollout)
    truth = oracle.mean_logprobs(oracle.double_precision(module), rollout)[:, 0]
    np.testing.assert_allclose(found, truth, rtol=0, atol=FLOAT32)
    assert rows == [rollout.n_states * len(rollout.answers[0])], "one call for the rows of all states"


@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_bias_of_the_head_is_handed_over(name: str, rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_model("llama")
    module.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY))
    install(monkeypatch, name)
    found = PEERS[name].open_peer(setup_of(module)).score(rollout)
    truth = oracle.mean_logprobs(oracle.double_precision(module), rollout)[:, 0]
    np.testing.assert_allclose(found, truth, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_fused_loss_that_ignores_the_reduction_is_reported(
    name: str, module: PreTrainedModel, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, name)
    monkeypatch.setattr(sys.modules[__name__], "row_losses", lambda *_: torch.zeros(()))
    with pytest.raises(PeerError, match=rf"{name}: expected a loss for each of \d+ rows, got \(\)"):
        PEERS[name].open_peer(setup_of(module)).score(rollout)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_why_not_of_a_fused_head(name: str, module: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    why_not = PEERS[name].why_not
    folder, package = FUSED[name]
    installed: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    assert why_not(setup_of(module)) == "its kernel runs on CUDA devices, and the model is on cpu"
    assert why_not(setup_of(module, OnCuda)) == f"the package {package} is not installed"
    installed.add(folder)
    assert why_not(setup_of(module, OnCuda)) is None
    assert why_not(setup_of(tiny_model("gemma2"), OnCuda)) is None
    reason = "the model scales its logits (logit_scale 0.25), which the loss cannot"
    assert why_not(setup_of(tiny_model("cohere"), OnCuda)) == reason


def test_flash_attn_switches_the_models_attention_and_back(
    rollout: Rollout, truth_S: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny_model("llama")
    implementations: list[str] = []
    switched_at_call: list[list[str]] = []
    forward = module.forward

    def watched(*arguments: Any, **named: Any) -> Any:
        switched_at_call.append(list(implementations))
        return forward(*arguments, **named)

    watched.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "set_attn_implementation", implementations.append)
    monkeypatch.setattr(module, "forward", watched)
    found = flash_attn.open_peer(setup_of(module)).score(rollout)
    np.testing.assert_allclose(found, truth_S, rtol=0, atol=FLOAT32)
    assert {tuple(before) for before in switched_at_call} == {("flash_attention_2",)}
    assert implementations == ["flash_attention_2", "sdpa"]


def test_flash_attn_switches_back_after_a_failure(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_model("llama")
    implementations: list[str] = []

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(module, "set_attn_implementation", implementations.append)
    monkeypatch.setattr(flash_attn, "kv_cache_scores", fail)
    with pytest.raises(RuntimeError, match="no kernel"):
        flash_attn.open_peer(setup_of(module)).score(rollout)
    assert implementations == ["flash_attention_2", "sdpa"]


def test_why_not_of_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    half = tiny_model("llama", torch.bfloat16)
    installed: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    assert flash_attn.why_not(setup_of(half)) == "flash-attn runs on CUDA devices, and the model is on cpu"
    assert flash_attn.why_not(setup_of(half, OnCuda)) == "the package flash-attn is not installed"
    installed.add("flash_attn")
    monkeypatch.setattr(flash_attn, "is_flash_attn_2_available", lambda: False)
    assert "wants flash-attn 2.3.3" in str(flash_attn.why_not(setup_of(half, OnCuda)))
    monkeypatch.setattr(flash_attn, "is_flash_attn_2_available", lambda: True)
    assert flash_attn.why_not(setup_of(half, OnCuda)) is None
    reason = flash_attn.why_not(setup_of(tiny_model("llama"), OnCuda))
    assert reason == "flash-attn takes float16 or bfloat16, and the model is torch.float32"
    monkeypatch.setattr(half, "_supports_flash_attn", False)
    assert flash_attn.why_not(setup_of(half, OnCuda)) == "LlamaForCausalLM does not support it in transformers"


def test_one_token_answers_at_equal_boundaries(module: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = random_rollout(np.random.default_rng(5), turns=6, tokens=2, answers=(1,), opener=2)
    assert len(set(made.boundaries.tolist())) < made.n_states
    install(monkeypatch, "liger")
    found = PEERS["liger"].open_peer(setup_of(module)).score(made)
    truth = oracle.mean_logprobs(oracle.double_precision(module), made)[:, 0]
    np.testing.assert_allclose(found, truth, rtol=0, atol=FLOAT32)
