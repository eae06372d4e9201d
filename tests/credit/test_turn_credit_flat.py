"""The flat op against the oracle, its precision, its isolation and what it refuses."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_fast.config import CreditConfig
from trace_fast.errors import TraceFastError
from trace_fast.kernels.turn_credit import TurnCreditTensors, turn_credit_flat
from trace_fast.oracle_credit import reference_credit

U64, U32 = 2.0**-53, 2.0**-24  # unit roundoffs


def flat(
    scores: list[np.ndarray],
    n_turns: list[int],
    outcome: list[float],
    config: CreditConfig,
    dtype: torch.dtype = torch.float64,
) -> TurnCreditTensors:
    lengths = torch.tensor([len(s) for s in scores], dtype=torch.int32)
    cu = torch.zeros(len(scores) + 1, dtype=torch.int32)
    cu[1:] = lengths.cumsum(0)
    joined = np.concatenate([np.zeros(0), *scores])
    return turn_credit_flat(
        torch.from_numpy(joined).to(dtype),
        cu,
        torch.tensor(n_turns, dtype=torch.int64),
        torch.tensor(outcome, dtype=dtype),
        config,
    )


def parts(credit: TurnCreditTensors, cu_states: list[int]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(values, deltas, rewards) of each rollout."""
    cu_deltas, cu_turns = credit.cu_deltas_R1.tolist(), credit.cu_turns_R1.tolist()
    return [
        (
            credit.values_S[cu_states[i] : cu_states[i + 1]].numpy(),
            credit.deltas_D[cu_deltas[i] : cu_deltas[i + 1]].numpy(),
            credit.rewards_T[cu_turns[i] : cu_turns[i + 1]].numpy(),
        )
        for i in range(len(cu_states) - 1)
    ]


def absolute_rewards(deltas: np.ndarray, n_turns: int, a_out: float, config: CreditConfig) -> np.ndarray:
    """Sum of the magnitudes of the terms of each r_k: what relative error of a sum with cancellation is relative to."""
    size = np.zeros(n_turns)
    for k in range(n_turns):
        window = np.abs(deltas[k : min(k + config.horizon, n_turns)])
        weights = config.discount ** np.arange(len(window))
        if len(window):
            size[k] = (weights * window).sum() / (weights.sum() if config.normalize_window else 1.0)
        if k + max(config.horizon, 1) >= n_turns:
            size[k] += abs(config.terminal_scale * config.discount ** (n_turns - k) * a_out)
    return size


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[np.ndarray], list[int], list[float], CreditConfig]:
    n_turns = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 9, 61]), min_size=0, max_size=8))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = []
    for turns in n_turns:
        row = -random.exponential(draw(st.sampled_from([1e-3, 1.0, 20.0])), size=turns + draw(st.integers(1, 2)))
        unchanged = random.random(len(row) - 1) < 0.2
        for k in np.flatnonzero(unchanged):
            row[k + 1] = row[k]
        scores.append(row)
    config = CreditConfig(
        horizon=draw(st.sampled_from([0, 1, 2, 3, 8, 100, 10**6])),
        discount=draw(st.sampled_from([0.01, 0.5, 0.8, 0.999, 1.0])),
        gap_offset=draw(st.sampled_from([1e-3, 0.1, 1.0])),
        terminal_scale=draw(st.sampled_from([0.0, 2.0])),
        form=draw(st.sampled_from(["log_ratio", "raw", "linear"])),
        normalize_window=draw(st.booleans()),
    )
    return scores, n_turns, [float(a) for a in random.normal(size=len(n_turns))], config


