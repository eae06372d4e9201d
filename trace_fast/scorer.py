"""Scorer: rollouts in, gold-answer log-probabilities at every tool-call boundary out, one pass a pack."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trace_fast.checks import check_rollout
from trace_fast.config import Alias
from trace_fast.errors import ConfigError, RolloutError
from trace_fast.layout import PackedLayout, pack_layout, rows_of
from trace_fast.model import ReferenceModel, load_tokenizer, tokenizer_hash
from trace_fast.model_spec import one_line
from trace_fast.plan import cut_packs, pack_budget
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore

Errors = Callable[[RolloutError], None]
TRUNK_SEGMENT = 32  # trunk tokens in a segment of the head's call, which means nothing to them: a small program's work


@dataclass(frozen=True)
class PackResult:
    """One scored pack: ``scores[i]`` belongs to ``rollouts[i]``; rollouts that failed are in neither."""

    scores: list[RolloutScore]
    rollouts: list[Rollout]
    tokens_unique: int
    tokens_naive: int
    seconds: float


@dataclass(frozen=True)
class _PackLogprobs:
    """What one pass gives: of every item of the layout the mean and the log-probability of each of its tokens, of every
    rollout those of its own tokens that were asked for, and which rows' hidden states are finite."""

    means_I: np.ndarray
    tokens_I: list[np.ndarray]
    own_R: list[np.ndarray]
    finite_N: np.ndarray


@dataclass(frozen=True)
class _OwnTokens:
    """Which of a rollout's own tokens are scored besides its states: all, those that the policy wrote, or none."""

    all: bool
    written: bool

    def check(self, rollout: Rollout) -> None:
        if self.written and rollout.loss_mask is None:
            raise RolloutError(
                "format",
                "loss_mask: expected one, since the tokens that the policy wrote are to be scored",
                rollout_id=rollout.id,
                source=rollout.source,
            )

    def of(self, rollout: Rollout) -> np.ndarray:
        """``(N-1,) bool``: of the tokens after the first; none where there are none."""
        if self.written and not self.all:
            return self._mask(rollout)
        return np.full(len(rollout.input_ids[1:]), self.all)

    def written_of(self, rollout: Rollout, own: np.ndarray) -> np.ndarray | None:
        """From the log-probabilities of the tokens ``of`` chose, those of the written ones."""
        if not self.written:
            return None
        return own[self._mask(rollout)] if self.all else own

    @staticmethod
    def _mask(rollout: Rollout) -> np.ndarray:
        assert rollout.loss_mask is not None  # check
        return rollout.loss_mask[1:]


