"""The Triton kernels of token_logprob in Triton's interpreter: run with TRITON_INTERPRET=1, in a process of their own.

bfloat16 is not among the dtypes: the interpreter multiplies its bits. The kernels are the same for float16, and
``make kernels-check`` compiles both.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from derivative_refusals import expect_first_order_only, expect_no_forward_mode

from trace_fast.errors import ConfigError
from trace_fast.kernels.token_logprob import (
    merge_parts,
    segment_mean_logprob,
    token_logprob,
    token_logprob_parts,
    triton_impl,
    why_not,
)
from trace_fast.kernels.token_logprob.triton_impl import OPS

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not triton_impl.INTERPRETED, reason="needs TRITON_INTERPRET=1 before Triton is imported"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of lanes past the end that are never stored
]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 4.0},
    "everything": {"softcap": 7.0, "logit_scale": 1.7, "temperature": 1.3, "bias": True},
}
# Rows: half a block, one more than that, more than a block. Hidden sizes: with descriptors (16-byte rows) and without,
# both with a remainder. Vocabularies around one, two and four tiles.
SHAPES = [(1, 1, 40), (5, 300, 72), (65, 513, 33), (130, 256, 8)]
DTYPES = [torch.float32, torch.float16]
EPS = torch.finfo(torch.float32).eps


def problem(rows: int, vocabulary: int, hidden: int, dtype: torch.dtype, *, bias: bool) -> dict[str, torch.Tensor]:
    tensors = {"hidden_MH": torch.randn(rows, hidden), "weight_VH": torch.randn(vocabulary, hidden) / 2}
    if bias:
        tensors["bias_V"] = torch.randn(vocabulary)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def settings_of(features: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in features.items() if name != "bias"}


def some_targets(rows: int, vocabulary: int) -> torch.Tensor:
    targets = torch.randint(0, vocabulary, (rows,))
    targets[0], targets[-1] = 0, vocabulary - 1
    return targets


def slack(tensors: dict[str, torch.Tensor]) -> float:
    """One rounding of every product and sum of the largest logit that these tensors could give."""
    hidden, weight = tensors["hidden_MH"].float(), tensors["weight_VH"].float()
    return hidden.shape[1] * EPS * float(hidden.norm(dim=1).max() * weight.norm(dim=1).max() + 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize(("rows", "vocabulary", "hidden"), SHAPES)
def test_equals_the_oracle(
    features: dict[str, Any], rows: int, vocabulary: int, hidden: int, dtype: torch.dtype
) -> None:
    tensors = problem(rows, vocabulary, hidden, dtype, bias="bias" in features)
    call = {"targets_M": some_targets(rows, vocabulary), **settings_of(features)}
    wanted, wanted_entropy = token_logprob(return_entropy=True, backend="reference", **call, **doubled(tensors))
    plain = token_logprob(backend="triton", **call, **tensors)
    logprob, entropy = token_logprob(return_entropy=True, backend="triton", **call, **tensors)
    assert plain.dtype == logprob.dtype == entropy.dtype == torch.float32
    for got, truth in ((plain, wanted), (logprob, wanted), (entropy, wanted_entropy)):
        torch.testing.assert_close(got.double(), truth, rtol=0, atol=slack(tensors))
    assert (plain <= 0).all()
    assert (entropy >= 0).all()


@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_logits_far_from_zero(level: float) -> None:
    """verl #7439 and #2656: a maximum that starts at 0, and a tail that adds exp(0)."""
    tensors = problem(3, 300, 16, torch.float32, bias=True)
    tensors["bias_V"] += level
    targets = some_targets(3, 300)
    got = token_logprob(targets_M=targets, backend="triton", **tensors)
    wanted = token_logprob(targets_M=targets, backend="reference", **doubled(tensors))
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2 * 2**-10)  # steps of a float32 logit at 1e4
    assert (got <= 0).all()


def test_peaked_and_impossible_logits() -> None:
    hidden, weight, targets = torch.ones(3, 8), torch.zeros(700, 8), torch.tensor([699, 0, 650])
    bias = torch.full((700,), float("-inf"))  # whole tiles of impossible tokens
    bias[[650, 699]] = torch.tensor([0.0, 90.0])
    logprob, entropy = token_logprob(hidden, weight, targets, bias_V=bias, return_entropy=True, backend="triton")
    assert logprob.tolist() == [0.0, float("-inf"), -90.0]
    assert entropy.tolist() == pytest.approx([91 * 2.718281828459045**-90] * 3, abs=1e-30)


