"""turn_credit in C++: against the float64 oracle, its precision and its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from turn_credit_problems import SETTINGS, UNIT, batch, in_float64, numbers, raw_tensors, run, size_of_terms

from trace_fast import native
from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.errors import TraceFastError
from trace_fast.kernels.turn_credit import credit_and_advantages, turn_credit_flat, why_not
from trace_fast.oracle_credit import reference_credit

DTYPES = (torch.float32, torch.float64)
OUTPUTS = {  # and the offsets of a rollout in each
    "values_S": "cu_states_R1",
    "deltas_D": "cu_deltas_R1",
    "rewards_T": "cu_turns_R1",
    "advantages_N": "cu_tokens_R1",
}
MISSING = why_not("native", device=torch.device("cpu"), dtype=torch.float32)
needs_native = pytest.mark.skipif(MISSING is not None, reason=f"native turn_credit: {MISSING}")
def kernels() -> list[str]:
    return list(native.module().elementwise_kernels()) if MISSING is None else []


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["log_ratio", "raw", "linear"])
@pytest.mark.parametrize(
    ("horizon", "normalize", "tail"),
    [
        (0, True, "off"),
        (1, True, "constant"),
        (3, True, "group_mean"),
        (7, False, "group_mean"),
        (10**30, True, "group_mean"),
    ],
)
def test_equals_the_oracle(dtype: torch.dtype, form: Any, horizon: int, normalize: bool, tail: Any) -> None:
    """It computes in float64 and rounds once: half a unit of the result, and the float64 rounding of sums of terms."""
    credit = CreditConfig(form=form, horizon=horizon, normalize_window=normalize)
    advantage = AdvantageConfig(answer_tail=tail)
    tensors = batch(dtype)
    truth = run(in_float64(tensors), credit, advantage, "reference")
    got = run(tensors, credit, advantage, "native")
    slack = 2 * 132 * UNIT[torch.float64] * size_of_terms(truth, tensors, credit)
    for name, wanted in numbers(truth).items():
        found = numbers(got)[name]
        assert found.dtype == dtype
        error = (found.double() - wanted).abs()
        assert (error <= UNIT[dtype] * wanted.abs() + slack).all(), (name, float(error.max()))
    assert torch.equal(got.credit.cu_deltas_R1, truth.credit.cu_deltas_R1)
    assert torch.equal(got.credit.cu_turns_R1, truth.credit.cu_turns_R1)
    assert (got.advantages_N[~tensors["loss_mask_N"]] == 0).all()
    alone = turn_credit_flat(
        tensors["mean_logprobs_S"],
        tensors["cu_states_R1"],
        tensors["n_turns_R"],
        tensors["outcome_advantages_R"],
        credit,
        backend="native",
    )
    assert torch.equal(alone.rewards_T, got.credit.rewards_T)
    assert torch.equal(alone.values_S, got.credit.values_S)


@needs_native
@pytest.mark.parametrize("turns", [0, 1, 61])
def test_equals_the_loops_of_the_paper(turns: int) -> None:
    scores = -np.random.default_rng(turns).exponential(3.0, size=turns + 2)
    expected = reference_credit(scores, turns, 0.7, CreditConfig())
    got = turn_credit_flat(
        torch.from_numpy(scores),
        torch.tensor([0, turns + 2], dtype=torch.int32),
        torch.tensor([turns]),
        torch.tensor([0.7], dtype=torch.float64),
        CreditConfig(),
        backend="native",
    )
    pairs = zip((got.values_S, got.deltas_D, got.rewards_T), expected, strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-12, atol=6 * UNIT[torch.float64])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", kernels() or ["baseline"])
def test_small_gains_keep_their_digits_on_every_instruction_set(kernel: str, dtype: torch.dtype) -> None:
    """A credit is off by 8 float64 units relative (4 in the quotient, the logarithm's 2, its argument's 2), and half a
    unit of its dtype, for gains of any size. numpy's log1p on the same quotient is the oracle of the logarithm."""
    random = np.random.default_rng(3)
    before = -random.exponential(4.0, size=4001)
    after = np.minimum(before + random.choice([-1, 1], 4001) * 10.0 ** random.uniform(-14, 5, 4001), 0.0)
    after[:5] = before[:5]
    pairs = torch.from_numpy(np.stack((before, after), 1)).to(dtype)
    exact = pairs.double().numpy()
    gain = exact[:, 1] - exact[:, 0]
    wanted = np.copysign(np.log1p(np.abs(gain) / np.minimum(0.1 - exact[:, 0], 0.1 - exact[:, 1])), gain)
    tensors = raw_tensors(
        {
            "mean_logprobs_S": pairs.reshape(-1),
            "cu_states_R1": torch.arange(0, 8003, 2, dtype=torch.int32),
            "n_turns_R": torch.ones(4001, dtype=torch.int64),
            "outcome_advantages_R": torch.zeros(4001, dtype=dtype),
            "loss_mask_N": torch.zeros(0, dtype=torch.bool),
        }
    )
    del tensors["advantages_N"], tensors["loss_mask_N"]
    native.module().turn_credit(tensors, SETTINGS, 1, kernel)
    found = tensors["deltas_D"].double().numpy()
    rounding = UNIT[dtype] if dtype == torch.float32 else 0.0
    assert (np.abs(found - wanted) <= (8 * UNIT[torch.float64] + rounding) * np.abs(wanted)).all()
    assert (found[:5] == 0).all()


