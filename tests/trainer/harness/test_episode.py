"""Episodes from a script: tokens, masks, boundaries, stops, diagnostics and rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.formats import read_rollouts
from trace_fast.rollout import Rollout
from trace_fast.trainer.engines.engine import FinishReason, Generation
from trace_fast.trainer.harness import ChatFrame, Harness, HarnessConfig, Task
from trace_fast.trainer.search import Browser, SearchIndex, tool_schemas

QUESTION = "Who is mayor of the city?"
TASK = Task("t", QUESTION, ("Mira Kern", "Kern"), {"level": 2})
SEARCH_BASEL = '{"query": "Basel mayor"}'
ANSWER = "<answer>Mira Kern</answer>"
Scripted = Callable[..., Any]


@pytest.fixture
def run(frame: ChatFrame, index: SearchIndex, scripted: Scripted) -> Callable[..., Rollout]:
    """``(*messages, **settings) -> rollout`` of the one task."""

    def one(*messages: Any, clock: Callable[[], float] = lambda: 0.0, task: Task = TASK, **settings: Any) -> Rollout:
        harness = Harness(frame, index, HarnessConfig(**settings), clock=clock)
        (rollout,) = harness.run([task], scripted(frame, {task.question: list(messages)}), seed=0)
        return rollout

    return one


def _written(rollout: Rollout, frame: ChatFrame) -> list[str]:
    assert rollout.loss_mask is not None
    cuts = np.flatnonzero(np.diff(np.concatenate([[False], rollout.loss_mask, [False]])))
    return [frame.tokenizer.decode(rollout.input_ids[a:b]) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


def test_a_finished_episode(run: Any, frame: ChatFrame, call: Any) -> None:
    first, second = "I search.\n" + call("browser.search", SEARCH_BASEL), call("browser.open", '{"id": 0}')
    rollout = run(first, second, ANSWER)
    end = "<|im_end|>"
    assert _written(rollout, frame) == [first + end, second + end, ANSWER + end]
    assert (rollout.n_turns, rollout.n_states, rollout.finished) == (2, 4, True)
    assert rollout.boundaries[-1] == len(rollout.input_ids)
    pieces = np.split(rollout.input_ids, rollout.boundaries)
    texts = [frame.tokenizer.decode(piece) for piece in pieces]
    assert texts[0].endswith(f"{QUESTION}<|im_end|>\n")
    assert texts[1].startswith("<|im_start|>assistant\nI search.")
    assert "\n<|im_start|>tool\nResults for 'Basel mayor':\n[0] Basel\n" in texts[1]
    assert texts[2].endswith("page 0, 2 lines\n0: Basel lies on the Rhine.\n1: Its mayor is Mira Kern.<|im_end|>\n")
    assert texts[3] == f"<|im_start|>assistant\n{ANSWER}<|im_end|>"
    assert rollout.reward == pytest.approx(1.1)
    assert rollout.extra["stop_reason"] == "answer"
    assert rollout.extra["level"] == 2
    assert rollout.answer_texts == TASK.answers
    json.dumps(rollout.extra)


def test_log_probabilities_are_the_engines_where_the_policy_wrote(run: Any, call: Any) -> None:
    rollout = run(call("browser.search", SEARCH_BASEL), ANSWER)
    assert np.isnan(rollout.logprobs[~rollout.loss_mask]).all()
    cuts = np.flatnonzero(np.diff(np.concatenate([[False], rollout.loss_mask, [False]])))
    for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
        wanted = -1 - np.arange(stop - start, dtype=np.float32) / 1024
        np.testing.assert_array_equal(rollout.logprobs[start:stop], wanted)


@pytest.mark.parametrize("template", [None, "qwen2_5", "qwen3"])
def test_ids_are_those_of_reading_the_conversation_as_messages(
    frame: ChatFrame, frame_of: Any, index: SearchIndex, scripted: Scripted, call: Any, tmp_path: Path, template: Any
) -> None:
    """Two ways to the same rollout: token by token here, and the reader of the messages form."""
    own = frame if template is None else frame_of(template, "<|im_start|>", "<|im_end|>")
    answer = f"<think>\n\n</think>\n\n{ANSWER}" if template == "qwen3" else ANSWER
    acted = [("browser.search", {"query": "Basel mayor"}), ("browser.open", {"id": 0, "loc": 1})]
    browser = Browser(index, observation_tokens=512, count_tokens=own.count_tokens)
    script = [call(name, json.dumps(arguments)) for name, arguments in acted]
    messages: list[dict[str, Any]] = list(own.messages(QUESTION))
    for number, (name, arguments) in enumerate(acted):
        function = {"name": name, "arguments": arguments}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{number}", "function": function}]}
        )
        text = browser.call(name, arguments).text
        messages.append({"role": "tool", "content": text, "tool_call_id": f"c{number}", "name": name})
    messages.append({"role": "assistant", "content": ANSWER})
    record = {"messages": messages, "answer": list(TASK.answers), "tools": tool_schemas()}
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    (read,) = read_rollouts(tmp_path / "r.jsonl", own.tokenizer)

    harness = Harness(own, index, HarnessConfig(observation_tokens=512))
    (rollout,) = harness.run([TASK], scripted(own, {QUESTION: [*script, answer]}), seed=0)
    length = len(rollout.input_ids)
    assert rollout.input_ids.tolist() == read.input_ids[:length].tolist()
    assert own.tokenizer.decode(read.input_ids[length:]) == "\n"  # after the last end-of-turn token
    assert rollout.boundaries[:-1].tolist() == read.boundaries[:-1].tolist()
    assert [opener.tolist() for opener in rollout.openers[:-1]] == [opener.tolist() for opener in read.openers[:-1]]
    assert [ids.tolist() for ids in rollout.answers] == [ids.tolist() for ids in read.answers]
    if template != "qwen3":  # its reader counts the empty reasoning as the template's, not the policy's
        assert rollout.loss_mask.tolist() == read.loss_mask[:length].tolist()


@pytest.mark.parametrize(
    ("messages", "settings", "stop", "turns"),
    [
        (["nothing to say"], {}, "parse", 0),
        (["<answer>x"], {}, "parse", 0),
        (["CALL", "CALL", "CALL"], {"max_turns": 2}, "max_turns", 2),
        (["CALL"], {"max_turns": 0}, "max_turns", 0),
        (["CALL", "CALL", "<answer>x</answer>"], {"max_turns": 2}, "answer", 2),
        (["CALL", "nothing"], {}, "parse", 1),
    ],
)
def test_stops(run: Any, call: Any, messages: list[str], settings: Any, stop: str, turns: int) -> None:
    call_text = call("browser.search", SEARCH_BASEL)
    rollout = run(*[call_text if message == "CALL" else message for message in messages], **settings)
    assert rollout.extra["stop_reason"] == stop
    assert rollout.n_turns == turns
    assert rollout.finished == (stop == "answer")
    if stop != "answer":
        assert rollout.reward == 0.0
        assert rollout.extra["prediction"] is None
        assert rollout.loss_mask[-1]


def test_a_message_that_reaches_its_limit(run: Any, frame: ChatFrame, scripted: Scripted) -> None:
    cut = scripted(frame, {}).written("I think that", FinishReason.LENGTH)
    rollout = run(cut, max_response_tokens=len(cut.ids))
    assert rollout.extra["stop_reason"] == "length"
    assert rollout.n_states == 1
    assert rollout.input_ids[-len(cut.ids) :].tolist() == cut.ids.tolist()


def test_the_room_of_the_trajectory(run: Any, frame: ChatFrame, scripted: Scripted, call: Any) -> None:
    prompt = len(frame.prompt(QUESTION).ids)
    assert run(max_tokens=prompt).extra["stop_reason"] == "context"
    cut = scripted(frame, {}).written("I think that", FinishReason.LENGTH)
    assert run(cut, max_tokens=prompt + len(cut.ids)).extra["stop_reason"] == "context"

    text = call("browser.search", SEARCH_BASEL)
    whole = run(text, ANSWER)
    before_answer = int(np.flatnonzero(~whole.loss_mask)[-1]) + 1
    rollout = run(text, max_tokens=before_answer)
    assert rollout.extra["stop_reason"] == "context"
    assert (rollout.n_turns, rollout.n_states) == (0, 1)
    assert rollout.loss_mask[-1]  # the observation does not fit, so it is not there
    answer = scripted(frame, {}).written(ANSWER)
    enough = run(text, answer, max_tokens=before_answer + len(answer.ids))
    assert enough.input_ids.tolist() == whole.input_ids.tolist()


def test_requests_ask_for_no_more_than_there_is_room(frame: ChatFrame, index: SearchIndex, scripted: Any) -> None:
    prompt = len(frame.prompt(QUESTION).ids)
    engine = scripted(frame, {QUESTION: [ANSWER]})
    Harness(frame, index, HarnessConfig(max_tokens=prompt + 30, temperature=0.7, top_p=0.9)).run([TASK], engine, seed=0)
    ((request,),) = engine.requests
    assert (request.max_new_tokens, request.temperature, request.top_p) == (30, 0.7, 0.9)
    assert request.stop_ids == frame.stop_ids


def test_out_of_time(run: Any, call: Any) -> None:
    times = iter([0.0, 1.0, 241.0])
    rollout = run(call("browser.search", SEARCH_BASEL), clock=lambda: next(times))
    assert rollout.extra["stop_reason"] == "timeout"
    assert rollout.n_turns == 1


def test_an_engine_that_fails_ends_its_episode_only(frame: ChatFrame, index: SearchIndex, scripted: Any) -> None:
    ids = np.asarray([5, 6], dtype=np.int64)
    broken = Generation(ids, np.asarray([-1.0, -2.0], dtype=np.float32), FinishReason.ERROR, "server is gone")
    other = Task("u", "Which river is it?", ("Rhine",))
    engine = scripted(frame, {QUESTION: [broken], other.question: ["<answer>the Rhine</answer>"]})
    lost, kept = Harness(frame, index, HarnessConfig()).run([TASK, other], engine, seed=0)
    assert lost.extra["stop_reason"] == "engine_error"
    assert lost.extra["engine_error"] == "server is gone"
    assert lost.input_ids[-2:].tolist() == [5, 6]
    assert (kept.extra["stop_reason"], kept.reward) == ("answer", pytest.approx(1.1))


def _generation(ids: list[int], logprobs: list[float], finish: FinishReason = FinishReason.STOP) -> Generation:
    return Generation(np.asarray(ids, dtype=np.int64), np.asarray(logprobs, dtype=np.float32), finish)


@pytest.mark.parametrize(
    ("ids", "logprobs", "finish", "reason"),
    [
        ([5, -1], [-1.0], FinishReason.STOP, "expected one log-probability an id"),
        ([5, -1], [-1.0, float("nan")], FinishReason.STOP, "expected finite log-probabilities <= 0, got nan at id 1"),
        ([5, -1], [0.5, -1.0], FinishReason.STOP, "got 0.5 at id 0"),
        ([5, 6], [-1.0, -1.0], FinishReason.STOP, "end in one of"),
        ([], [], FinishReason.STOP, "end in one of"),
        ([5, 6, 7, 8], [-1.0] * 4, FinishReason.LENGTH, "at most 3 ids"),
    ],
)
def test_an_engine_that_breaks_its_protocol_is_an_error(
    run: Any, frame: ChatFrame, ids: list[int], logprobs: list[float], finish: FinishReason, reason: str
) -> None:
    ids = [frame.stop_ids[0] if i == -1 else i for i in ids]
    with pytest.raises(TraceFastError, match=reason):
        run(_generation(ids, logprobs, finish), max_response_tokens=3)


def test_a_generation_too_few_is_an_error(frame: ChatFrame, index: SearchIndex) -> None:
    class Short:
        def generate(self, requests: Any) -> list[Generation]:
            return []

    with pytest.raises(TraceFastError, match="expected 1 generations, got 0"):
        Harness(frame, index, HarnessConfig()).run([TASK], Short(), seed=0)


def test_diagnostics_of_tool_use(run: Any, call: Any) -> None:
    messages = [
        call("browser.open", "{}"),  # navigation error
        call("browser.search", '{"query": "Basel mayor"}'),
        call("browser.search", '{"query": "basel  MAYOR"}'),  # repeated
        call("browser.open", '{"id": 0}'),
        call("browser.open", '{"loc": 0}'),  # moving is not reopening
        call("browser.open", '{"id": 0}'),  # reopened
        call("browser.find", '{"pattern": "Mira"}'),
        call("browser.find", '{"pattern": "Mira"}'),  # repeated
        call("browser.find", '{"pattern": "mira"}'),
        call("browser.open", '{"id": 44}'),  # navigation error
        call("browser.click", "{}"),
        "<tool_call>{}</tool_call>",
        ANSWER,
    ]
    rollout = run(*messages)
    assert rollout.n_turns == len(messages) - 1
    wanted = {
        "calls": {"browser.click": 1, "browser.find": 3, "browser.open": 5, "browser.search": 2},
        "failed_calls": {"browser.click": 1, "browser.open": 2},
        "repeated_queries": 1,
        "reopened_documents": 1,
        "repeated_finds": 1,
        "navigation_errors": 2,
        "invalid_turns": {"malformed_call": 1},
        "repairs": {},
        "format_valid": True,
        "correct": True,
    }
    assert {key: rollout.extra[key] for key in wanted} == wanted
    assert rollout.extra["written_tokens"] == int(rollout.loss_mask.sum())


def test_an_invalid_turn_costs_a_turn_and_says_why(run: Any, frame: ChatFrame, call: Any) -> None:
    text = call("browser.search", SEARCH_BASEL)
    rollout = run(text + text, ANSWER)
    assert rollout.n_turns == 1
    shown = frame.tokenizer.decode(rollout.input_ids[~rollout.loss_mask])
    assert "Error: expected one tool call a turn, got more; none was carried out" in shown
    assert rollout.extra["calls"] == {}


def test_repairs_are_counted_in_evaluation(run: Any, call: Any) -> None:
    text = call("search", SEARCH_BASEL)
    rollout = run(text + text, "<answer>Kern", parser="repair")
    assert rollout.extra["repairs"] == {"several_calls": 1, "tool_name": 1, "unclosed_answer": 1}
    assert rollout.extra["calls"] == {"browser.search": 1}
    assert (rollout.extra["correct"], rollout.extra["format_valid"]) == (True, False)
    assert rollout.reward == pytest.approx(1.0)


def test_a_transcript_for_reports(run: Any, call: Any) -> None:
    text = call("browser.search", SEARCH_BASEL)
    rollout = run(text, ANSWER)
    assert [(s.role, s.turn, s.tool) for s in rollout.transcript] == [
        ("user", -1, None), ("assistant", 0, "browser.search"), ("tool", 0, "browser.search"), ("assistant", 1, None),
    ]  # fmt: skip
    assert rollout.transcript[1].text == text


def test_samples_are_grouped_and_seeds_are_their_own(frame: ChatFrame, index: SearchIndex, scripted: Any) -> None:
    tasks = [TASK, Task("u", "Which river is it?", ("Rhine",))]
    engine = scripted(frame, {task.question: [ANSWER] * 3 for task in tasks})
    rollouts = Harness(frame, index, HarnessConfig()).run(tasks, engine, seed=1, samples=3)
    assert [(r.id, r.group) for r in rollouts] == [(f"{g}/{n}", g) for g in ("t", "u") for n in range(3)]
    seeds = [request.seed for request in engine.requests[0]]
    assert len(set(seeds)) == 6
    again = scripted(frame, {task.question: [ANSWER] * 3 for task in tasks})
    Harness(frame, index, HarnessConfig()).run(tasks, again, seed=1, samples=3)
    assert [request.seed for request in again.requests[0]] == seeds


@pytest.mark.parametrize("answers", [(), ("",), ("x", " ")])
def test_unusable_tasks_are_refused_before_anything_runs(run: Any, answers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="task 't': answers"):
        run(task=Task("t", QUESTION, answers))


def test_tasks_with_one_id_and_no_samples_are_refused(frame: ChatFrame, index: SearchIndex, scripted: Any) -> None:
    harness = Harness(frame, index, HarnessConfig())
    with pytest.raises(ConfigError, match="got 't' twice"):
        harness.run([TASK, TASK], scripted(frame, {}), seed=0)
    with pytest.raises(ConfigError, match="samples: expected at least 1, got 0"):
        harness.run([TASK], scripted(frame, {}), seed=0, samples=0)


def test_settings_are_the_papers_and_unknown_ones_are_refused() -> None:
    config, evaluation = HarnessConfig(), HarnessConfig.evaluation()
    assert (config.max_turns, config.max_tokens, config.max_response_tokens) == (60, 48_000, 4_096)
    assert (config.observation_tokens, config.timeout_s, config.format_score) == (2_048, 240.0, 0.1)
    assert (evaluation.max_turns, evaluation.max_tokens, evaluation.max_response_tokens) == (80, 72_000, 8_192)
    assert (config.parser, evaluation.parser) == ("strict", "repair")
    with pytest.raises(ValueError, match="max_turn"):
        HarnessConfig(max_turn=3)
