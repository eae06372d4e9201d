"""Sharding of a policy over the data ranks with FSDP2; gradients of the ranks are summed, not averaged.

Parameters are kept and updated in float32 (the master weights); a layer's are gathered in the compute dtype just before
it runs. The objective's denominators are the whole batch's, so the ranks' gradients add up to the batch's.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_policy(policy: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> None:
    """Shards ``policy`` in place, a group of parameters a layer and one for what is left; parameters become float32.

    One group after the other is converted, moved to the mesh's device and cut, so that no more than one of them is
    there in full: a model may be larger than a device.

    Args:
        layers: decoder layers inside ``policy``. mesh: of one dimension, or two: (replicate, shard).
        compute_dtype: of the forward and backward passes; gradients are reduced in float32.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    inside = {id(part) for layer in layers for part in layer.modules()}
    for layer in layers:
        nn.Module.to(layer, torch.float32)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    for part in policy.modules():
        if id(part) not in inside and not list(part.children()):
            nn.Module.to(part, torch.float32)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
