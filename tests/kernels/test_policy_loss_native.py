"""policy_loss in C++: its precision on every instruction set, its bits, its autograd, and what the module refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from policy_loss_problems import CONFIGS, UNIT, Batch, batch, by_hand, run

from trace_fast import native
from trace_fast.errors import TraceFastError
from trace_fast.kernels.policy_loss import PolicyLossConfig, policy_loss, why_not
from trace_fast.kernels.policy_loss.metrics import BINS, KL, LOSS, SUMS, bin_middle

MISSING = why_not("native", device=torch.device("cpu"), dtype=torch.float32)
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"native policy_loss: {MISSING}")
SETTINGS: dict[str, Any] = {
    "sequence_ratio": False,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "max_log_ratio": 20.0,
    "tis_cap": 2.0,
}


def kernels() -> list[str]:
    return list(native.module().elementwise_kernels()) if MISSING is None else []


def raw_tensors(problem: Batch) -> dict[str, torch.Tensor]:
    """As the native module takes them; outputs are filled with NaN or garbage, every token weighs 1."""
    rollouts = len(problem.cu_tokens_R1) - 1
    counts = torch.full((rollouts,), -99)
    native.module().policy_loss_counts(problem.mask_N, problem.cu_tokens_R1, counts, 1)
    return {
        "logprobs_N": problem.logprobs_N,
        "old_logprobs_N": problem.old_logprobs_N,
        "sampler_logprobs_N": problem.sampler_logprobs_N,
        "advantages_N": problem.advantages_N,
        "mask_N": problem.mask_N,
        "cu_tokens_R1": problem.cu_tokens_R1,
        "n_tokens_R": counts,
        "weight_R": torch.ones(rollouts, dtype=torch.float64),
        "grads_N": torch.full_like(problem.logprobs_N, float("nan")),
        "sums": torch.full((SUMS,), float("nan"), dtype=torch.float64),
        "histogram": torch.full((BINS,), -99),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", kernels() or ["baseline"])
def test_every_instruction_set_rounds_once(kernel: str, dtype: torch.dtype) -> None:
    """Half a unit of the gradient's dtype; in float64 the exponentials (1 unit each, arguments exact to one) and four
    products make 8."""
    problem = batch(dtype, spread=2.0)
    raw = raw_tensors(problem)
    native.module().policy_loss(raw, SETTINGS, 1, kernel)
    loss, grad, metrics = by_hand(problem, PolicyLossConfig(aggregation="token_mean"))
    n_tokens = metrics["n_tokens"]
    rounding = UNIT[dtype] if dtype == torch.float32 else 0.0
    error = abs(raw["grads_N"].double().numpy() - grad * n_tokens)
    # A log ratio of size x is off by x units, which the exponential turns into relative ones; x < 20 here.
    assert (error <= (rounding + (8 + 20) * UNIT[torch.float64]) * abs(grad * n_tokens)).all()
    assert float(raw["sums"][LOSS]) == pytest.approx(loss * n_tokens, rel=1e-12)
    assert float(raw["sums"][KL]) == pytest.approx(metrics["approx_kl"] * n_tokens, rel=1e-12)
    assert int(raw["histogram"].sum()) == n_tokens


@pytest.mark.parametrize("sequence", [False, True])
def test_any_threads_and_instruction_set_give_the_same_bits_and_leave_no_entry_unwritten(sequence: bool) -> None:
    problem = batch(torch.float32, [i * 37 % 1500 for i in range(120)])  # about 90,000 tokens: several blocks
    results = []
    for threads, kernel in [(1, kernels()[0]), (2, kernels()[0]), *((5, kernel) for kernel in kernels())]:
        raw = raw_tensors(problem)
        native.module().policy_loss(raw, SETTINGS | {"sequence_ratio": sequence}, threads, kernel)
        results.append([raw[name] for name in ("grads_N", "sums", "histogram", "n_tokens_R")])
    assert all(tensor.isfinite().all() for tensor in results[0])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kernel", kernels() or ["baseline"])
def test_a_sequence_ratio_is_that_of_tokens_which_all_have_its_log_ratio(kernel: str) -> None:
    """Rollouts over several blocks, within one, and of no trained token; the old log-probabilities are 0, so that no
    difference rounds: the same bits of gradients, sums and bins."""
    problem = batch(torch.float64, [20_000, 3, 700, 40_001, 1, 9], spread=0.3)
    problem.mask_N[-9:] = False
    problem.old_logprobs_N = torch.zeros_like(problem.old_logprobs_N)
    sequences = raw_tensors(problem)
    native.module().policy_loss(sequences, SETTINGS | {"sequence_ratio": True}, 2, kernel)
    tokens = raw_tensors(problem)
    tokens["logprobs_N"] = problem.logprobs_N.clone()
    for begin, end in itertools.pairwise(problem.cu_tokens_R1.tolist()):
        trained = problem.logprobs_N[begin:end].where(problem.mask_N[begin:end], 0.0)
        parts = [trained[part::8].cumsum(0)[-1:].sum() for part in range(8)]  # summed as the op does, in eight parts
        total = sum(map(float, parts))
        tokens["logprobs_N"][begin:end] = total / max(int(problem.mask_N[begin:end].sum()), 1)
    native.module().policy_loss(tokens, SETTINGS, 2, kernel)
    for name in ("grads_N", "sums", "histogram"):
        assert torch.equal(sequences[name], tokens[name]), name
    assert int(sequences["histogram"].sum()) == int(problem.mask_N.sum())


def test_bins_hold_the_log_ratios_they_say() -> None:
    """Every bin's middle is counted in that bin, with its sign; what is smaller than all of them, next to 0."""
    middles = bin_middle(torch.arange(BINS))
    assert (middles.diff() > 0).all()
    values = torch.cat((middles, torch.tensor([0.0, 1e-12, -1e-12], dtype=torch.float64)))
    zeros = torch.zeros_like(values)
    everything = torch.ones(len(values), dtype=torch.bool)
    raw = raw_tensors(Batch(values, zeros, zeros, zeros, everything, torch.tensor([0, len(values)])))
    native.module().policy_loss(raw, SETTINGS, 1, "baseline")
    expected = torch.ones(BINS, dtype=torch.int64)
    expected[BINS // 2] += 2
    expected[BINS // 2 - 1] += 1
    assert torch.equal(raw["histogram"], expected)


def test_gradient_is_that_of_finite_differences() -> None:
    problem = batch(torch.float64, (6, 4), kept=1.0, seed=2)
    ratios = (problem.logprobs_N - problem.old_logprobs_N).exp()
    assert min(float((ratios - corner).abs().min()) for corner in (0.8, 1.28)) > 1e-3  # differences stay on one side

    def loss(logprobs_N: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            logprobs_N,
            problem.old_logprobs_N,
            problem.advantages_N,
            problem.mask_N,
            problem.cu_tokens_R1,
            PolicyLossConfig(),
            sampler_logprobs_N=problem.sampler_logprobs_N,
            backend="native",
        ).loss

    assert torch.autograd.gradcheck(loss, (problem.logprobs_N.clone().requires_grad_(),), eps=1e-6)


def test_backward_scales_with_the_incoming_gradient() -> None:
    problem = batch(torch.float32)
    _, grad = run(problem, PolicyLossConfig(), "native")
    logprobs_N = problem.logprobs_N.clone().requires_grad_()
    loss = policy_loss(
        logprobs_N,
        problem.old_logprobs_N,
        problem.advantages_N,
        problem.mask_N,
        problem.cu_tokens_R1,
        PolicyLossConfig(),
        sampler_logprobs_N=problem.sampler_logprobs_N,
        backend="native",
    ).loss
    (3 * loss).backward()
    assert logprobs_N.grad is not None
    assert torch.equal(logprobs_N.grad, 3 * grad)


@pytest.mark.parametrize("name", CONFIGS)
def test_custom_op_passes_opcheck(name: str) -> None:
    from trace_fast.kernels.policy_loss.native_impl import policy_loss as op

    config, problem = CONFIGS[name], batch(torch.float32, (5, 0, 30))
    for tensor in (problem.logprobs_N, problem.old_logprobs_N, problem.sampler_logprobs_N, problem.advantages_N):
        tensor[~problem.mask_N] = 0  # opcheck compares inputs before and after, and NaN is not equal to itself
    arguments = (
        problem.logprobs_N.requires_grad_(),
        problem.old_logprobs_N,
        None if config.tis_cap is None else problem.sampler_logprobs_N,
        problem.advantages_N,
        problem.mask_N,
        problem.cu_tokens_R1,
        *(None, None, None),
        *(config.ratio, config.clip_low, config.clip_high, config.max_log_ratio, config.tis_cap),
        *(config.aggregation, config.divisor),
    )
    assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


def test_compiles_into_one_graph() -> None:
    problem, config = batch(torch.float32), PolicyLossConfig()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            logits - 1.0,
            problem.old_logprobs_N,
            problem.advantages_N,
            problem.mask_N,
            problem.cu_tokens_R1,
            config,
            sampler_logprobs_N=problem.sampler_logprobs_N,
            backend="native",
        ).loss

    inputs = [problem.logprobs_N.clone().requires_grad_() for _ in range(2)]
    for function, logits in zip((loss, torch.compile(loss, backend="aot_eager", fullgraph=True)), inputs, strict=True):
        function(logits).backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert torch.equal(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs_N": [0.0]}, "logprobs_N: expected a torch.Tensor, got .*list"),
        ({"logprobs_N": torch.zeros(8).half()}, "logprobs_N: expected torch.float32 or torch.float64"),
        ({"logprobs_N": torch.zeros(16)[::2]}, "logprobs_N: expected a contiguous tensor"),
        ({"old_logprobs_N": torch.zeros(9)}, r"old_logprobs_N: expected shape \(8,\), got shape \(9,\)"),
        ({"advantages_N": torch.zeros(8).double()}, "advantages_N: expected torch.float32"),
        ({"mask_N": torch.zeros(8)}, "mask_N: expected torch.bool, got torch.float32"),
        ({"mask_N": torch.zeros(8).bool().to("meta")}, "mask_N: expected a tensor on cpu, got meta"),
        ({"cu_tokens_R1": torch.tensor([0, 3, 9])}, "cu_tokens_R1: expected 8 as last offset .* got 9"),
        ({"cu_tokens_R1": torch.tensor([0, 9, 8])}, "cu_tokens_R1: expected offsets that never decrease"),
        ({"cu_tokens_R1": torch.tensor([0, -(2**60), 8])}, "cu_tokens_R1: expected offsets that never"),
        ({"cu_tokens_R1": torch.tensor([0, 3, 5, 8])}, r"cu_tokens_R1: expected shape \(3,\)"),
        ({"weight_R": torch.ones(2)}, "weight_R: expected torch.float64, got torch.float32"),
        ({"grads_N": torch.zeros(7)}, "grads_N: expected shape"),
        ({"sums": torch.zeros(3).double()}, "sums: expected shape"),
        ({"histogram": torch.zeros(3).long()}, "histogram: expected shape"),
    ],
)
def test_the_native_module_names_bad_tensors(change: dict[str, Any], message: str) -> None:
    good = raw_tensors(batch(torch.float32, (3, 5)))
    native.module().policy_loss(good, SETTINGS, 1, "baseline")
    with pytest.raises(ValueError, match=message):
        native.module().policy_loss(good | change, SETTINGS, 1, "baseline")


