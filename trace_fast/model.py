"""The only Hugging Face seam: a transformers decoder that runs a ``PackedLayout`` through its own layers.

The model keeps its code. Its attention is switched to a function registered with transformers' own
``AttentionInterface``; the pack travels to it as a keyword argument of the forward call, so there is no global
state, and everything that was switched (attention, experts, training mode) is switched back afterwards.
What a model's attention means (scale, window, softcap, sinks, grouped heads) is taken from what it passes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from trace_fast.backends import Backends, pick_device, resolve
from trace_fast.errors import ConfigError, ModelError
from trace_fast.kernels.prefix_attention import AttentionPlan, plan_attention, prefix_attention
from trace_fast.kernels.token_logprob import token_logprob
from trace_fast.layout import PackedLayout, SpanRanges
from trace_fast.model_spec import LOADER_ERRORS, ModelSpec, model_location, one_line
from trace_fast.row_blocks import ROW_BLOCK, FixedRowBlocks

ATTENTION_NAME = "trace_fast"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class _Pass:
    """One forward pass of one pack, handed to every attention layer as a keyword argument."""

    plan: AttentionPlan
    layers_seen: int = 0


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    trace_fast_pass: _Pass | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,  # what transformers passes along for other implementations (dropout is 0 in eval mode)
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: (1, H, N, D) in, (1, N, H, D) out."""
    if trace_fast_pass is None:
        raise ModelError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    if position_bias is not None:
        raise ModelError(f"{type(module).__name__} adds a position bias to its attention, which is not supported")
    trace_fast_pass.layers_seen += 1
    out_NHD = prefix_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        trace_fast_pass.plan,
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return out_NHD[None], None


AttentionInterface.register(ATTENTION_NAME, _attention)


