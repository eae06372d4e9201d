"""Files and folders that are replaced whole, or stay as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_fast.atomic_write import new_file, new_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_at_the_end_under_its_suffixes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_text("old")
    with new_file(path) as file:
        assert file.suffixes[-2:] == [".jsonl", ".gz"]
        file.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.jsonl.gz"]


def test_an_error_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write() -> None:
        with new_file(path) as file:
            file.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_folder_is_replaced_with_all_it_held(tmp_path: Path) -> None:
    path = tmp_path / "model"
    for content in ("old", "new"):
        with new_folder(path) as folder:
            (folder / "inner").mkdir(parents=True)
            (folder / "inner" / content).write_text(content)
            assert content == "old" or names(path / "inner") == ["old"]
    assert names(path / "inner") == ["new"]
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("at", ["block", "rename"])
def test_an_error_leaves_the_folder_that_was_there(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").write_text("old")
    rename = Path.rename

    def broken(self: Path, target: Path) -> Path:
        if self.suffix == ".new":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    def write() -> None:
        with new_folder(path) as folder:
            folder.mkdir()
            (folder / "new").write_text("new")
            if at == "block":
                raise OSError(28, "No space left on device")

    if at == "rename":
        monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(OSError, match="No space left"):
        write()
    assert names(path) == ["old"]
    assert names(tmp_path) == ["model"]