def test_a_defect_of_any_tensor_is_named(defect: Any) -> None:
    good = raw_tensors(batch(torch.float32, (3, 5)))
    assert len(good) == 11
    for name, tensor in good.items():
        if defect.affects(tensor):
            with pytest.raises(ValueError, match=f"^{name}: expected {defect.expected}"):
                native.module().policy_loss(good | {name: defect.spoil(tensor)}, SETTINGS, 1, "baseline")
    counted = {name: good[name] for name in ("mask_N", "cu_tokens_R1", "n_tokens_R")}
    for name, tensor in counted.items():
        if defect.affects(tensor):
            with pytest.raises(ValueError, match=f"^{name}: expected {defect.expected}"):
                native.module().policy_loss_counts(*(counted | {name: defect.spoil(tensor)}).values(), 1)


@pytest.mark.parametrize("defect", ["misaligned"], indirect=True)
def test_the_op_names_a_tensor_that_is_not_aligned(defect: Any) -> None:
    problem = batch(torch.float32, (3, 5))
    problem.old_logprobs_N = defect.spoil(problem.old_logprobs_N)
    with pytest.raises(TraceFastError, match="old_logprobs_N: expected memory aligned to its elements of 4 bytes"):
        run(problem, PolicyLossConfig(), "native")


@pytest.mark.parametrize(
    ("settings", "threads", "kernel", "message"),
    [
        ({"clip_low": "narrow"}, 1, "baseline", "clip_low: expected a number, got narrow"),
        ({"sequence_ratio": "yes"}, 1, "baseline", "sequence_ratio: expected a bool, got yes"),
        ({}, 0, "baseline", "n_threads: expected at least 1, got 0"),
        ({}, 1, "avx1024", r"kernel: expected one that this processor runs \(.*baseline\), got avx1024"),
    ],
)
def test_the_native_module_names_bad_settings(
    settings: dict[str, Any], threads: int, kernel: str, message: str
) -> None:
    raw = raw_tensors(batch(torch.float32, (3, 5)))
    with pytest.raises(ValueError, match=message):
        native.module().policy_loss(raw, SETTINGS | settings, threads, kernel)


def test_counts_refuse_offsets_that_lead_outside() -> None:
    mask, counts = torch.ones(8, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    for cu in ([0, 3, 9], [0, 9, 8], [-1, 3, 8], [0, -5, 8], [0, 3, 7]):
        with pytest.raises(ValueError, match="cu_tokens_R1: expected"):
            native.module().policy_loss_counts(mask, torch.tensor(cu), counts, 1)
    with pytest.raises(ValueError, match=r"cu_tokens_R1: expected shape \(3,\), got shape \(2,\)"):
        native.module().policy_loss_counts(mask, torch.tensor([0, 8]), counts, 1)


@pytest.mark.parametrize("missing", ["logprobs_N", "weight_R", "histogram"])
def test_a_missing_tensor_is_named(missing: str) -> None:
    raw = raw_tensors(batch(torch.float32, (3, 5)))
    del raw[missing]
    with pytest.raises(ValueError, match=f"{missing}: expected an entry of that name, got none"):
        native.module().policy_loss(raw, SETTINGS, 1, "baseline")
