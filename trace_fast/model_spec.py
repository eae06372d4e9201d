"""What is known of a model without its weights: sizes, limits, refusals. Part of the Hugging Face seam."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trace_fast.errors import ModelError

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# What transformers and the formats below it raise for files that are missing, damaged or of another kind.
LOADER_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
    LookupError,
    ImportError,
    EOFError,
    struct.error,
    SafetensorError,
)
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}  # frequencies change with the longest position of a call


def one_line(error: BaseException, limit: int = 400) -> str:
    """An error of a library as part of one of our messages."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + "..."


def model_location(model: str) -> tuple[str, dict[str, str]]:
    """(name, extra arguments) for transformers' ``from_pretrained``; a ``.gguf`` path becomes folder + file.

    Raises ModelError when the path looks local and does not exist.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {model!r}: no such GGUF file")
        return str(path.parent), {"gguf_file": path.name}
    if path.exists():
        return str(path), {}
    if model.startswith((".", "/", "~")):
        raise ModelError(f"model {model!r}: no such folder")
    return model, {}


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a decoder, for refusals and predictions.

    Args:
        name: how the user named the model.
        architecture: transformers' ``model_type``.
        layer_types: kind of each layer, where the config says so.
        window: attention window of the sliding layers, or None.
        max_positions: longest sequence that the model's positions cover, or None when unlimited.
        length_rule: why ``max_positions`` is what it is.
    """

    name: str
    architecture: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    layer_types: tuple[str, ...] = ()
    window: int | None = None
    max_positions: int | None = None
    length_rule: str = ""
    experts_per_token: int = 0
    n_experts: int = 0
    tied_head: bool = False
    stateful: bool = False

    @classmethod
    def from_pretrained(cls, model: str) -> ModelSpec:
        """Reads the config alone (path, hub id or GGUF file). Raises ModelError with the loader's reason."""
        from transformers import AutoConfig  # heavy import, only where a model is named

        name, extra = model_location(model)
        try:
            config = AutoConfig.from_pretrained(name, **extra)
        except LOADER_ERRORS as error:
            raise ModelError(f"cannot read the config of {model!r}: {one_line(error)}") from error
        return cls.from_config(config, model)

    @classmethod
    def from_config(cls, config: Any, name: str, *, stateful: bool = False) -> ModelSpec:
        """From a transformers config object. Raises ModelError where it is not a decoder's."""
        text = config.get_text_config(decoder=True)
        needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        missing = [key for key in needed if not _get(text, key)]
        if missing:
            raise ModelError(
                f"{name}: {getattr(config, 'model_type', type(config).__name__)!r} is no attention-only decoder "
                f"(its config has no {missing[0]}); recurrent models cannot share a state between branches"
            )
        hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
        max_positions, rule = _position_limit(text)
        experts = _get(text, "num_experts") or _get(text, "num_local_experts") or 0
        return cls(
            name=name,
            architecture=str(text.model_type),
            n_layers=int(text.num_hidden_layers),
            hidden_size=hidden,
            n_heads=heads,
            n_kv_heads=int(_get(text, "num_key_value_heads") or heads),
            head_dim=int(_get(text, "head_dim") or hidden // heads),
            intermediate_size=int(
                (experts and _get(text, "moe_intermediate_size")) or _get(text, "intermediate_size") or 4 * hidden
            ),
            vocab_size=int(text.vocab_size),
            layer_types=tuple(_get(text, "layer_types") or ()),
            window=_get(text, "sliding_window"),
            max_positions=max_positions,
            length_rule=rule,
            experts_per_token=int(_get(text, "num_experts_per_tok") or 0) if experts else 0,
            n_experts=int(experts),
            tied_head=bool(_get(config, "tie_word_embeddings")),
            stateful=stateful,
        )

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer; ``None`` sees everything."""
        if not self.layer_types:
            return (self.window,) * self.n_layers
        return tuple(self.window if kind == "sliding_attention" else None for kind in self.layer_types)

    def check_supported(self) -> None:
        """Raises ModelError for recurrent and hybrid models and for attention that is not causal by ranges."""
        odd = sorted(set(self.layer_types) - ATTENTION_LAYERS)
        if odd or self.stateful:
            kind = ", ".join(odd) or "recurrent"
            if odd and not self.stateful and all("chunk" in k for k in odd):
                raise ModelError(
                    f"{self.name} ({self.architecture}) has {kind} layers: what a token sees there depends on where "
                    "chunks begin, which is not supported. Use full or sliding-window attention"
                )
            raise ModelError(
                f"{self.name} ({self.architecture}) has {kind} layers: their state runs through every token in order, "
                "so branches of a shared prefix cannot be scored in one pass. Use an attention-only reference model "
                "(full or sliding-window attention)"
            )


def _get(config: Any, key: str) -> Any:
    return getattr(config, key, None)


def _position_limit(config: Any) -> tuple[int | None, str]:
    limit = _get(config, "max_position_embeddings")
    parameters = _get(config, "rope_parameters") or {}
    # one set of parameters, or one a layer type
    sets = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    for rope in sets:
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings") or _get(config, "original_max_position_embeddings")
            bounds = [int(b) for b in (original, limit) if b]
            return min(bounds) if bounds else None, (
                f"its {rope['rope_type']} RoPE changes every position's angles once a sequence is longer, so prefixes "
                "of a longer rollout would not be what the model computes for them alone"
            )
    return (int(limit) if limit else None), "its position embeddings end there"
