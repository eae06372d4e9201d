"""The policy in training: a transformers decoder over packed micro-batches, sharded over a mesh.

What the rollouts of a micro-batch have in common from their first token on (a group's prompt, mostly) is computed once,
forward and backward, by prefix attention; the head runs over trained tokens only, and no logits are ever in memory.
With a tensor mesh each rank holds a share of the vocabulary, and a token's log-probability is put together from the
ranks' maxima, sums and target logits.

Suffixes: N distinct tokens of the pack, L trained tokens, H hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trace_fast.backends import Backends, dtype_of, resolve
from trace_fast.errors import ConfigError, ModelError, TraceFastError
from trace_fast.kernels.prefix_attention import plan_attention
from trace_fast.kernels.token_logprob import token_logprob, token_logprob_parts
from trace_fast.layout import pack_sequences
from trace_fast.model import LanguageHead, ReferenceModel
from trace_fast.model_attention import ATTENTION_NAME, AttentionPass
from trace_fast.model_context import quiet_transformers
from trace_fast.model_spec import LOADER_ERRORS, ModelSpec, model_location, one_line
from trace_fast.trainer.batch import TrainingBatch
from trace_fast.trainer.microbatches import MicroBatch, microbatches
from trace_fast.trainer.parallel import ParallelConfig, TrainMesh, shard_policy
from trace_fast.trainer.parallel.tensor import apply_tensor_parallel, gather_sequence, local_part, sum_over_ranks


class PolicyConfig(BaseModel):
    """The model to train: a folder or hub id, and the dtype of its forward and backward passes.

    Master weights, gradients and the optimiser are float32 whatever ``dtype`` is.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    backend: Literal["auto", "triton", "native", "reference"] = "auto"