@dataclass(frozen=True)
class _Head:
    """logits = softcap(scale * (hidden weight^T + bias)); checked against the model's own logits on loading.

    Weight and bias are looked up at every use: a trainer may put other tensors in their place.
    """

    embeddings: torch.nn.Module
    softcap: float | None
    scale: float

    @property
    def weight(self) -> torch.Tensor:
        weight = self.embeddings.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        bias = getattr(self.embeddings, "bias", None)
        assert bias is None or isinstance(bias, torch.Tensor)
        return bias

    @classmethod
    def of(cls, module: PreTrainedModel) -> _Head:
        embeddings = module.get_output_embeddings()
        weight = getattr(embeddings, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
            raise ModelError(
                f"{type(module).__name__}: expected a language-model head with a floating-point (vocabulary, hidden) "
                f"weight, got {type(embeddings).__name__}; load a causal language model with an unquantised head"
            )
        config = module.config.get_text_config()
        divisor = getattr(config, "logits_scaling", None)  # Granite
        return cls(
            embeddings=embeddings,
            softcap=getattr(config, "final_logit_softcapping", None),
            scale=float(getattr(config, "logit_scale", None) or 1.0) / float(divisor or 1.0),
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the model computes them, in its dtype: only for the check on loading."""
        logits = F.linear(hidden, self.weight, self.bias) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass
class ReferenceModel:
    """A frozen decoder, its head, and the backends that its packs run on.

    Raises on construction:
        ModelError: recurrent or hybrid layers, an architecture outside the attention interface, or one whose
            logits this seam does not reproduce.
    """

    module: PreTrainedModel
    spec: ModelSpec
    backends: Backends
    head: _Head = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        self.spec.check_supported()
        if not getattr(self.module, "_supports_attention_backend", False):
            raise ModelError(
                f"{type(self.module).__name__} does not use transformers' attention interface; "
                "use an architecture that does (Llama, Qwen, Mistral, Gemma, gpt-oss, ...)"
            )
        self.head = _Head.of(self.module)
        self._verify()
        local = Path(self.spec.name)
        name = local.name if local.exists() else self.spec.name  # a folder's place is nobody else's business
        self.identity = f"{name}@{_weights_hash(self.module)}"

    @classmethod
    def load(cls, model: str, *, dtype: str, device: str, backend: str) -> ReferenceModel:
        """Loads weights by path, hub id or GGUF file.

        Raises:
            ConfigError: unknown dtype, device or backend. ModelError: cannot be loaded, or not completely; the message
                carries the loader's reason.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        name, extra = model_location(model)
        place = pick_device(device)
        if not extra:  # cheap, and refuses before gigabytes are read; a GGUF's config costs as much as its weights
            ModelSpec.from_pretrained(model).check_supported()
        with _quiet_transformers():
            try:
                module, info = AutoModelForCausalLM.from_pretrained(
                    name, dtype=DTYPES[dtype], output_loading_info=True, **extra
                )
            except LOADER_ERRORS as error:
                raise ModelError(f"cannot load the weights of {model!r}: {one_line(error)}") from error
        absent = sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]])
        if absent:  # transformers fills them with random numbers
            raise ModelError(
                f"the weights of {model!r} are incomplete: expected a tensor of the right shape for every parameter, "
                f"{len(absent)} are missing or of another shape: {', '.join(absent[:5])}"
            )
        torch.nn.Module.to(module, place)
        return cls.of(module.eval(), name=model, backend=backend)

    @classmethod
    def of(cls, module: PreTrainedModel, *, name: str | None = None, backend: str = "auto") -> ReferenceModel:
        """Around a model that is already there; it is left as it was after every pass."""
        if not isinstance(module, PreTrainedModel):
            raise ModelError(
                f"expected a transformers PreTrainedModel, got {type(module).__name__}; unwrap it first "
                "(.module of DDP and FSDP1, get_base_model() of PEFT)"
            )
        name = name or module.name_or_path or type(module).__name__
        spec = ModelSpec.from_config(module.config, name, stateful=module._is_stateful)
        return cls(module, spec, resolve(backend, next(module.parameters()).device))

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: ids must lie below it."""
        return min(len(_embedding(self.module)), len(self.head.weight))

    @torch.no_grad()
    def hidden_states(self, layout: PackedLayout) -> torch.Tensor:
        """``(N, H)`` last hidden states (after the final norm) of every row, in the model's dtype."""
        return self._forward(torch.as_tensor(layout.input_ids), torch.as_tensor(layout.positions), layout.spans)

    @torch.no_grad()
    def token_logprobs(self, hidden_NH: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """``(M,) float32`` log p(targets[m] | row rows[m]) on the CPU; the head sees only these rows."""
        hidden_MH = hidden_NH[rows.to(hidden_NH.device)].to(self.head.weight.device)
        with _own_precision(self.device), FixedRowBlocks():
            return token_logprob(
                hidden_MH,
                self.head.weight,
                targets.to(self.head.weight.device),
                bias_V=self.head.bias,
                softcap=self.head.softcap,
                logit_scale=self.head.scale,
                backend=self.backends.token_logprob,
            ).cpu()

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, spans: SpanRanges) -> torch.Tensor:
        rows = len(input_ids)
        padding = (0, -rows % ROW_BLOCK)
        device = _embedding(self.module).device
        this_pass = _Pass(plan_attention(spans, self.backends.prefix_attention))
        with _attached(self.module), _own_precision(device), FixedRowBlocks():
            output = self.module.get_decoder()(
                input_ids=F.pad(input_ids, padding)[None].to(device),
                position_ids=F.pad(positions, padding)[None].to(device),
                use_cache=False,
                trace_fast_pass=this_pass,
            )
        layers = self.spec.n_layers
        if this_pass.layers_seen != layers:
            raise ModelError(
                f"{type(self.module).__name__}: expected {layers} attention layers to run through the attention "
                f"interface, {this_pass.layers_seen} did; the others would not have seen the pack's structure"
            )
        return output.last_hidden_state[0, :rows]

    @torch.no_grad()
    def _verify(self) -> None:
        """Runs a few tokens through the model as it is and through this seam: anything about an architecture
        that the seam does not know (another logit scale, a bias in the attention) shows here, not in scores."""
        count = 32
        ids = torch.arange(count) * 7919 % min(self.vocab_size, 32000)
        spans = SpanRanges.single(count)
        device = _embedding(self.module).device
        with _evaluating(self.module), _own_precision(device):
            own_hidden = self.module.get_decoder()(input_ids=ids[None].to(device), use_cache=False).last_hidden_state
            own_logits = self.module(input_ids=ids[None].to(device), use_cache=False).logits
        hidden = self._forward(ids, torch.arange(count), spans)
        if not torch.isfinite(own_hidden).all() or not torch.isfinite(own_logits).all():
            raise ModelError(f"{self.spec.name}: NaN or Inf in the model's own output; check its weights and dtype")
        epsilon = torch.finfo(self.dtype).eps
        scale = own_logits.float().abs().max()
        off = (self.head.logits(own_hidden).float() - own_logits.float()).abs().max()
        if off > 8 * epsilon * scale:  # the same few operations: only their rounding may differ
            raise ModelError(
                f"{type(self.module).__name__}: its logits are not softcap(scale * head(hidden)) as understood "
                f"here (largest difference {float(off):.3g} of {float(scale):.3g}); this architecture is not supported"
            )
        error = (hidden.float() - own_hidden[0].float()).norm() / own_hidden.float().norm()
        # rounding errors of two orders of summation grow with depth like a random walk
        bound = 16 * epsilon * self.spec.n_layers**0.5
        if error > max(bound, 1e-5):
            raise ModelError(
                f"{type(self.module).__name__}: hidden states through the attention interface differ from the "
                f"model's own by {float(error):.3g} (bound {bound:.3g}); its attention has a feature that is not "
                "passed to attention functions, so it cannot be scored exactly"
            )


