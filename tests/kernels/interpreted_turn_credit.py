"""turn_credit's Triton kernels in Triton's interpreter (run with TRITON_INTERPRET=1, by ``test_triton.py``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from derivative_refusals import expect_no_forward_mode
from turn_credit_problems import UNIT, batch, in_float64, numbers, run, size_of_terms

from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.errors import TraceFastError
from trace_fast.kernels.turn_credit import why_not
from trace_fast.kernels.turn_credit.outputs import empty_outputs
from trace_fast.kernels.turn_credit.triton_impl import turn_credit

DTYPES = (torch.float32, torch.float64)


def test_this_is_the_interpreter() -> None:
    assert why_not("triton", device=torch.device("cpu"), dtype=torch.float32) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["log_ratio", "raw", "linear"])
@pytest.mark.parametrize(
    ("horizon", "normalize", "tail"),
    [
        (0, True, "off"),
        (1, True, "constant"),
        (3, True, "group_mean"),
        (7, False, "group_mean"),
        (200, True, "group_mean"),
    ],
)
def test_error_is_that_of_eager_and_the_rounding_of_its_sums(
    dtype: torch.dtype, form: Any, horizon: int, normalize: bool, tail: Any
) -> None:
    """Slack: a window adds K terms one after the other (2 K units), values and blocks add up to 132 terms, a credit
    itself is off by 8 units (quotients 4, logarithm 2, its correction 2)."""
    credit = CreditConfig(form=form, horizon=horizon, normalize_window=normalize)
    advantage = AdvantageConfig(answer_tail=tail)
    tensors = batch(dtype)
    truth = run(in_float64(tensors), credit, advantage, "reference")
    eager = numbers(run(tensors, credit, advantage, "reference"))
    got = numbers(run(tensors, credit, advantage, "triton"))
    terms = 132 if form == "linear" else 2 * min(horizon, 132)
    slack = (8 + terms) * UNIT[dtype] * size_of_terms(truth, tensors, credit)
    for name, wanted in numbers(truth).items():
        assert got[name].dtype == dtype
        error = (got[name].double() - wanted).abs().max()
        allowed = (eager[name].double() - wanted).abs().max()
        assert error <= allowed + slack, (name, float(error), float(allowed))


def test_small_gains_keep_their_digits() -> None:
    before = -torch.rand(200, dtype=torch.float64) * 8
    gains = (torch.rand(200).double() - 0.5) * 10.0 ** -torch.arange(0, 20, 0.1, dtype=torch.float64)
    after = (before + gains).clamp(max=0)
    after[:3] = before[:3]
    tensors = {
        "mean_logprobs_S": torch.stack((before, after), 1).reshape(-1),
        "cu_states_R1": torch.arange(0, 401, 2, dtype=torch.int32),
        "n_turns_R": torch.ones(200, dtype=torch.int64),
        "outcome_advantages_R": torch.zeros(200, dtype=torch.float64),
        "boundaries_S": torch.zeros(400, dtype=torch.int64),
        "loss_mask_N": torch.zeros(0, dtype=torch.bool),
        "cu_tokens_R1": torch.zeros(201, dtype=torch.int32),
        "group_ids_R": torch.zeros(200, dtype=torch.int64),
    }
    got = run(tensors, CreditConfig(), AdvantageConfig(), "triton").credit.deltas_D
    gain = after - before
    wanted = torch.copysign(torch.log1p(gain.abs() / (0.1 - torch.maximum(before, after))), gain)
    assert ((got - wanted).abs() <= 8 * UNIT[torch.float64] * wanted.abs()).all()
    assert (got[:3] == 0).all()


@pytest.mark.parametrize("with_tokens", [True, False])
def test_nothing_is_left_unwritten(with_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*arguments: Any) -> Any:
        return tuple(t.fill_(float("nan") if t.is_floating_point() else -99) for t in empty_outputs(*arguments))

    monkeypatch.setattr("trace_fast.kernels.turn_credit.triton_impl.empty_outputs", poisoned)
    tensors = batch(torch.float32)
    states = [tensors[k] for k in ("mean_logprobs_S", "cu_states_R1", "n_turns_R", "outcome_advantages_R")]
    tokens = [tensors[k] for k in ("boundaries_S", "loss_mask_N", "cu_tokens_R1", "group_ids_R")]
    settings = (3, 0.8, 0.1, 2.0, "log_ratio", True, 1.0, 0.2, "group_mean", 0.05)
    outputs = turn_credit(*states, *(tokens if with_tokens else [None] * 4), int(tensors["n_turns_R"].sum()), *settings)
    assert all(output.isfinite().all() for output in outputs)
    assert outputs[3][0] == outputs[4][0] == 0
    assert outputs[4][-1] == tensors["n_turns_R"].sum()


def test_a_rollout_has_the_same_bits_in_any_batch() -> None:
    tensors = batch(torch.float32)
    whole = run(tensors, CreditConfig(), AdvantageConfig(answer_tail="constant"), "triton")
    cu, cut = tensors["cu_states_R1"].tolist(), tensors["cu_tokens_R1"].tolist()
    r = 4
    alone = run(
        {
            "mean_logprobs_S": tensors["mean_logprobs_S"][cu[r] : cu[r + 1]],
            "boundaries_S": tensors["boundaries_S"][cu[r] : cu[r + 1]],
            "cu_states_R1": torch.tensor([0, cu[r + 1] - cu[r]], dtype=torch.int32),
            "n_turns_R": tensors["n_turns_R"][r : r + 1],
            "outcome_advantages_R": tensors["outcome_advantages_R"][r : r + 1],
            "loss_mask_N": tensors["loss_mask_N"][cut[r] : cut[r + 1]],
            "cu_tokens_R1": torch.tensor([0, cut[r + 1] - cut[r]], dtype=torch.int32),
            "group_ids_R": tensors["group_ids_R"][r : r + 1],
        },
        CreditConfig(),
        AdvantageConfig(answer_tail="constant"),
        "triton",
    )
    turns = whole.credit.cu_turns_R1.tolist()
    assert torch.equal(alone.credit.values_S, whole.credit.values_S[cu[r] : cu[r + 1]])
    assert torch.equal(alone.credit.rewards_T, whole.credit.rewards_T[turns[r] : turns[r + 1]])
    assert torch.equal(alone.advantages_N, whole.advantages_N[cut[r] : cut[r + 1]])


@pytest.mark.parametrize("form", ["log_ratio", "raw", "linear"])
def test_any_number_of_programs_gives_the_same_bits(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = batch(torch.float32)
    results = []
    for shares in (1, 2, 7):
        monkeypatch.setattr("trace_fast.kernels.turn_credit.triton_impl.shares_a_rollout", lambda *_, n=shares: n)
        results.append(numbers(run(tensors, CreditConfig(form=form), AdvantageConfig(), "triton")))
    for other in results[1:]:
        for name, first in results[0].items():
            assert torch.equal(first, other[name]), name


def test_bad_contents_are_refused_where_looking_costs_nothing() -> None:
    tensors = batch(torch.float32)
    bad = tensors["cu_states_R1"].clone()
    bad[2] = 4000
    with pytest.raises(TraceFastError, match="cu_states_R1: expected offsets that increase"):
        run(tensors | {"cu_states_R1": bad}, CreditConfig(), AdvantageConfig(), "triton")


def test_unsound_rollouts_become_nan_and_leave_the_others() -> None:
    """What a CUDA device gets unchecked: here the op itself, below the checks."""
    tensors = batch(torch.float32)
    settings = (3, 0.8, 0.1, 2.0, "log_ratio", True, 1.0, 0.2, "group_mean", 0.05)
    total = int(tensors["n_turns_R"].sum())

    def outputs(change: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        t = tensors | change
        states = [t[k] for k in ("mean_logprobs_S", "cu_states_R1", "n_turns_R", "outcome_advantages_R")]
        return turn_credit(
            *states, t["boundaries_S"], t["loss_mask_N"], t["cu_tokens_R1"], t["group_ids_R"], total, *settings
        )

    sound = outputs({})
    scores = tensors["mean_logprobs_S"].clone()
    scores[tensors["cu_states_R1"][2] + 5] = 0.25  # no log-probability
    values, deltas, *_ = outputs({"mean_logprobs_S": scores})
    first, last = tensors["cu_states_R1"][2:4].tolist()
    assert values[first + 5].isnan()
    assert deltas[first - 2 + 4 : first - 2 + 6].isnan().all()
    assert torch.equal(values[:first], sound[0][:first])
    assert torch.equal(values[last:], sound[0][last:])

    turns = tensors["n_turns_R"].clone()
    turns[2] += 1  # 61 turns, then 62 of 62 states: the offsets of later turns shift past the end
    values, *_ = outputs({"n_turns_R": turns})
    assert values[first:last].isnan().all()
    assert torch.equal(values[:first], sound[0][:first])


def test_custom_op_passes_opcheck() -> None:
    tensors = batch(torch.float32, (2, 0, 5), (6, 3, 9))
    states = [tensors[k] for k in ("mean_logprobs_S", "cu_states_R1", "n_turns_R", "outcome_advantages_R")]
    tokens = [tensors[k] for k in ("boundaries_S", "loss_mask_N", "cu_tokens_R1", "group_ids_R")]
    for extra in (tokens, [None] * 4):
        results = torch.library.opcheck(
            turn_credit, (*states, *extra, 7, 3, 0.8, 0.1, 2.0, "log_ratio", True, 1.0, 0.2, "group_mean", 0.05)
        )
        assert set(results.values()) == {"SUCCESS"}


def test_a_tangent_is_refused() -> None:
    tensors = batch(torch.float32, (2, 1), (5, 3))

    def rewards(x: torch.Tensor) -> torch.Tensor:
        return run(tensors | {"mean_logprobs_S": x}, CreditConfig(), AdvantageConfig(), "triton").credit.rewards_T

    expect_no_forward_mode(rewards, tensors["mean_logprobs_S"], "triton")


def test_what_could_overflow_is_refused() -> None:
    tensors = batch(torch.float32, (2, 1), (5, 3))
    settings = CreditConfig.model_construct(**dict(CreditConfig()) | {"terminal_scale": 1e39})
    with pytest.raises(TraceFastError, match="terminal_scale: expected a number from 0 to"):
        run(tensors, settings, AdvantageConfig(), "triton")
    tensors["outcome_advantages_R"] = torch.full((2,), 2e9)
    with pytest.raises(TraceFastError, match="outcome_advantages_R: expected numbers of magnitude up to"):
        run(tensors, CreditConfig(), AdvantageConfig(), "triton")
