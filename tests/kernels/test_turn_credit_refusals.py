"""What turn_credit refuses by name, through the op and by the native module itself, and that nothing crashes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from turn_credit_problems import SETTINGS, batch, raw_tensors, run

from trace_fast import native
from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.kernels.turn_credit import turn_credit_flat, why_not

MISSING = why_not("native", device=torch.device("cpu"), dtype=torch.float32)
needs_native = pytest.mark.skipif(MISSING is not None, reason=f"native turn_credit: {MISSING}")


def good() -> dict[str, Any]:
    return batch(torch.float32, (1, 1), (4, 2), seed=1)


def in_dtype(tensors: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}


def changed(name: str, index: int, value: float) -> dict[str, Any]:
    tensor = good()[name].clone()
    tensor[index] = value
    return {name: tensor}


BAD: list[tuple[dict[str, Any], str]] = [
    (
        changed("mean_logprobs_S", 1, 0.5),
        r"mean_logprobs_S: expected log-probabilities between -3.4e\+36 and 0, got 0.5 at \[1\]",
    ),
    (changed("mean_logprobs_S", 3, float("nan")), r"mean_logprobs_S: expected log-probabilities .* got nan at \[3\]"),
    (changed("mean_logprobs_S", 4, float("-inf")), r"mean_logprobs_S: expected log-probabilities .* got -inf at \[4\]"),
    (changed("cu_states_R1", 0, 1), "cu_states_R1: expected 0 as first offset, got 1"),
    (changed("cu_states_R1", 1, 0), r"cu_states_R1: expected offsets that increase .* got 0 then 0 at \[0\], \[1\]"),
    (changed("cu_states_R1", 1, 9), r"cu_states_R1: expected offsets that increase .* got 9 then 5 at \[1\], \[2\]"),
    (changed("cu_states_R1", 1, -(2**31)), "cu_states_R1: expected offsets that increase"),
    (changed("cu_states_R1", 2, 6), r"cu_states_R1: expected 5 as last offset \(the length of mean_logprobs_S\)"),
    (changed("n_turns_R", 0, -1), r"n_turns_R: expected T >= 0, got -1 at \[0\]"),
    (changed("n_turns_R", 1, 2**40), r"cu_states_R1: expected T\+1 or T\+2 states .* got 3 states at \[1\]"),
    (changed("outcome_advantages_R", 1, float("inf")), r"outcome_advantages_R: expected finite .*, got inf at \[1\]"),
    (changed("cu_tokens_R1", 0, 2), "cu_tokens_R1: expected 0 as first offset, got 2"),
    (changed("cu_tokens_R1", 1, 7), r"cu_tokens_R1: expected offsets that never decrease, got 7 then 6 at"),
    (changed("cu_tokens_R1", 2, 2**31 - 1), r"cu_tokens_R1: expected 6 as last offset \(the length of loss_mask_N\)"),
    (changed("boundaries_S", 1, 5), r"boundaries_S: expected token counts from 0 .* got 5 at \[1\], where .* has 4"),
    (changed("boundaries_S", 2, -1), r"boundaries_S: expected token counts from 0 to .* got -1 at \[2\]"),
    ({"boundaries_S": torch.tensor([3, 2, 0, 1, 2])}, "boundaries_S: expected token counts that never .* 3 then 2"),
]


@needs_native
@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_contents_are_named_by_the_op_and_by_the_native_module(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceFastError, match=message):
        run(good() | change, CreditConfig(), AdvantageConfig(), "native", total_turns=2)
    raw = raw_tensors(good()) | change
    with pytest.raises(ValueError, match=message):
        native.module().turn_credit(raw, SETTINGS, 2, "baseline")


STRIDED = torch.zeros(10)[::2]
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"mean_logprobs_S": [-1.0]}, "mean_logprobs_S: expected a torch.Tensor, got .*list"),
    ({"mean_logprobs_S": STRIDED}, "mean_logprobs_S: expected a contiguous tensor, got stride"),
    ({"mean_logprobs_S": torch.zeros(5, 1)}, r"mean_logprobs_S: expected .* got shape \(5, 1\)"),
    ({"mean_logprobs_S": torch.zeros(5).half()}, "mean_logprobs_S: expected torch.float32 or .*, got torch.float16"),
    ({"cu_states_R1": torch.tensor([0.0, 2, 5])}, "cu_states_R1: expected torch.int32.*, got torch.float32"),
    ({"cu_states_R1": torch.zeros(0, dtype=torch.int32)}, "cu_states_R1: expected"),
    ({"cu_states_R1": torch.zeros(3, dtype=torch.int32).to("meta")}, "cu_states_R1: expected a tensor on cpu.* meta"),
    ({"n_turns_R": torch.tensor([1.0, 1.0])}, "n_turns_R: expected .*torch.int64, got torch.float32"),
    ({"outcome_advantages_R": torch.zeros(3)}, "outcome_advantages_R: expected .* got "),
    ({"loss_mask_N": torch.ones(6)}, "loss_mask_N: expected torch.bool, got torch.float32"),
    ({"group_ids_R": torch.zeros(3, dtype=torch.int64)}, "expected .* got "),
    ({"boundaries_S": torch.zeros(4, dtype=torch.int64)}, "boundaries_S: expected .* got "),
    ({"cu_tokens_R1": torch.zeros(4, dtype=torch.int32)}, "cu_tokens_R1: expected .* got "),
]


@needs_native
@pytest.mark.parametrize(("change", "message"), FORMS)
def test_wrong_forms_are_named_by_the_op_and_by_the_native_module(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceFastError, match=message):
        run(good() | change, CreditConfig(), AdvantageConfig(), "native")
    with pytest.raises(ValueError, match=message):
        native.module().turn_credit(raw_tensors(good()) | change, SETTINGS, 1, "baseline")


@needs_native
def test_a_defect_of_any_tensor_is_named(defect: Any) -> None:
    tensors = raw_tensors(batch(torch.float32, (2, 3), (4, 2)))
    assert len(tensors) == 14
    for name, tensor in tensors.items():
        if defect.affects(tensor):
            with pytest.raises(ValueError, match=f"^{name}: expected {defect.expected}"):
                native.module().turn_credit(tensors | {name: defect.spoil(tensor)}, SETTINGS, 1, "baseline")


@needs_native
@pytest.mark.parametrize("defect", ["misaligned"], indirect=True)
@pytest.mark.parametrize("name", ["mean_logprobs_S", "cu_tokens_R1", "group_ids_R"])
def test_the_op_names_a_tensor_that_is_not_aligned(name: str, defect: Any) -> None:
    tensors = good()
    tensors[name] = defect.spoil(tensors[name])
    with pytest.raises(TraceFastError, match=rf"{name}: expected memory aligned to its elements of \d bytes"):
        run(tensors, CreditConfig(), AdvantageConfig(), "native")


@needs_native
@pytest.mark.parametrize(
    ("change", "settings", "threads", "kernel", "message"),
    [
        ({"values_S": torch.zeros(4)}, {}, 1, "baseline", r"values_S: expected shape \(5,\), got shape \(4,\)"),
        ({"deltas_D": torch.zeros(5)}, {}, 1, "baseline", r"deltas_D: expected shape \(3,\), got shape \(5,\)"),
        ({"rewards_T": torch.zeros(3)}, {}, 1, "baseline", "total_turns: expected 2 .* got 3"),
        ({"advantages_N": torch.zeros(6).double()}, {}, 1, "baseline", "advantages_N: expected torch.float32"),
        ({"n_turns_R": torch.zeros(9, dtype=torch.int64)}, {}, 1, "baseline", "cu_states_R1: expected shape"),
        ({}, {"form": "cubic"}, 1, "baseline", "form: expected log_ratio, raw or linear, got cubic"),
        ({}, {"answer_tail": "long"}, 1, "baseline", "answer_tail: expected group_mean, constant or off, got long"),
        ({}, {"horizon": -1}, 1, "baseline", "horizon: expected 0 or more, got -1"),
        ({}, {"horizon": 2.5}, 1, "baseline", "horizon: expected an integer below 2.63, got 2.5"),
        ({}, {"discount": 0.0}, 1, "baseline", "discount: expected a number above 0 and up to 1, got 0"),
        ({}, {"discount": "high"}, 1, "baseline", "discount: expected a number, got high"),
        ({}, {"gap_offset": 0.0}, 1, "baseline", "gap_offset: expected at least 1.17549435e-38, got 0"),
        ({}, {"gap_offset": 1e10}, 1, "baseline", r"gap_offset: expected a number from 0 to 1e\+09, got 1e\+10"),
        ({}, {"terminal_scale": 1e39}, 1, "baseline", r"terminal_scale: expected a number from 0 to .*, got 1e\+39"),
        ({}, {"terminal_scale": float("nan")}, 1, "baseline", "terminal_scale: expected a number from .*, got nan"),
        ({}, {"alpha_out": -1.0}, 1, "baseline", "alpha_out: expected a number from 0 to .*, got -1"),
        ({}, {"alpha_turn": 1e39}, 1, "baseline", r"alpha_turn: expected a number from 0 to .*, got 1e\+39"),
        ({}, {"answer_tail_scale": float("inf")}, 1, "baseline", "answer_tail_scale: expected a number from .* inf"),
        ({}, {}, 0, "baseline", "n_threads: expected at least 1, got 0"),
        ({}, {}, 1, "avx1024", r"kernel: expected one that this processor runs \(.*baseline\), got avx1024"),
    ],
)
def test_the_native_module_names_what_only_it_sees(
    change: dict[str, Any], settings: dict[str, Any], threads: int, kernel: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        native.module().turn_credit(raw_tensors(good()) | change, SETTINGS | settings, threads, kernel)


BACKENDS = ["reference", pytest.param("native", marks=needs_native)]
LARGEST = 1e9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("credit", "advantage", "outcome", "message"),
    [
        ({"terminal_scale": 1e39}, {}, 1.0, r"terminal_scale: expected a number from 0 to 1e\+09, got 1e\+39"),
        ({"terminal_scale": 2e9}, {}, 1.0, r"terminal_scale: expected a number from 0 to 1e\+09, got 2000000000"),
        ({"gap_offset": 1e39}, {}, 1.0, r"gap_offset: expected a number from 0 to 1e\+09, got 1e\+39"),
        ({"gap_offset": 1e-320}, {}, 1.0, "gap_offset: expected at least .* for torch.float.*, got 1e-320"),
        ({}, {"alpha_out": 1e39}, 1.0, r"alpha_out: expected a number from 0 to 1e\+09, got 1e\+39"),
        ({}, {"alpha_turn": 1e300}, 1.0, r"alpha_turn: expected a number from 0 to 1e\+09, got 1e\+300"),
        ({}, {"answer_tail_scale": 1e10}, 1.0, r"answer_tail_scale: expected a number from 0 to 1e\+09, got 1000"),
        ({}, {}, 2e9, r"outcome_advantages_R: expected numbers of magnitude up to 1e\+09, got -?2(e\+09|000000000)"),
    ],
)
def test_what_could_overflow_is_refused(
    backend: str, dtype: torch.dtype, credit: dict, advantage: dict, outcome: float, message: str
) -> None:
    tensors = in_dtype(good(), dtype)
    tensors["outcome_advantages_R"].fill_(outcome)
    # without the validation of the settings' own classes, which may be narrower
    settings = CreditConfig.model_construct(**dict(CreditConfig()) | credit)
    others = AdvantageConfig.model_construct(**dict(AdvantageConfig()) | advantage)
    with pytest.raises(TraceFastError, match=message):
        run(tensors, settings, others, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["log_ratio", "raw", "linear"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_settings_give_finite_results(
    backend: str, form: Any, normalize: bool, dtype: torch.dtype
) -> None:
    tensors = in_dtype(good(), dtype)
    tensors["outcome_advantages_R"] = torch.tensor([LARGEST, -LARGEST], dtype=dtype)
    credit = CreditConfig(
        terminal_scale=LARGEST, gap_offset=0.5, form=form, discount=1.0, horizon=9, normalize_window=normalize
    )
    advantage = AdvantageConfig(alpha_out=LARGEST, alpha_turn=LARGEST, answer_tail_scale=LARGEST)
    worst = -0.49 * torch.finfo(dtype).max / LARGEST / (2 * 5)  # just inside what the scores may be
    tensors["mean_logprobs_S"] = torch.tensor([0.0, worst, 0.0, worst, 0.0], dtype=dtype)
    result = run(tensors, credit, advantage, backend)
    for found in (result.credit.values_S, result.credit.deltas_D, result.credit.rewards_T, result.advantages_N):
        assert found.isfinite().all()
    assert result.advantages_N.abs().max() >= LARGEST**3 / 2, "large enough to show an overflow"


@needs_native
def test_a_missing_tensor_is_named() -> None:
    raw = raw_tensors(good())
    del raw["group_ids_R"]
    with pytest.raises(ValueError, match="group_ids_R: expected an entry of that name, got none"):
        native.module().turn_credit(raw, SETTINGS, 1, "baseline")


@needs_native
def test_random_offsets_never_crash() -> None:
    """Whatever the integers are: a ValueError, or (where they happen to be right) finite results."""
    random = torch.Generator().manual_seed(0)
    refused = 0
    for trial in range(2000):
        raw = raw_tensors(batch(torch.float64, (2, 0, 5), (6, 3, 9), seed=trial))
        for name in ("cu_states_R1", "cu_tokens_R1", "n_turns_R", "boundaries_S"):
            if torch.rand((), generator=random) < 0.5:
                at = int(torch.randint(0, len(raw[name]), (), generator=random))
                raw[name] = raw[name].clone()
                raw[name][at] += int(torch.randint(-3, 4, (), generator=random)) * 10 ** (trial % 9)
        try:
            native.module().turn_credit(raw, SETTINGS, 2, "baseline")
        except ValueError:
            refused += 1
        else:
            assert all(raw[k].isfinite().all() for k in ("values_S", "deltas_D", "rewards_T", "advantages_N"))
    assert 1000 < refused < 2000


def test_an_explicit_choice_runs_or_raises() -> None:
    tensors = good()
    with pytest.raises(ConfigError, match="backend 'fast' cannot run: expected one of reference, native, triton, cuda"):
        run(tensors, CreditConfig(), AdvantageConfig(), "fast")
    with pytest.raises(ConfigError, match="backend 'cuda' cannot run: the CUDA kernel runs on CUDA devices, got cpu"):
        run(tensors, CreditConfig(), AdvantageConfig(), "cuda")
    meta = {k: v.to("meta") for k, v in tensors.items()}
    with pytest.raises(ConfigError, match="backend 'native' cannot run: the C\\+\\+ code runs on the CPU, got meta"):
        run(meta, CreditConfig(), AdvantageConfig(), "native", total_turns=2)


@pytest.mark.parametrize("backend", ["native"])
@pytest.mark.parametrize(
    ("turns", "total", "message"),
    [
        ([2, 2**40], None, r"n_turns_R: expected 0\.\.4 turns in total for these states, got 1099511627778"),
        ([2, 1], -1, r"total_turns: expected 0\.\.4 turns in total for these states, got -1"),
        ([2, 1], 2**40, r"total_turns: expected 0\.\.4 turns in total"),
        ([2, 1], 1.5, r"total_turns: expected 0\.\.4 turns in total for these states, got 1\.5"),
    ],
)
def test_totals_are_checked_before_memory_is_asked_for(
    backend: str, turns: list[int], total: int | None, message: str
) -> None:
    if why_not(backend, device=torch.device("cpu"), dtype=torch.float32) is not None:
        pytest.skip("the native module is not built (trace-fast info says why)")
    scores = torch.full((6,), -1.0)
    cu = torch.tensor([0, 4, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        turn_credit_flat(
            scores, cu, torch.tensor(turns), torch.zeros(2), CreditConfig(), backend=backend, total_turns=total
        )
