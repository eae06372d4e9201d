"""Adam in float32 over a sharded policy, with its state on the device or on the host.

On the host (``offload``), both moments and a copy of the weights stay there: gradients come down, new weights go up, a
bucket at a time, so that the copies of one bucket run while the next is computed. The arithmetic is torch's own AdamW
on each rank's share, the same in both places: on the CPU the results are equal bit for bit.

The state exists from the start for every parameter, so a parameter that never had a gradient does not change what a
checkpoint holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trace_fast.trainer.parallel.tensor import local_part

BUCKET_ELEMENTS = 1 << 24  # of one bucket: 64 MiB a copy
MOMENTS = ("exp_avg", "exp_avg_sq")
Decay = Annotated[float, Field(ge=0, lt=1)]


def _tuple(value: Any) -> Any:
    """TOML has arrays only, and strict validation takes no list for a tuple."""
    return tuple(value) if isinstance(value, list) else value


class AdamConfig(BaseModel):
    """Adam with decoupled weight decay; the paper's values as defaults (TRACE, Table 3).

    ``warmup_steps``: optimiser steps over which the learning rate rises linearly to ``lr``, then it is constant.
    ``max_grad_norm``: gradients are scaled down to this norm; ``None`` switches that off. Weight decay is for
    matrices only. ``offload``: state and update on the host.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lr: float = Field(1e-6, gt=0)
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(_tuple)] = (0.9, 0.98)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup_steps: int = Field(0, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0)
    offload: bool = False

    def lr_at(self, step: int) -> float:
        """Learning rate of optimiser step ``step`` (from 0)."""
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1))


class Adam:
    """The optimiser of one process's share of the parameters.

    Args:
        parameters: by name, float32; DTensors or plain tensors.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AdamConfig) -> None:
        for name, parameter in parameters.items():
            assert parameter.dtype == torch.float32, (name, parameter.dtype)
        self.config = config
        self.steps = 0
        self._parameters = dict(parameters)
        device = next(iter(parameters.values())).device
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None
        self._buckets = [_Bucket(names, self._parameters, config) for names in _bucket_names(self._parameters)]
        self._host_meshes: dict[DeviceMesh, DeviceMesh] = {}

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Norm of all gradients, over all ranks; it may differ between ranks in the last bit. Waits for the device."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """One update, with the gradients scaled to at most ``max_grad_norm``; then they are dropped."""
        assert math.isfinite(grad_norm), grad_norm
        limit = self.config.max_grad_norm
        scale = 1.0 if limit is None or grad_norm <= limit else limit / grad_norm
        lr = self.config.lr_at(self.steps)
        if self._streams is None or not self.config.offload:
            for bucket in self._buckets:
                bucket.take_gradients(scale)
                bucket.update(lr)
                bucket.give_weights()
        else:
            self._overlapped(self._streams, scale, lr)
        for parameter in self._parameters.values():
            parameter.grad = None
        self.steps += 1

    def _overlapped(self, streams: tuple[torch.cuda.Stream, torch.cuda.Stream], scale: float, lr: float) -> None:
        """All gradients on their way down at once; each bucket is computed when its own have come."""
        down, up = streams
        down.wait_stream(torch.cuda.current_stream())
        arrived = []
        with torch.cuda.stream(down):
            for bucket in self._buckets:
                bucket.take_gradients(scale)
                arrived.append(down.record_event())
        for bucket, event in zip(self._buckets, arrived, strict=True):
            event.synchronize()
            bucket.update(lr)
            with torch.cuda.stream(up):
                bucket.give_weights()
        torch.cuda.current_stream().wait_stream(up)
        torch.cuda.current_stream().wait_stream(down)  # gradients may be freed after it

    def state(self) -> dict[str, Any]:
        """Moments by name, as tensors that share memory with the optimiser's own, placed like their parameters.

        All processes call it together.
        """
        found: dict[str, Any] = {}
        for bucket in self._buckets:
            for name, values in bucket.moments().items():
                found |= {f"{name}.{kind}": self._placed_like(self._parameters[name], values[kind]) for kind in MOMENTS}
        return found

    def _placed_like(self, parameter: Tensor, local: Tensor) -> Tensor:
        """A rank's share as the DTensor that it is a share of, so that a checkpoint fits any other mesh."""
        if not isinstance(parameter, DTensor):
            return local
        mesh = parameter.device_mesh
        if local.device.type != mesh.device_type:  # on that mesh it would become a copy on the device
            if mesh not in self._host_meshes:
                names = mesh.mesh_dim_names
                self._host_meshes[mesh] = DeviceMesh(local.device.type, mesh.mesh, mesh_dim_names=names)
            mesh = self._host_meshes[mesh]
        placed = DTensor.from_local(
            local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        assert placed.to_local().data_ptr() == local.data_ptr(), "a checkpoint would be loaded into a copy"
        return placed

    def restored(self, steps: int) -> None:
        """After ``state`` and the parameters were filled from a checkpoint."""
        self.steps = steps
        for bucket in self._buckets:
            bucket.restored(steps)


class _Bucket:
    """Some parameters: this rank's share, what is updated (itself, or a copy on the host), and torch's AdamW."""

    def __init__(self, names: list[str], parameters: Mapping[str, nn.Parameter], config: AdamConfig) -> None:
        self._parameters = {name: parameters[name] for name in names}
        self._own = {name: local_part(parameters[name].detach()) for name in names}
        pinned = config.offload and next(iter(self._own.values())).is_cuda
        self._offload = config.offload
        self._masters = {
            name: nn.Parameter(_host_copy(own, pinned) if config.offload else own) for name, own in self._own.items()
        }
        for master in self._masters.values():
            master.grad = torch.zeros_like(master, pin_memory=pinned) if config.offload else None
        decayed = [self._masters[name] for name in names if parameters[name].ndim > 1]
        others = [self._masters[name] for name in names if parameters[name].ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        for master in self._masters.values():
            self._adam.state[master] = {
                "step": torch.zeros((), device=master.device),
                **{kind: torch.zeros_like(master) for kind in MOMENTS},
            }

    def take_gradients(self, scale: float) -> None:
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            gradient = local_part(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            if scale != 1.0:
                gradient.mul_(scale)
            if self._offload:
                assert master.grad is not None
                master.grad.copy_(gradient, non_blocking=True)
            else:
                master.grad = gradient

    def update(self, lr: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()

    def give_weights(self) -> None:
        if self._offload:
            for name, own in self._own.items():
                own.copy_(self._masters[name], non_blocking=True)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        return {name: self._adam.state[master] for name, master in self._masters.items()}

    @torch.no_grad()
    def restored(self, steps: int) -> None:
        for name, master in self._masters.items():
            self._adam.state[master]["step"].fill_(steps)
            if self._offload:
                master.copy_(self._own[name])


def _bucket_names(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    buckets: list[list[str]] = [[]]
    size = 0
    for name, parameter in parameters.items():
        elements = local_part(parameter.detach()).numel()
        if buckets[-1] and size + elements > BUCKET_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += elements
    return buckets


def _host_copy(tensor: Tensor, pinned: bool) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    copy.copy_(tensor)
    return copy
