"""The trie: every distinct prefix once, every row behind exactly its own prefix."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import random_rollout

from trace_fast.layout import PackedLayout, pack_layout, rows_of
from trace_fast.plan import cut_packs
from trace_fast.rollout import Rollout

ids = st.lists(st.integers(0, 2), max_size=7)  # three tokens only, so that everything collides with everything


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    found = []
    for r in range(draw(st.integers(1, 4))):
        if found and draw(st.booleans()):
            tokens = found[-1].input_ids.tolist()[: draw(st.integers(0, 9))] + draw(ids)
        else:
            tokens = draw(ids)
        turns = draw(st.integers(0, 4))
        states = turns + draw(st.integers(1, 2))
        cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), min_size=states, max_size=states)))
        opener = draw(st.lists(st.integers(0, 2), min_size=0 if cuts[0] else 1, max_size=3))
        answers = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=3))
        prefixes = None
        if draw(st.integers(0, 3)) == 0:  # a template that rewrote history
            prefixes = [draw(ids) if opener else [0, *draw(ids)] for _ in range(states)]
        found.append(
            Rollout(
                id=str(r),
                group="g",
                input_ids=np.array(tokens, dtype=np.int64),
                boundaries=np.array(cuts),
                n_turns=turns,
                answers=tuple(np.array(a) for a in answers),
                openers=(np.array(opener, dtype=np.int64),) * states,
                state_prefixes=tuple(np.array(p, dtype=np.int64) for p in prefixes) if prefixes else None,
            )
        )
    return found


def paths(layout: PackedLayout) -> list[tuple[int, ...]]:
    """The tokens that each row sees, itself included, from the visibility that attention gets."""
    spans, found = layout.spans, []
    for p in range(len(spans)):
        before = layout.input_ids[rows_of(spans.ancestors(p))].tolist()
        own = layout.input_ids[spans.starts[p] : spans.ends[p]].tolist()
        found += [tuple(before + own[: i + 1]) for i in range(len(own))]
    return found


@given(rollouts())
def test_every_row_sees_exactly_its_prefix_and_no_prefix_is_computed_twice(pack: list[Rollout]) -> None:
    layout = pack_layout(pack)
    seen = paths(layout)
    assert len(seen) == len(layout)
    assert len(set(seen)) == len(seen), "a prefix has two rows"
    assert layout.positions.tolist() == [len(path) - 1 for path in seen]

    wanted, naive, item = set(), 0, 0
    for r, rollout in enumerate(pack):
        trunk = rollout.input_ids.tolist()
        wanted |= {tuple(trunk[: n + 1]) for n in range(len(trunk))}
        assert layout.input_ids[layout.trunk_rows(r)].tolist() == trunk
        for k in range(rollout.n_states):
            for a, answer in enumerate(rollout.answers):
                lead = [*rollout.prefix(k).tolist(), *rollout.openers[k].tolist()]
                full = lead + answer.tolist()
                wanted |= {tuple(full[: n + 1]) for n in range(len(full) - 1)}
                naive += len(full) - 1
                assert (layout.item_rollout[item], layout.item_state[item], layout.item_alias[item]) == (r, k, a)
                pairs = slice(layout.cu_targets[item], layout.cu_targets[item + 1])
                assert layout.target_ids[pairs].tolist() == answer.tolist()
                for j, row in enumerate(layout.target_rows[pairs]):
                    assert seen[row] == tuple(full[: len(lead) + j]), "scored from another prefix"
                item += 1
    assert set(seen) == wanted, "the trie holds exactly the prefixes that are needed"
    assert layout.tokens_naive == naive


def test_a_trunk_is_contiguous_and_a_branch_sees_one_range() -> None:
    rollout = random_rollout(np.random.default_rng(0), turns=5, tokens=300)
    layout = pack_layout([rollout])
    assert layout.trunk_ranges[0].tolist() == [[0, 320]]
    for p in range(1, len(layout.spans)):
        assert len(layout.spans.ancestors(p)) == 1


def test_equal_rollouts_and_aliases_cost_nothing_twice() -> None:
    rng = np.random.default_rng(1)
    one = random_rollout(rng, "a", answers=(5,))
    twice = pack_layout([one, one])
    assert len(twice) == len(pack_layout([one]))
    assert len(twice.item_state) == 2 * one.n_states


@pytest.mark.parametrize("states", [0, 1, 61])
def test_states_of_any_number(states: int) -> None:
    rollout = random_rollout(np.random.default_rng(2), turns=states, tokens=200, answers=(1, 63))
    layout = pack_layout([rollout])
    assert len(layout.item_state) == 2 * (states + 2)
    assert np.diff(layout.cu_targets).tolist() == [1, 63] * (states + 2)


def long_group(tokens: int) -> list[Rollout]:
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 50000, 600)
    return [
        random_rollout(
            rng, str(r), prompt=prompt, turns=60, tokens=tokens - 600, answers=(8,), opener=5, vocabulary=50000
        )
        for r in range(8)
    ]


def test_planning_eight_rollouts_of_48000_tokens_and_62_states_is_fast_and_linear() -> None:
    group = long_group(48000)

    def best_of(rollouts: list[Rollout]) -> float:
        times = []
        for _ in range(5):
            started = time.process_time()
            for pack in cut_packs(rollouts, 10**9):
                pack_layout(pack)
            times.append(time.process_time() - started)
        return min(times)

    full = best_of(group)
    layout = pack_layout(group)
    branches = sum(12 * len(np.unique(r.boundaries)) for r in group)  # opener 5 + answer 8 - 1, no token in common
    assert len(layout) == 600 + 8 * 47400 + branches
    assert full < 0.5
    assert full < 6 * best_of(long_group(24000)) + 0.02, "doubling the tokens must not quadruple the time"


def test_packs_follow_the_budget_and_keep_the_order() -> None:
    rng = np.random.default_rng(4)
    group = [random_rollout(rng, str(i), tokens=100) for i in range(7)]
    packs = list(cut_packs(group, 400))
    assert [r.id for pack in packs for r in pack] == [str(i) for i in range(7)]
    assert all(len(pack_layout(pack)) <= 400 for pack in packs)
    assert len(packs) == 4
    assert [len(p) for p in cut_packs(group, 1)] == [1] * 7, "a rollout beyond the budget gets its own pack"
