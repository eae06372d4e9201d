"""Runs episodes: all of them advance together, one generation and one call at a time.

The engine gets the requests of all episodes that still run, so it can batch them; their calls are carried out at the
same time, so the search can. What an episode becomes depends on its task and its seed, not on the others, as far as the
engine keeps that promise.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.rollout import Rollout
from trace_fast.trainer.engines.engine import Engine
from trace_fast.trainer.harness.actions import ActionParser
from trace_fast.trainer.harness.config import HarnessConfig
from trace_fast.trainer.harness.episode import Clock, Episode, Task
from trace_fast.trainer.harness.frame import ChatFrame
from trace_fast.trainer.search.browser import Browser, Index


class Harness:
    """What all episodes share.

    Args:
        frame: of the policy's tokenizer. index: what the browser searches in; called from several threads.
    """

    def __init__(
        self, frame: ChatFrame, index: Index, config: HarnessConfig, *, clock: Clock = time.monotonic
    ) -> None:
        self._frame = frame
        self._index = index
        self._config = config
        self._clock = clock
        self._parser = ActionParser(
            frame.call_format, repair=config.parser == "repair", thinking_open=frame.thinking_open
        )

    def run(
        self,
        tasks: Sequence[Task],
        engine: Engine,
        *,
        seed: int,
        samples: int = 1,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Rollout]:
        """``samples`` rollouts of every task, by task; those of one task form a group and lie side by side.

        Args:
            stop: asked between turns; where it says so, all episodes are given up and there are no rollouts.

        Raises:
            ConfigError, RolloutError: a task that cannot be run, before anything is generated.
            TraceFastError: the engine broke its protocol.
        """
        if samples < 1:
            raise ConfigError(f"samples: expected at least 1, got {samples}")
        twice = [name for name, count in Counter(task.id for task in tasks).items() if count > 1]
        if twice:
            raise ConfigError(f"tasks: expected ids that differ, since each names a group, got {twice[0]!r} twice")
        episodes = [
            self._episode(task, f"{task.id}/{sample}", [seed, number, sample])
            for number, task in enumerate(tasks)
            for sample in range(samples)
        ]
        with ThreadPoolExecutor(self._config.tool_threads, thread_name_prefix="tools") as tools:
            while self._advance(episodes, engine, tools):
                if stop():
                    return []
        return [episode.rollout() for episode in episodes]

    def _episode(self, task: Task, id: str, entropy: list[int]) -> Episode:
        browser = Browser(
            self._index,
            observation_tokens=self._config.observation_tokens,
            count_tokens=self._frame.count_tokens,
        )
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint32)[0])
        return Episode(task, self._frame, browser, self._config, self._parser, id=id, seed=seed, clock=self._clock)

    @staticmethod
    def _advance(episodes: Sequence[Episode], engine: Engine, tools: ThreadPoolExecutor) -> bool:
        """One turn of every episode that still runs; False when none does."""
        waiting = [(episode, request) for episode in episodes if (request := episode.request()) is not None]
        if not waiting:
            return False
        generations = engine.generate([request for _, request in waiting])
        if len(generations) != len(waiting):
            raise TraceFastError(f"engine: expected {len(waiting)} generations, got {len(generations)}")
        acting = [
            (episode, action)
            for (episode, _), generation in zip(waiting, generations, strict=True)
            if (action := episode.accept(generation)) is not None
        ]
        observations = tools.map(lambda pair: pair[0].carry_out(pair[1]), acting)
        for (episode, action), observation in zip(acting, observations, strict=True):
            episode.observe(action, observation)
        return True