class NonFiniteError(TraceFastError):
    """Log-probabilities, loss or gradient are NaN or infinite; nothing was updated in this optimiser step."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """A micro-batch's distinct tokens, ready for the model.

    Args:
        input_ids_N, positions_N: ``int64``, padded to a multiple of the tensor ranks.
        attention: who sees whom. rows_L: row whose output predicts each trained token.
    """

    input_ids_N: Tensor
    positions_N: Tensor
    attention: AttentionPass
    rows_L: Tensor
    targets_L: Tensor
    temperature: float


class PolicyModule(nn.Module):
    """Decoder and head in one call, so that sharding gathers the head's weight for it too."""

    def __init__(self, module: PreTrainedModel, backends: Backends, tensor_mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.module = module
        self.head = LanguageHead.of(module)
        self.backends = backends
        self.tensor_mesh = tensor_mesh

    def forward(self, tokens: PackedTokens) -> Tensor:
        """``(L,) float32`` log-probability (nats) of every trained token; differentiable in the weights."""
        output = self.module.get_decoder()(
            input_ids=tokens.input_ids_N[None],
            position_ids=tokens.positions_N[None],
            use_cache=False,
            trace_fast_pass=tokens.attention,
        )
        hidden_1NH = output.last_hidden_state
        if self.tensor_mesh is None:
            return token_logprob(
                hidden_1NH[0, tokens.rows_L],
                self.head.weight,
                tokens.targets_L,
                bias_V=self.head.bias,
                softcap=self.head.softcap,
                logit_scale=self.head.scale,
                temperature=tokens.temperature,
                backend=self.backends.token_logprob,
            )
        hidden_NH = gather_sequence(hidden_1NH, self.tensor_mesh)[0]
        return self._vocabulary_parallel(hidden_NH[tokens.rows_L], tokens, self.tensor_mesh)

    def _vocabulary_parallel(self, hidden_LH: Tensor, tokens: PackedTokens, mesh: DeviceMesh) -> Tensor:
        weight, bias = local_part(self.head.weight), self.head.bias
        parts = token_logprob_parts(
            hidden_LH,
            weight,
            tokens.targets_L,
            vocabulary_start=mesh.get_local_rank() * len(weight),
            bias_V=None if bias is None else local_part(bias),
            softcap=self.head.softcap,
            logit_scale=self.head.scale,
            temperature=tokens.temperature,
            backend=self.backends.token_logprob,
        )
        peak_L = parts.max_M.detach().clone()
        dist.all_reduce(peak_L, dist.ReduceOp.MAX, group=mesh.get_group())
        total_L = sum_over_ranks(parts.sum_M * (parts.max_M.detach() - peak_L).exp(), mesh)
        logprob_L = sum_over_ranks(parts.target_M, mesh) - peak_L - total_L.log()
        held_L = sum_over_ranks(parts.held_M.to(peak_L), mesh)
        logprob_L = logprob_L.masked_fill(held_L != 1, float("nan"))  # a target that no rank's share holds
        return logprob_L - logprob_L.detach().clamp(min=0)  # a rounding overshoot goes, its gradient stays


class Policy:
    """A policy on its mesh. All processes of the mesh make it, and call each of its methods, together.

    Raises on construction:
        ConfigError: a mesh that the architecture cannot be cut for, or a model with dropout.
        ModelError: an architecture that packs cannot run through exactly.
    """

    def __init__(
        self, module: PreTrainedModel, config: PolicyConfig, mesh: TrainMesh, parallel: ParallelConfig
    ) -> None:
        self.mesh = mesh
        self.spec = ModelSpec.from_config(module.config, config.path)
        self.spec.check_supported()
        _refuse_dropout(module)
        mesh.together(lambda: ReferenceModel.of(module) if mesh.is_first else None)  # runs a small pack and compares
        dtype = dtype_of(config.dtype)
        self.backends = resolve(config.backend, mesh.device, dtype, head_dim=self.spec.head_dim, training=True)
        module.set_attn_implementation(ATTENTION_NAME)
        module.eval()
        if parallel.activation_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            module.train()  # transformers looks at the mode of a layer; without dropout it changes nothing else
        tensor_mesh = mesh.tensor if mesh.tensor.size() > 1 else None
        if tensor_mesh is not None:
            apply_tensor_parallel(module, tensor_mesh)
        self.module = PolicyModule(module, self.backends, tensor_mesh)
        shard_policy(self.module, module.get_decoder().layers, mesh.data, compute_dtype=dtype)

    @classmethod
    def load(cls, config: PolicyConfig, mesh: TrainMesh, parallel: ParallelConfig) -> Policy:
        """From a folder or hub id.

        Raises:
            ModelError: it cannot be loaded; the message carries the loader's reason.
        """
        return cls(mesh.together(lambda: load_module(config.path)), config, mesh, parallel)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by the model's own names; each rank's are its share of them."""
        self._resharded()
        return {n: p for n, p in self.module.module.named_parameters() if p.requires_grad}

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """``(L,) float32`` log-probability (nats) of each trained token of a micro-batch."""
        logprobs: Tensor = self.module(self._packed(micro))
        return logprobs

    @torch.no_grad()
    def batch_logprobs(self, batch: TrainingBatch, budget: int) -> Tensor:
        """``(N,) float32`` log-probability of each trained token of a batch, 0 elsewhere; on the CPU, on all ranks.

        Raises:
            NonFiniteError: one is NaN or infinite; on all ranks.
        """
        unweighted = batch.with_advantages(torch.zeros_like(batch.sampler_logprobs_N))
        starts = batch.cu_tokens_R1.tolist()
        own: list[tuple[int, np.ndarray]] = []
        for micro in microbatches(unweighted, budget, rank=self.mesh.data_rank, n_ranks=self.mesh.n_data_ranks):
            logprobs_L = self.logprobs(micro.to(self.mesh.device)).cpu().numpy()
            cu = micro.cu_trained_R1.tolist()
            own += [(r, logprobs_L[cu[i] : cu[i + 1]]) for i, r in enumerate(micro.rollouts) if cu[i + 1] > cu[i]]
        found_N = torch.zeros(batch.input_ids_N.numel())
        for parts in self.mesh.gather_objects(own):
            for r, values in parts:
                trained = batch.loss_mask_N[starts[r] : starts[r + 1]]
                found_N[starts[r] : starts[r + 1]][trained] = torch.from_numpy(values)
        if not bool(found_N.isfinite().all()):
            raise NonFiniteError("expected finite log-probabilities of the policy, got NaN or infinity")
        return found_N

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full, float32, by the model's own names; gathered one at a time."""
        self._resharded()
        for name, parameter in self.module.module.named_parameters():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()

    def _resharded(self) -> None:
        """After a forward pass alone, what is not in a layer is still gathered; its parameters are then others."""
        assert isinstance(self.module, FSDPModule)
        self.module.reshard()

    def _packed(self, micro: MicroBatch) -> PackedTokens:
        """Places of rollouts' tokens among the distinct ones of the pack."""
        ids, cu = micro.input_ids_N.cpu().numpy(), micro.cu_tokens_R1.tolist()
        layout = pack_sequences([ids[a:b] for a, b in itertools.pairwise(cu)])
        place_N = torch.from_numpy(np.concatenate([layout.trunk_rows(i) for i in range(len(cu) - 1)]))
        padding = (0, -len(layout) % self.mesh.tensor.size())
        device = self.mesh.device
        return PackedTokens(
            input_ids_N=F.pad(torch.from_numpy(layout.input_ids), padding).to(device),
            positions_N=F.pad(torch.from_numpy(layout.positions), padding).to(device),
            attention=AttentionPass(plan_attention(layout.spans, self.backends.prefix_attention)),
            rows_L=place_N.to(device)[micro.rows_L],
            targets_L=micro.targets_L,
            temperature=micro.temperature,
        )


def load_module(path: str) -> PreTrainedModel:
    """A transformers model with its weights in the dtype they are stored in, on the CPU.

    Raises:
        ModelError: it cannot be loaded, or not completely; the message carries the loader's reason.
    """
    name, extra = model_location(path)
    with quiet_transformers():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto", output_loading_info=True, **extra)
        except LOADER_ERRORS as error:
            raise ModelError(f"cannot load the weights of {path!r}: {one_line(error)}") from error
    module, info = loaded
    assert isinstance(module, PreTrainedModel)
    absent = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if absent:
        raise ModelError(f"the weights of {path!r} are incomplete: {len(absent)} missing: {', '.join(absent[:5])}")
    return module


def _refuse_dropout(module: PreTrainedModel) -> None:
    config = module.config.get_text_config(decoder=True).to_dict()
    for key, value in config.items():
        if ("dropout" in key or key.endswith("_pdrop")) and value:
            raise ConfigError(
                f"policy: expected a model without dropout, got {key} = {value}; the log-probabilities in training "
                "would not be those of the policy that sampled"
            )
