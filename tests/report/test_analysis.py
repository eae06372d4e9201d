"""Whole-file figures, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trace_fast.errors import RolloutError
from trace_fast.report import ReportEntry
from trace_fast.report.analysis import RolloutView, credit_scale, summarize, turn_tools
from trace_fast.report.record import parse_entry
from trace_fast.rollout import Segment

MakeRecord = Callable[..., dict[str, Any]]


def view(record: dict[str, Any], tools: tuple[str | None, ...] = (), threshold: float = -0.3) -> RolloutView:
    parsed = parse_entry(ReportEntry(record), 1)
    return RolloutView(parsed, parsed.first_secured(threshold), tools or (None,) * parsed.n_turns)


def states(make_record: MakeRecord, mean_logprobs: list[float], **keys: Any) -> dict[str, Any]:
    """A finished record with these mean log-probabilities and credit 0 everywhere."""
    deltas = [0.0] * (len(mean_logprobs) - 1)
    return make_record("r", deltas, mean_logprobs=mean_logprobs, **keys)


@pytest.mark.parametrize(
    ("name", "decisive", "harmful"),
    [
        ("P1", 0, None),
        ("P2", 3, 2),
        ("P3", 1, None),
        ("P4", 0, None),
        ("P5", 5, 2),
        ("N1", 2, 4),
        ("N2", 0, 6),
        ("N3", 0, 6),
        ("N4", 0, 4),
        ("N5", 0, 6),
    ],
)
def test_decisive_and_harmful_turns_of_the_papers_rollouts(
    name: str, decisive: int, harmful: int | None, a5_deltas: dict[str, list[float]], make_record: MakeRecord
) -> None:
    rollout = view(make_record(name, a5_deltas[name]))
    assert (rollout.decisive_turn, rollout.harmful_turn) == (decisive, harmful)


def test_answer_generation_is_never_the_decisive_or_harmful_turn(make_record: MakeRecord) -> None:
    up, down = view(make_record("r", [0.1, 9.0])), view(make_record("r", [-0.1, -9.0]))
    assert (up.decisive_turn, up.harmful_turn) == (0, None)
    assert (down.decisive_turn, down.harmful_turn) == (None, 0)
    cut_off = view(make_record("r", [0.1, 9.0], finished=False))
    assert cut_off.decisive_turn == 1
    empty = view(make_record("r", [1.0]))
    assert (empty.decisive_turn, empty.harmful_turn) == (None, None)


@pytest.mark.parametrize(("reward", "outcome"), [(1.0, "right"), (0.5, "right"), (0.1, "wrong"), (None, "unknown")])
def test_a_format_score_alone_is_wrong(reward: float | None, outcome: str, make_record: MakeRecord) -> None:
    assert view(make_record("r", [1.0, 0.0], reward=reward)).outcome == outcome


@pytest.mark.parametrize(
    ("mean_logprobs", "secured", "post"),
    [
        ([-0.2, -1.0, -1.0, -1.0], "in time", [0, 1]),
        ([-2.0, -0.3, -1.0, -1.0], "in time", [1]),
        ([-2.0, -1.0, -0.1, -0.1], "in time", []),
        ([-2.0, -1.0, -1.0, -0.1], "after the answer", []),
        ([-2.0, -1.0, -1.0, -0.31], "never", []),
    ],
)
def test_when_a_rollout_counts_as_secured(
    mean_logprobs: list[float], secured: str, post: list[int], make_record: MakeRecord
) -> None:
    rollout = view(states(make_record, mean_logprobs))
    assert rollout.secured == secured
    assert list(rollout.post_secured_turns) == post


def test_threshold_is_the_reports_own(make_record: MakeRecord) -> None:
    record = states(make_record, [-2.0, -0.8, -0.1])
    assert view(record).secured_at == 2
    assert view(record, threshold=-1.0).secured_at == 1


def test_whole_file_figures(make_record: MakeRecord) -> None:
    secured_early = make_record("a", [2.5, -0.5, 0.25, 0.0], mean_logprobs=[-2, -0.2, -1, -1, -1], reward=0.0)
    late_right = make_record("b", [-1.0, 0.5, 3.0], mean_logprobs=[-2, -3, -2, -0.1], reward=1.0)
    never_right = make_record("c", [0.5], finished=False, mean_logprobs=[-2, -1], reward=1.0)
    from_start = make_record("d", [1.0, 0.0], mean_logprobs=[-0.1, -0.1, -0.1], reward=1.0)
    unknown = make_record("e", [0.0], mean_logprobs=[-2, -2])
    summary = summarize(
        [
            view(secured_early, ("search", "open", "find")),
            view(late_right, ("search", "open")),
            view(never_right, ("open",)),
            view(from_start),
            view(unknown),
        ]
    )
    figures = {
        tool.name: (tool.turns, tool.total, tool.mean, tool.helped, tool.harmed, tool.post_secured)
        for tool in summary.tools
    }
    assert figures == {
        "search": (2, 1.5, 0.75, 1, 1, 0),
        None: (1, 1.0, 1.0, 1, 0, 1),
        "open": (3, 0.5, 0.5 / 3, 2, 1, 1),
        "find": (1, 0.25, 0.25, 1, 0, 1),
    }
    assert [tool.name for tool in summary.tools] == ["search", None, "open", "find"]
    assert summary.first_secured == {"before turn 0": 1, "after turn 0": 1, "after the answer": 1, "never": 2}
    assert summary.secured_but_wrong == [0]
    assert summary.right_but_never_secured == [1, 2]
    assert summary.post_secured == [0, 3]
    assert (summary.turns, summary.post_secured_turns, summary.post_secured_credit) == (7, 3, 0.75)
    assert summary.outcomes == {"right": 3, "wrong": 1, "unknown": 1}


def test_tools_of_a_turn() -> None:
    transcript = [
        Segment("assistant", "", -1, "not a turn"),
        Segment("assistant", "", 0, "search, open, search"),
        Segment("tool", "", 0, "search"),
        Segment("tool", "", 1, "find"),
        Segment("assistant", "", 3, "the final answer calls nothing"),
    ]
    assert turn_tools(transcript, 3) == ("search + open", "find", None)


def test_tint_scale_ignores_outliers_and_answer_generation(make_record: MakeRecord) -> None:
    many = view(make_record("r", [0.5] * 98 + [1.0, 50.0] + [900.0]))
    assert credit_scale([many]) == 0.5
    assert credit_scale([view(make_record("r", [7.0]))]) == 1.0
    assert credit_scale([]) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": [0.0]}, "values: expected 3 entries for T = 1, got 1"),
        ({"deltas": [1.0]}, "deltas: expected 2 entries for T = 1, got 1"),
        ({"turn_rewards": []}, "turn_rewards: expected 1 entries for T = 1, got 0"),
        ({"boundaries": [1, 2]}, "boundaries: expected 3 entries for T = 1, got 2"),
        ({"n_turns": 5}, "mean_logprobs: expected T+1 or T+2 entries for T = 5 turns, got 3"),
        ({"values": [0.0, float("nan"), 1.0]}, "values.1: Input should be a finite number, got nan"),
        ({"id": 7}, "id: Input should be a valid string, got 7"),
        ({"status": "error"}, "status: Input should be 'ok', got 'error'"),
        ({"deltas": [1.0, "2"]}, "deltas.1: Input should be a valid number, got '2'"),
    ],
)
def test_a_bad_record_is_refused_by_name(change: dict[str, Any], message: str, make_record: MakeRecord) -> None:
    with pytest.raises(RolloutError) as caught:
        parse_entry(ReportEntry(make_record("r", [1.0, 0.0]) | change), 4)
    assert caught.value.reason == message
    assert (caught.value.kind, caught.value.source) == ("format", "score record 4")


def test_a_missing_key_and_a_turn_out_of_range_are_refused(make_record: MakeRecord) -> None:
    record = make_record("r", [1.0, 0.0], source="scores.jsonl:3")
    with pytest.raises(RolloutError, match=r"scores.jsonl:3: rollout 'r': transcript: expected turns -1..1, got"):
        parse_entry(ReportEntry(record, (Segment("tool", "", 2),)), 1)
    del record["deltas"]
    with pytest.raises(RolloutError, match="deltas: Field required"):
        parse_entry(ReportEntry(record), 1)
