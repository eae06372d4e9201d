"""What a report is made of: one score record and its transcript, checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trace_fast.errors import RolloutError
from trace_fast.rollout import PROMPT_TURN, Segment


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """One rollout of the report.

    Args:
        record: a score record, as in a line of a scores file.
        transcript: the rollout's segments, in order; empty where the rollouts file was not given.
    """

    record: Mapping[str, Any]
    transcript: Sequence[Segment] = ()


class ScoreRecord(BaseModel):
    """The parts of a score record that the report shows; T tool turns, S = T+1 or T+2 states, natural log (nats).

    ``mean_logprobs`` and ``values`` have S entries, ``deltas`` S-1 (the T+1st belongs to answer generation),
    ``turn_rewards`` T (TRACE, Eqs. 5-10). Other keys are left alone.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    id: str
    group: str
    n_turns: int = Field(ge=0)
    boundaries: list[int]
    answer: str | list[str] | None = None
    mean_logprobs: list[float]
    values: list[float]
    deltas: list[float]
    turn_rewards: list[float]
    outcome_advantage: float | None = None
    secured_at: int | None = None
    reward: float | None = None
    extra: dict[str, Any] = Field(default_factory=dict)
    model: str = ""
    source: str = ""
    status: Literal["ok"]

    @property
    def finished(self) -> bool:
        """Whether a final answer was written (S = T+2)."""
        return len(self.mean_logprobs) == self.n_turns + 2

    def first_secured(self, threshold: float) -> int | None:
        """First state k whose mean log-probability is at least ``threshold`` nats, or ``None``."""
        return next((k for k, value in enumerate(self.mean_logprobs) if value >= threshold), None)


def transcript_fits(transcript: Sequence[Segment], n_turns: int) -> bool:
    """Whether every segment lies in the prompt (turn -1), in a tool turn 0..T-1 or in the final answer (turn T)."""
    return all(PROMPT_TURN <= segment.turn <= n_turns for segment in transcript)


def parse_entry(entry: ReportEntry, place: int) -> ScoreRecord:
    """Checks record and transcript of the ``place``-th entry (1-based).

    Raises:
        RolloutError: kind ``format``; the message names the key, what was expected and what came.
    """
    raw = entry.record
    rollout_id, source = str(raw.get("id", "?")), str(raw.get("source") or f"score record {place}")

    def error(reason: str) -> RolloutError:
        return RolloutError("format", reason, rollout_id=rollout_id, source=source)

    try:
        record = ScoreRecord.model_validate(dict(raw))
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise error(f"{where}: {first['msg']}, got {first['input']!r:.80}") from exc
    turns, states = record.n_turns, len(record.mean_logprobs)
    if states not in (turns + 1, turns + 2):
        raise error(f"mean_logprobs: expected T+1 or T+2 entries for T = {turns} turns, got {states}")
    lengths = {"boundaries": states, "values": states, "deltas": states - 1, "turn_rewards": turns}
    for name, expected in lengths.items():
        if len(getattr(record, name)) != expected:
            raise error(f"{name}: expected {expected} entries for T = {turns}, got {len(getattr(record, name))}")
    if not transcript_fits(entry.transcript, turns):
        found = sorted({segment.turn for segment in entry.transcript})
        raise error(f"transcript: expected turns {PROMPT_TURN}..{turns}, got segments of turns {found[0]}..{found[-1]}")
    return record
