"""Containers, compression, encodings and limits: what comes in, and what is said when it does not."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_fast.errors import ConfigError, InputError, RolloutError
from trace_fast.formats import FieldKeys, Limits, read_outcomes, read_rollouts
from trace_fast.formats.json_document import split_document
from trace_fast.formats.strict_json import LiteralFloat, parse_json, too_deep
from trace_fast.rollout import Rollout


def _record(i: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"r{i}",
        "group": "g",
        "input_ids": [i, i + 1, i + 2, i + 3],
        "boundaries": [1, 3, 4],
        "answer_ids": [7, i],
        "opener_ids": [9],
        "reward": 0.5,
        "extra": {"note": "é漢", "n": i},
        **more,
    }


RECORDS = [_record(i) for i in range(20)]
LINES = "".join(json.dumps(r) + "\n" for r in RECORDS).encode()


def _summary(rollouts: Any) -> list[Any]:
    return [
        (r.id, r.group, r.input_ids.tolist(), r.boundaries.tolist(), r.n_turns, [a.tolist() for a in r.answers],
         [o.tolist() for o in r.openers], r.reward, r.extra)
        for r in rollouts
    ]  # fmt: skip


EXPECTED = [
    (f"r{i}", "g", [i, i + 1, i + 2, i + 3], [1, 3, 4], 1, [[7, i]], [[9]] * 3, 0.5, {"note": "é漢", "n": i})
    for i in range(20)
]


def _read(path: Any, **options: Any) -> tuple[list[Rollout], list[RolloutError]]:
    errors: list[RolloutError] = []
    return list(read_rollouts(path, errors=errors.append, **options)), errors


def _containers() -> dict[str, bytes]:
    table = pa.Table.from_pylist(RECORDS)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    keyed = {r["id"]: {k: v for k, v in r.items() if k != "id"} for r in RECORDS}
    frames = zstandard.compress(LINES[:1000]) + zstandard.compress(LINES[1000:])
    return {
        "a.jsonl": LINES,
        "a.ndjson": LINES,
        "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
        "blank.jsonl": b"\n\n" + LINES.replace(b"\n", b"\n \t\n"),
        "bom.jsonl": b"\xef\xbb\xbf" + LINES,
        "no_end.jsonl": LINES.rstrip(b"\n"),
        "list.json": json.dumps(RECORDS).encode(),
        "bom.json": b"\xef\xbb\xbf" + json.dumps(RECORDS, indent=2).encode(),
        "dict.json": json.dumps(keyed, indent=1).encode(),
        "lines.json": LINES,
        "pretty.json": "\n".join(json.dumps(r, indent=2) for r in RECORDS).encode(),
        "a.jsonl.gz": gzip.compress(LINES),
        "a.jsonl.zst": zstandard.compress(LINES),
        "frames.jsonl.zst": frames,
        "members.jsonl.gz": gzip.compress(LINES[:1000]) + gzip.compress(LINES[1000:]),
        "list.json.gz": gzip.compress(json.dumps(RECORDS).encode()),
        "wrong_name.jsonl": gzip.compress(LINES),
        "wrong_name.json": zstandard.compress(json.dumps(RECORDS).encode()),
        "no_name": LINES,
        "no_name_list": json.dumps(RECORDS).encode(),
        "no_name_pretty": "\n".join(json.dumps(r, indent=2) for r in RECORDS).encode(),
        "a.parquet": sink.getvalue(),
        "wrong_name_parquet.jsonl": sink.getvalue(),
        "a.parquet.zst": zstandard.compress(sink.getvalue()),
    }


CONTAINERS = _containers()


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_same_rollouts(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(CONTAINERS[name])
    rollouts, errors = _read(path)
    assert errors == []
    assert _summary(rollouts) == EXPECTED


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "list.json", "pretty.json", "a.parquet", "a.jsonl.zst"])
def test_stdin(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Stdin:
        buffer = io.BytesIO(CONTAINERS[name])

    monkeypatch.setattr(sys, "stdin", Stdin())
    rollouts, errors = _read("-")
    assert errors == []
    assert _summary(rollouts) == EXPECTED
    assert rollouts[0].source == "stdin:1"


def test_sources_are_lines_in_jsonl_and_record_numbers_elsewhere(tmp_path: Path) -> None:
    lines, document = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_bytes(b"\n" + LINES.replace(b"\n", b"\n\n"))
    document.write_bytes(CONTAINERS["pretty.json"])
    rollouts, _ = _read([lines, str(document)])
    assert [r.source for r in rollouts] == [f"{lines}:{2 * i + 2}" for i in range(20)] + [
        f"{document}:{i + 1}" for i in range(20)
    ]


def test_single_record_document_whose_first_value_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"extra": {"a": 1}, **{k: v for k, v in RECORDS[3].items() if k != "extra"}}))
    rollouts, errors = _read(path)
    assert errors == []
    assert [(r.id, r.extra) for r in rollouts] == [("r3", {"a": 1})]


# --- bad records: each one error, the others untouched ------------------------------------------------------------

BAD_LINES = [
    (b'{"id": "x", "input_ids": [1', "parse", "not JSON"),
    (b'{"id": "x", "reward": NaN}', "parse", "NaN is not JSON"),
    (b'{"id": "x", "reward": -Infinity}', "parse", "-Infinity is not JSON"),
    (b'{"id": "x", "id": "y"}', "parse", "'id' appears twice"),
    (b'{"id": "\\ud800"}', "parse", "lone surrogate"),
    (b'{"id": "\\udc00\\ud800"}', "parse", "lone surrogate"),
    (b'{"id": "\xff"}', "parse", "byte 0xff"),
    (b'{"id": "\xed\xa0\x80"}', "parse", "expected UTF-8"),
    (b'{"reward": 1e999}', "parse", "out of range"),
    (b'{"reward": ' + b"9" * 5000 + b"}", "parse", "4300 digits"),
    (b"[" * 100_000, "parse", "levels of nesting"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "parse", "levels of nesting"),
    (b"[" * 65 + b"]" * 65, "parse", "at most 64 levels"),
    (b"[1, 2]", "format", "expected a JSON object, got a list of 2"),
    (b"null", "format", "expected a JSON object, got null"),
    (b'"text"', "format", "expected a JSON object, got 'text'"),
    (b'{"a": 1, "b": 2}', "format", "(keys: 'a', 'b')"),
    (b"{}", "format", "(keys: none)"),
    (b"\x00\x00", "parse", "not JSON"),
]


def _balanced(line: bytes) -> bool:
    """Whether a record ends where it should, so that a JSON list goes on after it."""
    return line.count(b"[") + line.count(b"{") == line.count(b"]") + line.count(b"}") and line[:1] != b"\x00"


CASES = [("jsonl", *case) for case in BAD_LINES] + [("json", *case) for case in BAD_LINES if _balanced(case[0])]


@pytest.mark.parametrize(("container", "line", "kind", "words"), CASES, ids=range(len(CASES)))
def test_bad_record_is_one_error(tmp_path: Path, container: str, line: bytes, kind: str, words: str) -> None:
    good = json.dumps(RECORDS[1]).encode()
    path = tmp_path / f"a.{container}"
    if container == "jsonl":
        path.write_bytes(good + b"\n" + line + b"\n" + good)
    else:
        path.write_bytes(b"[" + good + b",\n" + line + b",\n" + good + b"]")
    rollouts, errors = _read(path)
    assert [r.id for r in rollouts] == ["r1", "r1"]
    assert [(e.kind, e.source) for e in errors] == [(kind, f"{path}:2")]
    assert words in errors[0].reason
    with pytest.raises(RolloutError) as caught:
        list(read_rollouts(path))
    assert str(caught.value) == str(errors[0])


def test_oversize_records_are_skipped_in_bounded_memory(tmp_path: Path) -> None:
    big = _record(1, text="x" * 5000)
    limits = Limits(max_record_bytes=2000)
    lines, document, keyed = tmp_path / "a.jsonl", tmp_path / "b.json", tmp_path / "c.json"
    lines.write_text("\n".join(json.dumps(r) for r in (RECORDS[0], big, RECORDS[2])))
    document.write_text(json.dumps([RECORDS[0], big, RECORDS[2]]))
    keyed.write_text(json.dumps({"a": RECORDS[0], "b": big, "c": RECORDS[2]}))
    for path in (lines, document, keyed):
        rollouts, errors = _read(path, limits=limits)
        assert [r.id for r in rollouts] == ["r0", "r2"]
        assert [(e.kind, e.source) for e in errors] == [("parse", f"{path}:2")]
        assert "at most 2000 bytes" in errors[0].reason


def test_a_line_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    line = json.dumps(RECORDS[0]).encode()
    path = tmp_path / "a.jsonl"
    for end in (b"", b"\n", b"\r\n"):
        path.write_bytes(line + end + line)
        rollouts, errors = _read(path, limits=Limits(max_record_bytes=len(line)))
        assert (len(rollouts), len(errors)) == ((0, 1) if end == b"" else (2, 0))


def test_text_limit(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    path = tmp_path / "a.jsonl"
    messages = [{"role": "user", "content": "word " * 300}]
    path.write_text(json.dumps({"messages": messages, "answer": "A"}))
    errors: list[RolloutError] = []
    assert list(read_rollouts(path, smollm2_tokenizer, errors=errors.append, limits=Limits(max_text=1000))) == []
    assert (errors[0].kind, "at most 1000 characters of text, got 1501" in errors[0].reason) == ("parse", True)
    assert len(list(read_rollouts(path, smollm2_tokenizer, limits=Limits(max_text=1501)))) == 1


# --- whole files --------------------------------------------------------------------------------------------------


def _until_it_breaks(path: Path) -> tuple[list[str], str]:
    """Ids of the rollouts before the file breaks, and what is said then."""
    seen: list[str] = []

    def read() -> None:
        for rollout in read_rollouts(path, errors=lambda error: None):
            seen.append(rollout.id)

    with pytest.raises(InputError) as caught:
        read()
    return seen, str(caught.value)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_truncated_archive_yields_the_good_records_first(tmp_path: Path, kind: str) -> None:
    import random

    noise = random.Random(0)
    records = [_record(i, noise=noise.randbytes(3000).hex()) for i in range(200)]
    data = "".join(json.dumps(r) + "\n" for r in records).encode()
    packed = gzip.compress(data) if kind == "gz" else zstandard.compress(data)
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(packed[: len(packed) * 2 // 3])
    seen, message = _until_it_breaks(path)
    assert seen == [f"r{i}" for i in range(len(seen))]
    assert len(seen) > 50
    assert str(path) in message


def test_corrupt_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    packed = bytearray(gzip.compress(LINES))
    packed[-5] ^= 0xFF
    path.write_bytes(packed)
    _, message = _until_it_breaks(path)
    assert "CRC" in message


@pytest.mark.parametrize(
    ("data", "ids", "words"),
    [
        (json.dumps(RECORDS[:3])[:-1].encode(), ["r0", "r1", "r2"], "truncated"),
        (b"[" + json.dumps(RECORDS[0]).encode() + b" " + json.dumps(RECORDS[1]).encode(), ["r0"], "between records"),
        (b'{"a": ' + json.dumps(RECORDS[0]).encode() + b", b", ["r0"], "quoted key"),
        (b"[,]", [], "expected a record"),
        (b"hello", [], "expected a JSON list or object"),
        (b"\xff\xfe[\x00", [], "UTF-16"),
    ],
)
def test_broken_document(tmp_path: Path, data: bytes, ids: list[str], words: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    seen, message = _until_it_breaks(path)
    assert seen == ids
    assert words in message


def test_document_that_ends_within_a_record_reports_that_record(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps(RECORDS[:3]).encode()[:-20])
    rollouts, errors = _read(path)
    assert [r.id for r in rollouts] == ["r0", "r1"]
    assert [(e.kind, e.source, e.reason) for e in errors] == [
        ("parse", f"{path}:3", "the file ends within this record")
    ]


def test_missing_file_directory_and_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        list(read_rollouts(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="got a directory"):
        list(read_rollouts(tmp_path))
    with pytest.raises(ConfigError, match="auto, tokens, segments, responses, completion, messages, chatml, search_r1"):
        read_rollouts(tmp_path / "a.jsonl", format="parquet")  # at once, not when reading begins
    with pytest.raises(ConfigError, match="expected text or token ids"):
        read_rollouts(tmp_path / "a.jsonl", opener=[1, -2])
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(InputError, match="not readable as Parquet"):
        list(read_rollouts(tmp_path / "a.parquet"))
    with pytest.raises(ConfigError, match="max_depth"):
        Limits(max_depth=0)


def test_empty_files_hold_no_records(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.txt", "a.bin"):
        (tmp_path / name).write_bytes(b" \n")
        assert _read(tmp_path / name) == ([], [])


def test_outcomes_skip_bad_records(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES.split(b"\n")[0] + b"\n{bad\n" + json.dumps(_record(5, reward=True)).encode())
    assert list(read_outcomes(path)) == [(f"{path}:1", "r0", "g", 0.5), (f"{path}:3", "r5", "g", 1.0)]


# --- JSON ---------------------------------------------------------------------------------------------------------


def test_numbers_remember_their_spelling() -> None:
    value = parse_json(b'{"a": 1.50, "b": 1e3, "c": 12}', Limits())
    assert value == {"a": 1.5, "b": 1000.0, "c": 12}
    assert (value["a"].literal, value["b"].literal) == ("1.50", "1e3")
    assert json.dumps(value) == '{"a": 1.5, "b": 1000.0, "c": 12}'
    import pickle

    assert pickle.loads(pickle.dumps(value["a"])).literal == "1.50"
    with pytest.raises(ValueError, match="out of range"):
        LiteralFloat("1e400")


def test_surrogate_pairs_are_text() -> None:
    assert parse_json(b'"\\ud83d\\ude00"', Limits()) == "😀"
    assert parse_json(b'"\\\\ud800"', Limits()) == "\\ud800"


def test_depth_counts_brackets_outside_strings_only() -> None:
    assert not too_deep(b'{"a": "[[[[[[[["}', 2)
    assert not too_deep(b'["\\"[[[[", "\\\\"]', 2)
    assert too_deep(b'["\\\\", [[1]]]', 2)
    assert too_deep(b"[[[]]]", 2)
    assert not too_deep(b"[[],[],[],[]]", 2)


class _Trickle(io.BytesIO):
    """A stream that gives a few bytes at a time, so that every byte is once at the edge of a chunk."""

    def __init__(self, data: bytes, step: int) -> None:
        super().__init__(data)
        self._step = step

    def read(self, size: int | None = -1) -> bytes:
        return super().read(self._step)


json_values = st.recursive(
    st.none() | st.integers(-5, 10**6) | st.text('\\"[]{},: aé漢', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('\\"[]{}a', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(json_values, max_size=4), st.sampled_from([None, 1]), st.booleans(), st.integers(1, 3))
def test_documents_split_at_the_records_wherever_chunks_end(values: Any, indent: Any, ascii: bool, step: int) -> None:
    document = json.dumps(values, indent=indent, ensure_ascii=ascii).encode()
    split = split_document(_Trickle(document, step), "a.json", lambda key: False, Limits())
    assert [(key, json.loads(raw)) for key, raw in split] == [(None, value) for value in values]
    keyed = {f'k"{i}\\': {"v": value} for i, value in enumerate(values)}
    document = json.dumps(keyed, indent=indent, ensure_ascii=ascii).encode()
    split = split_document(_Trickle(document, step), "a.json", lambda key: False, Limits())
    assert [(key, json.loads(raw)) for key, raw in split] == (list(keyed.items()) or [(None, {})])


def test_dict_of_records_takes_the_users_keys_for_record_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    record = {"meta": {"gold": "x"}, **{k: v for k, v in RECORDS[0].items() if k != "answer_ids"}}
    path.write_text(json.dumps({**record, "answer_ids": [1]}))
    rollouts, errors = _read(path, keys=FieldKeys(group="meta.gold"))
    assert errors == []
    assert [(r.id, r.group) for r in rollouts] == [("r0", "x")]
