"""turn_credit takes int32 and int64 offsets alike: the same bits, and the same refusals of what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from turn_credit_problems import batch, numbers, run

from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.errors import TraceFastError
from trace_fast.kernels.turn_credit import token_advantages_flat, token_turns_flat, turn_credit_flat, why_not
from trace_fast.kernels.turn_credit.checks import LARGEST_OFFSET, int32_offsets

MISSING = why_not("native", device=torch.device("cpu"), dtype=torch.float32)
NATIVE = pytest.param("native", marks=pytest.mark.skipif(MISSING is not None, reason=f"native turn_credit: {MISSING}"))
BACKENDS = ["reference", NATIVE]
OFFSETS = ("cu_states_R1", "cu_tokens_R1")


def widened(tensors: dict[str, Any], *names: str) -> dict[str, Any]:
    return tensors | {name: tensors[name].long() for name in names}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["log_ratio", "linear"])
@pytest.mark.parametrize("names", [OFFSETS[:1], OFFSETS[1:], OFFSETS], ids=str)
def test_both_types_give_the_same_bits(names: tuple[str, ...], form: Any, backend: str) -> None:
    tensors, credit, advantage = batch(torch.float32), CreditConfig(form=form), AdvantageConfig()
    wanted = run(tensors, credit, advantage, backend)
    found = run(widened(tensors, *names), credit, advantage, backend, total_turns=int(tensors["n_turns_R"].sum()))
    for name, numbers_ in numbers(wanted).items():
        assert torch.equal(numbers(found)[name], numbers_), name
    for name in ("cu_deltas_R1", "cu_turns_R1"):
        assert torch.equal(getattr(found.credit, name), getattr(wanted.credit, name))
        assert getattr(found.credit, name).dtype == torch.int32


def test_the_parts_take_both_types_too() -> None:
    tensors, advantage = batch(torch.float64), AdvantageConfig()
    whole = run(tensors, CreditConfig(), advantage, "reference")
    long = widened(tensors, *OFFSETS)
    turns_N = token_turns_flat(long["boundaries_S"], long["cu_states_R1"], long["n_turns_R"], long["cu_tokens_R1"])
    found_N = token_advantages_flat(
        turns_N,
        long["loss_mask_N"],
        long["cu_tokens_R1"],
        whole.credit.rewards_T,
        whole.credit.cu_turns_R1.long(),
        long["outcome_advantages_R"],
        long["group_ids_R"],
        advantage,
    )
    assert torch.equal(found_N, whole.advantages_N)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2**32 + 2, 5], "expected offsets that increase"),
        ([-(2**32), 2, 5], "expected 0 as first offset"),
        ([0, 2, 2**32 + 5], r"expected 5 as last offset \(the length of mean_logprobs_S\)"),
        ([0, 2, 2**63 - 1], r"expected 5 as last offset \(the length of mean_logprobs_S\)"),
    ],
)
def test_an_offset_that_int32_would_wrap_is_refused(offsets: list[int], message: str, backend: str) -> None:
    """Cut to 32 bits, each of these would be [0, 2, 5] or end in a valid offset."""
    scores, turns = torch.full((5,), -1.0), torch.tensor([1, 1])
    with pytest.raises(TraceFastError, match=f"cu_states_R1: {message}"):
        turn_credit_flat(scores, torch.tensor(offsets), turns, torch.zeros(2), CreditConfig(), backend=backend)


def test_more_entries_than_int32_counts_are_refused() -> None:
    cu = torch.tensor([0, LARGEST_OFFSET + 1])
    with pytest.raises(TraceFastError, match="cu_tokens_R1: expected offsets into at most 2147483647 entries, got"):
        int32_offsets("cu_tokens_R1", cu, LARGEST_OFFSET + 1)
    assert int32_offsets("cu_tokens_R1", cu - 1, LARGEST_OFFSET).tolist() == [-1, LARGEST_OFFSET]