class Scorer:
    """A frozen reference model that scores rollouts exactly, in one packed pass.

    Use ``from_pretrained`` or ``from_module``. On a CPU results do not depend on how rollouts are packed, bit for bit.
    On a GPU the same pack gives the same bits, and in another one the last may differ.
    """

    def __init__(
        self, model: ReferenceModel, tokenizer: Any, *, alias: Alias = "max", max_tokens_per_pack: int | None = None
    ) -> None:
        if alias not in get_args(Alias):
            raise ConfigError(f"alias: expected one of {', '.join(get_args(Alias))}, got {alias!r}")
        self.model = model
        self.tokenizer = tokenizer
        self.alias = alias
        dtype = str(model.dtype).removeprefix("torch.")
        self._reference = f"{model.identity}+{tokenizer_hash(tokenizer)}" if tokenizer is not None else model.identity
        self.max_tokens_per_pack = pack_budget(max_tokens_per_pack, model.spec, dtype, model.device)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        dtype: str = "bfloat16",
        device: str = "auto",
        backend: str = "auto",
        alias: Alias = "max",
        max_tokens_per_pack: int | None = None,
    ) -> Scorer:
        """Loads a reference model and its tokenizer.

        Args:
            model: folder, hub id, or GGUF file.
            dtype: ``float32``, ``bfloat16`` or ``float16``; log-sum-exp and reductions are float32 in each.
            device: ``auto`` (CUDA when there is one), ``cpu``, ``cuda``, ``cuda:N``.
            backend: ``auto``, or a name that ``trace-fast info`` lists.
            alias: how several accepted spellings of an answer become one score: the best (``max``), their ``mean``,
                or the log of the mean of exp(l-bar) (``logsumexp``; never above the best).
            max_tokens_per_pack: bound on one pass; ``None`` takes what half of the free memory holds.

        Raises:
            ConfigError, ModelError: with what was expected and what came.
        """
        loaded = ReferenceModel.load(model, dtype=dtype, device=device, backend=backend)
        return cls(loaded, load_tokenizer(model), alias=alias, max_tokens_per_pack=max_tokens_per_pack)

    @classmethod
    def from_module(
        cls,
        module: Any,
        tokenizer: Any,
        *,
        backend: str = "auto",
        alias: Alias = "max",
        max_tokens_per_pack: int | None = None,
    ) -> Scorer:
        """Around a transformers model that the caller holds; nothing of it is changed between calls.

        Raises:
            ModelError: not a transformers model, or one that cannot be scored exactly.
        """
        loaded = ReferenceModel.of(module, backend=backend)
        return cls(loaded, tokenizer, alias=alias, max_tokens_per_pack=max_tokens_per_pack)

    @property
    def reference(self) -> str:
        """``"name@hash"`` of weights, config and tokenizer as they were on construction; stands in score records."""
        return self._reference

    def score(
        self,
        rollouts: Iterable[Rollout],
        *,
        trunk_logprobs: bool = False,
        written_logprobs: bool = False,
        errors: Errors | None = None,
        progress: bool = False,
    ) -> list[RolloutScore]:
        """Scores rollouts, in order.

        Args:
            rollouts: any number, from a list or an iterator.
            trunk_logprobs: also score every token of each rollout, from the same pass.
            written_logprobs: also score the tokens that the policy wrote (``loss_mask``), which are few.
            errors: gets the error of each rollout that cannot be scored, which is then left out of the result;
                ``None`` raises the first one.
            progress: show a progress line on a terminal.

        Raises:
            RolloutError: only when ``errors`` is ``None``.
        """
        scores: list[RolloutScore] = []
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, transient=True, disable=not progress) as bar:
            task = bar.add_task("scoring", total=None)
            packs = self.iter_packs(
                rollouts, trunk_logprobs=trunk_logprobs, written_logprobs=written_logprobs, errors=errors
            )
            for pack in packs:
                scores += pack.scores
                bar.update(task, description=f"scored {len(scores)} rollouts")
        return scores

    def iter_packs(
        self,
        rollouts: Iterable[Rollout],
        *,
        trunk_logprobs: bool = False,
        written_logprobs: bool = False,
        errors: Errors | None = None,
    ) -> Iterator[PackResult]:
        """As ``score``, a pack at a time: what has been yielded is final, so a caller can write and stop anywhere."""
        tokens = _OwnTokens(trunk_logprobs, written_logprobs)

        def report(error: RolloutError) -> None:
            if errors is None:
                raise error
            errors(error)

        def usable() -> Iterator[Rollout]:
            for rollout in rollouts:
                try:
                    check_rollout(rollout, self.model.spec, self.model.vocab_size)
                    tokens.check(rollout)
                except RolloutError as error:
                    report(error)
                else:
                    yield rollout

        for pack in cut_packs(usable(), self.max_tokens_per_pack):
            yield from self._score_pack(pack, tokens, report)

    def _score_pack(self, pack: list[Rollout], tokens: _OwnTokens, report: Errors) -> Iterator[PackResult]:
        """One pass; where it does not fit into memory, a rollout at a time, and those that still do not are errors."""
        started = time.perf_counter()
        layout = pack_layout(pack)
        try:
            found = self._run(layout, pack, tokens)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            if len(pack) == 1:
                reason = f"one pass over its {len(layout)} distinct tokens does not fit into memory: {one_line(error)}"
                report(RolloutError("length", reason, rollout_id=pack[0].id, source=pack[0].source))
                return
            for rollout in pack:
                yield from self._score_pack([rollout], tokens, report)
            return
        scores, scored = [], []
        for r, rollout in enumerate(pack):
            try:
                score = self._combine(rollout, layout, r, found, tokens)
                _check_trunk(rollout, found.finite_N[layout.trunk_rows(r)])
                scores.append(score)
            except RolloutError as error:
                report(error)
            else:
                scored.append(rollout)
        yield PackResult(scores, scored, len(layout), layout.tokens_naive, time.perf_counter() - started)

    def _run(self, layout: PackedLayout, pack: list[Rollout], tokens: _OwnTokens) -> _PackLogprobs:
        """The forward pass, and one call of the head for all answers and the rollouts' own tokens."""
        hidden = self.model.hidden_states(layout)
        # Rollouts of a group share states, whose answers are scored once. An answer is known by its end: the place in
        # the trie, the token that it predicts, and how many there are.
        last_I, count_I = layout.cu_targets[1:] - 1, np.diff(layout.cu_targets)
        ends = np.stack([layout.target_rows[last_I], layout.target_ids[last_I], count_I], axis=1)
        _, first_S, segment_I = np.unique(ends, axis=0, return_index=True, return_inverse=True)
        places = rows_of(np.stack([layout.cu_targets[first_S], layout.cu_targets[first_S + 1]], axis=1))
        pairs = np.stack([layout.target_rows, layout.target_ids], axis=1)[places]
        lengths_S = count_I[first_S]
        own = [
            np.stack([layout.trunk_rows(r)[:-1], p.input_ids[1:]], axis=1)[tokens.of(p)] for r, p in enumerate(pack)
        ]
        distinct, place = np.unique(np.concatenate(own), axis=0, return_inverse=True)  # they share prompts
        if len(distinct):
            pairs = np.concatenate([pairs, distinct])
            cuts = np.append(np.arange(0, len(distinct), TRUNK_SEGMENT), len(distinct))
            lengths_S = np.concatenate([lengths_S, np.diff(cuts)])
        cu = np.concatenate([[0], np.cumsum(lengths_S)])
        head = (torch.as_tensor(x) for x in (pairs[:, 0], pairs[:, 1], cu))
        means, logprobs = (x.numpy() for x in self.model.mean_logprobs(hidden, *head))
        tokens_I = [logprobs[cu[s] : cu[s + 1]].copy() for s in segment_I.reshape(-1)]
        own_R = np.split(logprobs[len(places) :][place.reshape(-1)], np.cumsum([len(pairs) for pairs in own])[:-1])
        finite_N = torch.isfinite(hidden).all(-1).cpu().numpy()
        return _PackLogprobs(means[segment_I.reshape(-1)], tokens_I, own_R, finite_N)

    def _combine(
        self, rollout: Rollout, layout: PackedLayout, index: int, found: _PackLogprobs, own: _OwnTokens
    ) -> RolloutScore:
        """Items of one rollout → its score; aliases are combined a state at a time."""
        states, aliases = rollout.n_states, len(rollout.answers)
        means = np.empty((states, aliases))
        tokens: dict[tuple[int, int], np.ndarray] = {}
        for item in np.flatnonzero(layout.item_rollout == index):
            k, a = int(layout.item_state[item]), int(layout.item_alias[item])
            tokens[k, a], means[k, a] = found.tokens_I[item], found.means_I[item]
        best = np.argmax(means, axis=1)
        if self.alias == "max":
            combined = means.max(axis=1)
        elif self.alias == "mean":
            combined = means.mean(axis=1)
        else:
            peak = means.max(axis=1)
            combined = peak + np.log(np.exp(means - peak[:, None]).mean(axis=1))
        return RolloutScore(
            id=rollout.id,
            group=rollout.group,
            n_turns=rollout.n_turns,
            boundaries=rollout.boundaries,
            mean_logprobs=combined,
            alias_mean_logprobs=means,
            alias=best,
            token_logprobs=tuple(tokens[k, int(best[k])] for k in range(states)),
            answer=rollout.answer_texts[best[-1]] if rollout.answer_texts else None,
            answer_ids=rollout.answers[best[-1]],
            reward=rollout.reward,
            trunk_logprobs=found.own_R[index] if own.all else None,
            written_logprobs=own.written_of(rollout, found.own_R[index]),
            model=self.reference,
            source=rollout.source,
            extra=rollout.extra,
        )


def _check_trunk(rollout: Rollout, finite: np.ndarray) -> None:
    """A broken token may lie outside the window of every scored row: the scores are numbers, the model is not sound."""
    if not finite.all():
        raise RolloutError(
            "non_finite",
            f"the model gave a hidden state that is not finite at token {int(np.argmin(finite))}; expected finite "
            "numbers. Check the weights, or score in float32 if the model overflows in this dtype",
            rollout_id=rollout.id,
            source=rollout.source,
        )


def _out_of_memory(error: RuntimeError) -> bool:
    """torch has a class of its own for CUDA; its CPU allocator says it in words."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
