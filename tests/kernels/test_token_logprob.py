"""token_logprob against float64, at the vocabularies and logits that have gone wrong elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trace_fast.errors import ConfigError
from trace_fast.kernels.token_logprob import token_logprob
from trace_fast.kernels.token_logprob.torch_impl import VOCABULARY_CHUNK

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 4.0},
    "scale": {"logit_scale": 0.0625},
    "temperature": {"temperature": 0.7},
    "bias": {"bias": True},
    "everything": {"softcap": 7.0, "logit_scale": 1.7, "temperature": 1.3, "bias": True},
}


def problem(
    rows: int, vocabulary: int, hidden: int = 24, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + vocabulary)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[-1] = vocabulary - 1
    targets[0] = 0
    return torch.randn(rows, hidden).to(dtype), torch.randn(vocabulary, hidden).to(dtype), targets


def truth(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **features: Any) -> torch.Tensor:
    """Straight from the formula, in float64."""
    bias = features.get("bias_V")
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    logits = logits * features.get("logit_scale", 1.0)
    if "softcap" in features:
        logits = features["softcap"] * torch.tanh(logits / features["softcap"])
    logits = logits / features.get("temperature", 1.0)
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("vocabulary", [1, 7, VOCABULARY_CHUNK, VOCABULARY_CHUNK + 1, 50257])
def test_equals_the_formula(backend: str, features: dict[str, Any], vocabulary: int) -> None:
    hidden, weight, targets = problem(5, vocabulary)
    settings = {k: v for k, v in features.items() if k != "bias"}
    if features.get("bias"):
        settings["bias_V"] = torch.randn(vocabulary)
    got = token_logprob(hidden, weight, targets, backend=backend, **settings)
    assert got.dtype == torch.float32
    wanted = truth(hidden, weight, targets, **settings)
    # float32: 24 products and additions a logit of size <= 30, then one log-sum-exp
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=30 * 24 * torch.finfo(torch.float32).eps)
    assert (got <= 0).all()


@pytest.mark.parametrize("vocabulary", [129920, 151936])
def test_vocabularies_that_are_no_multiple_of_the_chunk(vocabulary: int) -> None:
    """verl #2656: the tail of the vocabulary added exp(0), and a log-probability became +123.7."""
    hidden, weight, targets = problem(3, vocabulary, hidden=8)
    far_below = torch.full((vocabulary,), -200.0)
    for bias in (None, far_below):
        got = token_logprob(hidden, weight, targets, bias_V=bias)
        torch.testing.assert_close(got.double(), truth(hidden, weight, targets), rtol=0, atol=1e-4)
        assert (got <= 0).all()


def test_all_negative_logits() -> None:
    """verl #7439: a running maximum that starts at 0 is wrong when every logit is below."""
    hidden, weight, targets = problem(4, 30000)
    bias = torch.full((30000,), -1e4)
    got = token_logprob(hidden, weight, targets, bias_V=bias)
    # at magnitude 1e4 a float32 logit has steps of 2^-10
    torch.testing.assert_close(got.double(), truth(hidden, weight, targets), rtol=0, atol=2 * 2**-10)


def test_a_certain_token_is_zero_and_never_above() -> None:
    hidden, weight, targets = problem(64, 20000)
    bias = torch.zeros(20000)
    bias[targets] = 200.0
    got = token_logprob(hidden, weight, targets, bias_V=bias)
    assert (got <= 0).all()
    certain = token_logprob(torch.ones(1, 1), torch.tensor([[90.0], [0.0]]), torch.tensor([0]))
    assert certain.item() == 0.0
    hopeless = token_logprob(torch.ones(1, 1), torch.tensor([[90.0], [0.0]]), torch.tensor([1]))
    assert hopeless.item() == -90.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_do_not_round_the_logits(dtype: torch.dtype) -> None:
    hidden, weight, targets = problem(40, 9000, hidden=64, dtype=dtype)
    wanted = truth(hidden, weight, targets)
    error = (token_logprob(hidden, weight, targets).double() - wanted).abs().max()
    naive = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]
    assert error < 1e-4
    assert error < (naive.double() - wanted).abs().max() / 20


