"""The command line with a scorer that needs no model: ``python fake_cli.py score ... --model fake``.

Numbers depend on a rollout's tokens alone, so that runs can be compared byte for byte. Model names carry the
behaviour: ``fake:pack=3:sleep=0.01:fail=r2:hash=b``. ``--serve`` is for tests that kill many runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from trace_fast.cli import build_app
from trace_fast.errors import ModelError, RolloutError
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore


@dataclass
class FakePack:
    scores: list[RolloutScore]
    rollouts: list[Rollout]
    tokens_unique: int
    tokens_naive: int
    seconds: float


class FakeScorer:
    """Packs of a fixed number of rollouts; ``fail`` names ids for which the model gives NaN."""

    tokenizer: Any = None

    def __init__(self, *, pack: int = 3, sleep: float = 0.0, fail: tuple[str, ...] = (), hash: str = "a") -> None:
        self.reference = f"fake@{hash}"
        self.pack, self.sleep, self.fail = pack, sleep, fail

    def iter_packs(
        self,
        rollouts: Iterable[Rollout],
        *,
        trunk_logprobs: bool = False,
        errors: Callable[[RolloutError], None] | None = None,
    ) -> Iterator[FakePack]:
        stream = iter(rollouts)
        while pack := list(islice(stream, self.pack)):
            time.sleep(self.sleep)
            scores = []
            for rollout in pack:
                try:
                    scores.append(self._score(rollout, trunk_logprobs))
                except RolloutError as error:
                    assert errors is not None
                    errors(error)
            unique = sum(len(r.input_ids) for r in pack)
            naive = sum(int(r.boundaries.sum()) for r in pack)
            yield FakePack(scores, pack, unique, naive, 0.25)

    def _score(self, rollout: Rollout, trunk_logprobs: bool) -> RolloutScore:
        states, aliases = rollout.n_states, len(rollout.answers)
        seeds = [zlib.crc32(rollout.prefix(k).tobytes()) for k in range(states)]
        logprobs = -1e-3 - np.array([[(s >> (a * 3)) % 9973 / 1000 for a in range(aliases)] for s in seeds])
        if rollout.id in self.fail:
            logprobs[0, 0] = np.nan
        alias = logprobs.argmax(axis=1)
        return RolloutScore(
            id=rollout.id,
            group=rollout.group,
            n_turns=rollout.n_turns,
            boundaries=rollout.boundaries,
            mean_logprobs=logprobs.max(axis=1),
            alias_mean_logprobs=logprobs,
            alias=alias,
            token_logprobs=tuple(np.full(len(rollout.answers[a]), -0.5, np.float32) for a in alias),
            answer=None if rollout.answer_texts is None else rollout.answer_texts[alias[-1]],
            answer_ids=rollout.answers[alias[-1]],
            reward=rollout.reward,
            trunk_logprobs=np.full(len(rollout.input_ids) - 1, -0.1, np.float32) if trunk_logprobs else None,
            model=self.reference,
            source=rollout.source,
            extra=rollout.extra,
        )


def open_fake(settings: Any) -> FakeScorer:
    """The scorer that a model name ``fake:key=value:...`` describes."""
    name, *options = settings.model.split(":")
    if name != "fake":
        raise ModelError(f"cannot load {settings.model!r}: there is no such model")
    values = dict(option.split("=", 1) for option in options)
    return FakeScorer(
        pack=int(values.get("pack", 3)),
        sleep=float(values.get("sleep", 0)),
        fail=tuple(values.get("fail", "").split(",")),
        hash=values.get("hash", "a"),
    )


def serve() -> None:
    """Runs each command line (a JSON list on stdin) in a forked process: imports are paid once, kills hit one run.

    Prints the process id, then the exit status (negative: the signal that ended it).
    """
    from trace_fast import cli_score

    assert cli_score.turn_credit  # imported before the first fork
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                build_app(open_scorer=open_fake)(json.loads(line))
            except SystemExit as stop:
                code = int(stop.code or 0)
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        build_app(open_scorer=open_fake)()
