"""Numbers that C++ and Python both hold: the native module exports its own, and they are the same."""

from __future__ import annotations

import pytest

from trace_fast import native
from trace_fast.kernels.policy_loss import metrics
from trace_fast.kernels.prefix_attention.native_plan import KEY_BLOCK
from trace_fast.kernels.turn_credit.checks import LARGEST_SETTING

pytestmark = pytest.mark.skipif(not native.status().available, reason=f"native module: {native.status().reason}")


@pytest.mark.parametrize(
    ("exported", "ours"),
    [
        ("PREFIX_ATTENTION_KEY_BLOCK", KEY_BLOCK),
        ("POLICY_LOSS_SUMS", metrics.SUMS),
        ("POLICY_LOSS_BINS", metrics.BINS),
        ("POLICY_LOSS_BINS_PER_OCTAVE", metrics.BINS_PER_OCTAVE),
        ("POLICY_LOSS_LOWEST_EXPONENT", metrics.LOWEST_EXPONENT),
        ("TURN_CREDIT_LARGEST_SETTING", LARGEST_SETTING),
    ],
)
def test_a_number_is_the_same_on_both_sides(exported: str, ours: float) -> None:
    assert getattr(native.module(), exported) == ours


def test_places_of_the_sums() -> None:
    places = native.module().POLICY_LOSS_SUM_PLACES
    assert {name: getattr(metrics, name) for name in places} == places
    assert sorted(places.values()) == list(range(metrics.SUMS)), "every place has a name"


def test_every_exported_number_is_compared_here() -> None:
    exported = {name for name in dir(native.module()) if name.isupper()}
    compared = {"PREFIX_ATTENTION_KEY_BLOCK", "POLICY_LOSS_SUM_PLACES", "TURN_CREDIT_LARGEST_SETTING"}
    assert exported - compared == {f"POLICY_LOSS_{n}" for n in ("SUMS", "BINS", "BINS_PER_OCTAVE", "LOWEST_EXPONENT")}
