"""What a whole file of scored rollouts says: credit by tool, when answers were secured, and what became of them.

A state is *secured* when its mean log-probability reaches the threshold; a rollout is secured *in time* when one of
its states S_0..S_T, those before the final answer is written, is. S_{T+1} contains the answer the policy wrote, so
a right answer nearly always secures it; counting it would hide the rollouts that were right without evidence.
A rollout is *right* when its reward is at least ``RIGHT_AT``: a well-formed wrong answer may earn a format score
(0.1 in TRACE, Table 4), so "above zero" would call it right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trace_fast.report.record import ScoreRecord
from trace_fast.rollout import Segment

RIGHT_AT = 0.5
NEVER = "never"
AFTER_ANSWER = "after the answer"


@dataclass(frozen=True, slots=True)
class RolloutView:
    """One rollout with what the page derives from it; turns are 0-based tool turns.

    Args:
        record: the checked score record.
        secured_at: first secured state by the report's threshold, or ``None``.
        tools: name of the tool(s) of each of the T turns, ``None`` where not recorded.
    """

    record: ScoreRecord
    secured_at: int | None
    tools: tuple[str | None, ...]

    @property
    def outcome(self) -> str:
        """``"right"``, ``"wrong"`` or ``"unknown"`` (no reward recorded)."""
        if self.record.reward is None:
            return "unknown"
        return "right" if self.record.reward >= RIGHT_AT else "wrong"

    @property
    def secured(self) -> str:
        """``"in time"`` (by S_0..S_T), ``"after the answer"`` (only by S_{T+1}) or ``"never"``."""
        if self.secured_at is None:
            return NEVER
        return "in time" if self.secured_at <= self.record.n_turns else AFTER_ANSWER

    @property
    def post_secured_turns(self) -> range:
        """The tool turns taken from the first secured state on: turn k starts at state k."""
        turns = self.record.n_turns
        return range(turns if self.secured_at is None else min(self.secured_at, turns), turns)

    @property
    def decisive_turn(self) -> int | None:
        """Tool turn with the largest positive delta (the first of equals)."""
        return decisive_turn(self.record.deltas, self.record.n_turns)

    @property
    def harmful_turn(self) -> int | None:
        """Tool turn with the most negative delta (the first of equals)."""
        return decisive_turn([-delta for delta in self.record.deltas], self.record.n_turns)


def decisive_turn(deltas: Sequence[float], n_turns: int) -> int | None:
    """0-based tool turn of the largest positive one-step credit delta_k (Eq. 7), the first of equals; or ``None``.

    ``deltas`` (nats) may hold one entry more than turns, that of answer generation, which is no turn's.
    """
    credits = list(deltas[:n_turns])
    best = max(range(len(credits)), key=credits.__getitem__, default=None)
    return best if best is not None and credits[best] > 0 else None


def turn_tools(transcript: Sequence[Segment], n_turns: int) -> tuple[str | None, ...]:
    """Tools of each turn: the distinct names called in it, in order, joined by " + "; the caller's names win."""
    names: list[dict[str, dict[str, None]]] = [defaultdict(dict) for _ in range(n_turns)]
    for segment in transcript:
        if segment.tool and 0 <= segment.turn < n_turns:
            names[segment.turn][segment.role].update(dict.fromkeys(segment.tool.split(", ")))
    return tuple(" + ".join(turn.get("assistant") or turn.get("tool") or ()) or None for turn in names)


@dataclass(slots=True)
class ToolCredit:
    """Sum and mean of delta (nats) over the ``turns`` tool turns that used this tool; ``None`` = not recorded."""

    name: str | None
    turns: int = 0
    total: float = 0.0
    helped: int = 0
    harmed: int = 0
    post_secured: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.turns


@dataclass(slots=True)
class FileSummary:
    """Counts and lists over all rollouts; lists hold positions (0-based) in the file."""

    tools: list[ToolCredit] = field(default_factory=list)
    first_secured: dict[str, int] = field(default_factory=dict)
    secured_but_wrong: list[int] = field(default_factory=list)
    right_but_never_secured: list[int] = field(default_factory=list)
    post_secured: list[int] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    turns: int = 0
    post_secured_turns: int = 0
    post_secured_credit: float = 0.0

    def as_json(self) -> dict[str, Any]:
        tools = [asdict(tool) | {"mean": tool.mean} for tool in self.tools]
        return asdict(self) | {"tools": tools, "first_secured": list(self.first_secured.items())}


def summarize(views: Sequence[RolloutView]) -> FileSummary:
    """All whole-file figures of the report."""
    summary = FileSummary(outcomes=dict.fromkeys(("right", "wrong", "unknown"), 0))
    tools: dict[str | None, ToolCredit] = {}
    states: dict[int, int] = defaultdict(int)
    others = {AFTER_ANSWER: 0, NEVER: 0}
    for place, view in enumerate(views):
        deltas, post = view.record.deltas, view.post_secured_turns
        summary.outcomes[view.outcome] += 1
        summary.turns += view.record.n_turns
        summary.post_secured_turns += len(post)
        summary.post_secured_credit += sum(deltas[k] for k in post)
        for k, name in enumerate(view.tools):
            tool = tools.setdefault(name, ToolCredit(name))
            tool.turns += 1
            tool.total += deltas[k]
            tool.helped += deltas[k] > 0
            tool.harmed += deltas[k] < 0
            tool.post_secured += k in post
        if view.secured == "in time":
            assert view.secured_at is not None
            states[view.secured_at] += 1
        else:
            others[view.secured] += 1
        if view.outcome == "wrong" and view.secured == "in time":
            summary.secured_but_wrong.append(place)
        if view.outcome == "right" and view.secured != "in time":
            summary.right_but_never_secured.append(place)
        if post:
            summary.post_secured.append(place)
    summary.post_secured.sort(key=lambda place: -len(views[place].post_secured_turns))
    summary.tools = sorted(tools.values(), key=lambda tool: -tool.total)
    for state in range(max(states, default=-1) + 1):
        summary.first_secured["before turn 0" if state == 0 else f"after turn {state - 1}"] = states[state]
    summary.first_secured |= others
    return summary


def credit_scale(views: Sequence[RolloutView]) -> float:
    """Delta (nats) at which the tint is strongest: the 98th percentile of |delta|, so one outlier hides nothing."""
    sizes = sorted(abs(delta) for view in views for delta in view.record.deltas[: view.record.n_turns])
    return max(sizes[int(0.98 * (len(sizes) - 1))], 1e-3) if sizes else 1.0