@needs_native
@pytest.mark.parametrize("form", ["log_ratio", "raw", "linear"])
def test_any_number_of_threads_gives_the_same_bits_and_leaves_no_entry_unwritten(form: str) -> None:
    turns = [i % 37 for i in range(1500)]  # 27,000 states: more than a dozen blocks
    tensors = batch(torch.float32, turns, [3 * t + 2 for t in turns], seed=4)
    results = []
    for threads in (1, 2, 5):
        out = raw_tensors(tensors)
        native.module().turn_credit(out, SETTINGS | {"form": form}, threads, kernels()[0])
        results.append({k: out[k] for k in ("values_S", "deltas_D", "rewards_T", "advantages_N")})
    for name, first in results[0].items():
        assert first.isfinite().all(), name
        assert all(torch.equal(first, other[name]) for other in results[1:]), name


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["log_ratio", "raw", "linear"])
@pytest.mark.parametrize("horizon", [3, 7, 100])
def test_a_rollout_has_the_same_bits_alone_in_any_batch_and_on_any_instruction_set(
    dtype: torch.dtype, form: str, horizon: int
) -> None:
    """A fused multiply-add in the vector part of a loop and none in its remainder would show here."""
    turns = torch.randint(0, 62, (60,)).tolist()
    tensors = batch(dtype, turns, [3 * t + 5 for t in turns], seed=horizon)
    settings = SETTINGS | {"form": form, "horizon": horizon, "answer_tail": "constant"}  # group_mean depends on others
    whole = raw_tensors(tensors)
    native.module().turn_credit(whole, settings, 1, kernels()[0])
    for kernel in kernels()[1:]:
        other = raw_tensors(tensors)
        native.module().turn_credit(other, settings, 1, kernel)
        assert all(torch.equal(other[name], whole[name]) for name in OUTPUTS), kernel
    cu = {name: whole[name].tolist() for name in ("cu_states_R1", "cu_deltas_R1", "cu_turns_R1", "cu_tokens_R1")}
    for r in range(60):
        states = slice(cu["cu_states_R1"][r], cu["cu_states_R1"][r + 1])
        tokens = slice(cu["cu_tokens_R1"][r], cu["cu_tokens_R1"][r + 1])
        alone = raw_tensors(
            {
                **{name: tensors[name][states] for name in ("mean_logprobs_S", "boundaries_S")},
                **{name: tensors[name][r : r + 1] for name in ("n_turns_R", "outcome_advantages_R", "group_ids_R")},
                "loss_mask_N": tensors["loss_mask_N"][tokens],
                "cu_states_R1": torch.tensor([0, states.stop - states.start], dtype=torch.int32),
                "cu_tokens_R1": torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32),
            }
        )
        native.module().turn_credit(alone, settings, 1, kernels()[r % len(kernels())])
        for name, offsets in OUTPUTS.items():
            assert torch.equal(alone[name], whole[name][cu[offsets][r] : cu[offsets][r + 1]]), name