@settings(max_examples=200, deadline=None)
@given(batches())
def test_equals_the_oracle_in_float64(batch: tuple[list[np.ndarray], list[int], list[float], CreditConfig]) -> None:
    """To 1e-12 relative; beside it only the oracle's own rounding: log(a / b) of quotients that are off by 5 U64."""
    scores, n_turns, outcome, config = batch
    credit = flat(scores, n_turns, outcome, config)
    cu = np.concatenate(([0], np.cumsum([len(s) for s in scores]))).astype(int).tolist()
    assert credit.cu_deltas_R1.tolist() == [c - i for i, c in enumerate(cu)]
    assert credit.cu_turns_R1.tolist() == np.concatenate(([0], np.cumsum(n_turns))).astype(int).tolist()
    log_rounding = 6 * U64 if config.form == "log_ratio" else 0.0
    for (values, deltas, rewards), score, turns, a_out in zip(parts(credit, cu), scores, n_turns, outcome, strict=True):
        expected = reference_credit(score, turns, a_out, config)
        np.testing.assert_allclose(deltas, expected.deltas, rtol=1e-12, atol=log_rounding)
        summed = np.abs(expected.deltas).sum() if config.form == "linear" else 0.0
        np.testing.assert_allclose(values, expected.values, rtol=1e-12, atol=log_rounding + 1e-12 * summed)
        window = 1.0 if config.normalize_window else min(config.horizon, turns)
        bound = 1e-12 * absolute_rewards(expected.deltas, turns, a_out, config) + window * log_rounding
        assert (np.abs(rewards - expected.rewards) <= bound).all()


@settings(max_examples=100, deadline=None)
@given(batches())
def test_credit_of_tool_turns_telescopes(batch: tuple[list[np.ndarray], list[int], list[float], CreditConfig]) -> None:
    """Sum of delta_0..delta_{T-1} = log(d_0 / d_T), and an unchanged score gives exactly 0."""
    scores, n_turns, outcome, config = batch
    config = config.model_copy(update={"form": "log_ratio"})
    cu = np.concatenate(([0], np.cumsum([len(s) for s in scores]))).astype(int).tolist()
    for (values, deltas, _), score, turns in zip(
        parts(flat(scores, n_turns, outcome, config), cu), scores, n_turns, strict=True
    ):
        expected = np.log((config.gap_offset - score[0]) / (config.gap_offset - score[turns]))
        tolerance = 1e-15 * (1 + np.abs(deltas).sum()) * max(turns, 1)
        assert deltas[:turns].sum() == pytest.approx(expected, abs=tolerance)
        assert values[turns] == pytest.approx(expected, abs=1e-14)
        assert values[0] == 0.0
        assert (deltas[np.diff(score) == 0] == 0.0).all()


def exact_log_ratio(before: float, after: float, offset: float) -> float:
    with localcontext() as context:
        context.prec = 60
        return float(((Decimal(offset) - Decimal(before)) / (Decimal(offset) - Decimal(after))).ln())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_step_credit_has_small_relative_error_for_gains_of_any_size(dtype: torch.dtype) -> None:
    """Within u (4 (1 - exp(-|delta|)) + 2 |delta|), which is at most 6 u |delta|.

    The quotient x = |gain| / gap is off by 4 u relative (offset, gap, gain, division), which log1p turns into
    4 u x / (1 + x) = 4 u (1 - exp(-|delta|)), and log1p itself is good to one unit in the last place, 2 u |delta|.
    The eager log(d_k / d_{k+1}) is off by up to u (5 + 2 |delta|): always more, and every digit of a small gain.
    """
    unit = U32 if dtype == torch.float32 else U64
    random = np.random.default_rng(3)
    before = -random.exponential(4.0, size=2000)
    after = np.minimum(before + random.choice([-1, 1], 2000) * 10.0 ** random.uniform(-14, 1.5, 2000), 0.0)
    pairs = torch.from_numpy(np.stack((before, after), 1)).to(dtype)
    config = CreditConfig(gap_offset=0.1)
    got = flat(list(pairs.double().numpy()), [1] * 2000, [0.0] * 2000, config, dtype).deltas_D.double().numpy()
    expected = np.array([exact_log_ratio(b, a, 0.1) for b, a in pairs.double().tolist()])
    size = np.abs(expected)
    assert (np.abs(got - expected) <= unit * (4 * -np.expm1(-size) + 2 * size)).all()
    gaps = -pairs + 0.1
    eager = torch.log(gaps[:, 0] / gaps[:, 1]).double().numpy()
    eager_relative = np.abs(eager - expected)[size > 0] / size[size > 0]
    assert eager_relative.max() > 1e3 * 6 * unit  # the reason for the form that is used


