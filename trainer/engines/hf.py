"""The rollout engine inside this process: a transformers decoder that continues many sequences at once.

Sequences live in slots (``slot_attention``). A prompt is put into a slot, what another slot or an earlier call knows of
its beginning is copied, the rest is prefilled in packed passes; then all slots advance together, one token a pass, and
a slot whose sequence ends takes the next prompt at once. Between calls the slots keep what they hold, so the next turn
of a conversation computes its new tokens only. Ids go in and come out; nothing is tokenised.

How far a request's result depends on its company. Its random numbers are its own: one generator a request, one number
a token. Its logits are, too, up to rounding: a matrix product may round a row differently beside other rows (about 1e-6
in float32), and a draw that falls so close to the border between two tokens then falls on its other side. With
``exact=True`` (CPU) it depends on nothing else, bit for bit: products are done in blocks of fixed shape, and keys and
values that decoding computed are not used for later prompts, which costs time.

Shapes: B sequences that decode, V vocabulary. Log-probabilities: float32, nats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trace_fast.errors import ConfigError
from trace_fast.trainer.engines.engine import FinishReason, Generation, Request, failed, why_refused
from trace_fast.trainer.engines.sampler import draw
from trace_fast.trainer.engines.slot_attention import Run, SlotStore
from trace_fast.trainer.engines.slot_model import SlotModel
from trace_fast.trainer.engines.slots import Place, SlotBook


@dataclass
class EngineStats:
    """Tokens since the engine was made. Prompts: ``prefilled`` + ``reused``; ``decoded``: one at a time."""

    prefilled: int = 0
    reused: int = 0
    decoded: int = 0
    passes: int = 0


@dataclass(eq=False)
class _Sequence:
    """A request on its way. The keys and values of its last id are not there yet."""

    number: int
    request: Request
    limit: int
    slot: int = -1
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.request.prompt_ids, dtype=np.int64)
        self.uniform = np.random.Generator(np.random.Philox(key=self.request.seed)).random(self.limit)
        self.stop_ids = frozenset(self.request.stop_ids)

    @property
    def position(self) -> int:
        """Of the last id."""
        return len(self.prompt) + len(self.ids) - 1

    def finish(self) -> FinishReason | None:
        if self.ids[-1] in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.ids) == self.limit else None

    def generation(self, finish: FinishReason, error: str | None = None) -> Generation:
        return Generation(np.array(self.ids, np.int64), np.array(self.logprobs, np.float32), finish, error)


class HfEngine:
    """See the module.

    Args:
        module: a causal language model; left as it was after every call.
        n_slots: sequences that decode together. More requests than slots wait for their turn.
        max_length: tokens of a sequence, prompt and continuation. The keys and values of ``n_slots * max_length``
            tokens are allocated by the first call.
        cache_tokens: tokens of sequences that lost their slot whose keys and values are kept beside the slots.
        prefill_rows: prompt tokens of one pass.
        exact: results that depend on nothing but request and weights, bit for bit (CPU).

    Raises:
        ConfigError: a size out of range, more positions than the model has, ``exact`` where it is not on the CPU.
        ModelError: as ``SlotModel``.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        n_slots: int,
        max_length: int,
        cache_tokens: int = 0,
        prefill_rows: int = 2048,
        exact: bool = False,
    ) -> None:
        sizes = {"n_slots": (n_slots, 1), "max_length": (max_length, 2), "prefill_rows": (prefill_rows, 1)}
        for name, (value, least) in (sizes | {"cache_tokens": (cache_tokens, 0)}).items():
            if value < least:
                raise ConfigError(f"{name}: expected at least {least}, got {value}")
        self._model = SlotModel(module, exact=exact)
        spec = self._model.spec
        if spec.max_positions is not None and max_length > spec.max_positions:
            raise ConfigError(
                f"max_length: expected at most {spec.max_positions} for {spec.name}, got {max_length}, because "
                f"{spec.length_rule}"
            )
        self._max_length = max_length
        self._prefill_rows = prefill_rows
        self._exact = exact
        self._store = SlotStore(n_slots, max_length)
        self._book = SlotBook(self._store, cache_tokens)
        self._weights = self._model.fingerprint()
        self.weights_version = 0
        self.stats = EngineStats()

    @property
    def cache_bytes(self) -> int:
        """Of the slots' keys and values; 0 before the first call."""
        return self._store.bytes

    @property
    def tokens_aside(self) -> int:
        """Of sequences kept beside the slots."""
        return self._book.tokens_aside

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies weights into the model's own by name, and drops all keys and values. Weights that are the model's own
        tensors already cost nothing.

        Raises:
            ConfigError: a name that the model does not have, or another shape; the weights before it are changed.
        """
        own = self._model.module.state_dict(keep_vars=True)
        self._book.forget()
        for name, weight in weights:
            target = own.get(name)
            if target is None or target.shape != weight.shape:
                expected = "a parameter of the model" if target is None else f"shape {tuple(target.shape)}"
                raise ConfigError(f"weight {name!r}: expected {expected}, got shape {tuple(weight.shape)}")
            if target.data_ptr() != weight.data_ptr():
                with torch.no_grad():
                    target.copy_(weight)
        self._weights = self._model.fingerprint()
        self.weights_version = version

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, in order; what is wrong with one request becomes its error.

        Keys and values of other weights are never used: parameters that were replaced or written to in place since the
        last call are noticed. Writes that torch does not see (``.data``) need an ``update_weights``.

        Raises:
            ModelError: the model's layers do not run through the attention interface as they should.
        """
        fingerprint = self._model.fingerprint()
        if fingerprint != self._weights:
            self._book.forget()
            self._weights = fingerprint
        done: list[Generation | None] = [None] * len(requests)
        sequences: list[_Sequence] = []
        for number, request in enumerate(requests):
            problem = why_refused(request, vocab_size=self._model.vocab_size, max_length=self._max_length)
            if problem is not None:
                done[number] = failed(problem)
            elif not (room := self._max_length - len(request.prompt_ids)):
                done[number] = Generation(np.empty(0, np.int64), np.empty(0, np.float32), FinishReason.LENGTH)
            else:
                sequences.append(_Sequence(number, request, min(request.max_new_tokens, room)))
        if sequences:
            try:
                with self._model.running():
                    self._run(sequences, done)
            except BaseException:
                self._book.forget()  # slots of sequences that broke off
                raise
        generations = [generation for generation in done if generation is not None]
        assert len(generations) == len(requests)
        return generations

    def _run(self, sequences: list[_Sequence], done: list[Generation | None]) -> None:
        reserved = self._book.reserve([sequence.prompt for sequence in sequences])
        continuing = [(sequences[number], slot) for number, slot in reserved.items()]
        waiting = deque(s for number, s in enumerate(sequences) if number not in reserved)
        active: list[_Sequence] = []
        while continuing or waiting or active:
            admitted = self._admit(continuing, waiting)
            continuing = []
            if admitted:
                self._prefill(admitted, done)
                active = sorted((*active, *(s for s, _ in admitted if s.slot >= 0)), key=lambda s: s.slot)
            else:
                self._decode(active, done)
                active = [s for s in active if s.slot >= 0]

    # --- prompts ------------------------------------------------------------------------------------------------

    def _admit(
        self, continuing: list[tuple[_Sequence, int]], waiting: deque[_Sequence]
    ) -> list[tuple[_Sequence, Place]]:
        """Puts prompts into slots: those that continue one, then others as long as a slot is free."""
        self._book.begin_round()
        admitted = [(sequence, self._book.place(sequence.prompt, slot)) for sequence, slot in continuing]
        while waiting and (slot := self._book.free_slot()) is not None:
            sequence = waiting.popleft()
            admitted.append((sequence, self._book.place(sequence.prompt, slot)))
        for sequence, place in admitted:
            sequence.slot = place.slot
        return admitted

    def _prefill(self, admitted: list[tuple[_Sequence, Place]], done: list[Generation | None]) -> None:
        """Computes prompts, wave by wave, and draws the first id of each."""
        for wave in range(1 + max(place.wave for _, place in admitted)):
            todo: deque[tuple[_Sequence, int]] = deque()
            for sequence, place in admitted:
                if place.wave == wave:
                    start = self._book.join(place)
                    self.stats.reused += start
                    todo.append((sequence, start))
            while todo:
                self._prefill_pass(todo, done)

    def _prefill_pass(self, todo: deque[tuple[_Sequence, int]], done: list[Generation | None]) -> None:
        """One pass over the first prompts of ``todo``; one that does not fit as a whole stays there with its rest."""
        runs: list[Run] = []
        parts: list[np.ndarray] = []
        whole: list[_Sequence] = []
        ends: list[int] = []
        rows = 0
        while todo and rows < self._prefill_rows:
            sequence, start = todo.popleft()
            stop = min(len(sequence.prompt), start + self._prefill_rows - rows)
            runs.append(Run(sequence.slot, start, stop))
            parts.append(sequence.prompt[start:stop])
            rows += stop - start
            if stop < len(sequence.prompt):
                todo.appendleft((sequence, stop))
            else:
                whole.append(sequence)
                ends.append(rows - 1)
        logits_BV = self._model.logits(self._store, runs, np.concatenate(parts), np.array(ends, dtype=np.int64))
        self.stats.passes += 1
        self.stats.prefilled += rows
        for run in runs:
            self._book.computed(run.slot, run.stop)
        self._draw(whole, logits_BV, done)

    # --- continuations ------------------------------------------------------------------------------------------

    def _decode(self, active: list[_Sequence], done: list[Generation | None]) -> None:
        """One token of every active sequence; they are in the order of their slots."""
        runs = [Run(s.slot, s.position, s.position + 1) for s in active]
        ids = np.array([s.ids[-1] for s in active], dtype=np.int64)
        logits_BV = self._model.logits(self._store, runs, ids, np.arange(len(ids)), decoding=True)
        self.stats.passes += 1
        self.stats.decoded += len(ids)
        if not self._exact:
            self._book.append(np.array([run.slot for run in runs]), np.array([run.start for run in runs]), ids)
        self._draw(active, logits_BV, done)

    def _draw(self, sequences: list[_Sequence], logits_BV: Tensor, done: list[Generation | None]) -> None:
        """The next id of each; sequences that end leave their slot (``slot`` is -1 then)."""
        if not sequences:
            return
        drawn = draw(
            logits_BV,
            np.array([s.request.temperature for s in sequences]),
            np.array([s.request.top_p for s in sequences]),
            np.array([s.uniform[len(s.ids)] for s in sequences]),
        )
        triples = zip(drawn.ids.tolist(), drawn.logprobs.tolist(), drawn.good.tolist(), strict=True)
        for sequence, (token, logprob, good) in zip(sequences, triples, strict=True):
            if not good:
                where = f"{len(sequence.prompt)} prompt tokens and {len(sequence.ids)} of its own"
                done[sequence.number] = sequence.generation(
                    FinishReason.ERROR, f"logits that are no numbers (NaN or Inf) after {where}; check the weights"
                )
                self._book.discard(sequence.slot)
                sequence.slot = -1
                continue
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            finish = sequence.finish()
            if finish is not None:
                done[sequence.number] = sequence.generation(finish)
                self._book.release(sequence.slot)
                sequence.slot = -1
