"""The same rollout gets the same bits alone, in any pack, in any order, at any thread count; changing one branch or
one rollout changes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import CPU_BACKENDS, random_rollout, tiny_model

import trace_fast as tf
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.scorer import Scorer

# One of each kind of arithmetic: fused tiles, experts, windows, softcaps (eager tiles), sinks.
FAMILIES = ["llama", "qwen3-moe", "mistral-window", "gemma2", "gpt-oss"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same_bits(a: RolloutScore, b: RolloutScore) -> None:
    np.testing.assert_array_equal(a.mean_logprobs, b.mean_logprobs)
    np.testing.assert_array_equal(a.alias_mean_logprobs, b.alias_mean_logprobs)
    for x, y in zip(a.token_logprobs, b.token_logprobs, strict=True):
        np.testing.assert_array_equal(x, y)
    if a.trunk_logprobs is not None and b.trunk_logprobs is not None:
        np.testing.assert_array_equal(a.trunk_logprobs, b.trunk_logprobs)


def groups() -> list[Rollout]:
    """Two groups, one duplicate, a rollout that is a prefix of another, and one past a depth block."""
    rng = np.random.default_rng(0)
    found = []
    for g, (prompt, lengths) in enumerate([(60, (40, 170, 480)), (25, (90, 33))]):
        shared = rng.integers(3, 211, prompt)
        found += [
            random_rollout(
                rng, f"{g}.{i}", prompt=shared, turns=i + 1, tokens=n, answers=(1, 6), opener=2, group=str(g)
            )
            for i, n in enumerate(lengths)
        ]
    short = replace(found[1], id="prefix", input_ids=found[1].input_ids[: found[1].boundaries[-2]],
                    boundaries=found[1].boundaries[:-1], openers=found[1].openers[:-1])  # fmt: skip
    return [*found, short, replace(found[0], id="again")]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_alone_and_packed(name: str, dtype: torch.dtype, backend: str) -> None:
    module = tiny_model(name, dtype)
    pack = groups()

    def score(rollouts: list[Rollout], budget: int) -> list[RolloutScore]:
        scorer = Scorer.from_module(module, None, backend=backend, max_tokens_per_pack=budget)
        return scorer.score(rollouts, trunk_logprobs=True)

    whole, single, backwards = score(pack, 100_000), score(pack, 1), score(pack[::-1], 700)
    for a, b, c in zip(whole, single, backwards[::-1], strict=True):
        assert a.id == b.id == c.id
        same_bits(a, b)
        same_bits(a, c)
    same_bits(whole[0], whole[-1])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_alone_and_packed_at_odd_thread_counts(name: str, threads: int) -> None:
    """ATen gives each thread a share that may end inside a vector; the odd elements take another exp."""
    torch.set_num_threads(threads)
    module = tiny_model(name, intermediate_size=1000)
    pack = groups()
    whole = Scorer.from_module(module, None, max_tokens_per_pack=100_000).score(pack, trunk_logprobs=True)
    single = Scorer.from_module(module, None, max_tokens_per_pack=1).score(pack, trunk_logprobs=True)
    for a, b in zip(whole, single, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_changed_branch_changes_only_itself(name: str, backend: str) -> None:
    module = tiny_model(name)
    scorer = Scorer.from_module(module, None, backend=backend)
    pack = groups()
    before = scorer.score(pack, trunk_logprobs=True)
    changed = pack[2]
    answer = changed.answers[1].copy()
    answer[2] = answer[2] % 200 + 5
    opener = changed.openers[1].copy()
    opener[0] = opener[0] % 200 + 5
    openers = (changed.openers[0], opener, *changed.openers[2:])
    after = scorer.score(
        [*pack[:2], replace(changed, answers=(changed.answers[0], answer), openers=openers), *pack[3:]],
        trunk_logprobs=True,
    )
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        if i != 2:
            same_bits(a, b)
    old, new = before[2], after[2]
    np.testing.assert_array_equal(old.trunk_logprobs, new.trunk_logprobs)
    kept = [k for k in range(changed.n_states) if k != 1]
    np.testing.assert_array_equal(old.alias_mean_logprobs[kept, 0], new.alias_mean_logprobs[kept, 0])
    assert (old.alias_mean_logprobs[:, 1] != new.alias_mean_logprobs[:, 1]).all()
    assert old.alias_mean_logprobs[1, 0] != new.alias_mean_logprobs[1, 0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_changed_rollout_changes_no_other(name: str) -> None:
    scorer = Scorer.from_module(tiny_model(name), None)
    pack = groups()
    before = scorer.score(pack)
    ids = pack[0].input_ids.copy()
    ids[10] = ids[10] % 200 + 5  # inside the prompt that its group shared with it
    after = scorer.score([replace(pack[0], input_ids=ids), *pack[1:]])
    assert (before[0].mean_logprobs != after[0].mean_logprobs).any()
    for a, b in zip(before[1:], after[1:], strict=True):
        same_bits(a, b)


SMALL = tiny_model("llama", num_hidden_layers=2)
tokens = st.lists(st.integers(3, 5), max_size=8)


@st.composite
def tries(draw: st.DrawFn) -> list[Rollout]:
    """Random tries of random depth over three tokens: duplicates, empty observations (b_k = b_{k+1}), no prompt."""
    found: list[Rollout] = []
    for r in range(draw(st.integers(2, 4))):
        lead = found[-1].input_ids.tolist() if found and draw(st.booleans()) else []
        ids = lead + draw(tokens)
        states = draw(st.integers(1, 5))
        cuts = sorted(draw(st.lists(st.integers(0, len(ids)), min_size=states, max_size=states)))
        found.append(
            Rollout(
                id=str(r),
                group="g",
                input_ids=np.array(ids, dtype=np.int64),
                boundaries=np.array(cuts),
                n_turns=states - 1,
                answers=tuple(
                    np.array(a)
                    for a in draw(st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=5), min_size=1, max_size=2))
                ),
                openers=(np.array(draw(st.lists(st.integers(3, 5), min_size=1, max_size=3))),) * states,
            )
        )
    return found


@given(tries())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_random_tries(pack: list[Rollout]) -> None:
    scorer = Scorer.from_module(SMALL, None, max_tokens_per_pack=100_000)
    for together, rollout in zip(scorer.score(pack), pack, strict=True):
        same_bits(together, scorer.score([rollout])[0])


def test_half_of_the_memory_bounds_a_pack() -> None:
    scorer = tf.Scorer.from_module(SMALL, None)
    assert 4096 <= scorer.max_tokens_per_pack <= 65536