@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 600])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    hidden, weight, targets = problem(rows, 10000)
    together = token_logprob(hidden, weight, targets)
    for i in {0, rows // 2, rows - 1}:
        assert torch.equal(token_logprob(hidden[i : i + 1], weight, targets[i : i + 1]), together[i : i + 1])
    order = torch.randperm(rows)
    assert torch.equal(token_logprob(hidden[order], weight, targets[order]), together[order])


def test_a_broken_row_is_nan_and_leaves_the_others() -> None:
    hidden, weight, targets = problem(6, 10000)
    clean = token_logprob(hidden, weight, targets)
    hidden[2] = float("nan")
    got = token_logprob(hidden, weight, targets)
    assert got[2].isnan()
    others = torch.tensor([0, 1, 3, 4, 5])
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-12},
        {"temperature": 1e12},
        {"softcap": 1e-12},
        {"softcap": 1e12},
        {"logit_scale": 1e12, "temperature": 1e-12},
        {"logit_scale": -1e12, "softcap": 1e12, "temperature": 1e-12},
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_give_numbers(backend: str, settings: dict[str, float]) -> None:
    hidden, weight, targets = problem(4, 9)
    found = token_logprob(hidden, weight, targets, backend=backend, **settings)
    wanted = token_logprob(hidden.double(), weight.double(), targets, backend="reference", **settings)
    assert found.isfinite().all()
    # logits are sums of 24 products up to 40, and what is done to them is relative to the size that they get
    size = 40 * abs(settings.get("logit_scale", 1.0)) / settings.get("temperature", 1.0)
    atol = 24 * max(size, 1.0) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=atol)


def test_no_rows() -> None:
    hidden, weight, targets = problem(1, 5)
    assert token_logprob(hidden[:0], weight, targets[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets_M": torch.tensor([5])}, r"targets: expected ids in 0\.\.4, got 5\.\.5"),
        ({"targets_M": torch.tensor([-1])}, r"targets: expected ids in 0\.\.4, got -1\.\.-1"),
        ({"targets_M": torch.tensor([0], dtype=torch.int32)}, "targets: expected dtype int64, got torch.int32"),
        ({"targets_M": torch.tensor([0, 1])}, r"targets: expected shape \(1,\), got \(2,\)"),
        ({"weight_VH": torch.zeros(5, 3)}, "weight: expected hidden size 24, got 3"),
        ({"hidden_MH": torch.zeros(24)}, r"hidden: expected a \(rows, hidden\) tensor, got shape \(24,\)"),
        ({"bias_V": torch.zeros(4)}, r"bias: expected shape \(5,\), got \(4,\)"),
        ({"temperature": 0.0}, r"temperature: expected a number from 1e-12 to 1e\+12, got 0.0"),
        ({"temperature": 1e-40}, "temperature: expected a number from .* got 1e-40"),  # infinite logits in float32
        ({"temperature": 1e300}, r"temperature: expected a number from .* got 1e\+300"),
        ({"temperature": float("nan")}, "temperature: expected a number from .* got nan"),
        ({"softcap": 0.0}, r"softcap: expected None or a number from 1e-12 to 1e\+12, got 0.0"),
        ({"softcap": float("inf")}, "softcap: expected None or a number from .* got inf"),
        ({"softcap": 1e-320}, "softcap: expected None or a number from .* got 1e-320"),
        ({"logit_scale": float("inf")}, r"logit_scale: expected a number of size up to 1e\+12, got inf"),
        ({"logit_scale": float("nan")}, "logit_scale: expected a number of size up to .* got nan"),
        ({"logit_scale": -1e39}, r"logit_scale: expected a number of size up to .* got -1e\+39"),
        ({"hidden_MH": torch.zeros(1, 24, dtype=torch.int64)}, "hidden: expected a floating dtype, got torch.int64"),
        ({"weight_VH": torch.zeros(5, 24, device="meta")}, "weight: expected device cpu, got meta"),
        ({"weight_VH": torch.zeros(0, 24)}, r"weight: expected at least one entry and one column, got shape \(0, 24\)"),
        ({"backend": "cutlass"}, "backend 'cutlass': expected one of reference, torch, triton"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    hidden, weight, _ = problem(1, 5)
    call = {"hidden_MH": hidden, "weight_VH": weight, "targets_M": torch.tensor([0]), **arguments}
    with pytest.raises(ConfigError, match=message):
        token_logprob(**call)
