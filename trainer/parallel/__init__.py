"""How a training run is spread over processes: the mesh, tensor and sequence parallelism, sharding of parameters."""

from trace_fast.trainer.parallel.mesh import ParallelConfig, PeerError, TrainMesh
from trace_fast.trainer.parallel.shard import shard_policy

__all__ = ["ParallelConfig", "PeerError", "TrainMesh", "shard_policy"]
