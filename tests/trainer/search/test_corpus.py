"""Reading corpora: every container gives the same documents, and errors name the file and the row."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from trace_fast.errors import InputError
from trace_fast.trainer.search import Document, read_corpus

ROWS: list[dict[str, Any]] = [
    {"docid": "a", "url": "u/a", "title": "A", "text": "first\nsecond", "other": 1},
    {"docid": 7, "url": "u/7", "title": None, "text": "größer"},
    {"docid": "c", "url": "", "title": "C", "text": ""},
]
WANTED = [Document("a", "u/a", "A", "first\nsecond"), Document("7", "u/7", "", "größer"), Document("c", "", "C", "")]


def _jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def _gzipped(path: Path) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    return path


def _parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{**row, "docid": str(row["docid"])} for row in ROWS]), path)
    return path


def _dataset(path: Path) -> Path:
    import datasets

    datasets.Dataset.from_list([{**row, "docid": str(row["docid"])} for row in ROWS]).save_to_disk(path)
    return path


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / "0.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[1:]))
    (path / "readme.md").write_text("no corpus")
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [("c.jsonl", _jsonl), ("c.jsonl.gz", _gzipped), ("c.parquet", _parquet), ("saved", _dataset), ("files", _folder)],
)
def test_every_container_gives_the_same_documents(tmp_path: Path, name: str, write: Callable[[Path], Path]) -> None:
    assert list(read_corpus(write(tmp_path / name))) == WANTED


def test_documents_come_before_the_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1]) + "\nbroken\n")
    assert list(islice(read_corpus(path), 2)) == WANTED[:2]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object with docid, url, title, text, got list"),
        ('{"url": "u", "text": "t"}', "docid: expected text or an integer, got nothing"),
        ('{"docid": true, "url": "u", "text": "t"}', "docid: expected text or an integer, got True"),
        ('{"docid": "", "url": "u", "text": "t"}', "docid: expected text or an integer, got ''"),
        ('{"docid": "x", "text": "t"}', "url: expected text, got nothing"),
        ('{"docid": "x", "url": "u"}', "text: expected text, got nothing"),
        ('{"docid": "x", "url": "u", "text": 3}', "text: expected text, got 3"),
        ('{"docid": "x", "url": "u", "text": "t", "title": []}', "title: expected text, got []"),
    ],
)
def test_an_error_names_file_and_row(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(InputError) as caught:
        list(read_corpus(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert reason in str(caught.value)


def test_a_saved_dataset_without_a_column_is_named_with_what_it_has(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"docid": "a", "body": "t"}]).save_to_disk(tmp_path / "d")
    with pytest.raises(InputError, match="column 'url' is missing; got docid, body"):
        list(read_corpus(tmp_path / "d"))


def test_a_row_of_a_saved_dataset_is_named(tmp_path: Path) -> None:
    import datasets

    rows = [{"docid": "a", "url": "u", "text": "t"}, {"docid": "b", "url": "u", "text": None}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    with pytest.raises(InputError, match=r"d:2: text: expected text, got nothing"):
        list(read_corpus(tmp_path / "d"))


def test_splits_are_named_instead_of_one_being_chosen(tmp_path: Path) -> None:
    import datasets

    one = datasets.Dataset.from_list([{"docid": "a", "url": "u", "text": "t"}])
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "d")
    with pytest.raises(InputError, match="several splits; name one of them: test, train"):
        list(read_corpus(tmp_path / "d"))
    assert [document.docid for document in read_corpus(tmp_path / "d" / "train")] == ["a"]


def test_a_missing_file_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        list(read_corpus(tmp_path / "nothing.jsonl"))
    with pytest.raises(InputError, match="expected a saved dataset"):
        list(read_corpus(tmp_path))
