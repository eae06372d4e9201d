"""One retriever for many callers at once: their queries run in common batches, and known ones are not run again.

A batch is whatever came in while the one before it ran, so a lone caller never waits for company. Every query is
searched to one fixed depth and a caller gets the beginning of that list; what it gets does not depend on how many
results others asked for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from types import TracebackType

from trace_fast.errors import ConfigError
from trace_fast.trainer.search.retriever import Match, Retriever, SearchError

Found = dict[str, list[Match]]


@dataclass(slots=True)
class _Batch:
    """Queries that will run together; open to more until it starts."""

    queries: list[str] = field(default_factory=list)


class QueryService:
    """A ``Retriever`` over another one.

    Args:
        depth: matches searched for each query; no caller may ask for more.
        max_batch: queries in one call of the retriever.
        cache_size: queries whose matches are kept, the least recently used go first; 0 keeps none.
        timeout_s: seconds that one call waits.

    Raises:
        ConfigError: a setting below its least value.
    """

    def __init__(
        self,
        retriever: Retriever,
        *,
        depth: int = 50,
        max_batch: int = 64,
        cache_size: int = 100_000,
        timeout_s: float = 30.0,
    ) -> None:
        for name, value, least in (("depth", depth, 1), ("max_batch", max_batch, 1), ("cache_size", cache_size, 0)):
            if value < least:
                raise ConfigError(f"{name}: expected at least {least}, got {value}")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s: expected more than 0, got {timeout_s}")
        self._retriever = retriever
        self._depth = depth
        self._max_batch = max_batch
        self._cache_size = cache_size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, list[Match]] = OrderedDict()
        self._running: dict[str, Future[Found]] = {}
        self._open: tuple[_Batch, Future[Found]] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="search")

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Match]]:
        """As ``Retriever.retrieve``.

        Raises:
            SearchError: the retriever's own, or it gave no answer within ``timeout_s``.
            ConfigError: ``k`` is beyond ``depth``.
        """
        if not 1 <= k <= self._depth:
            raise ConfigError(f"k: expected 1..{self._depth} (the depth of this service), got {k}")
        with self._lock:
            waits = [(query, self._known_or_joined(query)) for query in queries]
        return [self._wait(query, known)[:k] for query, known in waits]

    def close(self) -> None:
        """Ends the service; batches that have not started are dropped and their callers get a ``CancelledError``."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> QueryService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- under the lock -----------------------------------------------------------------------------------------

    def _known_or_joined(self, query: str) -> list[Match] | Future[Found]:
        if query in self._cache:
            self._cache.move_to_end(query)
            return self._cache[query]
        if query in self._running:  # another caller asked the same a moment ago
            return self._running[query]
        if self._open is None or len(self._open[0].queries) >= self._max_batch:
            batch = _Batch()
            self._open = (batch, self._executor.submit(self._run, batch))
        batch, future = self._open
        batch.queries.append(query)
        self._running[query] = future
        return future

    # --- outside of it ------------------------------------------------------------------------------------------

    def _run(self, batch: _Batch) -> Found:
        with self._lock:
            if self._open is not None and self._open[0] is batch:
                self._open = None
            queries = tuple(batch.queries)
        try:
            results = self._retriever.retrieve(queries, self._depth)
            if len(results) != len(queries):
                raise SearchError(f"the retriever gave {len(results)} lists of matches for {len(queries)} queries")
            found = dict(zip(queries, results, strict=True))
            with self._lock:
                for query, matches in found.items():
                    self._remember(query, matches)
            return found
        finally:
            with self._lock:
                for query in queries:
                    del self._running[query]

    def _remember(self, query: str, matches: list[Match]) -> None:
        self._cache[query] = matches
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    def _wait(self, query: str, known: list[Match] | Future[Found]) -> list[Match]:
        if isinstance(known, list):
            return known
        try:
            return known.result(self._timeout_s)[query]
        except FutureTimeout:
            raise SearchError(f"the search gave no answer within {self._timeout_s:g} s") from None