def _embedding(module: PreTrainedModel) -> torch.Tensor:
    weight = module.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode; every submodule's own mode comes back afterwards."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True


def _own_precision(device: torch.device) -> torch.autocast:
    """Scores are those of the model's dtype, also inside a trainer's mixed-precision region."""
    return torch.autocast(device.type, enabled=False)


@contextlib.contextmanager
def _attached(module: PreTrainedModel) -> Iterator[None]:
    """Switches attention (and experts, whose grouped kernels depend on the company) for one forward pass."""
    attention = _implementations(module)
    experts = module.get_experts_implementation() if module._can_set_experts_implementation() else None
    with _evaluating(module), _quiet_transformers():
        try:
            module.set_attn_implementation(ATTENTION_NAME)
            if experts is not None:
                module.set_experts_implementation("eager")
            yield
        finally:
            module.set_attn_implementation(attention)
            if experts is not None:
                module.set_experts_implementation(experts)


def _implementations(module: PreTrainedModel) -> dict[str, str]:
    """Attention implementation of the model and of each sub-config, in the form ``set_attn_implementation`` takes."""
    config = module.config
    found = {"": config._attn_implementation or "eager"}
    for key in config.sub_configs:
        sub = getattr(config, key, None)
        if sub is not None:
            found[key] = sub._attn_implementation or "eager"
    return found


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Loading bars and advice of transformers stay off our users' terminals; errors still raise."""
    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _weights_hash(module: torch.nn.Module, samples: int = 65536) -> str:
    """16 hex digits over names, shapes, dtypes, an exact sum of all bits and evenly spaced values of every tensor."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().reshape(-1)
        bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        picked = bits[:: max(1, len(bits) // samples)].cpu().contiguous()
        digest.update(picked.view(torch.uint8).numpy().tobytes())
        digest.update(str(int(bits.sum(dtype=torch.int64))).encode())
    return digest.hexdigest()


def load_tokenizer(model: str) -> Any:
    """The tokenizer alone. Raises ModelError with the loader's reason."""
    name, extra = model_location(model)
    with _quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(name, **extra)
        except LOADER_ERRORS as error:
            raise ModelError(f"cannot load the tokenizer of {model!r}: {one_line(error)}") from error


__all__ = ["DTYPES", "ModelSpec", "ReferenceModel", "load_tokenizer"]
