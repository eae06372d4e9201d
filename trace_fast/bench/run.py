"""A whole run: a model, rollouts and peers in, rows out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from trace_fast.bench.about import about
from trace_fast.bench.compare import OURS, Say, TraceFast, compare, method_fields
from trace_fast.bench.measure import gemm_rate
from trace_fast.bench.peers import BASELINE, ENDPOINTS, PEERS, SLOW, Peer, PeerSetup, peer_module
from trace_fast.bench.peers.http_json import check_url
from trace_fast.bench.rows import Row
from trace_fast.bench.truth import true_scores
from trace_fast.checks import check_rollout
from trace_fast.errors import ConfigError, RolloutError
from trace_fast.layout import pack_layout
from trace_fast.plan import layout_flops
from trace_fast.rollout import Rollout
from trace_fast.scorer import Scorer


@dataclass(frozen=True)
class PeerChoice:
    """Which peers run: those named, or all but the slow ones; endpoints by name of the peer.

    Raises:
        ConfigError: an unknown peer, an endpoint for a peer that has none, or what is no URL.
    """

    named: tuple[str, ...] = ()
    endpoints: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.named:
            peer_module(name)
        for name, url in self.endpoints.items():
            if name not in ENDPOINTS:
                raise ConfigError(f"endpoint: expected {' or '.join(sorted(ENDPOINTS))}=URL, got {name!r}")
            check_url(name, url)

    @classmethod
    def of(cls, named: Sequence[str], endpoints: Sequence[str]) -> PeerChoice:
        """From what the user wrote; an endpoint is ``NAME=URL``."""
        urls: dict[str, str] = {}
        for text in endpoints:
            name, equals, url = text.partition("=")
            if not equals or name in urls:
                raise ConfigError(f"endpoint: expected sglang=URL or vllm=URL, each once, got {text!r}")
            urls[name] = url
        return cls(tuple(dict.fromkeys(named)), urls)

    @property
    def names(self) -> list[str]:
        """In the order of ``PEERS``. The baseline is always there, and so is every peer with an endpoint."""
        wanted = set(self.named) or set(PEERS) - SLOW
        return [name for name in PEERS if name in wanted | {BASELINE} | self.endpoints.keys()]

    def asked_for(self, name: str) -> bool:
        """Whether the user named it, so that its absence is a failure of the run."""
        return name in self.named or name in self.endpoints


def comparable(rollout: Rollout, scorer: Scorer) -> Rollout:
    """The rollout as every method can score it: with its first gold answer only.

    Raises:
        RolloutError: the model refuses it, or its history was rewritten (the peers share a prefix between states).
    """
    check_rollout(rollout, scorer.model.spec, scorer.model.vocab_size)
    if not rollout.nested:
        raise RolloutError(
            "inexact",
            "its template rewrites history, so states are no prefixes of one sequence, which the peers need",
            rollout_id=rollout.id,
            source=rollout.source,
        )
    if not all(len(opener) for opener in rollout.openers):
        raise RolloutError(
            "opener",
            "a state has an empty opener; the peers need at least one token between a state and its answer",
            rollout_id=rollout.id,
            source=rollout.source,
        )
    if len(rollout.answers) == 1:
        return rollout
    texts = None if rollout.answer_texts is None else rollout.answer_texts[:1]
    return dataclasses.replace(rollout, answers=rollout.answers[:1], answer_texts=texts)


class Bench:
    """Peers of one model, opened once; ``rows`` measures rollouts. Use as a context manager.

    Attributes:
        absent: why the peers that do not run do not, by name.
    """

    def __init__(self, scorer: Scorer, model: str, choice: PeerChoice) -> None:
        self._scorer = scorer
        self._device: torch.device = scorer.model.device
        self._dtype = str(scorer.model.dtype).removeprefix("torch.")
        setup = PeerSetup(scorer.model.module, scorer.model.spec, model, choice.endpoints)
        reasons = {name: PEERS[name].why_not(setup) for name in choice.names}
        self.absent: dict[str, str] = {name: reason for name, reason in reasons.items() if reason is not None}
        self._setup = setup
        self._names = [name for name in choice.names if name not in self.absent]
        self._methods: dict[str, Peer] = {OURS: TraceFast(scorer)}
        self._opened = ExitStack()

    def __enter__(self) -> Bench:
        """Opens the peers; those already open are closed when one cannot be."""
        with ExitStack() as opened:
            for name in self._names:
                self._methods[name] = PEERS[name].open_peer(self._setup)
                opened.callback(self._methods[name].close)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def rows(self, rollouts: Sequence[Rollout], *, rounds: int, say: Say) -> Iterator[list[Row]]:
        """The rows of each rollout in turn (as ``comparable`` gives them), absent peers included."""
        say(f"float64 truth of {len(rollouts)} rollouts")
        truths = true_scores(self._scorer.model.module, rollouts)
        backends = self._scorer.model.backends
        seconds: dict[tuple[str, int, int], float] = {}  # of a method at a number of turns and of distinct tokens
        for rollout, truth_S in zip(rollouts, truths, strict=True):
            rate = gemm_rate(self._scorer.model.dtype, self._device)
            layout = pack_layout([rollout])
            flops = layout_flops(self._scorer.model.spec, layout)
            found = compare(rollout, self._methods, truth_S, rounds=rounds, device=self._device, say=say)
            shared: dict[str, Any] = {
                **about(self._device),
                "model": self._scorer.reference,
                "backend": backends.arithmetic(self._scorer.model.dtype),
                "dtype": self._dtype,
                "gemm_gflops": round(rate / 1e9, 1),
                "rollout": rollout.id,
                "turns": rollout.n_turns,
                "states": rollout.n_states,
                "tokens_trunk": len(rollout.input_ids),
                "tokens_unique": len(layout),
                "tokens_naive": layout.tokens_naive,
                "flops": flops,
            }
            fields = [method_fields(name, found, truth_S, flops / rate) for name in found]
            fields += [{"method": name, "numbers": "absent", "reason": why} for name, why in self.absent.items()]
            for one in fields:
                if one.get("seconds") is None:
                    continue
                seconds[one["method"], rollout.n_turns, len(layout)] = one["seconds"]
                half = seconds.get((one["method"], rollout.n_turns // 2, len(layout)))
                if half is not None and rollout.n_turns and rollout.n_turns % 2 == 0:
                    one["added_by_doubled_turns"] = one["seconds"] / half - 1
            yield [Row(**shared, **one) for one in fields]
