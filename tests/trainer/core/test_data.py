"""Questions from files, and the order in which a run takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_fast.errors import ConfigError, InputError
from trace_fast.trainer.data import check_key, read_tasks, step_tasks
from trace_fast.trainer.harness import Task

TASKS = [Task(str(i), f"question {i}", ("answer",)) for i in range(7)]


def taken(steps: range, count: int, seed: int = 0, tasks: list[Task] = TASKS) -> list[list[str]]:
    return [[task.id for task in step_tasks(tasks, step, count, seed)] for step in steps]


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    """Steps of 7 are whole epochs; steps of 1 and of 7 go through the same order."""
    epochs = taken(range(3), 7)
    assert [sorted(epoch) for epoch in epochs] == [[task.id for task in TASKS]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [name for step in taken(range(21), 1) for name in step] == [name for epoch in epochs for name in epoch]


def test_a_step_over_the_end_of_an_epoch_takes_a_question_once() -> None:
    order = [name for epoch in taken(range(4), 7) for name in epoch]
    steps = taken(range(5), 5)
    for step, names in enumerate(steps):
        assert names == list(dict.fromkeys(order[5 * step : 5 * step + 5]))
    assert {len(names) for names in taken(range(50), 5)} == {3, 4, 5}


def test_a_step_depends_on_seed_and_number_only() -> None:
    assert taken(range(9, 10), 3) == [taken(range(12), 3)[9]]
    assert taken(range(4), 3, seed=1) != taken(range(4), 3, seed=0)


def test_more_questions_a_step_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.prompts: expected at most the 7 training questions, got 8"):
        step_tasks(TASKS, 0, 8, 0)


def test_what_a_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"question": "a?", "answers": "x"}\n\n'
        '{"id": 5, "question": "b?", "answers": ["y", "z"], "hops": 2}\n'
        '{"id": "five", "question": "c?\u2028", "answers": ["\\ud83d\\ude00"]}'
    )
    assert read_tasks(str(path)) == [
        Task("1", "a?", ("x",)),
        Task("5", "b?", ("y", "z"), {"hops": 2}),
        Task("five", "c?\u2028", ("\U0001f600",)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "q.jsonl: expected at least one question, got an empty file"),
        ("\n \n", "q.jsonl: expected at least one question"),
        ("{", "q.jsonl:1: expected JSON"),
        ("[" * 100_000, "q.jsonl:1: expected JSON"),
        ("[]", "q.jsonl:1: expected an object, got list"),
        ("{}", "q.jsonl:1: question: expected text, got None"),
        ('{"question": " ", "answers": "x"}', "q.jsonl:1: question: expected text, got ' '"),
        ('{"question": "\\ud800", "answers": "x"}', "q.jsonl:1: question: expected text"),
        ('{"question": "a"}', "q.jsonl:1: answers: expected text or a list of texts, got None"),
        ('{"question": "a", "answers": []}', "q.jsonl:1: answers: expected text"),
        ('{"question": "a", "answers": ["x", ""]}', "q.jsonl:1: answers: expected text"),
        ('{"question": "a", "answers": ["x", 3]}', "q.jsonl:1: answers: expected text"),
        ('{"id": null, "question": "a", "answers": "x"}', "q.jsonl:1: id: expected text or an integer, got None"),
        ('{"id": true, "question": "a", "answers": "x"}', "q.jsonl:1: id: expected text or an integer, got True"),
        ('{"question": "a", "answers": "x"}\n{"id": 1, "question": "b", "answers": "x"}', "q.jsonl:2: id: expected an"),
    ],
)
def test_what_is_no_question_is_named_by_file_line_and_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_tasks(str(path))
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    for name in ("nowhere.jsonl", "latin.jsonl", "."):
        with pytest.raises(InputError, match="cannot be read"):
            read_tasks(str(tmp_path / name))


def test_a_key_that_results_are_split_by_is_looked_at_before() -> None:
    def tasks(*values: object) -> list[Task]:
        return [Task(str(i), "a", ("x",), {"hops": value}) for i, value in enumerate(values)]

    check_key(tasks(1, 2, "three"), "hops", "q.jsonl")
    check_key(tasks(1), None, "q.jsonl")
    check_key(tasks(*range(50), "1"), "hops", "q.jsonl")  # the text and the integer are one metric
    odd = ((None, "None"), (True, "True"), ([1], r"\[1\]"), (" ", "' '"), ("\ud800", ""), ("x" * 101, "'xxx"))
    for value, shown in odd:
        with pytest.raises(ConfigError, match=rf"evaluation\.by: q.jsonl: question '1': .* under 'hops', got {shown}"):
            check_key(tasks(1, value), "hops", "q.jsonl")
    with pytest.raises(ConfigError) as caught:
        check_key(tasks("x" * 1_000_000), "hops", "q.jsonl")
    assert len(str(caught.value)) < 500
    with pytest.raises(ConfigError, match="expected at most 50 values of 'hops', got 51"):
        check_key(tasks(*range(51)), "hops", "q.jsonl")


@pytest.mark.parametrize("key", ["prediction", "calls", "correct", "id", "answers"])
def test_results_are_not_split_by_what_the_policy_writes(key: str) -> None:
    with pytest.raises(ConfigError, match=f"expected a key of the questions, got '{key}'"):
        check_key([Task("0", "a", ("x",), {key: 1})], key, "q.jsonl")
