from __future__ import annotations

from pathlib import Path

import pytest
from small_world import make_folder


@pytest.fixture(scope="session")
def small_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random policy, a tiny docworld and its questions."""
    folder = tmp_path_factory.mktemp("small-world")
    make_folder(folder)
    return folder
