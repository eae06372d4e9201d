"""Records of every form with something broken in them, for tests of reading and of the command line."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": "Ula"}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Where is Ula?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "Ula is in Orm.", "tool_call_id": "c1", "name": "look"},
    {"role": "assistant", "content": "In Orm."},
]
ITEMS = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c1"},
    {"type": "function_call_output", "call_id": "c1", "output": "Orm"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Orm."}]},
]
SEEDS: list[dict[str, Any]] = [
    {"id": "m", "group": 1, "messages": CHAT, "tools": [{"name": "look", "parameters": {}}], "answer": ["Orm", "orm"]},
    {"id": 1, "prompt": CHAT[:2], "completion": CHAT[2:], "answer": "Orm", "reward": 1.0, "info": {"oai_tools": []}},
    {"responses_create_params": {"input": CHAT[:1]}, "response": {"output": ITEMS}, "expected_answer": 12.50},
    {"messages": [*CHAT[:2], {"role": "assistant", "content": "<tool_call>{}</tool_call>"},
                  {"role": "user", "content": "<tool_response>x</tool_response>"}], "answer": [["Orm"]]},
    {"text": "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n", "gt": "Orm"},
    {"question": "Q", "full_output": "<search>x</search><information>y</information><answer>z</answer>", "gold": "Orm"},
    {"traj": "Q\nThought 1: a\nAction 1: b[c]\nObservation 1: d\nAction 2: finish[e]\n", "gt": "Orm"},
    {"segments": [{"role": "prompt", "text": "p"}, {"role": "assistant", "text": "a"}, {"role": "tool", "text": "t"}],
     "answer": "Orm"},
    {"input_ids": [1, 2, 3, 4], "boundaries": [1, 2, 4], "answer_ids": [[5], [6]], "opener_ids": [7],
     "loss_mask": [0, 1, 0, 1], "logprobs": [None, -0.5, -1, 0], "reward": True, "n_turns": 1},
]  # fmt: skip


def _deep(n: int) -> Any:
    value: Any = 1
    for _ in range(n):
        value = [value]
    return value


HOSTILE: list[Callable[[random.Random], Any]] = [
    lambda r: None,
    lambda r: r.choice([True, False]),
    lambda r: r.choice([0, -1, 2**31, 2**63, -(2**63), 10**400]),
    lambda r: r.choice([0.0, -0.0, 1e308, 1.5]),
    lambda r: r.choice(["", " ", "\x00", "﻿", "\u202e", "<answer>", "<|im_end|>", "{{ 7*7 }}", "{% raise %}", "é" * 50]),
    lambda r: r.choice(["\ud800", "a\udfffb"]),
    lambda r: [],
    lambda r: {},
    lambda r: [[]],
    lambda r: [None, 1, "x", {}],
    lambda r: {"role": "assistant", "content": r.choice([1, None, [], {}])},
    lambda r: _deep(r.choice([3, 70, 400])),
    lambda r: "word " * r.choice([1, 3000]),
    lambda r: '{"a": ' * r.choice([1, 90]),
    lambda r: "Thought 1: x\nAction 9999999999999999999999: y",
    lambda r: r.choice(["user", "tool", "assistant", "system", "function_call", "message", "image"]),
]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _paths(item, (*path, key))
    return found


def _mutate(record: dict[str, Any], r: random.Random) -> bytes:
    record = copy.deepcopy(record)
    for _ in range(r.choice([0, 1, 1, 2, 4])):
        paths = _paths(record)
        if not paths:
            break
        *parents, key = r.choice(paths)
        holder: Any = record
        for parent in parents:
            holder = holder[parent]
        action = r.random()
        if action < 0.2:
            del holder[key]
        elif action < 0.3 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[key] = r.choice(HOSTILE)(r)
    line = json.dumps(record, ensure_ascii=r.random() < 0.5).encode("utf-8", "surrogatepass")
    damage = r.random()
    if damage < 0.08:
        line = line[: r.randrange(len(line))]
    elif damage < 0.16:
        at = r.randrange(len(line))
        line = line[:at] + bytes([r.choice([0, 9, 34, 44, 92, 123, 125, 128, 255])]) + line[at + 1 :]
    elif damage < 0.2:
        line = line.replace(b"1", r.choice([b"NaN", b"Infinity", b"1e9999", b"01", b"9" * 5000]), 1)
    elif damage < 0.22:
        line = line[:-1] + b', "id": 1, "id": 2}'
    return line


def fuzzed_lines(seed: int, count: int) -> list[bytes]:
    """``count`` lines, the same for the same seed; a few are blank, most hold a record with something wrong in it."""
    r = random.Random(seed)
    return [_mutate(SEEDS[i % len(SEEDS)], r) for i in range(count)]