@pytest.mark.parametrize("horizon", [0, 1, 3, 8, 100])
@pytest.mark.parametrize("discount", [0.8, 1.0])
def test_float32_reward_error_is_within_the_derived_bound(horizon: int, discount: float) -> None:
    """Against the oracle on the same (float32) scores.

    A delta is off by 8 u |delta|. Each of at most 2 log2(K) + 1 joins of windows multiplies by a rounded factor and
    adds (3 u), the division by a rounded Z costs 2 u, all relative to the sum of magnitudes; the terminal term has
    two rounded factors, two products and the final sum (5 u).
    """
    config = CreditConfig(horizon=horizon, discount=discount)
    random = np.random.default_rng(horizon)
    n_turns = [0, 1, 2, 7, 20, 61, 61]
    scores = [np.float32(-random.exponential(3.0, size=t + 2)).astype(np.float64) for t in n_turns]
    outcome = np.float32(random.normal(size=len(n_turns))).astype(np.float64).tolist()
    cu = np.concatenate(([0], np.cumsum([len(s) for s in scores]))).tolist()
    credit = parts(flat(scores, n_turns, outcome, config, torch.float32), cu)
    joins = 2 * max(min(horizon, 61).bit_length(), 1) + 1
    worst = 0.0
    for (_, _, rewards), score, turns, a_out in zip(credit, scores, n_turns, outcome, strict=True):
        expected = reference_credit(score, turns, a_out, config)
        bound = (8 + 3 * joins + 2 + 5) * U32 * absolute_rewards(expected.deltas, turns, a_out, config)
        error = np.abs(rewards - expected.rewards)
        assert (error <= bound + 1e-15).all()
        worst = max(worst, float(error.max(initial=0.0)))
    if horizon:
        assert worst > 0  # float32 was computed in, not float64


