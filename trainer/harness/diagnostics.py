"""What an episode's tool use looked like: counts that are recorded with every rollout (TRACE, Section 4.1 and A.3)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trace_fast.trainer.search.browser import Observation
from trace_fast.trainer.search.tools import FIND, OPEN, SEARCH


class Diagnostics:
    """Counts the calls of one episode as they come.

    A query is *repeated* when it was searched before but for letter case and spacing; a document is *reopened* when a
    result opens one that was opened before (moving within the open page is not); a find is repeated when the same text
    was looked for in the same document. A *navigation error* is an ``open`` or ``find`` that failed.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._invalid: Counter[str] = Counter()
        self._repairs: Counter[str] = Counter()
        self._repeated: Counter[str] = Counter()
        self._seen: set[tuple[str, ...]] = set()

    def called(self, name: str, arguments: dict[str, Any], observation: Observation) -> None:
        """One call that reached the browser."""
        self._calls[name] += 1
        if observation.error:
            self._errors[name] += 1
        elif name == SEARCH:
            self._again("queries", " ".join(arguments["query"].casefold().split()))
        elif name == OPEN and arguments.get("id", -1) != -1:
            self._again("documents", str(observation.docid))
        elif name == FIND:
            self._again("finds", str(observation.docid), arguments["pattern"])

    def invalid(self, kind: str) -> None:
        """One turn without a call that could be carried out."""
        self._invalid[kind] += 1

    def repaired(self, kinds: tuple[str, ...]) -> None:
        """Repairs of one turn."""
        self._repairs.update(kinds)

    def record(self) -> dict[str, Any]:
        """The counts as plain JSON types."""
        return {
            "calls": dict(sorted(self._calls.items())),
            "failed_calls": dict(sorted(self._errors.items())),
            "repeated_queries": self._repeated["queries"],
            "reopened_documents": self._repeated["documents"],
            "repeated_finds": self._repeated["finds"],
            "navigation_errors": self._errors[OPEN] + self._errors[FIND],
            "invalid_turns": dict(sorted(self._invalid.items())),
            "repairs": dict(sorted(self._repairs.items())),
        }

    def _again(self, what: str, *key: str) -> None:
        if (what, *key) in self._seen:
            self._repeated[what] += 1
        self._seen.add((what, *key))
