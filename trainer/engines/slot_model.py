"""The Hugging Face seam of the rollout engine: a transformers decoder that runs rows of many slots.

As in scoring, the model keeps its code: its attention is switched to the one of ``slot_attention`` for a while, and
everything that was switched is switched back. Its logits are its own head's, computed for the rows that are asked for.

Shapes: R rows of a pass, B rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trace_fast.errors import ConfigError, ModelError
from trace_fast.model_context import attached, evaluating, implementations, own_precision, quiet_transformers
from trace_fast.model_spec import ModelSpec
from trace_fast.row_blocks import FixedRowBlocks
from trace_fast.trainer.engines.slot_attention import SLOT_ATTENTION, Run, SlotPass, SlotStore

EXACT_ROWS = 64  # rows of one product with ``exact``
# Slots that decode together: (at most, idle ones between). Few on the CPU, where a block costs its longest sequence's
# length for each; many on a GPU, where launches cost.
_BLOCKS = {"cpu": (8, 0), "cuda": (1024, 1024)}


class SlotModel:
    """A decoder and how it is run.

    Args:
        exact: products in blocks of fixed shape, so that a row's result depends on its own sequence only (CPU).

    Raises:
        ConfigError: ``exact`` for a model that is not on the CPU.
        ModelError: recurrent or hybrid layers, an architecture outside the attention interface, or one whose logits are
            other ones when its attention runs here.
    """

    def __init__(self, module: PreTrainedModel, *, exact: bool) -> None:
        self.spec = ModelSpec.from_config(module.config, type(module).__name__, stateful=module._is_stateful)
        self.spec.check_supported()
        if not getattr(module, "_supports_attention_backend", False):
            raise ModelError(
                f"{self.spec.name} does not use transformers' attention interface; "
                "use an architecture that does (Llama, Qwen, Mistral, Gemma, gpt-oss, ...)"
            )
        embedding = module.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        self.device = embedding.device
        self.vocab_size = len(embedding)
        if exact and self.device.type != "cpu":
            raise ConfigError(f"exact: expected a model on the CPU, got one on {self.device}")
        self.module = module
        self._exact = exact
        self._block_slots, self._block_gap = _BLOCKS.get(self.device.type, _BLOCKS["cuda"])
        self._verify()

    def fingerprint(self) -> int:
        """Changes when a parameter is replaced or written to by torch's in-place operations."""
        return hash(tuple((p.data_ptr(), p._version) for p in self.module.parameters()))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Everything that is switched for ``logits``, once for many passes."""
        rows = FixedRowBlocks(EXACT_ROWS) if self._exact else contextlib.nullcontext()
        with torch.no_grad(), attached(self.module, SLOT_ATTENTION), own_precision(self.device), rows:
            yield

    def logits(
        self, store: SlotStore, runs: Sequence[Run], ids_R: np.ndarray, rows_B: np.ndarray, *, decoding: bool = False
    ) -> Tensor:
        """``(B, V)`` of some rows of a pass, inside ``running``; the keys and values of all rows go to the store.

        Args:
            ids_R: of the runs, one after the other. rows_B: of them. decoding: as ``SlotPass``.
        """
        padding = -len(ids_R) % EXACT_ROWS if self._exact else 0
        this_pass = SlotPass(
            store,
            runs,
            self.device,
            decoding=decoding,
            exact=self._exact,
            block_slots=self._block_slots,
            block_gap=self._block_gap,
        )
        ids, positions = torch.as_tensor(ids_R).to(self.device), this_pass.positions
        if padding:
            ids, positions = (torch.nn.functional.pad(t, (0, padding)) for t in (ids, positions))
        output = self.module(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=torch.as_tensor(rows_B).to(self.device),
            trace_fast_slots=this_pass,
        )
        if tuple(this_pass.windows) != self.spec.layer_windows:
            raise ModelError(
                f"{self.spec.name}: expected its attention layers to run through the attention interface with the "
                f"windows {self.spec.layer_windows} of its config, got {tuple(this_pass.windows)}"
            )
        logits_BV = output.logits[0]
        assert isinstance(logits_BV, Tensor)
        return logits_BV

    @torch.no_grad()
    def _verify(self) -> None:
        """Two short sequences in slots, one prefilled in two parts, then decoding: the logits must be the model's own,
        or it has a feature that this seam does not know."""
        ids = np.arange(24) * 7919 % min(self.vocab_size, 32000)
        store = SlotStore(2, len(ids))
        with self.running():
            self.logits(store, [Run(1, 0, 9)], ids[:9], np.array([8]))
            found = [self.logits(store, [Run(0, 0, 5), Run(1, 9, 20)], np.r_[ids[:5], ids[9:20]], np.array([4, 15]))]
            for step in range(4):
                runs = [Run(0, 5 + step, 6 + step), Run(1, 20 + step, 21 + step)]
                found.append(self.logits(store, runs, ids[[5 + step, 20 + step]], np.arange(2), decoding=True))
        rows = [row for step in range(5) for row in (4 + step, 19 + step)]
        with evaluating(self.module), own_precision(self.device), quiet_transformers():
            own = self._plain(ids)[rows]
            configured = implementations(self.module)
            try:
                self.module.set_attn_implementation("eager")
                eager = self._plain(ids)[rows]
            finally:
                self.module.set_attn_implementation(configured)
        if not torch.isfinite(own).all():
            raise ModelError(f"{self.spec.name}: NaN or Inf in the model's own logits; check its weights and dtype")
        error = _relative(torch.cat(found), own)
        # What the model's own implementations differ by is what rounding does to it; with only one of them, rounding
        # errors grow with depth like a random walk.
        epsilon = torch.finfo(own.dtype).eps
        bound = max(8 * _relative(eager, own), 4 * epsilon * self.spec.n_layers**0.5, 1e-5)
        if error > bound:
            raise ModelError(
                f"{self.spec.name}: logits through the attention interface differ from the model's own by {error:.3g} "
                f"(bound {bound:.3g}); its attention has a feature that is not passed to attention functions"
            )

    def _plain(self, ids: np.ndarray) -> Tensor:
        """``(R, V)`` of one sequence, by the model alone."""
        logits = self.module(input_ids=torch.as_tensor(ids)[None].to(self.device), use_cache=False).logits[0]
        assert isinstance(logits, Tensor)
        return logits


def _relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm, of the median row: a router may send a row elsewhere for a rounding."""
    return float(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).median())
