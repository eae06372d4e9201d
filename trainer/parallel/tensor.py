"""Tensor and sequence parallelism of a transformers decoder, as plans of ``parallelize_module`` (Megatron's scheme).

Between the blocks, activations are cut along the sequence; a block gathers them, works on its share of heads or
columns, and scatters the sum. Norms see a share of the rows. Embedding and head hold a share of the vocabulary.

    embed     rows of the vocabulary -> sum, scattered over the sequence
    norms     a share of the sequence, weights on all ranks (their gradients are summed)
    q k v     columns (heads);  o      rows -> scattered
    gate up   columns;          down   rows -> scattered
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from trace_fast.errors import ConfigError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
SEQUENCE = 1  # of hidden states (1, N, H)
HEADS = 2  # of queries and keys (1, N, heads, head_dim)


def apply_tensor_parallel(module: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cuts the decoder's weights over the ranks of a one-dimensional mesh, in place. Embedding and head stay tied.

    Raises:
        ConfigError: an architecture without a plan, or sizes that do not divide.
    """
    config = module.config.get_text_config(decoder=True)
    if config.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"parallel.tensor: expected one of the architectures {', '.join(ARCHITECTURES)}, got "
            f"{config.model_type!r}; shard it over data ranks only (tensor = 1)"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        size = getattr(config, name)
        if size % mesh.size():
            raise ConfigError(f"parallel.tensor: expected a divisor of {name} = {size}, got {mesh.size()}")
    decoder, head = module.get_decoder(), module.get_output_embeddings()
    tied = head.weight is decoder.embed_tokens.weight
    outer: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE)),
        "norm": SequenceParallel(use_local_output=True),
    }
    parallelize_module(decoder, mesh, outer)
    for layer in decoder.layers:
        parallelize_module(layer, mesh, _layer_plan(layer))
    if tied:
        head.weight = decoder.embed_tokens.weight
    else:
        parallelize_module(module, mesh, {_name_of(module, head): ColwiseParallel()})
    whole = [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise ConfigError(f"parallel.tensor: no plan for {', '.join(whole[:5])} of {type(module).__name__}")


def gather_sequence(hidden_1NH: Tensor, mesh: DeviceMesh) -> Tensor:
    """All rows, from each rank's share; in the backward pass the ranks' gradients are summed and scattered."""
    sharded = DTensor.from_local(hidden_1NH, mesh, [Shard(SEQUENCE)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def sum_over_ranks(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' values, on all of them, for a computation that all then do alike."""
    partial = DTensor.from_local(values, mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()]).to_local()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread over a mesh; another tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layer_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(use_local_output=True),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(SEQUENCE)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
        "post_attention_layernorm": SequenceParallel(use_local_output=True),
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(SEQUENCE),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
    }
    for norm in ("q_norm", "k_norm"):  # Qwen3: over each head, and heads are what is cut
        if hasattr(layer.self_attn, norm):
            plan[f"self_attn.{norm}"] = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
    return plan


def _name_of(module: nn.Module, part: nn.Module) -> str:
    return next(name for name, found in module.named_modules() if found is part)
