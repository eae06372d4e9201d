"""A document as the browser shows it: numbered lines, searchable, cut to a token budget on the edge of a line.

Long paragraphs are wrapped between words, so that windows and budgets cut where a reader would. Exact search runs over
paragraphs, not over wrapped lines: a pattern that spans a wrap is found, and is reported at the line it begins in.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trace_fast.trainer.search.bm25 import words
from trace_fast.trainer.search.corpus import Document

LINE_WIDTH = 100  # characters
CUT_MARK = " [cut]"
CountTokens = Callable[[str], int]

_LINE = re.compile(rf"\S.{{0,{LINE_WIDTH - 1}}}(?=\s|$)|\S.{{0,{LINE_WIDTH - 1}}}")


@dataclass(frozen=True, slots=True)
class Page:
    """Lines of a document. ``paragraphs[i]`` begins at line ``first_lines[i]``; ``starts[n]`` is where line n begins
    in its paragraph."""

    document: Document
    lines: tuple[str, ...]
    paragraphs: tuple[str, ...]
    first_lines: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, document: Document) -> Page:
        """Splits the text at its line breaks and wraps what is longer than ``LINE_WIDTH``; blank lines are lines."""
        lines: list[str] = []
        paragraphs: list[str] = []
        first_lines: list[int] = []
        starts: list[int] = []
        for paragraph in document.text.splitlines():
            first_lines.append(len(lines))
            paragraphs.append(paragraph)
            for start, line in _wrap(paragraph):
                starts.append(start)
                lines.append(line)
        return cls(document, tuple(lines), tuple(paragraphs), tuple(first_lines), tuple(starts))

    def find(self, pattern: str) -> list[int]:
        """Numbers of the lines in which the exact text begins, in order, each once."""
        found: dict[int, None] = {}
        for number, paragraph in enumerate(self.paragraphs):
            at = paragraph.find(pattern)
            while at >= 0:
                found[self._line_at(number, at)] = None
                at = paragraph.find(pattern, at + 1)
        return list(found)

    def _line_at(self, paragraph: int, offset: int) -> int:
        last = self.first_lines[paragraph + 1] if paragraph + 1 < len(self.first_lines) else len(self.lines)
        line = self.first_lines[paragraph]
        while line + 1 < last and self.starts[line + 1] <= offset:
            line += 1
        return line

    def relevant_line(self, query: str) -> int:
        """The line that shares most with a query: its words count by how few lines have them; 0 where none has any."""
        wanted = set(words(query))
        shared = [wanted.intersection(words(line)) for line in self.lines]
        counts = Counter(word for line in shared for word in line)
        weights = [sum(1 / counts[word] for word in sorted(line)) for line in shared]
        return max(range(len(weights)), key=lambda line: (weights[line], -line), default=0)


def _wrap(paragraph: str) -> list[tuple[int, str]]:
    """``(offset, line)`` pieces; a word longer than a line is cut."""
    if len(paragraph) <= LINE_WIDTH:
        return [(0, paragraph.strip())]
    return [(match.start(), match.group()) for match in _LINE.finditer(paragraph)] or [(0, "")]


def cut_to_budget(head: str, lines: Sequence[str], budget: int, count_tokens: CountTokens) -> tuple[str, int]:
    """``head`` and as many leading lines as fit; ``(text, lines taken)``.

    A first line that does not fit alone is cut within and marked, so that something is always shown.
    """
    taken, spent = 0, count_tokens(head)
    while taken < len(lines) and spent < budget:
        spent += count_tokens("\n" + lines[taken])
        taken += 1

    def text_of(count: int) -> str:
        return "\n".join([head, *lines[:count]])

    # Pieces counted apart are an estimate; the text as a whole decides.
    while taken < len(lines) and count_tokens(text_of(taken + 1)) <= budget:
        taken += 1
    while taken > 1 and count_tokens(text_of(taken)) > budget:
        taken -= 1
    return cut_text(text_of(taken), budget, count_tokens), taken


def cut_text(text: str, budget: int, count_tokens: CountTokens) -> str:
    """The text, or as much of its beginning as fits with a mark that it was cut."""
    if count_tokens(text) <= budget:
        return text
    low, high = 0, len(text)  # the beginning of length low fits; of length high does not
    while high - low > 1:
        middle = (low + high) // 2
        if count_tokens(text[:middle] + CUT_MARK) <= budget:
            low = middle
        else:
            high = middle
    return text[:low] + CUT_MARK
