"""Writes a world as files: ``corpus.jsonl``, ``questions.<split>.jsonl`` and ``summary.json``.

A corpus record is ``{docid, url, title, text}``; a question record is ``{id, question, answers, template, hops,
support, obfuscations, entities, split}``. UTF-8, one record a line, keys in this order, so equal worlds give equal
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trace_fast.atomic_write import write_atomically
from trace_fast.errors import OutputError
from trace_fast.trainer.docworld.schema import SPLITS
from trace_fast.trainer.docworld.world import World


def write_world(world: World, folder: str | Path) -> dict[str, Path]:
    """Writes all files, each as a whole: an interrupted run leaves no half file under its name.

    Returns:
        Paths by ``corpus``, ``train``, ``validation``, ``test`` and ``summary``.

    Raises:
        OutputError: the folder or a file cannot be written.
    """
    folder = Path(folder)
    paths = {"corpus": folder / "corpus.jsonl"}
    paths |= {split: folder / f"questions.{split}.jsonl" for split in SPLITS}
    paths["summary"] = folder / "summary.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(paths["corpus"], _lines(document.to_record() for document in world.documents))
        for split in SPLITS:
            write_atomically(paths[split], _lines(question.to_record() for question in world.questions(split)))
        write_atomically(paths["summary"], json.dumps(world.summary(), indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"docworld: expected to write into folder {folder}, got: {error}") from error
    return paths


def _lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
