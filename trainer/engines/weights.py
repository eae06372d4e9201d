"""New weights for an engine: one interface, three ways.

``HfEngine`` takes them in place. ``DiskWeights`` writes a model folder, whole or not at all, and has a server load it.
``NcclWeights`` broadcasts them into a server's GPUs through the server's own group, bucket by bucket: the server is
told what comes and receives it while this side sends. Names and shapes are those of the checkpoint (Hugging Face).

The requests are tested against small servers that speak the protocols. The NCCL transport itself needs GPUs and the
server's package, and has not run in these tests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import Tensor

from trace_fast.atomic_write import new_folder
from trace_fast.errors import ConfigError, OutputError
from trace_fast.trainer.engines.engine import Engine

Weights = Iterable[tuple[str, Tensor]]


class WeightSink(Protocol):
    """Whatever can be given new weights."""

    def update_weights(self, weights: Weights, version: int) -> None:
        """Every parameter in full, by the model's own names; the whole of ``weights`` is consumed. Afterwards
        everything that is generated comes from these weights.

        Args:
            version: number of the policy that these are the weights of.

        Raises:
            TraceFastError: it did not work; what the engine holds then is not known.
        """
        ...


class TrainableEngine(Engine, WeightSink, Protocol):
    """An engine whose weights follow a policy in training: new ones come between two calls of ``generate``."""


class Bystander:
    """For a process whose engine's weights another process updates: takes part in gathering them, and drops them."""

    def update_weights(self, weights: Weights, version: int) -> None:
        for _ in weights:
            pass


@dataclass(frozen=True, slots=True)
class Meta:
    """A tensor as servers are told of it: ``dtype`` is such as ``bfloat16``."""

    name: str
    dtype: str
    shape: list[int]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Meta:
        return cls(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


class WeightServer(Protocol):
    """A server's calls for weight updates. All raise ``ServerError``."""

    def world_size(self) -> int:
        """Ranks that join the group."""
        ...

    def load(self, folder: Path, version: int) -> None:
        """Loads a model folder that the server can read, and drops its caches."""
        ...

    def join(self, address: str, port: int, rank_offset: int, world_size: int) -> None:
        """Joins the group; returns when all ranks have."""
        ...

    def begin(self) -> None:
        """Nothing is generated from here to ``finish``; what runs is aborted."""
        ...

    def receive(self, metas: Sequence[Meta]) -> None:
        """Receives these tensors, in this order; returns when they are loaded."""
        ...

    def finish(self, version: int) -> None:
        """Drops the caches and generates again."""
        ...


class BroadcastGroup(Protocol):
    """The sending end of a group of which servers are the other ranks."""

    def join(self, address: str, port: int, world_size: int) -> None:
        """As rank 0; returns when all ranks have."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Sends one tensor to all other ranks."""
        ...


class DiskWeights:
    """Weights through a folder that trainer and server share.

    Args:
        folder: gets one sub-folder a version, ``step-<version>``.
        model: the model's folder, whose files other than weights (config, tokenizer) go along.
        keep: how many versions stay.
        shard_bytes: of one weights file; this much is held in memory.

    Raises:
        ConfigError: ``model`` has no config.json, or ``keep`` is less than 1.
    """

    def __init__(
        self, server: WeightServer, folder: Path, model: Path, *, keep: int = 2, shard_bytes: int = 4 << 30
    ) -> None:
        if not (model / "config.json").is_file():
            raise ConfigError(f"model: expected a folder with config.json, got {model}")
        if keep < 1 or shard_bytes < 1:
            raise ConfigError(f"keep, shard_bytes: expected at least 1, got {keep} and {shard_bytes}")
        self._server = server
        self._folder = folder
        self._model = model
        self._keep = keep
        self._shard_bytes = shard_bytes

    def update_weights(self, weights: Weights, version: int) -> None:
        """Writes them, has them loaded, then removes old versions.

        Raises:
            OutputError: they cannot be written; nothing is left behind. ServerError: the server did not load them.
        """
        target = self._folder / f"step-{version}"
        try:
            self._write(weights, target)
        except OSError as error:
            raise OutputError(f"cannot write the weights {target}: {error.strerror or error}") from error
        self._server.load(target.resolve(), version)
        for old in self._versions(before=version)[: 1 - self._keep or None]:
            shutil.rmtree(old)

    def _versions(self, before: int) -> list[Path]:
        numbered = [
            (int(number), path)
            for path in self._folder.glob("step-*")
            if (number := path.name.removeprefix("step-")).isdecimal() and int(number) < before
        ]
        return [path for _, path in sorted(numbered)]

    def _write(self, weights: Weights, target: Path) -> None:
        with new_folder(target) as folder:  # it may be there: the same version, from before a restart
            folder.mkdir(parents=True)
            for file in sorted(self._model.iterdir()):
                if file.is_file() and file.suffix not in (".safetensors", ".bin", ".gguf", ".pt") and (
                    not file.name.endswith(".index.json")
                ):
                    shutil.copyfile(file, folder / file.name)
            self._write_shards(weights, folder)

    def _write_shards(self, weights: Weights, folder: Path) -> None:
        shards: list[list[str]] = []
        total = 0
        for bucket in buckets(weights, self._shard_bytes):
            tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in bucket}
            total += sum(t.numel() * t.element_size() for t in tensors.values())
            save_file(tensors, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
            shards.append(list(tensors))
        index: dict[str, str] = {}
        for number, names in enumerate(shards):
            name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            (folder / f"shard-{number}").rename(folder / name)
            index |= dict.fromkeys(names, name)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


class NcclWeights:
    """Weights through a server's own group.

    Args:
        address, port: of rank 0, as the server reaches it.
        bucket_bytes: sent under one request to the server.
    """

    def __init__(
        self, server: WeightServer, group: BroadcastGroup, *, address: str, port: int, bucket_bytes: int = 1 << 30
    ) -> None:
        self._server = server
        self._group = group
        self._address = address
        self._port = port
        self._bucket_bytes = bucket_bytes
        self._joined = False

    def update_weights(self, weights: Weights, version: int) -> None:
        """Joins the group the first time; then all buckets.

        Raises:
            ServerError: the server refused or broke off. Where it does so while this side is sending, the transport's
                own timeout ends the sending.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as thread:
            if not self._joined:
                size = 1 + self._server.world_size()
                other = thread.submit(self._server.join, self._address, self._port, 1, size)
                self._group.join(self._address, self._port, size)
                other.result()
                self._joined = True
            self._server.begin()
            for bucket in buckets(weights, self._bucket_bytes):
                other = thread.submit(self._server.receive, [Meta.of(name, tensor) for name, tensor in bucket])
                for _, tensor in bucket:
                    self._group.broadcast(tensor.detach())
                other.result()
            self._server.finish(version)


def buckets(weights: Weights, size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Runs of weights of at most ``size`` bytes, or of one."""
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in weights:
        weight = tensor.numel() * tensor.element_size()
        if bucket and held + weight > size:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += weight
    if bucket:
        yield bucket
