"""Any mesh gives the single process's loss, gradients and weights; so does any split into micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

from trace_fast.errors import ConfigError
from trace_fast.trainer.parallel import ParallelConfig

RELATIVE = 1e-5  # float32, from the issue: other orders of summation and nothing else
QWEN, LLAMA = ("qwen3", True), ("llama", False)
MESHES: dict[str, tuple[int, dict[str, Any], tuple[str, bool]]] = {
    "tensor 2": (2, {"tensor": 2}, QWEN),
    "shard 2": (2, {"shard": 2}, QWEN),
    "shard 2, activations computed again": (2, {"shard": 2, "activation_checkpointing": True}, QWEN),
    "tensor 2, untied head": (2, {"tensor": 2}, LLAMA),
    "shard 2 x tensor 2": (4, {"shard": 2, "tensor": 2}, QWEN),
    "replicate 2 x tensor 2": (4, {"replicate": 2, "shard": 1, "tensor": 2}, QWEN),
    "replicate 2 x shard 2": (4, {"replicate": 2, "shard": 2}, QWEN),
}
SINGLE = {QWEN: "one process", LLAMA: "one process, untied head"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Loss, gradients and weights of every mesh."""
    folder = tmp_path_factory.mktemp("meshes")
    run_ranks(1, "rank_jobs:gradients_and_weights", str(folder), [(SINGLE[m], {}, *m) for m in (QWEN, LLAMA)])
    for n in (2, 4):
        cases = [(name, parallel, *model) for name, (size, parallel, model) in MESHES.items() if size == n]
        run_ranks(n, "rank_jobs:gradients_and_weights", str(folder), cases)
    return {path.stem: load_file(path) for path in folder.glob("*.safetensors")}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).double().norm() / expected.double().norm())


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_gives_the_single_process_loss_gradients_and_weights(
    name: str, runs: dict[str, dict[str, torch.Tensor]]
) -> None:
    model = MESHES[name][2]
    found, expected = runs[name], runs[SINGLE[model]]
    assert found.keys() == expected.keys()
    assert sum(key.startswith("grad.") for key in found) == {QWEN: 24, LLAMA: 21}[model]
    for key, value in expected.items():
        if key == "metrics":  # quantiles of ratios are means over micro-batches, which depend on the split
            continue
        assert float(value.double().norm()) > 0, key
        assert relative(found[key], value) <= RELATIVE, key


def test_any_split_into_microbatches_gives_the_same_gradients(tmp_path: Path) -> None:
    """1, 2, 4 and more micro-batches of rollouts of uneven lengths and masks, against plain full-batch autograd."""
    path = tmp_path / "found.safetensors"
    run_ranks(1, "rank_jobs:gradients_of_splits", str(path), [100_000, 200, 110, 60])
    found = load_file(path)
    counts = found.pop("counts").tolist()
    assert counts[0] == 1
    assert counts[1] == 2
    assert counts[2] > 2
    assert counts[3] >= 4
    plain = {name.removeprefix("plain."): value for name, value in found.items() if name.startswith("plain.")}
    assert len(plain) == 25
    for split in range(len(counts)):
        for name, value in plain.items():
            assert relative(found[f"{split}.{name}"], value) <= RELATIVE, (split, name)


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        ({"tensor": 3}, 4, "expected replicate x shard x tensor to be the number of processes, 4; got 1 x 1 x 3 = 3"),
        ({"shard": 2}, 1, "expected replicate x shard x tensor to be the number of processes, 1; got 1 x 2 x 1 = 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings: dict[str, int], processes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**settings).sizes(processes)


def test_what_is_left_of_the_processes_is_sharded_over() -> None:
    assert ParallelConfig(replicate=2, tensor=4).sizes(32) == (2, 4, 4)


def test_copies_of_a_parameter_stay_equal_bit_for_bit(tmp_path: Path) -> None:
    """Every rank scales by the same gradient norm, though ranks may add its parts in other orders."""
    run_ranks(4, "rank_jobs:copies_after_steps", str(tmp_path))
    ranks = [load_file(tmp_path / f"rank{i}.safetensors") for i in range(4)]
    assert len(ranks[0]) == 9
    for a, b in ((0, 1), (2, 3)):  # the tensor ranks of one shard
        for name, value in ranks[a].items():
            assert torch.equal(ranks[b][name], value), name