def test_a_broken_row_is_nan_and_leaves_the_others() -> None:
    tensors = problem(70, 300, 16, torch.float16, bias=False)
    targets = some_targets(70, 300)
    clean = token_logprob(targets_M=targets, backend="triton", **tensors)
    tensors["hidden_MH"][2], tensors["hidden_MH"][69] = float("nan"), float("inf")
    got = token_logprob(targets_M=targets, backend="triton", **tensors)
    assert got.isnan().nonzero()[:, 0].tolist() == [2, 69]
    assert torch.equal(got[~got.isnan()], clean[~got.isnan()])


def exact_problem(rows: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Products and sums without rounding, so that only the order of this op's own sums could show."""
    hidden, weight = torch.randint(-4, 5, (rows, 32)) / 8, torch.randint(-4, 5, (vocabulary, 32)) / 8
    return {"hidden_MH": hidden.half(), "weight_VH": weight.half()}


def test_a_row_does_not_depend_on_the_others() -> None:
    tensors = exact_problem(200, 700)
    targets = some_targets(200, 700)
    together = token_logprob(targets_M=targets, backend="triton", **tensors)
    for some in (slice(0, 1), slice(199, 200), slice(60, 130)):
        alone = token_logprob(tensors["hidden_MH"][some], tensors["weight_VH"], targets[some], backend="triton")
        assert torch.equal(alone, together[some])


@pytest.mark.parametrize("processors", [1, 3, 7, 132])
def test_results_do_not_depend_on_how_tiles_are_shared_out(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = problem(140, 1100, 16, torch.float16, bias=False)
    targets = some_targets(140, 1100)
    wanted = token_logprob(targets_M=targets, backend="triton", **tensors)
    monkeypatch.setattr(triton_impl, "_processors", lambda device: processors)
    assert torch.equal(token_logprob(targets_M=targets, backend="triton", **tensors), wanted)


@pytest.mark.parametrize("scratch_bytes", [48 << 20, 1])
def test_means_of_answers(scratch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the smallest scratch the rows run in two slices; an answer lies in both."""
    lengths = [1, 63, 2, 80, 5]
    tensors = problem(sum(lengths), 300, 24, torch.float16, bias=True)
    targets = some_targets(sum(lengths), 300)
    targets[[1, 5, 64, 65]] = -100
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    call = {"targets_M": targets, "cu_targets_S": cu, "ignore_index": -100}
    wanted_means, wanted = segment_mean_logprob(backend="reference", **call, **doubled(tensors))
    unsliced = segment_mean_logprob(backend="triton", **call, **tensors)
    monkeypatch.setattr(triton_impl, "SCRATCH_BYTES", scratch_bytes)
    means, logprobs = segment_mean_logprob(backend="triton", **call, **tensors)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=slack(tensors))
    torch.testing.assert_close(means, wanted_means, rtol=0, atol=slack(tensors), equal_nan=True)
    assert means.isnan().tolist() == [False, False, True, False, False]
    assert torch.equal(means.nan_to_num(1), unsliced[0].nan_to_num(1))
    assert torch.equal(logprobs, unsliced[1])


def test_slices_of_rows_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = problem(300, 300, 16, torch.float16, bias=False)
    targets = some_targets(300, 300)

    def every_result() -> list[torch.Tensor]:
        scored = token_logprob(targets_M=targets, return_entropy=True, backend="triton", **tensors)
        return [*scored, *token_logprob_parts(targets_M=targets, vocabulary_start=7, backend="triton", **tensors)]

    wanted = every_result()
    monkeypatch.setattr(triton_impl, "SCRATCH_BYTES", 1)
    for got, whole in zip(every_result(), wanted, strict=True):
        assert torch.equal(got, whole)


def test_rows_outside_every_segment_are_nan() -> None:
    """Offsets on a GPU are not read back: wrong ones must not show uninitialised memory as numbers."""
    torch.use_deterministic_algorithms(False)  # memory as it comes: the NaN must be written on purpose
    tensors = problem(6, 20, 16, torch.float32, bias=False)
    arguments = (*tensors.values(), some_targets(6, 20), None, None, 1.0, 1.0)
    logprob, _, mean, _, _ = OPS.score(*arguments, torch.tensor([1, 3, 3, 9]), None, False)
    assert logprob.isnan().tolist() == [True, False, False, False, False, False]
    assert mean.isnan().tolist() == [False, True, False]


def test_ids_that_nobody_could_check_give_nan() -> None:
    tensors = problem(4, 20, 16, torch.float32, bias=False)
    arguments = (*tensors.values(), torch.tensor([0, 20, -1, -100]), None, None, 1.0, 1.0)
    logprob = OPS.score(*arguments, None, -100, False)[0]
    assert logprob.isnan().tolist() == [False, True, True, False]
    assert logprob[3] == 0


def test_no_rows_and_no_answers() -> None:
    tensors = problem(1, 20, 16, torch.float32, bias=False)
    tensors["hidden_MH"] = tensors["hidden_MH"][:0]
    targets = torch.zeros(0, dtype=torch.int64)
    means, logprobs = segment_mean_logprob(
        targets_M=targets, cu_targets_S=torch.zeros(1).int(), backend="triton", **tensors
    )
    assert (means.shape, logprobs.shape) == ((0,), (0,))


@pytest.mark.parametrize("cuts", [[0, 700], [0, 1, 300, 700]])
def test_shards_of_the_vocabulary(cuts: list[int]) -> None:
    tensors = problem(9, 700, 24, torch.float16, bias=True)
    hidden, weight, bias = tensors.values()
    targets = some_targets(9, 700)
    shards = []
    for first, last in pairwise(cuts):
        call = {"bias_V": bias[first:last], "softcap": 6.0}
        shard = token_logprob_parts(hidden, weight[first:last], targets, first, backend="triton", **call)
        call["bias_V"] = bias[first:last].double()
        truth = token_logprob_parts(
            hidden.double(), weight[first:last].double(), targets, first, backend="reference", **call
        )
        for got, wanted in zip(shard, truth, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=slack(tensors), atol=slack(tensors))
        shards.append(shard)
    merged = merge_parts(*(torch.stack(part) for part in zip(*shards, strict=True)))
    wanted = token_logprob(targets_M=targets, softcap=6.0, backend="reference", **doubled(tensors))
    torch.testing.assert_close(merged.double(), wanted, rtol=0, atol=slack(tensors))


def gradients(tensors: dict[str, torch.Tensor], loss: Any) -> dict[str, torch.Tensor]:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    grads = torch.autograd.grad(loss(leaves), list(leaves.values()))
    return {name: grad.double() for name, grad in zip(leaves, grads, strict=True)}


def eager_logprob(
    leaves: dict[str, torch.Tensor], targets: torch.Tensor, settings: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As a trainer writes it: logits in the model's dtype, softmax in float32."""
    logits = F.linear(leaves["hidden_MH"], leaves["weight_VH"], leaves.get("bias_V")) * settings.get("logit_scale", 1.0)
    if "softcap" in settings:
        logits = settings["softcap"] * torch.tanh(logits / settings["softcap"])
    logprob = torch.log_softmax((logits / settings.get("temperature", 1.0)).float(), -1)
    return logprob.gather(1, targets[:, None])[:, 0], -(logprob.exp() * logprob).sum(1)


@pytest.mark.parametrize("chunk", [4096, 64])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_gradients_are_as_exact_as_eager_ones(
    features: dict[str, Any], dtype: torch.dtype, entropy: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_impl, "CHUNK_ROWS", chunk)
    monkeypatch.setattr(triton_impl, "CHUNK_COLUMNS", chunk)
    tensors = problem(70, 150, 24, dtype, bias="bias" in features)
    targets, settings, factors = some_targets(70, 150), settings_of(features), torch.randn(2, 70).double()
    if not entropy:
        factors[1] = 0

    def loss(backend: str) -> Any:
        def of(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
            if backend == "eager":
                logprob, entropy_M = eager_logprob(leaves, targets, settings)
            elif entropy:
                logprob, entropy_M = token_logprob(
                    targets_M=targets, return_entropy=True, backend=backend, **settings, **leaves
                )
            else:
                logprob = token_logprob(targets_M=targets, backend=backend, **settings, **leaves)
                entropy_M = torch.zeros(())
            return (logprob * factors[0] + entropy_M * factors[1]).sum()

        return of

    got, wanted = gradients(tensors, loss("triton")), gradients(doubled(tensors), loss("reference"))
    eager = gradients(tensors, loss("eager"))
    for name, truth in wanted.items():
        error, allowed = (got[name] - truth).abs().max(), (eager[name] - truth).abs().max()
        # one more rounding than eager has: its sums are not rounded to the dtype between chunks either
        rounding = torch.finfo(dtype).eps + 70 * EPS
        assert error <= allowed + rounding * truth.abs().max(), name


def test_an_ignored_broken_row_reaches_nobody() -> None:
    tensors = problem(5, 30, 16, torch.float32, bias=True)
    targets = torch.tensor([3, -100, 4, -100, 29])
    clean = {**tensors, "hidden_MH": tensors["hidden_MH"].masked_fill((targets == -100)[:, None], 0)}
    tensors["hidden_MH"][1], tensors["hidden_MH"][3] = float("nan"), float("inf")

    def loss(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        call = {"ignore_index": -100, "return_entropy": True, "backend": "triton"}
        logprob, entropy = token_logprob(targets_M=targets, **call, **leaves)
        return (logprob + entropy).sum()

    broken, wanted = gradients(tensors, loss), gradients(clean, loss)
    assert (broken["hidden_MH"][targets == -100] == 0).all()
    for name, grad in wanted.items():
        assert torch.equal(broken[name], grad)


def test_gradients_through_shards_of_the_vocabulary() -> None:
    tensors = problem(9, 60, 16, torch.float32, bias=True)
    targets, factors = some_targets(9, 60), torch.randn(9).double()

    def whole(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        return (token_logprob(targets_M=targets, backend="reference", softcap=5.0, **leaves) * factors).sum()

    def sharded(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden, weight, bias = leaves.values()
        shards = [
            token_logprob_parts(
                hidden, weight[a:b], targets, a, bias_V=bias[a:b], softcap=5.0, backend="triton"
            )
            for a, b in pairwise([0, 1, 33, 60])
        ]
        return (merge_parts(*(torch.stack(part) for part in zip(*shards, strict=True))) * factors).sum()

    got, wanted = gradients(tensors, sharded), gradients(doubled(tensors), whole)
    for name, truth in wanted.items():
        torch.testing.assert_close(got[name], truth, rtol=0, atol=60 * slack(tensors) * float(truth.abs().max()))


def test_custom_ops_pass_opcheck() -> None:
    torch.use_deterministic_algorithms(False)  # opcheck compares two runs, and NaN of unused memory is not equal to NaN
    hidden, weight, bias = problem(6, 40, 16, torch.float16, bias=True).values()
    targets = torch.tensor([0, 39, 5, -100, 7, 7])
    plain = (hidden, weight, targets, bias, 5.0, 1.1, 0.9)
    leaves = (hidden.clone().requires_grad_(), weight.clone().requires_grad_(), targets, bias, 5.0, 1.1, 0.9)
    torch.library.opcheck(OPS.score, (*leaves, torch.tensor([0, 2, 6]), -100, True))
    torch.library.opcheck(OPS.score, (*leaves, None, -100, False))
    torch.library.opcheck(OPS.parts, (*leaves, 10))
    peak, slope, curve, spike = torch.randn(4, 6).unbind()
    torch.library.opcheck(OPS.backward, (*plain, peak + 9, slope, curve, spike, 3, True, True, True))


def test_compiles_without_graph_breaks() -> None:
    tensors = problem(6, 40, 16, torch.float32, bias=True)
    targets = some_targets(6, 40)

    def loss(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        call = {"return_entropy": True, "backend": "triton"}
        logprob, entropy = token_logprob(
            leaves["hidden_MH"], leaves["weight_VH"], targets, bias_V=leaves["bias_V"], **call
        )
        return (logprob - entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, wanted = gradients(tensors, compiled), gradients(tensors, loss)
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad)


def test_matrices_may_have_any_strides() -> None:
    hidden, weight = problem(9, 31, 24, torch.float16, bias=False).values()
    targets = some_targets(9, 31)
    wide = torch.randn(9, 48).half()
    wide[:, ::2] = hidden
    got = token_logprob(wide[:, ::2], weight.T.contiguous().T, targets, backend="triton")
    wanted = token_logprob(hidden, weight, targets, backend="triton")
    torch.testing.assert_close(got, wanted, rtol=0, atol=slack({"hidden_MH": hidden, "weight_VH": weight}))


def test_what_the_kernels_do_not_take_is_refused_by_name() -> None:
    cpu = torch.device("cpu")
    assert why_not("triton", device=cpu, dtype=torch.float16) is None
    assert "multiplies bfloat16 by its bits" in str(why_not("triton", device=cpu, dtype=torch.bfloat16))
    hidden, weight = problem(2, 5, 16, torch.float16, bias=False).values()
    targets = some_targets(2, 5)
    with pytest.raises(ConfigError, match=r"need rows and head of one dtype, got torch.float16 and torch.float32"):
        token_logprob(hidden, weight.float(), targets, backend="triton")
    with pytest.raises(ConfigError, match=r"take float32, bfloat16 or float16 rows, got torch.float64"):
        token_logprob(hidden.double(), weight.double(), targets, backend="triton")


def test_derivatives_that_it_does_not_have_are_refused() -> None:
    hidden, weight, targets = torch.randn(3, 16), torch.randn(20, 16), torch.tensor([0, 19, 5])

    def means(x: torch.Tensor) -> torch.Tensor:
        return segment_mean_logprob(x, weight, targets, torch.tensor([0, 2, 3]), backend="triton")[0]

    expect_no_forward_mode(means, hidden, "triton")
    expect_first_order_only(means, hidden, "triton")
