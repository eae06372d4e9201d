"""Every real file is read to its end, with the turns and endings that a reader counts by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_fast.errors import RolloutError
from trace_fast.formats import FieldKeys, Limits, read_outcomes, read_rollouts, read_transcripts
from trace_fast.formats.build import parse_record
from trace_fast.formats.detect import record_key_test, what_format
from trace_fast.formats.files import read_records
from trace_fast.formats.template import ChatTemplate

# file, form, T of each rollout that reads, 1 where it finished, {record number: error kind}
FILES = [
    ("fireact_react/gpt-3.5-ft.json", "react", [10, 9, 8, 8, 0], [1, 1, 1, 1, 1], {}),
    ("fireact_react/llama-2-7b.json", "react", [9, 9, 9, 8, 8], [1, 1, 1, 1, 1], {}),
    (
        "livemcpbench_messages/claude-sonnet-4.subset.json",
        "messages",
        [33, 3, 39, 1, 10, 2, 14],
        [1, 1, 1, 1, 1, 1, 1],
        {3: "answer", 5: "answer"},
    ),
    ("nemo_gym_finance_sec_search/example_rollouts.jsonl", "responses", [4, 5, 6, 8, 10], [0, 0, 0, 0, 0], {}),
    ("reflexion_react_log/base_block0000.txt", None, [2], [1], {}),
    ("reflexion_react_log/base_block0001.txt", None, [2], [1], {}),
    ("reflexion_react_log/base_block0004.txt", None, [3], [1], {}),
    ("reflexion_react_log/base_block0034.txt", None, [2], [1], {}),
    ("reflexion_react_log/base_block0090.txt", None, [6], [0], {}),
    ("reflexion_react_log/base_block0091.txt", None, [6], [0], {}),
    ("reflexion_react_log/reflexion_block0083.txt", None, [6], [0], {}),
    ("reflexion_react_log/reflexion_block0101.txt", None, [2], [1], {}),
    ("reflexion_react_log/reflexion_block0119.txt", None, [2], [1], {}),
    ("search_r1_text/results_ppo_step400_format.jsonl", "search_r1", [5, 3, 5, 4], [0, 1, 0, 1], {}),
    ("search_r1_text/results_pubmedqa_paper400.jsonl", "search_r1", [5, 4], [0, 1], {}),
    ("search_r1_text/sft_fixed_vllm_100.jsonl", "search_r1", [2, 4, 5, 2], [1, 1, 0, 1], {}),
    ("tau_bench_airline/gpt-4o-airline.subset.json", "messages", [7, 2, 2, 13, 23, 16, 1], [1, 1, 1, 1, 0, 0, 1], {}),
    ("verifiers_evals/math-python--gpt-4.1-mini.dbaac595.jsonl", "completion", [2, 1, 2, 1, 2, 3], [1] * 6, {}),
    ("verifiers_evals/math-python--gpt-5-nano.cb7a1799.jsonl", "completion", [1] * 5, [1] * 5, {}),
    ("verifiers_evals/mcp-env--gpt-4.1-mini.468ee950.jsonl", "completion", [1, 1], [1, 1], {}),
    ("verifiers_evals/mcp-env--gpt-4.1-mini.fdac998f.jsonl", "completion", [1, 1], [1, 1], {}),
    ("webdancer_chatml_toolcall/sample_traj.jsonl", "chatml", [3, 2, 1, 1, 1, 2, 2, 1, 1, 1, 2], [1] * 11, {}),
]
CHAT_FILES = [name for name, form, *_ in FILES if form in ("messages", "responses", "completion", "chatml")]
CHAT_FILES.append("fireact_react/gpt-3.5-ft.json")


@pytest.mark.parametrize(("name", "form", "turns", "finished", "bad"), FILES, ids=[f[0] for f in FILES])
def test_real_file_reads_completely(
    shared_data: Path, smollm2_tokenizer: Any, name: str, form: str | None, turns: Any, finished: Any, bad: Any
) -> None:
    path = shared_data / name
    errors: list[RolloutError] = []
    rollouts = list(read_rollouts(path, smollm2_tokenizer, errors=errors.append))
    assert [r.n_turns for r in rollouts] == turns
    assert [int(r.finished) for r in rollouts] == finished
    assert {int(e.source.rsplit(":", 1)[1]): e.kind for e in errors} == bad
    if form is not None:
        raws = read_records(path, Limits(), record_key_test(FieldKeys()))
        assert {what_format(raw.value) for raw in raws} == {form}
    for rollout in rollouts:
        assert rollout.nested
        assert rollout.loss_mask is not None
        assert rollout.loss_mask[: rollout.boundaries[0]].sum() == 0
        ends = rollout.boundaries[: rollout.n_turns + 1]
        for k in range(rollout.n_turns):  # the policy writes in every turn, and the environment has the last word
            span = rollout.loss_mask[ends[k] : ends[k + 1]]
            assert span.any()
            assert not span[-1]
        assert {s.turn for s in rollout.transcript} >= set(range(rollout.n_turns))


@pytest.mark.parametrize("name", [f[0] for f in FILES])
def test_passes_without_tokenizer_name_the_same_records(shared_data: Path, smollm2_tokenizer: Any, name: str) -> None:
    path = shared_data / name
    rollouts = list(read_rollouts(path, smollm2_tokenizer, errors=lambda error: None))
    assert list(read_outcomes(path)) == [(r.source, r.id, r.group, r.reward) for r in rollouts]
    assert list(read_transcripts(path)) == [(r.source, r.id, r.transcript) for r in rollouts]


def test_answers_of_real_files(shared_data: Path, smollm2_tokenizer: Any) -> None:
    def answers(name: str) -> list[Any]:
        return [r.answer_texts for r in read_rollouts(shared_data / name, smollm2_tokenizer, errors=lambda e: None)]

    assert answers("search_r1_text/sft_fixed_vllm_100.jsonl")[3] == ("2017", "May\xa05,\xa02017")
    assert len(answers("search_r1_text/results_ppo_step400_format.jsonl")[2]) == 10
    assert answers("webdancer_chatml_toolcall/sample_traj.jsonl")[3] == ("gnomes of zürich",)
    assert answers("fireact_react/gpt-3.5-ft.json")[1] == ("u2 360° tour",)
    assert answers("reflexion_react_log/base_block0000.txt") == [('Jonny" Craig',)]
    assert answers("nemo_gym_finance_sec_search/example_rollouts.jsonl")[1] == ("$115.9 billion",)


def test_tau_bench_outputs_must_all_be_stated(shared_data: Path, smollm2_tokenizer: Any) -> None:
    import json

    path = shared_data / "tau_bench_airline/gpt-4o-airline.subset.json"
    outputs = [record["info"]["task"]["outputs"] for record in json.loads(path.read_text())]
    rollouts = list(read_rollouts(path, smollm2_tokenizer))
    assert [r.answer_texts for r in rollouts] == [(", ".join(o),) for o in outputs]
    joined = ["required outputs joined" in " ".join(r.notes) for r in rollouts]
    assert joined == [len(o) > 1 for o in outputs]


def test_parallel_calls_are_one_turn(shared_data: Path, smollm2_tokenizer: Any) -> None:
    rollout = list(
        read_rollouts(shared_data / "nemo_gym_finance_sec_search/example_rollouts.jsonl", smollm2_tokenizer)
    )[3]
    tools = [[s.tool for s in rollout.transcript if s.turn == 3 and s.role == role] for role in ("assistant", "tool")]
    assert [len(t) for t in tools] == [1, 3]
    assert tools[0][0].split(", ") == tools[1]


def test_search_r1_text_survives_piece_by_piece(shared_data: Path, smollm2_tokenizer: Any) -> None:
    import json

    path = shared_data / "search_r1_text/results_ppo_step400_format.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record, rollout in zip(records, read_rollouts(path, smollm2_tokenizer), strict=True):
        assert "".join(s.text for s in rollout.transcript) == record["question"] + "\n" + record["full_output"]
        for k in range(1, rollout.n_turns + 1):
            text = smollm2_tokenizer.decode(rollout.prefix(k))
            assert text.rstrip().endswith("</information>")
            assert text.count("<information>") == k


def _naive_prefixes(tokenizer: Any, path: Path) -> list[list[Any]]:
    """Each state prefix of each chat rendered and tokenised by itself."""
    template = ChatTemplate(tokenizer)
    result = []
    for raw in read_records(path, Limits(), record_key_test(FieldKeys())):
        try:
            chat = parse_record(raw, "auto", FieldKeys(), Limits()).parsed.body
        except RolloutError:
            continue
        messages, _ = template.adapt(chat.messages, chat.tools)
        texts = [
            tokenizer.apply_chat_template(messages[:end], tools=chat.tools, tokenize=False) for end in chat.turns().ends
        ]
        result.append([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    return result


@pytest.mark.parametrize("name", CHAT_FILES)
def test_state_prefixes_equal_naive_tokenisation_smollm2(shared_data: Path, smollm2_tokenizer: Any, name: str) -> None:
    path = shared_data / name
    rollouts = read_rollouts(path, smollm2_tokenizer, errors=lambda error: None)
    for rollout, naive in zip(rollouts, _naive_prefixes(smollm2_tokenizer, path), strict=True):
        assert [len(p) for p in naive] == rollout.boundaries.tolist()
        for k, ids in enumerate(naive):
            assert np.array_equal(rollout.prefix(k), ids)


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
@pytest.mark.parametrize(
    "name",
    [
        "webdancer_chatml_toolcall/sample_traj.jsonl",
        "tau_bench_airline/gpt-4o-airline.subset.json",
        "verifiers_evals/math-python--gpt-4.1-mini.dbaac595.jsonl",
    ],
)
def test_state_prefixes_equal_naive_tokenisation_qwen(
    shared_data: Path, qwen_tokenizer: Any, chat_template: Any, family: str, name: str
) -> None:
    qwen_tokenizer.chat_template = chat_template(family)
    path = shared_data / name
    rollouts = list(read_rollouts(path, qwen_tokenizer, opener="<answer>\n"))
    for rollout, naive in zip(rollouts, _naive_prefixes(qwen_tokenizer, path), strict=True):
        for k, ids in enumerate(naive):
            assert np.array_equal(rollout.prefix(k), ids)
    # Qwen3 drops the thinking of earlier answers: user messages between turns (tau-bench) rewrite history there.
    if family == "qwen2_5":
        assert all(r.nested for r in rollouts)
