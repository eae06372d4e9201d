"""Speed of turn credit and token advantages on objects, as the public calls take them (run with ``pytest -s``).

    python -m pytest -p no:xdist -s benchmarks/bench_credit.py

Each timed call is first checked against the NumPy oracle on a sample of its rollouts; a wrong result is never timed.
The op alone: ``bench_turn_credit.py``.
"""

from __future__ import annotations

import numpy as np
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from trace_fast.advantages import token_advantages
from trace_fast.config import AdvantageConfig
from trace_fast.credit import turn_credit
from trace_fast.kernels.turn_credit import token_advantages_flat
from trace_fast.oracle_credit import reference_credit
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore

ROLLOUTS, TURNS, GROUP = 100_000, 20, 8
STATES = TURNS + 2


def mean_logprobs() -> np.ndarray:
    return -np.random.default_rng(0).exponential(3.0, size=(ROLLOUTS, STATES))


def report(benchmark: BenchmarkFixture, what: str) -> None:
    seconds = benchmark.stats.stats.median
    rate = ROLLOUTS * TURNS / seconds
    print(f"\n{what}: {ROLLOUTS:,} rollouts x {TURNS} turns in {seconds:.3f} s ({rate:,.0f} turns/s)")


def test_turn_credit_objects(benchmark: BenchmarkFixture) -> None:
    rows = mean_logprobs()
    boundaries, alias, answer_ids = np.arange(STATES), np.zeros(STATES, dtype=np.int64), np.array([1])
    scores = [
        RolloutScore(
            id=str(i),
            group=str(i // GROUP),
            n_turns=TURNS,
            boundaries=boundaries,
            mean_logprobs=row,
            alias_mean_logprobs=row[:, None],
            alias=alias,
            token_logprobs=(),
            answer=None,
            answer_ids=answer_ids,
            reward=float(i % 3 == 0),
        )
        for i, row in enumerate(rows)
    ]
    credit = turn_credit(scores)
    for i in range(0, ROLLOUTS, ROLLOUTS // 50):
        expected = reference_credit(rows[i], TURNS, credit[i].outcome_advantage).rewards
        np.testing.assert_allclose(credit[i].rewards, expected, rtol=1e-12, atol=1e-14)
    benchmark.pedantic(turn_credit, (scores,), rounds=3, warmup_rounds=1)
    report(benchmark, "turn_credit (objects)")


def test_token_advantages_flat(benchmark: BenchmarkFixture) -> None:
    tokens = 200  # of a rollout: 20 of prompt, 8 a turn (half of them policy tokens), 20 of answer
    turns = np.repeat(np.arange(-1, TURNS + 1), [20] + [8] * TURNS + [20])
    mask = (turns == TURNS) | ((turns >= 0) & (np.arange(tokens) % 8 < 4))
    rewards = torch.rand(ROLLOUTS * TURNS, dtype=torch.float64)
    outcome = torch.linspace(-2, 2, ROLLOUTS, dtype=torch.float64)
    arguments = (
        torch.from_numpy(np.tile(turns, ROLLOUTS)),
        torch.from_numpy(np.tile(mask, ROLLOUTS)),
        torch.arange(0, ROLLOUTS * tokens + 1, tokens, dtype=torch.int32),
        rewards,
        torch.arange(0, ROLLOUTS * TURNS + 1, TURNS, dtype=torch.int32),
        outcome,
        torch.arange(ROLLOUTS) // GROUP,
        AdvantageConfig(),
    )
    last = token_advantages_flat(*arguments)[-tokens:].numpy()
    turn_term = np.append(0.2 * rewards[-TURNS:].numpy() + 2.0, 0.05 * 2.0)[np.maximum(turns, 0)]
    np.testing.assert_allclose(last, np.where(mask, turn_term, 0.0), rtol=1e-14)
    benchmark.pedantic(token_advantages_flat, arguments, rounds=3, warmup_rounds=1)
    report(benchmark, f"token_advantages_flat, {tokens} tokens a rollout")


def test_token_advantages_objects(benchmark: BenchmarkFixture) -> None:
    count, tokens = 2_000, 4_000
    rng = np.random.default_rng(2)
    boundaries = np.append(np.linspace(200, 3_800, TURNS + 1).astype(np.int64), tokens)
    openers = (np.array([1]),) * STATES
    rollouts = [
        Rollout(
            id=str(i),
            group=str(i // GROUP),
            input_ids=np.zeros(tokens, dtype=np.int64),
            boundaries=boundaries,
            n_turns=TURNS,
            answers=(np.array([1]),),
            openers=openers,
            loss_mask=rng.random(tokens) < 0.3,
        )
        for i in range(count)
    ]
    rows = mean_logprobs()[:count]
    scores = [
        RolloutScore(
            id=str(i),
            group=str(i // GROUP),
            n_turns=TURNS,
            boundaries=boundaries,
            mean_logprobs=row,
            alias_mean_logprobs=row[:, None],
            alias=np.zeros(STATES, dtype=np.int64),
            token_logprobs=(),
            answer=None,
            answer_ids=np.array([1]),
            reward=float(i % 3 == 0),
        )
        for i, row in enumerate(rows)
    ]
    credit = turn_credit(scores)
    first = token_advantages(rollouts, credit)[0]
    outcome = credit[0].outcome_advantage
    assert outcome is not None
    place = int(np.flatnonzero(rollouts[0].token_turns() == 7)[0])
    assert rollouts[0].loss_mask is not None
    wanted = (outcome + 0.2 * credit[0].rewards[7]) * rollouts[0].loss_mask[place]
    np.testing.assert_allclose(first[place], wanted, rtol=1e-6)
    benchmark.pedantic(token_advantages, (rollouts, credit), rounds=3, warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    print(f"\ntoken_advantages (objects): {count:,} rollouts x {tokens:,} tokens in {seconds:.3f} s")
