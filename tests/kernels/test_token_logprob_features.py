"""token_logprob's ignored rows, entropy, answers and vocabulary shards, against the reference in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from trace_fast.errors import ConfigError
from trace_fast.kernels.token_logprob import (
    merge_parts,
    segment_mean_logprob,
    token_logprob,
    token_logprob_parts,
    why_not,
)

BACKENDS = ["torch", "reference"]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"softcap": 7.0, "logit_scale": 1.7, "temperature": 1.3, "bias": True},
}
HIDDEN = 24
LARGEST_LOGIT = 40  # of rows and weights from a normal distribution, with a margin
# Every logit is a sum of HIDDEN products, each rounded once; the sums over the vocabulary round relative to 1.
SLACK = LARGEST_LOGIT * HIDDEN * torch.finfo(torch.float32).eps


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def problem(rows: int, vocabulary: int, features: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    settings = {name: value for name, value in features.items() if name != "bias"}
    if features.get("bias"):
        settings["bias_V"] = torch.randn(vocabulary)
    tensors = torch.randn(rows, HIDDEN), torch.randn(vocabulary, HIDDEN), torch.randint(0, vocabulary, (rows,))
    return tensors, settings


def doubled(values: tuple[Any, ...] | dict[str, Any]) -> Any:
    """The same numbers in float64."""

    def one(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    if isinstance(values, dict):
        return {name: one(value) for name, value in values.items()}
    return tuple(one(value) for value in values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("vocabulary", [1, 9, 8193])
def test_entropy(backend: str, features: dict[str, Any], vocabulary: int) -> None:
    tensors, settings = problem(5, vocabulary, features)
    logprob, entropy = token_logprob(*tensors, **settings, return_entropy=True, backend=backend)
    bias = settings.get("bias_V", torch.zeros(vocabulary)).double()
    logits = (tensors[0].double() @ tensors[1].double().T + bias) * settings.get("logit_scale", 1.0)
    if "softcap" in settings:
        logits = settings["softcap"] * torch.tanh(logits / settings["softcap"])
    wanted = torch.distributions.Categorical(logits=logits / settings.get("temperature", 1.0)).entropy()
    torch.testing.assert_close(entropy.double(), wanted, rtol=0, atol=SLACK)
    assert (entropy >= 0).all()
    assert torch.equal(logprob, token_logprob(*tensors, **settings, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_of_impossible_tokens_and_of_a_certain_one(backend: str) -> None:
    hidden = torch.ones(1, 1)
    bias = torch.full((9000,), float("-inf"))
    bias[[8500, 8600]] = 3.0  # everything before them is impossible, also the whole first chunk
    weight = torch.zeros(9000, 1)
    targets = torch.tensor([8500])
    logprob, entropy = token_logprob(hidden, weight, targets, bias_V=bias, return_entropy=True, backend=backend)
    torch.testing.assert_close(logprob, torch.tensor([0.5]).log())
    torch.testing.assert_close(entropy, torch.tensor([2.0]).log())
    bias[8600] = float("-inf")
    logprob, entropy = token_logprob(hidden, weight, targets, bias_V=bias, return_entropy=True, backend=backend)
    assert logprob.item() == 0.0
    assert entropy.item() == 0.0
    impossible = token_logprob(hidden, weight, torch.tensor([0]), bias_V=bias, backend=backend)
    assert impossible.item() == float("-inf")


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_rows_are_zero_whatever_they_hold(backend: str) -> None:
    (hidden, weight, targets), _ = problem(6, 50, {})
    clean, clean_entropy = token_logprob(hidden, weight, targets, return_entropy=True, backend=backend)
    targets[1], targets[4] = -100, -100
    hidden[4] = float("nan")
    got, entropy = token_logprob(
        hidden, weight, targets, ignore_index=-100, return_entropy=True, backend=backend
    )
    ignored = targets == -100
    assert (got[ignored] == 0).all()
    assert (entropy[ignored] == 0).all()
    assert torch.equal(got[~ignored], clean[~ignored])
    assert torch.equal(entropy[~ignored], clean_entropy[~ignored])


def test_an_id_can_be_ignored_though_it_is_in_the_vocabulary() -> None:
    (hidden, weight, targets), _ = problem(3, 7, {})
    targets[:] = torch.tensor([0, 3, 6])
    assert (token_logprob(hidden, weight, targets, ignore_index=3) == 0).tolist() == [False, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_means_of_answers(backend: str, offsets_dtype: torch.dtype) -> None:
    lengths = [1, 63, 2, 60, 1, 5]
    tensors, settings = problem(sum(lengths), 300, FEATURES["everything"])
    cu = torch.tensor([0, *lengths]).cumsum(0).to(offsets_dtype)
    means, logprobs = segment_mean_logprob(*tensors, cu, **settings, backend=backend)
    wanted = token_logprob(*doubled(tensors), **doubled(settings), backend="reference")
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=SLACK)
    expected = torch.stack([part.mean() for part in wanted.split(lengths)])
    torch.testing.assert_close(means, expected, rtol=0, atol=SLACK)
    assert torch.equal(logprobs, token_logprob(*tensors, **settings, backend=backend))
    own = torch.stack([part.double().mean() for part in logprobs.split(lengths)])
    torch.testing.assert_close(means, own, rtol=63 * torch.finfo(torch.float64).eps, atol=0)  # summed in float64


def test_a_mean_does_not_depend_on_other_answers() -> None:
    lengths = [3, 63, 17, 1]
    (hidden, weight, targets), _ = problem(sum(lengths), 300, {})
    cu = torch.tensor([0, *lengths]).cumsum(0)
    means, _ = segment_mean_logprob(hidden, weight, targets, cu)
    for segment in range(4):
        rows = slice(int(cu[segment]), int(cu[segment + 1]))
        alone, _ = segment_mean_logprob(hidden[rows], weight, targets[rows], torch.tensor([0, lengths[segment]]))
        assert torch.equal(alone[0], means[segment])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_rows_do_not_count_in_a_mean(backend: str) -> None:
    (hidden, weight, targets), _ = problem(7, 40, {})
    every = token_logprob(hidden, weight, targets, backend=backend)
    targets[[1, 5, 6]] = -100
    cu = torch.tensor([0, 3, 5, 7])
    means, _ = segment_mean_logprob(hidden, weight, targets, cu, ignore_index=-100, backend=backend)
    torch.testing.assert_close(means[0], every[[0, 2]].double().mean())
    torch.testing.assert_close(means[1], every[[3, 4]].double().mean())
    assert means[2].isnan()


def test_no_answers() -> None:
    (hidden, weight, targets), _ = problem(1, 5, {})
    for backend in BACKENDS:
        means, logprobs = segment_mean_logprob(hidden[:0], weight, targets[:0], torch.zeros(1).int(), backend=backend)
        assert (means.shape, logprobs.shape) == ((0,), (0,))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("cuts", [[0, 9000], [0, 1, 4500, 9000], [0, 8192, 8999, 9000]])
def test_shards_of_the_vocabulary_merge_to_the_whole(backend: str, features: dict[str, Any], cuts: list[int]) -> None:
    (hidden, weight, targets), settings = problem(11, 9000, features)
    bias = settings.pop("bias_V", None)
    targets[:3] = torch.tensor([0, 8999, 8192])
    shards = [
        token_logprob_parts(
            hidden,
            weight[first:last],
            targets,
            first,
            bias_V=None if bias is None else bias[first:last],
            backend=backend,
            **settings,
        )
        for first, last in pairwise(cuts)
    ]
    for (first, last), shard in zip(pairwise(cuts), shards, strict=True):
        elsewhere = (targets < first) | (targets >= last)
        assert (shard.target_M[elsewhere] == 0).all()
        assert (shard.sum_M >= 1).all()
    merged = merge_parts(*(torch.stack(part) for part in zip(*shards, strict=True)))
    settings = doubled(settings | {"bias_V": bias})
    wanted = token_logprob(*doubled((hidden, weight, targets)), backend="reference", **settings)
    torch.testing.assert_close(merged.double(), wanted, rtol=0, atol=SLACK)
    assert (merged <= 0).all()


def test_a_shard_of_impossible_tokens_adds_nothing() -> None:
    """flashinfer #4054: merging with an empty state gave NaN."""
    (hidden, weight, targets), _ = problem(4, 20, {})
    bias = torch.cat([torch.zeros(10), torch.full((10,), float("-inf"))])
    shards = [token_logprob_parts(hidden, weight[:10], targets % 10, 0, bias_V=bias[:10])]
    shards.append(token_logprob_parts(hidden, weight[10:], targets % 10, 10, bias_V=bias[10:]))
    merged = merge_parts(*(torch.stack(part) for part in zip(*shards, strict=True)))
    torch.testing.assert_close(merged, token_logprob(hidden, weight[:10], targets % 10))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target", [-1, -100, 20, 2**40])