@needs_native
def test_int32_arguments_and_a_known_total_change_nothing() -> None:
    wide, narrow = batch(torch.float32), batch(torch.float32, integers=torch.int32)
    total = int(wide["n_turns_R"].sum())
    first = run(wide, CreditConfig(), AdvantageConfig(), "native")
    second = run(narrow, CreditConfig(), AdvantageConfig(), "native", total_turns=total)
    for name, number in numbers(first).items():
        assert torch.equal(number, numbers(second)[name])
    with pytest.raises(TraceFastError, match=rf"total_turns: expected {total} \(the sum .*\), got {total + 1}"):
        run(wide, CreditConfig(), AdvantageConfig(), "native", total_turns=total + 1)


@needs_native
def test_no_rollouts() -> None:
    got = run(batch(torch.float32, (), ()), CreditConfig(), AdvantageConfig(), "native")
    assert [n.tolist() for n in numbers(got).values()] == [[], [], [], []]
    assert got.credit.cu_turns_R1.tolist() == [0]


@needs_native
def test_custom_op_passes_opcheck() -> None:
    from trace_fast.kernels.turn_credit.native_impl import turn_credit

    tensors = batch(torch.float32, (2, 0, 5), (6, 3, 9))
    states = [tensors[k] for k in ("mean_logprobs_S", "cu_states_R1", "n_turns_R", "outcome_advantages_R")]
    tokens = [tensors[k] for k in ("boundaries_S", "loss_mask_N", "cu_tokens_R1", "group_ids_R")]
    for extra in (tokens, [None] * 4):
        results = torch.library.opcheck(turn_credit, (*states, *extra, 7, *SETTINGS.values()))
        assert set(results.values()) == {"SUCCESS"}


@needs_native
def test_compiles_into_one_graph() -> None:
    tensors, credit, advantage = batch(torch.float32, (2, 0, 5), (6, 3, 9)), CreditConfig(), AdvantageConfig()

    def advantages(scores: torch.Tensor) -> torch.Tensor:
        arguments = tensors | {"mean_logprobs_S": scores}
        return run(arguments, credit, advantage, "native", total_turns=7).advantages_N

    compiled = torch.compile(advantages, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(tensors["mean_logprobs_S"]), advantages(tensors["mean_logprobs_S"]))


def test_reference_of_the_fused_call_is_the_three_calls_in_one() -> None:
    tensors = batch(torch.float64)
    whole = credit_and_advantages(**tensors, credit=CreditConfig(), advantage=AdvantageConfig())
    parts = turn_credit_flat(
        tensors["mean_logprobs_S"],
        tensors["cu_states_R1"],
        tensors["n_turns_R"],
        tensors["outcome_advantages_R"],
        CreditConfig(),
    )
    assert torch.equal(whole.credit.rewards_T, parts.rewards_T)
    r, config = 2, AdvantageConfig()  # one rollout, token by token
    cu, cut = tensors["cu_states_R1"].tolist(), tensors["cu_tokens_R1"].tolist()
    bounds = tensors["boundaries_S"][cu[r] : cu[r + 1]].tolist()
    rewards = parts.rewards_T[parts.cu_turns_R1[r] : parts.cu_turns_R1[r + 1]].tolist()
    outcome = float(tensors["outcome_advantages_R"][r])
    mask = tensors["loss_mask_N"][cut[r] : cut[r + 1]].tolist()
    answers = {i: cut[i] + int(tensors["boundaries_S"][cu[i] + tensors["n_turns_R"][i]]) for i in (0, 2, 4, 6)}
    lengths = [int(tensors["loss_mask_N"][start : cut[i + 1]].sum()) for i, start in answers.items()]  # its group
    mean = sum(lengths) / sum(n > 0 for n in lengths)
    for i, written in enumerate(mask):
        turn = sum(b <= i for b in bounds[: len(rewards) + 1]) - 1
        expected = 0.0
        if written and 0 <= turn < len(rewards):
            expected = config.alpha_out * outcome + config.alpha_turn * rewards[turn]
        elif written and turn >= 0:
            expected = config.alpha_out * outcome * config.answer_tail_scale * mean / lengths[1]
        assert float(whole.advantages_N[cut[r] + i]) == pytest.approx(expected, rel=1e-14)