@pytest.mark.parametrize("form", ["log_ratio", "raw", "linear"])
@pytest.mark.parametrize("horizon", [3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rollout_has_the_same_bits_alone_and_in_any_batch(form: Any, horizon: int, dtype: torch.dtype) -> None:
    config = CreditConfig(form=form, horizon=horizon)
    random = np.random.default_rng(5)
    n_turns = [int(t) for t in random.integers(0, 62, size=40)]
    scores = [-random.exponential(3.0, size=t + 1 + int(random.integers(2))) for t in n_turns]
    outcome = random.normal(size=40).tolist()
    cu = np.concatenate(([0], np.cumsum([len(s) for s in scores]))).tolist()
    together = parts(flat(scores, n_turns, outcome, config, dtype), cu)
    for i in range(40):
        alone = parts(flat([scores[i]], [n_turns[i]], [outcome[i]], config, dtype), [0, len(scores[i])])[0]
        for ours, theirs in zip(alone, together[i], strict=True):
            assert ours.tobytes() == theirs.tobytes()


def test_changing_one_rollout_leaves_the_others_bits() -> None:
    random = np.random.default_rng(6)
    scores = [-random.exponential(3.0, size=22) for _ in range(5)]
    config = CreditConfig(form="linear")
    cu = list(range(0, 111, 22))
    before = parts(flat(scores, [20] * 5, [1.0] * 5, config), cu)
    scores[2] = scores[2] * 1e6
    after = parts(flat(scores, [20] * 5, [1.0] * 5, config), cu)
    for i in (0, 1, 3, 4):
        for ours, theirs in zip(before[i], after[i], strict=True):
            assert ours.tobytes() == theirs.tobytes()
    assert (before[2][1] != after[2][1]).any()


def test_linear_values_are_running_sums_of_credit() -> None:
    config = CreditConfig(form="linear", gap_offset=0.5)
    credit = flat([np.array([-3.5, -1.5, -2.5, 0.0])], [2], [0.0], config)
    deltas = [2.0 / 4.0, -1.0 / 2.0, 2.5 / 3.0]
    assert credit.deltas_D.tolist() == deltas
    assert credit.values_S.tolist() == [0.0, 0.5, 0.0, 2.5 / 3.0]


def test_raw_values_are_gains_over_the_first_state() -> None:
    credit = flat([np.array([-3.0, -1.0, -2.5])], [1], [0.0], CreditConfig(form="raw"))
    assert credit.values_S.tolist() == [0.0, 2.0, 0.5]
    assert credit.deltas_D.tolist() == [2.0, -1.5]


def test_without_window_normalisation_sums_are_left_as_they_are() -> None:
    config = CreditConfig(form="raw", horizon=3, discount=0.5, normalize_window=False, terminal_scale=0.0)
    credit = flat([np.array([-8.0, -7.0, -5.0, -1.0, -0.5])], [4], [0.0], config)  # deltas 1, 2, 4, 0.5
    assert credit.rewards_T.tolist() == [1 + 1 + 1, 2 + 2 + 0.125, 4 + 0.25, 0.5]


def test_no_turns_and_no_rollouts_give_empty_tensors() -> None:
    credit = flat([np.array([-1.0]), np.array([-1.0, -0.5])], [0, 0], [1.0, 1.0], CreditConfig())
    assert credit.rewards_T.tolist() == []
    assert credit.values_S.tolist() == pytest.approx([0.0, 0.0, np.log(1.1 / 0.6)], rel=1e-14)
    assert credit.deltas_D.tolist() == pytest.approx([np.log(1.1 / 0.6)], rel=1e-14)
    empty = flat([], [], [], CreditConfig())
    assert [t.tolist() for t in (empty.values_S, empty.deltas_D, empty.rewards_T)] == [[], [], []]
    assert empty.cu_turns_R1.tolist() == [0]


def test_credit_carries_no_gradient() -> None:
    scores = torch.tensor([-2.0, -1.0], requires_grad=True)
    credit = turn_credit_flat(
        scores, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1]), torch.ones(1), CreditConfig()
    )
    assert not credit.rewards_T.requires_grad
    assert credit.rewards_T.dtype == torch.float32