def test_a_target_in_no_shard_or_in_two_is_never_a_number(backend: str, target: int) -> None:
    (hidden, weight, targets), _ = problem(3, 20, {})
    targets[:] = torch.tensor([3, target, 10])
    hidden.requires_grad_()
    shards = [token_logprob_parts(hidden, weight[:8], targets, 0, backend=backend)]
    shards.append(token_logprob_parts(hidden, weight[8:], targets, 8, backend=backend))
    assert [part.held_M.tolist() for part in shards] == [[1, 0, 0], [0, 0, 1]]
    merged = merge_parts(*(torch.stack(part) for part in zip(*shards, strict=True)))
    assert merged.isnan().tolist() == [False, True, False]
    (gradient,) = torch.autograd.grad(merged.nan_to_num().sum() + merged[1], hidden)
    assert gradient.isnan().any(1).tolist() == [False, True, False]
    shards.append(shards[0])  # a shard that came twice
    merged = merge_parts(*(torch.stack(part) for part in zip(*shards, strict=True)))
    assert merged.isnan().tolist() == [True, True, False]


def test_matrices_may_have_any_strides() -> None:
    (hidden, weight, targets), _ = problem(9, 31, {})
    wide = torch.randn(9, 2 * HIDDEN)
    wide[:, ::2] = hidden
    spread = torch.stack([targets, targets], 1)[:, 0]
    got = token_logprob(wide[:, ::2], weight.T.contiguous().T, spread)
    torch.testing.assert_close(got, token_logprob(hidden, weight, targets), rtol=0, atol=SLACK)


