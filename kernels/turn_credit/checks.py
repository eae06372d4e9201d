"""The checks of this op's arguments: one wording, and one device-to-host transfer for all checks of contents.

``check_*_form`` look at types, devices and lengths only and never wait for a device; the others look at contents too.

Suffixes: R rollouts, R1 = R+1 offsets, S states of all rollouts, T turns of all rollouts, N tokens of all rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.kernels.common.checks import FLOATS, INTEGERS, check_form

LARGEST_OFFSET = 2**31 - 1
# Of settings and outcome advantages: products of three of them and a number of tokens stay within float32.
LARGEST_SETTING = 1e9  # kLargestCreditSetting of csrc/cpu/turn_credit.h


@dataclass(frozen=True, slots=True)
class Rule:
    """What each entry of a tensor must satisfy: ``ok`` says where it does, ``describe(i)`` what came at entry i."""

    name: str
    expected: str
    ok: Tensor
    describe: Callable[[int], str]


def check_offsets_form(name: str, cu: Tensor, like: Tensor, n_segments: int | None = None) -> int:
    """``check_form`` for R+1 offsets; returns R."""
    check_form(name, cu, INTEGERS, like, None if n_segments is None else n_segments + 1)
    if not cu.numel():
        raise TraceFastError(f"{name}: expected R+1 offsets beginning with 0, got an empty tensor")
    return cu.numel() - 1


def int32_offsets(name: str, cu: Tensor, total: int) -> Tensor:
    """Offsets into ``total`` entries as int32, without a look at them.

    What int32 does not hold becomes the nearest that it does, so that an offset that is out of range stays so.
    """
    if total > LARGEST_OFFSET:
        raise TraceFastError(f"{name}: expected offsets into at most {LARGEST_OFFSET} entries, got {total} entries")
    if cu.dtype == torch.int32:
        return cu
    return cu.clamp(-LARGEST_OFFSET, LARGEST_OFFSET).to(torch.int32)


def offset_rules(name: str, cu: Tensor, total: int, of: str, least: int = 0) -> list[Rule]:
    """Offsets start at 0, end at ``total`` = the length of tensor ``of``, and grow by ``least`` or more."""
    steps = cu.diff()
    return [
        Rule(name, "0 as first offset", cu[:1] == 0, lambda i: f"{cu[0]}"),
        Rule(
            name,
            "offsets that increase (no segment is empty)" if least else "offsets that never decrease",
            steps >= least,
            lambda i: f"{cu[i]} then {cu[i + 1]} at [{i}], [{i + 1}]",
        ),
        Rule(name, f"{total} as last offset (the length of {of})", cu[-1:] == total, lambda i: f"{cu[-1]}"),
    ]


def finite_rule(name: str, values: Tensor) -> Rule:
    """Every value is a finite number."""
    return Rule(name, "finite numbers", values.isfinite(), lambda i: f"{values[i]} at [{i}]")


def outcome_rules(outcome_advantages_R: Tensor) -> list[Rule]:
    """Outcome advantages that no setting makes overflow."""
    name, values = "outcome_advantages_R", outcome_advantages_R
    expected = f"numbers of magnitude up to {LARGEST_SETTING:.9g}"
    within = Rule(name, expected, values.abs() <= LARGEST_SETTING, lambda i: f"{values[i]} at [{i}]")
    return [finite_rule(name, values), within]


def enforce(rules: Sequence[Rule], *sizes: Tensor) -> list[int]:
    """Raises ``TraceFastError`` for the first rule that is broken; else the integer scalars ``sizes`` on the host."""
    kept = [rule.ok.all().long() for rule in rules]
    on_host = torch.stack([*kept, *(size.long() for size in sizes)]).tolist()
    for rule, is_kept in zip(rules, on_host, strict=False):
        if not is_kept:
            first = int((~rule.ok).to(torch.uint8).argmax())
            raise TraceFastError(f"{rule.name}: expected {rule.expected}, got {rule.describe(first)}")
    return on_host[len(rules) :]


def largest(values: Tensor) -> Tensor:
    """Maximum of a non-negative integer tensor, 0 for an empty one."""
    return values.max() if values.numel() else values.new_zeros(())


def check_credit_form(
    mean_logprobs_S: Tensor, cu_states_R1: Tensor, n_turns_R: Tensor, outcome_advantages_R: Tensor, config: CreditConfig
) -> None:
    """Types, devices and lengths of the arguments of ``turn_credit_flat``."""
    check_form("mean_logprobs_S", mean_logprobs_S, FLOATS, mean_logprobs_S, None)
    n_rollouts = check_offsets_form("cu_states_R1", cu_states_R1, mean_logprobs_S)
    check_form("n_turns_R", n_turns_R, INTEGERS, mean_logprobs_S, n_rollouts)
    check_form("outcome_advantages_R", outcome_advantages_R, (mean_logprobs_S.dtype,), mean_logprobs_S, n_rollouts)
    # d = gap_offset - score is computed in this dtype, where a smaller offset would be 0 or lose its digits.
    least = torch.finfo(mean_logprobs_S.dtype).tiny
    if config.gap_offset < least:
        raise ConfigError(
            f"gap_offset: expected at least {least} for {mean_logprobs_S.dtype}, got {config.gap_offset}"
        )
    _check_setting("gap_offset", config.gap_offset)
    _check_setting("terminal_scale", config.terminal_scale)


def check_advantage_settings(config: AdvantageConfig) -> None:
    """Settings with which no advantage can overflow."""
    _check_setting("alpha_out", config.alpha_out)
    _check_setting("alpha_turn", config.alpha_turn)
    _check_setting("answer_tail_scale", config.answer_tail_scale)


def _check_setting(name: str, value: float) -> None:
    if not 0 <= value <= LARGEST_SETTING:
        raise ConfigError(f"{name}: expected a number from 0 to {LARGEST_SETTING:.9g}, got {value}")


def check_credit(
    mean_logprobs_S: Tensor,
    cu_states_R1: Tensor,
    n_turns_R: Tensor,
    outcome_advantages_R: Tensor,
    config: CreditConfig,
    alpha_turn: float = 0.0,
) -> tuple[int, int]:
    """Checks the arguments of ``turn_credit_flat``; returns the turns in total and in the longest rollout.

    ``alpha_turn`` is what the rewards will be multiplied with, where they will be.
    """
    check_credit_form(mean_logprobs_S, cu_states_R1, n_turns_R, outcome_advantages_R, config)
    # Below this, a quotient of gaps, a sum over the turns or an advantage made of it could overflow; no model comes
    # anywhere near it.
    limit = torch.finfo(mean_logprobs_S.dtype).max / max(alpha_turn, 1.0)
    limit *= min(config.gap_offset, 1.0) / (2 * max(mean_logprobs_S.numel(), 1))
    states_R = cu_states_R1.diff()
    extra_R = states_R - n_turns_R
    rules = [
        *offset_rules("cu_states_R1", cu_states_R1, mean_logprobs_S.numel(), "mean_logprobs_S", least=1),
        Rule("n_turns_R", "T >= 0", n_turns_R >= 0, lambda i: f"{n_turns_R[i]} at [{i}]"),
        Rule(
            "cu_states_R1",
            "T+1 or T+2 states for each rollout",
            (extra_R == 1) | (extra_R == 2),
            lambda i: f"{states_R[i]} states at [{i}], where n_turns_R is {n_turns_R[i]}",
        ),
        Rule(
            "mean_logprobs_S",
            f"log-probabilities between {-limit:.3g} and 0",
            (mean_logprobs_S <= 0) & (mean_logprobs_S >= -limit),
            lambda i: f"{mean_logprobs_S[i]} at [{i}]",
        ),
        *outcome_rules(outcome_advantages_R),
    ]
    total, longest = enforce(rules, n_turns_R.sum(), largest(n_turns_R))
    return total, longest


def check_outcome_advantages(rewards_R: Tensor, group_ids_R: Tensor, std: str) -> None:
    """Checks the arguments of ``outcome_advantages``."""
    check_form("rewards_R", rewards_R, FLOATS, rewards_R, None)
    check_form("group_ids_R", group_ids_R, INTEGERS, rewards_R, rewards_R.numel())
    if std not in ("population", "sample"):
        raise TraceFastError(f"std: expected 'population' or 'sample', got {std!r}")
    limit = torch.finfo(rewards_R.dtype).max / 2  # the difference of two rewards must be finite too
    enforce(
        [
            Rule(
                "rewards_R",
                f"finite numbers of magnitude up to {limit:.3g}",
                rewards_R.abs() <= limit,
                lambda i: f"{rewards_R[i]} at [{i}]",
            )
        ]
    )


def check_tokens_form(
    boundaries_S: Tensor, loss_mask_N: Tensor, cu_tokens_R1: Tensor, group_ids_R: Tensor, like_S: Tensor
) -> None:
    """Types, devices and lengths of what ``credit_and_advantages`` takes beside the scores ``like_S``."""
    check_form("boundaries_S", boundaries_S, INTEGERS, like_S, like_S.numel())
    check_form("loss_mask_N", loss_mask_N, (torch.bool,), like_S, None)
    check_form("group_ids_R", group_ids_R, INTEGERS, like_S, None)
    check_offsets_form("cu_tokens_R1", cu_tokens_R1, like_S, group_ids_R.numel())


def check_token_turns(
    boundaries_S: Tensor, cu_states_R1: Tensor, n_turns_R: Tensor, cu_tokens_R1: Tensor
) -> tuple[int, int]:
    """Checks the arguments of ``token_turns_flat``; returns the tokens in total and the turns in total."""
    check_form("boundaries_S", boundaries_S, INTEGERS, boundaries_S, None)
    n_rollouts = check_offsets_form("cu_states_R1", cu_states_R1, boundaries_S)
    check_form("n_turns_R", n_turns_R, INTEGERS, boundaries_S, n_rollouts)
    check_offsets_form("cu_tokens_R1", cu_tokens_R1, boundaries_S, n_rollouts)
    states_R = cu_states_R1.diff()
    extra_R = states_R - n_turns_R
    structure = [
        *offset_rules("cu_states_R1", cu_states_R1, boundaries_S.numel(), "boundaries_S", least=1),
        Rule("n_turns_R", "T >= 0", n_turns_R >= 0, lambda i: f"{n_turns_R[i]} at [{i}]"),
        Rule(
            "cu_states_R1",
            "T+1 or T+2 boundaries for each rollout",
            (extra_R == 1) | (extra_R == 2),
            lambda i: f"{states_R[i]} boundaries at [{i}], where n_turns_R is {n_turns_R[i]}",
        ),
        Rule("cu_tokens_R1", "0 as first offset", cu_tokens_R1[:1] == 0, lambda i: f"{cu_tokens_R1[0]}"),
        Rule(
            "cu_tokens_R1",
            "offsets that never decrease",
            cu_tokens_R1.diff() >= 0,
            lambda i: f"{cu_tokens_R1[i]} then {cu_tokens_R1[i + 1]} at [{i}], [{i + 1}]",
        ),
    ]
    n_tokens, n_turns = enforce(structure, cu_tokens_R1[-1], n_turns_R.sum())
    length_S = torch.repeat_interleave(cu_tokens_R1.diff(), states_R, output_size=boundaries_S.numel())
    first_S = torch.zeros_like(boundaries_S, dtype=torch.bool)
    first_S[cu_states_R1[:-1]] = True
    previous_S = torch.cat((boundaries_S[:1], boundaries_S[:-1]))
    enforce(
        [
            Rule(
                "boundaries_S",
                "token counts from 0 to the rollout's length",
                (boundaries_S >= 0) & (boundaries_S <= length_S),
                lambda i: f"{boundaries_S[i]} at [{i}], where the rollout has {length_S[i]} tokens",
            ),
            Rule(
                "boundaries_S",
                "token counts that never decrease within a rollout",
                first_S | (boundaries_S >= previous_S),
                lambda i: f"{previous_S[i]} then {boundaries_S[i]} at [{i - 1}], [{i}]",
            ),
        ]
    )
    return n_tokens, n_turns


def check_token_advantages(
    token_turns_N: Tensor,
    loss_mask_N: Tensor,
    cu_tokens_R1: Tensor,
    turn_rewards_T: Tensor,
    cu_turns_R1: Tensor,
    outcome_advantages_R: Tensor,
    group_ids_R: Tensor,
    config: AdvantageConfig,
) -> None:
    """Checks the arguments of ``token_advantages_flat``."""
    check_advantage_settings(config)
    check_form("turn_rewards_T", turn_rewards_T, FLOATS, turn_rewards_T, None)
    n_rollouts = check_offsets_form("cu_turns_R1", cu_turns_R1, turn_rewards_T)
    check_offsets_form("cu_tokens_R1", cu_tokens_R1, turn_rewards_T, n_rollouts)
    check_form("token_turns_N", token_turns_N, INTEGERS, turn_rewards_T, None)
    check_form("loss_mask_N", loss_mask_N, (torch.bool,), turn_rewards_T, token_turns_N.numel())
    check_form("outcome_advantages_R", outcome_advantages_R, (turn_rewards_T.dtype,), turn_rewards_T, n_rollouts)
    check_form("group_ids_R", group_ids_R, INTEGERS, turn_rewards_T, n_rollouts)
    most = torch.finfo(turn_rewards_T.dtype).max / (2 * max(config.alpha_turn, 1.0))
    enforce(
        [
            *offset_rules("cu_turns_R1", cu_turns_R1, turn_rewards_T.numel(), "turn_rewards_T"),
            *offset_rules("cu_tokens_R1", cu_tokens_R1, token_turns_N.numel(), "token_turns_N"),
            finite_rule("turn_rewards_T", turn_rewards_T),
            *outcome_rules(outcome_advantages_R),
            Rule(
                "turn_rewards_T",
                f"numbers of magnitude up to {most:.3g}",
                turn_rewards_T.abs() <= most,
                lambda i: f"{turn_rewards_T[i]} at [{i}]",
            ),
        ]
    )
    last_N = torch.repeat_interleave(cu_turns_R1.diff(), cu_tokens_R1.diff(), output_size=token_turns_N.numel())
    enforce(
        [
            Rule(
                "token_turns_N",
                "-1 (prompt), a turn of the rollout, or T (final answer)",
                (token_turns_N >= -1) & (token_turns_N <= last_N),
                lambda i: f"{token_turns_N[i]} at [{i}], where the rollout has {last_N[i]} turns",
            )
        ]
    )
