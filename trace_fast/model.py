"""The only Hugging Face seam: a transformers decoder that runs a ``PackedLayout`` through its own layers.

The model keeps its code. Its attention is switched to a function registered with transformers' own
``AttentionInterface``; the pack travels to it as a keyword argument of the forward call, so there is no global
state, and everything that was switched (attention, experts, training mode) is switched back afterwards.
What a model's attention means (scale, window, softcap, sinks, grouped heads) is taken from what it passes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trace_fast.backends import DTYPES, Backends, dtype_of, pick_device, resolve
from trace_fast.errors import ModelError
from trace_fast.kernels.prefix_attention import plan_attention
from trace_fast.kernels.token_logprob import segment_mean_logprob
from trace_fast.layout import PackedLayout, SpanRanges, pack_layout
from trace_fast.model_attention import ATTENTION_NAME, AttentionPass
from trace_fast.model_context import attached, evaluating, implementations, own_precision, quiet_transformers
from trace_fast.model_spec import LOADER_ERRORS, ModelSpec, model_location, one_line
from trace_fast.rollout import Rollout
from trace_fast.row_blocks import ROW_BLOCK, FixedRowBlocks


@dataclass(frozen=True)
class LanguageHead:
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
    def of(cls, module: PreTrainedModel) -> LanguageHead:
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
    head: LanguageHead = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        self.spec.check_supported()
        if not getattr(self.module, "_supports_attention_backend", False):
            raise ModelError(
                f"{type(self.module).__name__} does not use transformers' attention interface; "
                "use an architecture that does (Llama, Qwen, Mistral, Gemma, gpt-oss, ...)"
            )
        self.head = LanguageHead.of(self.module)
        self._verify()
        local = Path(self.spec.name)
        name = local.name if local.is_absolute() or local.exists() else self.spec.name  # where it lies is private
        self.identity = f"{name}@{_model_hash(self.module)}"

    @classmethod
    def load(cls, model: str, *, dtype: str, device: str, backend: str) -> ReferenceModel:
        """Loads weights by path, hub id or GGUF file.

        Raises:
            ConfigError: unknown dtype, device or backend. ModelError: cannot be loaded, or not completely; the message
                carries the loader's reason.
        """
        number_type = dtype_of(dtype)
        name, extra = model_location(model)
        place = pick_device(device)
        if not extra:  # cheap, and refuses before gigabytes are read; a GGUF's config costs as much as its weights
            ModelSpec.from_pretrained(model).check_supported()
        with quiet_transformers():
            try:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    name, dtype=number_type, output_loading_info=True, **extra
                )
            except LOADER_ERRORS as error:
                raise ModelError(f"cannot load the weights of {model!r}: {one_line(error)}") from error
        module, info = loaded
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
        weight, head = _embedding(module), LanguageHead.of(module).weight
        chosen = resolve(backend, weight.device, weight.dtype, head_dtype=head.dtype, head_dim=spec.head_dim)
        return cls(module, spec, chosen)

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
    def mean_logprobs(
        self, hidden_NH: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, cu_targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(S,) float64`` means and ``(M,) float32`` log p(targets[m] | row rows[m]), in nats, on the CPU.

        Segment s is targets ``cu_targets[s]:cu_targets[s+1]``; the head sees only these rows.
        """
        device = self.head.weight.device
        with own_precision(self.device), FixedRowBlocks():
            means, logprobs = segment_mean_logprob(
                hidden_NH[rows.to(hidden_NH.device)].to(device),
                self.head.weight,
                targets.to(device),
                cu_targets.to(device),
                bias_V=self.head.bias,
                softcap=self.head.softcap,
                logit_scale=self.head.scale,
                backend=self.backends.token_logprob,
            )
        return means.cpu(), logprobs.cpu()

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, spans: SpanRanges) -> torch.Tensor:
        rows = len(input_ids)
        padding = (0, -rows % ROW_BLOCK)
        device = _embedding(self.module).device
        this_pass = AttentionPass(plan_attention(spans, self.backends.prefix_attention))
        with attached(self.module, ATTENTION_NAME), own_precision(device), FixedRowBlocks():
            output = self.module.get_decoder()(
                input_ids=F.pad(input_ids, padding)[None].to(device),
                position_ids=F.pad(positions, padding)[None].to(device),
                use_cache=False,
                trace_fast_pass=this_pass,
            )
        self._check_layers(this_pass.windows)
        return output.last_hidden_state[0, :rows]

    def _check_layers(self, windows: list[int | None]) -> None:
        """Every layer must have asked for attention here, the sliding ones with their window."""
        name, wanted = type(self.module).__name__, self.spec.layer_windows
        if len(windows) != len(wanted):
            raise ModelError(
                f"{name}: expected {len(wanted)} attention layers to run through the attention interface, "
                f"{len(windows)} did; the others would not have seen the pack's structure"
            )
        for layer, (window, expected) in enumerate(zip(windows, wanted, strict=True)):
            if window != expected:
                raise ModelError(
                    f"{name}: expected layer {layer} to pass the window {expected} of its config to its attention "
                    f"function, got {window}; a window that exists in a mask only cannot be honoured here"
                )

    @torch.no_grad()
    def _verify(self) -> None:
        """Runs a small pack through this seam and its paths through the model as it is: anything about an
        architecture that the seam does not know (another logit scale, a bias in the attention, positions taken from
        the row number) shows here, not in scores."""
        ids = np.arange(32) * 7919 % min(self.vocab_size, 32000)
        probe = Rollout(
            id="probe",
            group="probe",
            input_ids=ids[:20],
            boundaries=np.array([9, 20]),
            n_turns=0,
            answers=(ids[20:27],),
            openers=(ids[27:],) * 2,
        )
        layout = pack_layout([probe])
        ours = self.hidden_states(layout)
        paths = [np.concatenate([probe.prefix(k), probe.openers[k], probe.answers[0][:-1]]) for k in range(2)]
        rows = [layout.target_rows[layout.cu_targets[k] : layout.cu_targets[k + 1]] for k in range(2)]
        with evaluating(self.module), own_precision(self.device), quiet_transformers():
            own = torch.cat([self._plain(path)[0][-7:] for path in paths])
            hidden, logits = self._plain(ids)
            configured = implementations(self.module)
            try:
                self.module.set_attn_implementation("eager")
                eager = torch.cat([self._plain(path)[0][-7:] for path in paths])
            finally:
                self.module.set_attn_implementation(configured)
        if not torch.isfinite(hidden).all() or not torch.isfinite(logits).all():
            raise ModelError(f"{self.spec.name}: NaN or Inf in the model's own output; check its weights and dtype")
        epsilon = torch.finfo(self.dtype).eps
        scale = logits.float().abs().max()
        off = (self.head.logits(hidden).float() - logits.float()).abs().max()
        if off > 2 * epsilon * scale:  # the same few operations on the same numbers: only their rounding may differ
            raise ModelError(
                f"{type(self.module).__name__}: its logits are not softcap(scale * head(hidden)) as understood "
                f"here (largest difference {float(off):.3g} of {float(scale):.3g}); this architecture is not supported"
            )
        error = _relative(ours[torch.as_tensor(np.concatenate(rows))], own)
        # What two of the model's own attention implementations differ by is what rounding does to it; where it has
        # only one, rounding errors grow with depth like a random walk.
        bound = max(8 * _relative(eager, own), 4 * epsilon * self.spec.n_layers**0.5, 1e-5)
        if error > bound:
            raise ModelError(
                f"{type(self.module).__name__}: hidden states through the attention interface differ from the "
                f"model's own by {error:.3g} (bound {bound:.3g}); its attention has a feature that is not "
                "passed to attention functions, so it cannot be scored exactly"
            )

    def _plain(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """``(L, H)`` hidden states and ``(L, V)`` logits of one sequence, by the model alone."""
        inputs = torch.as_tensor(ids)[None].to(_embedding(self.module).device)
        hidden = self.module.get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state
        return hidden[0], self.module(input_ids=inputs, use_cache=False).logits[0]


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm, of the median row: a router may send a row elsewhere for a rounding."""
    return float(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).median())


def _embedding(module: PreTrainedModel) -> torch.Tensor:
    weight = module.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _model_hash(module: PreTrainedModel, samples: int = 65536) -> str:
    """16 hex digits over the config and, of every tensor, name, shape, dtype, an exact sum of all bits and evenly
    spaced values."""
    digest = hashlib.blake2b(digest_size=8)
    config = module.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().reshape(-1)
        bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        picked = bits[:: max(1, len(bits) // samples)].cpu().contiguous()
        digest.update(picked.view(torch.uint8).numpy().tobytes())
        digest.update(str(int(bits.sum(dtype=torch.int64))).encode())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """16 hex digits over vocabulary, merges and chat template: what turns the text of a rollout into ids."""
    digest = hashlib.blake2b(digest_size=8)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    digest.update(described.encode())
    digest.update(json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True).encode())
    return digest.hexdigest()


def load_tokenizer(model: str) -> Any:
    """The tokenizer alone. Raises ModelError with the loader's reason."""
    name, extra = model_location(model)
    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(name, **extra)
        except LOADER_ERRORS as error:
            raise ModelError(f"cannot load the tokenizer of {model!r}: {one_line(error)}") from error


__all__ = ["DTYPES", "ModelSpec", "ReferenceModel", "load_tokenizer", "tokenizer_hash"]
