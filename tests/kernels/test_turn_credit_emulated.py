"""The CUDA kernel of turn_credit, compiled for the host and run there block by block: its arithmetic and its addresses.

What this cannot show is what many threads at a time do; the kernel's threads share nothing but strided loops between
barriers, and integer additions.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from turn_credit_problems import UNIT, batch, in_float64, numbers, run, size_of_terms

from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.kernels.turn_credit.outputs import empty_outputs, fill_offsets, group_mean_weights

REPOSITORY = Path(__file__).resolve().parents[2]
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
FORMS = ("log_ratio", "raw", "linear")
Emulated = Callable[..., tuple[Tensor, ...]]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (looked for c++, g++, clang++)")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """The op on checked or unchecked tensors; outputs as ``empty_outputs`` lays them out, NaN before it runs."""
    assert COMPILER is not None
    library = tmp_path_factory.mktemp("emulated") / "turn_credit.so"
    source = Path(__file__).with_name("turn_credit_emulated.cpp")
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{REPOSITORY / 'csrc'}"]
    subprocess.run([COMPILER, *options, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))

    def call(
        tensors: dict[str, Any],
        credit: CreditConfig,
        advantage: AdvantageConfig,
        shares: int,
        allocate: Callable[..., tuple[Tensor, ...]] = empty_outputs,
    ) -> tuple[Tensor, ...]:
        scores, mask = tensors["mean_logprobs_S"], tensors["loss_mask_N"]
        total = tensors.get("total_turns", int(tensors["n_turns_R"].sum()))
        outputs = allocate(scores, tensors["n_turns_R"], mask, total)
        for output in outputs:
            output.fill_(float("nan") if output.is_floating_point() else -99)
        fill_offsets(tensors["cu_states_R1"], tensors["n_turns_R"], outputs[3], outputs[4])
        named = ("mean_logprobs_S", "cu_states_R1", "n_turns_R", "outcome_advantages_R")
        inputs = [*(tensors[k] for k in named), *(tensors[k] for k in ("boundaries_S", "loss_mask_N", "cu_tokens_R1"))]
        rollouts = len(tensors["n_turns_R"])
        sizes = (ctypes.c_int64 * 5)(rollouts, len(scores), total, len(mask), credit.horizon)
        pointers = (ctypes.c_void_p * 13)(*(t.data_ptr() for t in (*inputs, *outputs)))
        reals = (ctypes.c_double * 5)(
            credit.discount, credit.gap_offset, credit.terminal_scale, advantage.alpha_out, advantage.alpha_turn
        )
        choices = (ctypes.c_int * 2)(FORMS.index(credit.form), credit.normalize_window)
        function = getattr(loaded, "run_float32" if scores.dtype == torch.float32 else "run_float64")

        length_R = torch.zeros(rollouts, dtype=torch.int64)
        function(sizes, pointers, reals, choices, None, 1, ctypes.c_void_p(length_R.data_ptr()))
        scale = 0.0 if advantage.answer_tail == "off" else advantage.answer_tail_scale
        weight_R = torch.full((rollouts,), scale, dtype=torch.float64)
        if advantage.answer_tail == "group_mean":
            weight_R = group_mean_weights(length_R, tensors["group_ids_R"], scale)
        function(sizes, pointers, reals, choices, ctypes.c_void_p(weight_R.data_ptr()), shares, None)
        return outputs

    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
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
    emulated: Emulated, dtype: torch.dtype, form: Any, horizon: int, normalize: bool, tail: Any
) -> None:
    """Slack: a window adds K terms one after the other (2 K units), running values up to 132; a credit itself is off by
    6 units (quotient 4, logarithm 2)."""
    credit = CreditConfig(form=form, horizon=horizon, normalize_window=normalize)
    advantage = AdvantageConfig(answer_tail=tail)
    tensors = batch(dtype)
    truth = run(in_float64(tensors), credit, advantage, "reference")
    eager = numbers(run(tensors, credit, advantage, "reference"))
    values, deltas, rewards, cu_deltas, cu_turns, advantages = emulated(tensors, credit, advantage, 3)
    got = {"values_S": values, "deltas_D": deltas, "rewards_T": rewards, "advantages_N": advantages}
    terms = 132 if form == "linear" else 2 * min(horizon, 132)
    slack = (6 + terms) * UNIT[dtype] * size_of_terms(truth, tensors, credit)
    for name, wanted in numbers(truth).items():
        error = (got[name].double() - wanted).abs().max()
        allowed = (eager[name].double() - wanted).abs().max()
        assert error <= allowed + slack, (name, float(error), float(allowed))
    assert torch.equal(cu_deltas, truth.credit.cu_deltas_R1)
    assert torch.equal(cu_turns, truth.credit.cu_turns_R1)


def test_any_number_of_shares_gives_the_same_bits(emulated: Emulated) -> None:
    tensors = batch(torch.float32)
    one, many = (emulated(tensors, CreditConfig(), AdvantageConfig(), shares) for shares in (1, 11))
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


def padded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A copy within a larger tensor whose margins hold a pattern, and that larger tensor."""
    fill = True if tensor.dtype == torch.bool else 77
    whole = torch.full((len(tensor) + 4096,), fill, dtype=tensor.dtype)
    whole[2048 : 2048 + len(tensor)] = tensor
    return whole[2048 : 2048 + len(tensor)], whole


def test_wild_offsets_write_nothing_outside_and_poison_their_rollout(emulated: Emulated) -> None:
    wholes: list[tuple[Tensor, int]] = []

    def guarded(*arguments: Any) -> tuple[Tensor, ...]:
        pairs = [padded(output) for output in empty_outputs(*arguments)]
        wholes[:] = [(whole, len(output)) for output, whole in pairs]
        return tuple(output for output, _ in pairs)

    random = torch.Generator().manual_seed(0)
    poisoned = 0
    for trial in range(300):
        tensors = batch(torch.float64, seed=trial)
        tensors["total_turns"] = int(tensors["n_turns_R"].sum())
        for name in ("cu_states_R1", "n_turns_R", "cu_tokens_R1", "boundaries_S"):
            at = torch.randint(0, len(tensors[name]), (1,), generator=random)
            shift = torch.randint(-(10 ** (1 + trial % 8)), 10 ** (1 + trial % 8), (1,), generator=random)
            tensors[name] = tensors[name].clone()
            tensors[name][at] += shift.to(tensors[name].dtype)
        outputs = emulated(tensors, CreditConfig(form=FORMS[trial % 3]), AdvantageConfig(), 2, guarded)
        for whole, length in wholes:
            assert (whole[:2048] == 77).all()
            assert (whole[2048 + length :] == 77).all()
        poisoned += bool(outputs[0].isnan().any())
    assert poisoned > 250
