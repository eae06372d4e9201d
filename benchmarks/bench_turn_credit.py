"""turn_credit on flat tensors: 1,000,000 states, and credit with token advantages of 10,000 rollouts.

    python -m pytest -s benchmarks/bench_turn_credit.py

The target on two cores is 20 ms for 1,000,000 states; on a GPU 100 microseconds for 10,000 rollouts. A timed call is
first checked against the NumPy oracle (float64) on a sample of its rollouts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.kernels.turn_credit import credit_and_advantages, outcome_advantages, turn_credit_flat, why_not
from trace_fast.oracle_credit import reference_credit

TURNS, GROUP = 20, 8
STATES = TURNS + 2
IMPLEMENTATIONS = ["native", "triton", "cuda"]
Race = Callable[..., dict[str, float]]


def runnable(name: str, device: torch.device, dtype: torch.dtype) -> None:
    reason = why_not(name, device=device, dtype=dtype)
    if reason is not None:
        pytest.skip(reason)


def scores(rollouts: int) -> np.ndarray:
    return -np.random.default_rng(0).exponential(3.0, size=(rollouts, STATES))


def flat(rows: np.ndarray, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Scores, offsets of the states, turns and outcome advantages of all rollouts."""
    count = len(rows)
    return (
        torch.from_numpy(rows.reshape(-1)).to(device, dtype),
        torch.arange(0, count * STATES + 1, STATES, dtype=torch.int32, device=device),
        torch.full((count,), TURNS, device=device),
        torch.linspace(-2, 2, count, dtype=torch.float64).to(device, dtype),
    )


def check(rewards_T: torch.Tensor, rows: np.ndarray, outcome_R: torch.Tensor, config: CreditConfig) -> None:
    """Rewards of 50 rollouts against the oracle on the very numbers that the op got."""
    dtype = rewards_T.dtype
    eps = torch.finfo(dtype).eps
    found = rewards_T.view(len(rows), TURNS).double().cpu().numpy()
    given = torch.from_numpy(rows).to(dtype).double().numpy()
    for i in range(0, len(rows), len(rows) // 50):
        expected = reference_credit(given[i], TURNS, float(outcome_R[i]), config).rewards
        # a log, a weighted mean over the horizon and a product, each of numbers of order 10
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=10 * 16 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_million_states(race: Race, device: torch.device, name: str, dtype: torch.dtype) -> None:
    runnable(name, device, dtype)
    rollouts = 1_000_000 // STATES
    rows = scores(rollouts)
    arguments, config = flat(rows, device, dtype), CreditConfig()

    def ours() -> object:
        return turn_credit_flat(*arguments, config, backend=name, total_turns=rollouts * TURNS)

    check(turn_credit_flat(*arguments, config, backend=name).rewards_T, rows, arguments[3], config)
    others = {"reference": lambda: turn_credit_flat(*arguments, config)}
    race("turn_credit", f"{rollouts * STATES} states, {dtype}", (name, ours), others, rounds=9)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_credit_and_advantages_of_10_000_rollouts(race: Race, device: torch.device, name: str) -> None:
    dtype, rollouts, tokens = torch.float32, 10_000, 200
    runnable(name, device, dtype)
    rows = scores(rollouts)
    states = flat(rows, device, dtype)
    bounds = np.append(np.linspace(20, 180, TURNS + 1).astype(np.int64), tokens)
    arguments = (
        states[0],
        torch.from_numpy(np.tile(bounds, rollouts)).to(device),
        *states[1:],
        torch.from_numpy(np.random.default_rng(1).random(rollouts * tokens) < 0.5).to(device),
        torch.arange(0, rollouts * tokens + 1, tokens, dtype=torch.int32, device=device),
        (torch.arange(rollouts) // GROUP).to(device),
        CreditConfig(),
        AdvantageConfig(),
    )
    expected = credit_and_advantages(*arguments)
    found = credit_and_advantages(*arguments, backend=name)
    check(found.credit.rewards_T, rows, states[3], CreditConfig())
    torch.testing.assert_close(found.advantages_N, expected.advantages_N, rtol=1e-5, atol=1e-5)

    def ours() -> object:
        return credit_and_advantages(*arguments, backend=name, total_turns=rollouts * TURNS)

    others = {"reference": lambda: credit_and_advantages(*arguments)}
    case = f"{rollouts} rollouts, {rollouts * tokens} tokens, with advantages"
    race("turn_credit", case, (name, ours), others, rounds=9)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_credit_of_10_000_rollouts(race: Race, device: torch.device, name: str) -> None:
    dtype, rollouts = torch.float32, 10_000
    runnable(name, device, dtype)
    rows = scores(rollouts)
    arguments, config = flat(rows, device, dtype), CreditConfig()
    check(turn_credit_flat(*arguments, config, backend=name).rewards_T, rows, arguments[3], config)

    def ours() -> object:
        return turn_credit_flat(*arguments, config, backend=name, total_turns=rollouts * TURNS)

    others = {"reference": lambda: turn_credit_flat(*arguments, config)}
    race("turn_credit", f"{rollouts} rollouts of {TURNS} turns", (name, ours), others, rounds=15)


@pytest.mark.parametrize("form", ["log_ratio", "raw", "linear"])
@pytest.mark.parametrize("horizon", [3, 100])
def test_reference(benchmark: BenchmarkFixture, form: str, horizon: int) -> None:
    """The torch form, which any device runs: 100,000 rollouts in a second is its target on two cores."""
    config = CreditConfig.model_validate({"form": form, "horizon": horizon})
    rows = scores(100_000)
    arguments = flat(rows, torch.device("cpu"), torch.float64)
    credit = turn_credit_flat(*arguments, config)
    check(credit.rewards_T, rows, arguments[3], config)
    benchmark.pedantic(turn_credit_flat, (*arguments, config), rounds=5, warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    print(f"\nturn_credit [reference] {form}, K = {horizon}: {len(rows):,} rollouts in {seconds:.3f} s")


def test_outcome_advantages(benchmark: BenchmarkFixture) -> None:
    rollouts = 100_000
    rewards = torch.from_numpy(np.random.default_rng(1).integers(0, 2, rollouts).astype(np.float64))
    groups = torch.arange(rollouts) % (rollouts // GROUP)
    first = rewards[groups == 0].numpy()
    expected = (first - first.mean()) / first.std() if first.std() else np.zeros(GROUP)
    np.testing.assert_allclose(outcome_advantages(rewards, groups)[groups == 0].numpy(), expected, atol=1e-14)
    benchmark.pedantic(outcome_advantages, (rewards, groups), rounds=5, warmup_rounds=1)
    print(f"\noutcome_advantages: {rollouts:,} rollouts in {benchmark.stats.stats.median:.3f} s")
