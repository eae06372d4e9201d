"""The browser of one episode: search results and pages that stay open between calls (TRACE, Section 4.1 and A.3).

``browser.search`` lists documents; its ids count from 0 and are those of the most recent search, whether it found
anything or not. ``browser.open`` with an id opens that document; -1 stays on the open page. ``loc`` -1 is the line
that matches the search best when a result is opened, and the top otherwise. Every document opened has a cursor (0, 1,
...) that it keeps; ``browser.find`` can name one, which makes that page the open one again.

A call that cannot be carried out is an observation with ``error`` set, and changes nothing. Observations hold at most
``observation_tokens`` tokens and end on the edge of a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from trace_fast.errors import ConfigError
from trace_fast.trainer.search.index import Hit
from trace_fast.trainer.search.pages import CountTokens, Page, cut_text, cut_to_budget
from trace_fast.trainer.search.retriever import SearchError
from trace_fast.trainer.search.tools import FIND, OPEN, SEARCH, ToolCallError, check_arguments

LEAST_TOKENS = 64  # below that not even a message fits
_SUMMARY = 200  # characters
_TITLE = 120


class Index(Protocol):
    """What a browser searches in; ``SearchIndex`` is one."""

    def search(self, query: str, topn: int) -> list[Hit]:
        """Raises ``SearchError`` where nothing could be searched."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy reads after a call. ``docid``: the document that the call was about, where there is one."""

    text: str
    error: bool = False
    docid: str | None = None


class Browser:
    """The state of one episode. One caller at a time; the index may be shared by many.

    Args:
        observation_tokens: most tokens of one observation, at least 64.
        count_tokens: how many tokens a text has for the policy.
    """

    def __init__(self, index: Index, *, observation_tokens: int, count_tokens: CountTokens) -> None:
        if observation_tokens < LEAST_TOKENS:
            raise ConfigError(f"observation_tokens: expected at least {LEAST_TOKENS}, got {observation_tokens}")
        self._index = index
        self._budget = observation_tokens
        self._count_tokens = count_tokens
        self._query = ""
        self._results: list[Hit] | None = None
        self._pages: list[Page] = []  # by cursor
        self._open: int | None = None  # cursor

    def call(self, name: str, arguments: Any) -> Observation:
        """Carries out one call; never raises for what a policy can write."""
        try:
            checked = check_arguments(name, arguments)
            if name == SEARCH:
                return self._search(**checked)
            if name == OPEN:
                return self._open_page(**checked)
            assert name == FIND, name
            return self._find(**checked)
        except ToolCallError as error:
            return Observation(cut_text(f"Error: {error}", self._budget, self._count_tokens), error=True)
        except SearchError as error:
            text = f"Error: {name}: the search failed: {error}"
            return Observation(cut_text(text, self._budget, self._count_tokens), error=True)

    # --- the tools ----------------------------------------------------------------------------------------------

    def _search(self, query: str, topn: int) -> Observation:
        self._results, self._query = self._index.search(query, topn), query
        shown = cut_text(query, self._budget // 4, self._count_tokens)
        if not self._results:
            return Observation(f"No documents for {shown!r}.")
        blocks = [self._result(number, hit) for number, hit in enumerate(self._results)]
        text, _ = cut_to_budget(f"Results for {shown!r}:", blocks, self._budget, self._count_tokens)
        return Observation(text)

    def _result(self, number: int, hit: Hit) -> str:
        page = Page.of(hit.document)
        line = page.relevant_line(self._query)
        summary = _cut(" ".join(page.lines[line : line + 3]), _SUMMARY)
        return f"[{number}] {_title(page)}\n    {hit.document.url}\n    {summary}"

    def _open_page(self, id: int, loc: int, num_lines: int) -> Observation:
        if id == -1:
            cursor, page = self._page_at(-1, OPEN)
            start = max(loc, 0)
        else:
            page = self._page_of_result(id)
            start = page.relevant_line(self._query) if loc == -1 else loc
            known = [other.document.docid for other in self._pages]
            cursor = known.index(page.document.docid) if page.document.docid in known else len(known)
        if num_lines == 0:
            raise ToolCallError(f"{OPEN}: num_lines: expected -1 or at least 1, got 0")
        if start >= max(len(page.lines), 1):
            raise ToolCallError(f"{OPEN}: loc: the page has lines 0..{len(page.lines) - 1}, got {loc}")
        if cursor == len(self._pages):
            self._pages.append(page)
        self._open = cursor
        end = len(page.lines) if num_lines == -1 else min(start + num_lines, len(page.lines))
        head = f"{_title(page)}\n{page.document.url}\npage {cursor}, {len(page.lines)} lines"
        return self._numbered(page, head, range(start, end))

    def _find(self, pattern: str, cursor: int) -> Observation:
        number, page = self._page_at(cursor, FIND)
        self._open = number
        shown = cut_text(pattern, self._budget // 4, self._count_tokens)
        found = page.find(pattern)
        if not found:
            return Observation(f"No line of page {number} has {shown!r}.", docid=page.document.docid)
        many = "1 line has" if len(found) == 1 else f"{len(found)} lines have"
        return self._numbered(page, f"{many} {shown!r} on page {number}:", found)

    # --- parts --------------------------------------------------------------------------------------------------

    def _page_of_result(self, id: int) -> Page:
        if self._results is None:
            raise ToolCallError(f"{OPEN}: id: nothing was searched yet, so there is no result {id}")
        if id >= len(self._results):
            raise ToolCallError(f"{OPEN}: id: the last search found {len(self._results)} documents, got {id}")
        return Page.of(self._results[id].document)

    def _page_at(self, cursor: int, tool: str) -> tuple[int, Page]:
        if self._open is None:
            raise ToolCallError(f"{tool}: no page is open; open a document of a search first")
        number = self._open if cursor == -1 else cursor
        if number >= len(self._pages):
            raise ToolCallError(f"{tool}: cursor: the pages opened are 0..{len(self._pages) - 1}, got {cursor}")
        return number, self._pages[number]

    def _numbered(self, page: Page, head: str, numbers: range | list[int]) -> Observation:
        lines = [f"{number}: {page.lines[number]}" for number in numbers]
        text, _ = cut_to_budget(head, lines, self._budget, self._count_tokens)
        return Observation(text, docid=page.document.docid)


def _title(page: Page) -> str:
    return _cut(page.document.title or next(filter(None, page.lines), page.document.docid), _TITLE)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