GOOD: dict[str, Any] = {
    "mean_logprobs_S": torch.tensor([-3.0, -2.0, -1.0, -4.0, -2.0]),
    "cu_states_R1": torch.tensor([0, 3, 5], dtype=torch.int32),
    "n_turns_R": torch.tensor([1, 1]),
    "outcome_advantages_R": torch.tensor([1.0, -1.0]),
    "config": CreditConfig(),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mean_logprobs_S": [-1.0, -2.0]}, "mean_logprobs_S: expected a torch.Tensor, got list"),
        ({"mean_logprobs_S": torch.zeros(5, 1)}, r"mean_logprobs_S: expected a flat tensor .* got shape \(5, 1\)"),
        (
            {"mean_logprobs_S": torch.zeros(5, dtype=torch.bfloat16)},
            "mean_logprobs_S: expected torch.float32 or torch.float64, got torch.bfloat16",
        ),
        (
            {"mean_logprobs_S": torch.tensor([-3.0, 0.5, -1.0, -4.0, -2.0])},
            r"mean_logprobs_S: expected log-probabilities between .* and 0, got 0.5 at \[1\]",
        ),
        (
            {"mean_logprobs_S": torch.tensor([-3.0, -1.0, -1.0, float("nan"), -2.0])},
            r"mean_logprobs_S: .* got nan at \[3\]",
        ),
        (
            {"mean_logprobs_S": torch.tensor([-3.0, -1.0, -1.0, -4.0, -float("inf")])},
            r"mean_logprobs_S: .* got -inf at \[4\]",
        ),
        ({"cu_states_R1": torch.tensor([0.0, 3, 5])}, "cu_states_R1: expected torch.int32 .*, got torch.float32"),
        ({"cu_states_R1": torch.tensor([], dtype=torch.int32)}, r"cu_states_R1: expected R\+1 offsets"),
        (
            {"cu_states_R1": torch.tensor([1, 3, 5], dtype=torch.int32)},
            "cu_states_R1: expected 0 as first offset, got 1",
        ),
        (
            {"cu_states_R1": torch.tensor([0, 3, 3], dtype=torch.int32)},
            r"cu_states_R1: expected offsets that increase .* got 3 then 3 at \[1\], \[2\]",
        ),
        (
            {"cu_states_R1": torch.tensor([0, 6, 5], dtype=torch.int32)},
            r"cu_states_R1: expected offsets that increase .* got 6 then 5 at \[1\], \[2\]",
        ),
        (
            {"cu_states_R1": torch.tensor([0, 3, 6], dtype=torch.int32)},
            r"cu_states_R1: expected 5 as last offset \(the length of mean_logprobs_S\), got 6",
        ),
        ({"n_turns_R": torch.tensor([1])}, "n_turns_R: expected 2 entries, got 1"),
        ({"n_turns_R": torch.tensor([1.0, 1.0])}, "n_turns_R: expected torch.int32 or torch.int64, got torch.float32"),
        ({"n_turns_R": torch.tensor([-1, 1])}, r"n_turns_R: expected T >= 0, got -1 at \[0\]"),
        (
            {"n_turns_R": torch.tensor([1, 2])},
            r"cu_states_R1: expected T\+1 or T\+2 states for each rollout, got 2 states at \[1\], where n_turns_R is 2",
        ),
        (
            {"outcome_advantages_R": torch.ones(2, dtype=torch.float64)},
            "outcome_advantages_R: expected torch.float32, got torch.float64",
        ),
        (
            {"outcome_advantages_R": torch.tensor([1.0, float("inf")])},
            r"outcome_advantages_R: expected finite numbers, got inf at \[1\]",
        ),
        (
            {"outcome_advantages_R": torch.ones(2, device="meta")},
            "outcome_advantages_R: expected a tensor on cpu like the others, got meta",
        ),
        ({"config": CreditConfig(gap_offset=1e-60)}, "gap_offset: expected at least .* for torch.float32, got 1e-60"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    turn_credit_flat(**GOOD)
    with pytest.raises(ValueError, match=message) as raised:
        turn_credit_flat(**(GOOD | changed))
    assert isinstance(raised.value, TraceFastError)


def test_gaps_near_the_range_of_float32_do_not_overflow() -> None:
    limit = torch.finfo(torch.float32).max * 0.1 / 4
    for form in ("log_ratio", "raw", "linear"):
        credit = flat(
            [np.array([-0.99 * limit, 0.0])], [1], [0.0], CreditConfig.model_validate({"form": form}), torch.float32
        )
        assert credit.deltas_D.isfinite().all()
        assert credit.deltas_D[0] > 0
    with pytest.raises(ValueError, match="mean_logprobs_S"):
        flat([np.array([-1.01 * limit, 0.0])], [1], [0.0], CreditConfig(), torch.float32)


@pytest.mark.parametrize(
    ("scores", "n_turns", "message"),
    [
        ([-1.0], 1, r"expected T\+1 or T\+2 states for T = 1, got 1"),
        ([-1.0, -2.0], -1, r"expected T\+1 or T\+2 states for T = -1, got 2"),
        ([-1.0, 0.5], 1, r"expected finite numbers <= 0, got 0.5 at \[1\]"),
        ([-1.0, float("nan")], 1, r"expected finite numbers <= 0, got nan at \[1\]"),
    ],
)
def test_oracle_refuses(scores: list[float], n_turns: int, message: str) -> None:
    with pytest.raises(TraceFastError, match=message):
        reference_credit(scores, n_turns)
