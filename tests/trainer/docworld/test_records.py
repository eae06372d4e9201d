"""Files, command line, and the same bytes everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trace_fast.errors import OutputError
from trace_fast.trainer.docworld import SPLITS, World, write_world
from trace_fast.trainer.docworld.__main__ import main
from trace_fast.trainer.docworld.dice import Dice

# Of seed 0, size tiny. Changes with any change of names, wording or order; policies trained before do not fit then.
DIGEST = "9490572eda7d460442ba21aff6304595bab99adfd94c81bbfec2d4e7de930ad3"


def digest(paths: dict[str, Path]) -> str:
    total = hashlib.sha256()
    for name, path in paths.items():
        total.update(name.encode() + path.read_bytes())
    return total.hexdigest()


def test_the_bytes_are_those_of_every_machine(world: World, tmp_path: Path) -> None:
    assert digest(write_world(world, tmp_path)) == DIGEST


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_hash_seed_changes_nothing(hash_seed: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trace_fast.trainer.docworld", "--size", "tiny", "--out", str(tmp_path)]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    names = ["corpus", *SPLITS, "summary"]
    paths = [tmp_path / "corpus.jsonl", *(tmp_path / f"questions.{split}.jsonl" for split in SPLITS)]
    assert digest(dict(zip(names, [*paths, tmp_path / "summary.json"], strict=True))) == DIGEST
    assert json.loads(done.stdout)["seed"] == 0


def test_another_seed_is_another_world(world: World, other_world: World) -> None:
    other = other_world
    assert {e.name for e in other.entities.values()} != {e.name for e in world.entities.values()}
    shared = {d.text for d in other.documents if d.facts} & {d.text for d in world.documents if d.facts}
    assert not shared


def test_records_hold_what_the_world_holds(world: World, tmp_path: Path) -> None:
    paths = write_world(world, tmp_path / "new" / "folder")
    corpus = [json.loads(line) for line in paths["corpus"].read_text(encoding="utf-8").splitlines()]
    assert [list(record) for record in corpus] == [["docid", "url", "title", "text"]] * len(world.documents)
    assert corpus == [document.to_record() for document in world.documents]
    docids = {record["docid"] for record in corpus}
    for split in SPLITS:
        records = [json.loads(line) for line in paths[split].read_text(encoding="utf-8").splitlines()]
        assert len(records) == len(world.questions(split))
        for record, question in zip(records, world.questions(split), strict=True):
            assert record == question.to_record()
            assert record["split"] == split
            assert set(record["support"]) <= docids
            assert len(record["support"]) == record["hops"]
            assert record["answers"]
    assert sorted((tmp_path / "new" / "folder").iterdir()) == sorted(paths.values())


def test_the_summary_counts_the_files(world: World, tmp_path: Path) -> None:
    paths = write_world(world, tmp_path)
    summary = json.loads(paths["summary"].read_text(encoding="utf-8"))
    corpus = [json.loads(line) for line in paths["corpus"].read_text(encoding="utf-8").splitlines()]
    assert summary["documents"] == len(corpus)
    assert summary["words"] == sum(len(record["title"].split()) + len(record["text"].split()) for record in corpus)
    for split in SPLITS:
        records = [json.loads(line) for line in paths[split].read_text(encoding="utf-8").splitlines()]
        counted = summary["questions"][split]
        assert counted["number"] == len(records)
        for hops, number in counted["hops"].items():
            assert number == sum(record["hops"] == int(hops) for record in records)
        for template, number in counted["templates"].items():
            assert number == sum(record["template"] == template for record in records)


def test_writing_again_replaces_the_files(world: World, other_world: World, tmp_path: Path) -> None:
    write_world(other_world, tmp_path)
    assert digest(write_world(world, tmp_path)) == DIGEST


def test_a_folder_that_cannot_be_written(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"expected to write into folder .*file, got: .*"):
        write_world(world, tmp_path / "file")


def test_the_command_refuses_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--size", "huge", "--out", str(tmp_path / "x")]) == 2
    assert "expected one of tiny, small, medium, large, got 'huge'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    with pytest.raises(SystemExit) as stopped:
        main(["--seed", "one", "--out", str(tmp_path / "x")])
    assert stopped.value.code == 2


def test_dice_are_pinned() -> None:
    dice = Dice(0, "pinned")
    assert [dice.below(1000) for _ in range(4)] == [77, 117, 686, 69]
    assert sorted(Dice(1).shuffled(range(50))) == list(range(50))
    assert Dice("a", 1).shuffled(range(50)) != Dice("a", 2).shuffled(range(50))
    draws = [Dice(n).weighted("abc", (0, 1, 3)) for n in range(400)]
    assert draws.count("a") == 0
    assert 70 <= draws.count("b") <= 130
