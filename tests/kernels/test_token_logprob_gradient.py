"""Gradients of token_logprob's torch implementation against autograd of the reference in float64; the custom ops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from trace_fast.kernels.token_logprob import merge_parts, segment_mean_logprob, token_logprob, token_logprob_parts
from trace_fast.kernels.token_logprob.torch_impl import OPS, ROW_BLOCK, VOCABULARY_CHUNK

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 4.0},
    "everything": {"softcap": 7.0, "logit_scale": 1.7, "temperature": 1.3, "bias": True},
}
HIDDEN = 24


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def problem(rows: int, vocabulary: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    tensors = {"hidden_MH": torch.randn(rows, HIDDEN), "weight_VH": torch.randn(vocabulary, HIDDEN) / 2}
    if bias:
        tensors["bias_V"] = torch.randn(vocabulary)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def gradients(
    tensors: dict[str, torch.Tensor], loss: Any, *, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """d loss(leaves) / d leaves, in float64 to compare."""
    leaves = {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in tensors.items()}
    grads = torch.autograd.grad(loss(leaves), list(leaves.values()))
    for grad, leaf in zip(grads, leaves.values(), strict=True):
        assert grad.dtype == leaf.dtype
    return {name: grad.double() for name, grad in zip(leaves, grads, strict=True)}


def assert_as_exact_as_eager(got: Any, eager: Any, wanted: Any, dtype: torch.dtype) -> None:
    """Error <= the eager one's + a rounding of the result + one float32 rounding per term of the longest sum."""
    for name, truth in wanted.items():
        error, allowed = (got[name] - truth).abs().max(), (eager[name] - truth).abs().max()
        slack = torch.finfo(dtype).eps + HIDDEN * ROW_BLOCK * torch.finfo(torch.float32).eps
        assert error <= allowed + slack * truth.abs().max(), name


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype"),
    [
        (5, 9, torch.float32),
        (1, 1, torch.float32),
        (ROW_BLOCK + 1, 300, torch.float32),
        (7, VOCABULARY_CHUNK + 1, torch.float32),
        (40, 700, torch.bfloat16),
        (40, 700, torch.float16),
        (40, 700, torch.float64),
    ],
)
def test_gradients_equal_those_of_the_oracle(
    features: dict[str, Any], rows: int, vocabulary: int, dtype: torch.dtype
) -> None:
    settings = {name: value for name, value in features.items() if name != "bias"}
    tensors = problem(rows, vocabulary, bias="bias" in features, dtype=dtype)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[0] = -100 if rows > 1 else 0
    cu = torch.tensor([0, rows // 2, rows] if rows > 1 else [0, 1])
    factors = torch.randn(3, rows, dtype=torch.float64)

    def loss(backend: str) -> Any:
        def of(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
            shared = {"ignore_index": -100, "backend": backend, **settings, **leaves}
            logprob, entropy = token_logprob(targets_M=targets, return_entropy=True, **shared)
            means, again = segment_mean_logprob(targets_M=targets, cu_targets_S=cu, **shared)
            terms = logprob * factors[0] + entropy * factors[1] + (again + 1).square() * factors[2]
            return terms.sum() + (means * factors[0, : len(means)]).sum()

        return of

    wanted = gradients(tensors, loss("reference"), dtype=torch.float64)
    assert_as_exact_as_eager(
        gradients(tensors, loss("torch")), gradients(tensors, loss("reference")), wanted, dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_threads_never_shows_in_values(dtype: torch.dtype) -> None:
    """With and without a gradient to come; two blocks of rows and two chunks. Gradients are sums over rows by torch's
    matrix products, which cut them by threads: they come again with the same number of them only."""
    rows, vocabulary = ROW_BLOCK + 3, VOCABULARY_CHUNK + 5
    tensors = problem(rows, vocabulary, bias=True, dtype=dtype)
    targets, factors = torch.randint(0, vocabulary, (rows,)), torch.randn(2, rows)

    def results() -> list[torch.Tensor]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        scored = token_logprob(targets_M=targets, softcap=5.0, return_entropy=True, **leaves)
        grads = torch.autograd.grad((torch.stack(scored) * factors).sum(), list(leaves.values()))
        return [*scored, token_logprob(targets_M=targets, softcap=5.0, **tensors), *grads]

    before = torch.get_num_threads()
    found: dict[int, list[torch.Tensor]] = {}
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found[threads] = results()
            assert all(map(torch.equal, found[threads], results())), f"repeated with {threads} threads"
    finally:
        torch.set_num_threads(before)
    for scored in found.values():
        assert all(map(torch.equal, scored[:3], found[1][:3])), "log-probability, entropy, and without a gradient"
    assert torch.equal(found[1][0], found[1][2])


@pytest.mark.parametrize("cuts", [[0, 60], [0, 1, 40, 60]])
def test_gradients_through_shards_of_the_vocabulary(cuts: list[int]) -> None:
    tensors = problem(9, 60, bias=True)
    targets = torch.randint(0, 60, (9,))
    factors = torch.randn(9, dtype=torch.float64)

    def whole(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        return (token_logprob(targets_M=targets, backend="reference", softcap=5.0, **leaves) * factors).sum()

    def sharded(backend: str) -> Any:
        def of(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
            shards = [
                token_logprob_parts(
                    leaves["hidden_MH"],
                    leaves["weight_VH"][first:last],
                    targets,
                    first,
                    bias_V=leaves["bias_V"][first:last],
                    softcap=5.0,
                    backend=backend,
                )
                for first, last in pairwise(cuts)
            ]
            return (merge_parts(*(torch.stack(part) for part in zip(*shards, strict=True))) * factors).sum()

        return of

    wanted = gradients(tensors, whole, dtype=torch.float64)
    eager = gradients(tensors, whole)
    for backend in ("torch", "reference"):
        assert_as_exact_as_eager(gradients(tensors, sharded(backend)), eager, wanted, torch.float32)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    for name in ("hidden_MH", "weight_VH", "bias_V"):
        tensors = problem(3, 11, bias=True)
        tensors[name].requires_grad_()
        targets = torch.tensor([0, 5, 10])
        token_logprob(targets_M=targets, **tensors).sum().backward()
        assert {key for key, tensor in tensors.items() if tensor.grad is not None} == {name}
        grad = tensors[name].grad
        tensors[name].grad = None
        token_logprob(targets_M=targets, backend="reference", **tensors).sum().backward()
        torch.testing.assert_close(grad, tensors[name].grad)


def test_an_ignored_broken_row_reaches_nobody() -> None:
    """prime-rl #2084: 0 times inf became NaN in every parameter."""
    tensors = problem(5, 30, bias=True)
    targets = torch.tensor([3, -100, 4, -100, 29])
    clean = {**tensors, "hidden_MH": tensors["hidden_MH"].clone()}
    tensors["hidden_MH"][1], tensors["hidden_MH"][3] = float("nan"), float("inf")
    clean["hidden_MH"][targets == -100] = 0

    def loss(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        logprob, entropy = token_logprob(targets_M=targets, ignore_index=-100, return_entropy=True, **leaves)
        return (logprob + entropy).sum()

    broken, wanted = gradients(tensors, loss), gradients(clean, loss)
    assert (broken["hidden_MH"][targets == -100] == 0).all()
    for name, grad in wanted.items():
        assert torch.equal(broken[name], grad)


def test_a_certain_token_has_a_finite_gradient() -> None:
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[90.0], [-90.0], [0.0]], requires_grad=True)
    for target in range(3):
        logprob, entropy = token_logprob(hidden, weight, torch.tensor([target]), return_entropy=True)
        grads = torch.autograd.grad(logprob.sum() + entropy.sum(), [hidden, weight])
        one_hot = torch.zeros(3).index_fill_(0, torch.tensor(target), 1.0)
        slope = one_hot - torch.tensor([1.0, 0.0, 0.0])  # target minus probabilities; the entropy is flat here
        torch.testing.assert_close(grads[1][:, 0], slope)
        torch.testing.assert_close(grads[0], (slope @ weight.detach())[None])


def op_arguments(dtype: torch.dtype) -> list[Any]:
    tensors = problem(6, 40, bias=True, dtype=dtype)
    hidden, weight, bias = (tensor.requires_grad_() for tensor in tensors.values())
    return [hidden, weight, torch.tensor([0, 39, 5, -100, 7, 7]), bias, 5.0, 1.1, 0.9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_custom_ops_pass_opcheck(dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(False)  # opcheck compares two runs, and NaN of unused memory is not equal to NaN
    arguments = op_arguments(dtype)
    starts = torch.tensor([0, 2, 6])
    torch.library.opcheck(OPS.score, (*arguments, starts, -100, True))
    torch.library.opcheck(OPS.score, (*arguments, None, -100, False))
    torch.library.opcheck(OPS.parts, (*arguments, 10))
    plain = [argument.detach() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    peak, slope, curve, spike = torch.randn(4, 6, dtype=accumulated).unbind()
    torch.library.opcheck(OPS.backward, (*plain, peak + 9, slope, curve, spike, 3, True, True, True))
    torch.library.opcheck(OPS.backward, (*plain, peak + 9, slope, curve[:0], spike, 0, True, False, False))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(backend: str) -> None:
    tensors = problem(6, 40, bias=True)
    targets, cu = torch.tensor([0, 39, 5, -100, 7, 7]), torch.tensor([0, 2, 6])

    def loss(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        logprob, entropy = token_logprob(
            leaves["hidden_MH"],
            leaves["weight_VH"],
            targets,
            bias_V=leaves["bias_V"],
            softcap=5.0,
            ignore_index=-100,
            return_entropy=True,
        )
        means, _ = segment_mean_logprob(
            leaves["hidden_MH"], leaves["weight_VH"], targets, cu, bias_V=leaves["bias_V"], ignore_index=-100
        )
        parts = token_logprob_parts(leaves["hidden_MH"], leaves["weight_VH"], targets, 0)
        return (logprob - entropy).sum() + means.square().sum() + parts.sum_M.log().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(tensors), loss(tensors))
    got, wanted = gradients(tensors, compiled), gradients(tensors, loss)
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad)


def test_ids_that_nobody_could_check_give_nan_not_numbers() -> None:
    """On a GPU and in compiled code ids are not read back; the op itself must not make numbers of a wrong one."""
    hidden, weight, _, bias, *settings = op_arguments(torch.float32)
    targets = torch.tensor([0, 40, -1, -100, 39, 1])
    logprob, _, means, _, _ = OPS.score(
        hidden, weight, targets, bias, *settings, torch.tensor([0, 1, 3, 6]), -100, False
    )
    assert logprob.isnan().tolist() == [False, True, True, False, False, False]
    assert means.isnan().tolist() == [False, True, False]
    (grad,) = torch.autograd.grad(logprob.sum(), hidden)
    assert grad.isnan().any(1).tolist() == [False, True, True, False, False, False]


def test_offsets_that_nobody_could_check_stay_inside_the_rows() -> None:
    hidden, weight, targets, bias, *settings = op_arguments(torch.float32)
    starts = torch.tensor([-5, 2, 1, 99])
    _, _, means, _, _ = OPS.score(hidden, weight, targets, bias, *settings, starts, -100, False)
    logprob = OPS.score(hidden, weight, targets, bias, *settings, None, -100, False)[0]
    torch.testing.assert_close(means[0], logprob[:2].double().mean())
    assert means[1].isnan()
    torch.testing.assert_close(means[2], logprob[2:].double().sum() / 3)  # four rows, one of them ignored
    (grad,) = torch.autograd.grad(means[0] + means[2], hidden)
    (wanted,) = torch.autograd.grad(logprob[:2].mean() + logprob[2:].sum() / 3, hidden)
    torch.testing.assert_close(grad, wanted)