def test_why_not_names_the_reason() -> None:
    cpu = torch.device("cpu")
    for backend in BACKENDS:
        assert why_not(backend, device=cpu, dtype=torch.bfloat16) is None
    assert "expected one of" in str(why_not("cutlass", device=cpu, dtype=torch.float32))
    assert why_not("triton", device=cpu, dtype=torch.float32) is not None  # the interpreter has tests of its own


def test_an_explicit_choice_that_cannot_run_raises() -> None:
    (hidden, weight, targets), _ = problem(2, 5, {})
    with pytest.raises(ConfigError, match="token_logprob: backend 'triton': Triton"):
        token_logprob(hidden, weight, targets, backend="triton")


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor([0, 2]), r"cu_targets: expected offsets from 0 to 3, got 0 to 2"),
        (torch.tensor([1, 3]), r"cu_targets: expected offsets from 0 to 3, got 1 to 3"),
        (torch.tensor([0, 2, 2, 3]), "cu_targets: expected increasing offsets, got 2 then 2 at segment 1"),
        (torch.tensor([0, 5, 3]), "cu_targets: expected increasing offsets, got 5 then 3 at segment 1"),
        (torch.tensor([0.0, 3.0]), "cu_targets: expected dtype int32 or int64, got torch.float32"),
        (torch.tensor([[0, 3]]), r"cu_targets: expected a \(segments \+ 1,\) tensor, got shape \(1, 2\)"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "cu_targets: expected device cpu, got meta"),
    ],
)
def test_bad_offsets_are_named(offsets: torch.Tensor, message: str) -> None:
    (hidden, weight, targets), _ = problem(3, 5, {})
    with pytest.raises(ConfigError, match=message):
        segment_mean_logprob(hidden, weight, targets, offsets)


def test_bad_shards_are_named() -> None:
    part = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"merge_parts: sum: expected shape \(2, 3\), got \(2, 4\)"):
        merge_parts(part, torch.zeros(2, 4), part, part)
    with pytest.raises(ConfigError, match=r"merge_parts: held: expected a floating dtype, got torch.bool"):
        merge_parts(part, part, part, part.bool())
    with pytest.raises(ConfigError, match=r"merge_parts: max: expected a \(shards, rows\) tensor, got shape \(3,\)"):
        merge_parts(part[0], part[0], part[0], part[0])
    (hidden, weight, targets), _ = problem(3, 5, {})
    with pytest.raises(ConfigError, match="vocabulary_start: expected 0 or more, got -1"):
        token_logprob_parts(hidden, weight, targets, -1)
    with pytest.raises(ConfigError, match=r"targets: expected ids in 0\.\.4 or -100, got -1\.\.2"):
        token_logprob(hidden, weight, torch.tensor([-100, -1, 2]), ignore_index=-100)
