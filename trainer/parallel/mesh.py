"""The processes of a run as a mesh of three dimensions, handed to whoever communicates.

    replicate   copies of the sharded model (hybrid sharding: one copy a node)
    shard       parameters, gradients and optimiser state are cut along it (FSDP2)
    tensor      matrices and the sequence are cut along it (tensor and sequence parallelism)

A *data rank* is a place in replicate x shard; each has micro-batches of its own, which the ranks of its tensor group
share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trace_fast.errors import ConfigError, TraceFastError

DIMENSIONS = ("replicate", "shard", "tensor")
T = TypeVar("T")


class PeerError(TraceFastError):
    """Another process of the run failed; what it says itself is the reason."""


class ParallelConfig(BaseModel):
    """Sizes of the mesh.

    ``replicate``, ``shard``, ``tensor``: see the module; ``shard`` 0 takes what the other two leave of the processes.
    ``activation_checkpointing``: keep only the input of every layer and run it again in the backward pass.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicate: int = Field(1, ge=1)
    shard: int = Field(0, ge=0)
    tensor: int = Field(1, ge=1)
    activation_checkpointing: bool = False

    def sizes(self, n_processes: int) -> tuple[int, int, int]:
        """(replicate, shard, tensor) for that many processes.

        Raises:
            ConfigError: their product is another number.
        """
        fixed = self.replicate * self.tensor
        shard = self.shard or max(n_processes // fixed, 1)
        sizes = (self.replicate, shard, self.tensor)
        if math.prod(sizes) != n_processes:
            raise ConfigError(
                f"parallel: expected replicate x shard x tensor to be the number of processes, {n_processes}; got "
                f"{self.replicate} x {shard} x {self.tensor} = {math.prod(sizes)}"
            )
        return sizes


@dataclass(frozen=True)
class TrainMesh:
    """The mesh of a run, and what this process is in it.

    Args:
        mesh: with the dimensions ``DIMENSIONS``, over all processes in order.
        device: of this process.
    """

    mesh: DeviceMesh
    device: torch.device

    @classmethod
    def create(cls, config: ParallelConfig, device_type: str) -> TrainMesh:
        """From the processes of the default group, which is initialised already.

        Raises:
            ConfigError: sizes that do not fit the number of processes.
        """
        mesh = init_device_mesh(device_type, config.sizes(dist.get_world_size()), mesh_dim_names=DIMENSIONS)
        device = torch.device(device_type)
        if device_type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())  # the launcher's choice, set with the group
        return cls(mesh, device)

    @property
    def rank(self) -> int:
        """Number of this process among all."""
        return self.mesh.get_rank()

    @property
    def n_ranks(self) -> int:
        return self.mesh.size()

    @property
    def n_data_ranks(self) -> int:
        return self.mesh.size() // self.tensor.size()

    @property
    def data_rank(self) -> int:
        """This process's place in replicate x shard: which micro-batches are its own."""
        return self.rank // self.tensor.size()

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that hold this process's model together."""
        return self.mesh["tensor"]

    @property
    def data(self) -> DeviceMesh:
        """The mesh that parameters are sharded over; two dimensions where the model is replicated too."""
        return self.mesh["shard"] if self.mesh["replicate"].size() == 1 else self.mesh["replicate", "shard"]

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    # --- communication over all processes -----------------------------------------------------------------------

    def gather_objects(self, own: Any) -> list[Any]:
        """What every process gives, in order of rank. Sizes may differ; every process must call it.

        Raises:
            PeerError: another process has gone.
        """
        found: list[Any] = [None] * self.n_ranks
        try:
            dist.all_gather_object(found, own)
        except RuntimeError as error:  # what torch raises for a closed connection and for its timeout
            raise PeerError(f"another process of the run ended, or does not answer: {error}") from error
        return found

    def together(self, work: Callable[[], T]) -> T:
        """What ``work`` gives here, when it is done on every process. What it communicates, it must also when it fails.

        Raises:
            PeerError: it failed on another process; with that one's rank and message. What it raised here, it raises.
        """
        failure: TraceFastError | OSError | None = None
        try:
            result = work()
        except (TraceFastError, OSError) as error:
            failure = error
        failures = self.gather_objects(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, message in enumerate(failures):
            if message is not None:
                raise PeerError(f"process {rank} of the run failed: {message}")
        return result

    def from_first(self, own: Any) -> Any:
        """What the first process gives, on all: for a number that must not differ between ranks in its last bit."""
        return self.gather_objects(own)[0]

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Sums over the data ranks, each counted once, in float64."""
        parts = self.gather_objects(list(values))
        first = parts[:: self.tensor.size()]
        return [math.fsum(column) for column in zip(*first, strict=True)]

    def any_rank(self, flag: bool) -> bool:
        """Whether any process says so; the same answer on all."""
        return any(self.gather_objects(flag))
