"""The tiny base policy, made once, and one practice world to make examples of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from trace_fast.trainer.base_policy import SIZES, frame_of, make_base
from trace_fast.trainer.base_policy.corpus import Corpus
from trace_fast.trainer.base_policy.library import Library
from trace_fast.trainer.base_policy.settings import practice_seeds
from trace_fast.trainer.base_policy.vocabulary import train_tokenizer
from trace_fast.trainer.docworld import make_world
from trace_fast.trainer.harness import ChatFrame


@dataclass(frozen=True)
class Made:
    """A policy in a folder, and what was said of it."""

    folder: Path
    record: dict[str, Any]
    lines: list[str]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, lines = tmp_path_factory.mktemp("base"), list[str]()
    return Made(folder, make_base(folder, world=folder / "world", size="tiny", threads=1, report=lines.append), lines)


@pytest.fixture(scope="session")
def frame() -> ChatFrame:
    size = SIZES["tiny"]
    return frame_of(train_tokenizer(Corpus(0, size).texts(), size.vocabulary))


@pytest.fixture(scope="session")
def library() -> Library:
    size = SIZES["tiny"]
    return Library(make_world(practice_seeds(0, size)[0], size.practice))


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
