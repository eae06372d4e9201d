"""Input order for what a scorer gives in packs and a reader gives in between."""

from __future__ import annotations

from collections import OrderedDict

from trace_fast.errors import RolloutError


class Ledger:
    """Keeps what was read but is not yet written, in input order.

    A record becomes ready once it and all before it are scored or failed. So both files stay prefixes of what an
    uninterrupted run writes, whatever the packs were: see ``trace_fast.score_writer``.
    """

    def __init__(self, *, strict: bool) -> None:
        # Taken from at the head: a plain dict would walk over all that was taken before to find it.
        self._pending: OrderedDict[str, bytes | RolloutError | None] = OrderedDict()
        self._strict = strict
        self.n_failed_waiting = 0
        self.stopping = False  # strict, and a record failed: read no further
        self.closed = False  # that record has been taken: nothing after it counts

    def read(self, source: str) -> None:
        assert source not in self._pending, f"two records have the source {source}"
        self._pending[source] = None

    def scored(self, source: str, line: bytes) -> None:
        if self.closed:
            return
        assert self._pending.get(source, line) is None, f"{source} was not read, or came out of the scorer twice"
        self._pending[source] = line

    def failed(self, error: RolloutError) -> None:
        """A record could not be read (it is new here then) or scored."""
        if self.closed or (self.stopping and error.source not in self._pending):
            return
        assert self._pending.get(error.source) is None, f"{error.source} came out of the scorer twice"
        self._pending[error.source] = error
        self.n_failed_waiting += 1
        self.stopping = self.stopping or self._strict

    def pop_ready(self) -> tuple[list[bytes], list[RolloutError]]:
        """Takes the longest settled run of records at the head; in strict mode nothing after the first failed one.

        Costs as much as it takes, however much waits behind the head.
        """
        scores: list[bytes] = []
        errors: list[RolloutError] = []
        while self._pending:
            outcome = next(iter(self._pending.values()))
            if outcome is None:
                break
            self._pending.popitem(last=False)
            if isinstance(outcome, bytes):
                scores.append(outcome)
                continue
            errors.append(outcome)
            if self._strict:
                self._pending.clear()
                self.closed = True
                break
        self.n_failed_waiting = 0 if self.closed else self.n_failed_waiting - len(errors)
        return scores, errors

    def check_empty(self) -> None:
        assert not self._pending, f"the scorer gave neither a number nor an error for {next(iter(self._pending))}"
