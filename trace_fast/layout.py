"""From rollouts to one packed sequence: a token trie over all prefixes of a pack, laid out trunk-first.

Every distinct token of the pack is one row. A *span* is a run of rows that follow each other in the trie (depth
grows by one); it hangs at one place of one parent span. A row sees the key ranges of its span's ancestors and its
own span causally, which is all an attention kernel has to know. Host-side integers only; linear in tokens.

Shapes: N rows, P spans, R key ranges, M scored (row, target) pairs, I items (rollout, state, alias).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from trace_fast.errors import TraceFastError
from trace_fast.rollout import Rollout


@dataclass(frozen=True, slots=True, eq=False)
class SpanRanges:
    """Who sees whom, for attention kernels.

    Span p holds rows ``starts[p]:ends[p]`` at depths ``depths[p], depths[p]+1, ...``. Its rows see, all of them,
    the key rows ``ranges[cu_ranges[p]:cu_ranges[p+1]]`` (``(R, 2)`` start, end; in order of depth, disjoint,
    covering depths 0..depths[p]) and, causally, their own span. All ``int64`` on the host.
    """

    n_rows: int
    starts: np.ndarray
    ends: np.ndarray
    depths: np.ndarray
    ranges: np.ndarray
    cu_ranges: np.ndarray

    @classmethod
    def single(cls, n_rows: int) -> SpanRanges:
        """One plain causal sequence."""
        none = np.empty((0, 2), dtype=np.int64)
        zero = np.zeros(1, dtype=np.int64)
        return cls(n_rows, zero, np.array([n_rows]), zero, none, np.zeros(2, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts)

    def check(self) -> None:
        """That these ranges are a trie: what an attention kernel relies on without looking.

        Raises:
            TraceFastError: (a ``ValueError``) a span or range outside the rows, spans that overlap, ranges that do not
                cover the depths before a span, or a path that is not that of the span it hangs under.
        """

        def refuse(p: int, expected: str, got: object) -> NoReturn:
            raise TraceFastError(f"spans: span {p}: expected {expected}, got {got}")

        owner_N = np.full(self.n_rows, -1, dtype=np.int64)
        paths: dict[int, list[tuple[int, int]]] = {}
        for p in range(len(self)):
            start, end, depth = int(self.starts[p]), int(self.ends[p]), int(self.depths[p])
            if not 0 <= start <= end <= self.n_rows:
                refuse(p, f"rows within 0..{self.n_rows}", f"{start}..{end}")
            if (owner_N[start:end] >= 0).any():
                refuse(p, "rows of no other span", f"{start}..{end}, which overlap span {owner_N[start:end].max()}")
            owner_N[start:end] = p
        for p in np.argsort(self.depths, kind="stable").tolist():  # ancestors begin higher: they come first
            ranges, depth = self.ancestors(p).tolist(), int(self.depths[p])
            for s, e in ranges:
                if not 0 <= s < e <= self.n_rows:
                    refuse(p, f"key ranges within 0..{self.n_rows}", f"{s}..{e}")
            covered = sum(e - s for s, e in ranges)
            if covered != depth:
                refuse(p, f"key ranges that cover its depth {depth}", f"{covered} keys")
            paths[p] = _joined([*ranges, [int(self.starts[p]), int(self.ends[p])]])
            parent = int(owner_N[ranges[-1][1] - 1]) if ranges else -1  # -1: keys that are no span's rows
            if parent >= 0 and (parent not in paths or not _is_prefix(_joined(ranges), paths[parent])):
                refuse(p, f"the path of span {parent} that it hangs under", f"{ranges}")

    def ancestors(self, span: int) -> np.ndarray:
        """``(r, 2)`` key ranges of span p, without its own rows."""
        return self.ranges[self.cu_ranges[span] : self.cu_ranges[span + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """One pack, ready for a single forward pass.

    Args:
        input_ids, positions: ``(N,)`` tokens and their depth in the trie (= their true position).
        spans: the visibility of rows.
        target_rows, target_ids: ``(M,)`` row whose hidden state predicts the token, and the token.
        cu_targets: ``(I+1,)`` item i owns pairs ``cu_targets[i]:cu_targets[i+1]``, one a gold-answer token.
        item_rollout, item_state, item_alias: ``(I,)`` what the item scores (rollout = index in the pack).
        trunk_ranges: for each rollout its own tokens as ``(r, 2)`` row ranges, in order.
        tokens_naive: tokens that one full pass a (state, alias) would have forwarded.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    spans: SpanRanges
    target_rows: np.ndarray
    target_ids: np.ndarray
    cu_targets: np.ndarray
    item_rollout: np.ndarray
    item_state: np.ndarray
    item_alias: np.ndarray
    trunk_ranges: tuple[np.ndarray, ...]
    tokens_naive: int

    def __len__(self) -> int:
        """N, the number of distinct tokens."""
        return len(self.input_ids)

    def trunk_rows(self, rollout: int) -> np.ndarray:
        """``(N_r,) int64`` row of each token of the rollout's ``input_ids``."""
        return rows_of(self.trunk_ranges[rollout])

    def __str__(self) -> str:
        spans = self.spans
        return (
            f"PackedLayout: {len(self.trunk_ranges)} rollouts, {len(self.item_state)} scored items, "
            f"{len(self.target_ids)} scored tokens; {len(self)} distinct of {self.tokens_naive} naive tokens "
            f"({self.tokens_naive / max(len(self), 1):.1f}x), {len(spans)} spans, {len(spans.ranges)} key ranges, "
            f"depth {int(self.positions.max(initial=-1)) + 1}"
        )


def _joined(ranges: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Ranges with those that touch made one."""
    found: list[tuple[int, int]] = []
    for s, e in ranges:
        if found and found[-1][1] == s:
            found[-1] = (found[-1][0], e)
        elif e > s:
            found.append((s, e))
    return found


def _is_prefix(ranges: list[tuple[int, int]], path: list[tuple[int, int]]) -> bool:
    """Whether the rows of ``ranges`` are the first rows of ``path``; both joined."""
    if len(ranges) > len(path) or ranges[:-1] != path[: len(ranges) - 1]:
        return False
    return ranges[-1][0] == path[len(ranges) - 1][0] and ranges[-1][1] <= path[len(ranges) - 1][1]


def rows_of(ranges: np.ndarray) -> np.ndarray:
    """Flattens ``(r, 2)`` row ranges into row numbers, in order."""
    return np.concatenate([np.arange(s, e) for s, e in ranges] or [np.empty(0, dtype=np.int64)])


class _Span:
    """A run of tokens; children hang after ``offset`` of them, found by (offset, first token)."""

    __slots__ = ("children", "depth", "offset", "parent", "row", "tokens")

    def __init__(self, parent: _Span | None, offset: int, tokens: np.ndarray) -> None:
        self.parent = parent
        self.offset = offset
        self.tokens = tokens
        self.depth: int = 0 if parent is None else parent.depth + offset
        self.children: dict[tuple[int, int], _Span] = {}
        self.row = -1  # first row, set when rows are handed out


class _Piece:
    """Tokens ``start:end`` of a span: one step of a path through the trie."""

    __slots__ = ("end", "span", "start")

    def __init__(self, span: _Span, start: int, end: int) -> None:
        self.span, self.start, self.end = span, start, end


class LayoutBuilder:
    """Collects rollouts of a pack; ``build`` lays them out. The trie shares whatever prefixes have in common:
    a group's prompt, an opener's first tokens with the trunk, aliases with each other, equal rollouts altogether.
    """

    def __init__(self) -> None:
        self._root = _Span(None, 0, np.empty(0, dtype=np.int64))
        self._rollouts: list[Rollout] = []
        self._trunks: list[list[_Piece]] = []
        self._new_spans: list[list[_Span]] = []  # a rollout's own spans, trunk first

    def add(self, rollout: Rollout) -> None:
        """Adds a rollout's trunk; branches follow in ``build``, so that they can share any trunk of the pack."""
        self._rollouts.append(rollout)
        self.add_sequence(rollout.input_ids)

    def add_sequence(self, input_ids: np.ndarray) -> None:
        """Adds a trunk alone."""
        new: list[_Span] = []
        self._trunks.append(self._extend((self._root, 0), input_ids, new))
        self._new_spans.append(new)

    def build(self) -> PackedLayout:
        items: list[tuple[int, int, int, list[_Piece], np.ndarray]] = []
        naive = 0
        for r, rollout in enumerate(self._rollouts):
            for k in range(rollout.n_states):
                if rollout.nested:
                    place = self._place(self._trunks[r], int(rollout.boundaries[k]))
                    lead: list[_Piece] = []
                else:
                    lead = self._extend((self._root, 0), rollout.prefix(k), self._new_spans[r])
                    place = (lead[-1].span, lead[-1].end) if lead else (self._root, 0)
                before = [_Piece(place[0], place[1] - 1, place[1])] if place[1] else []
                for a, answer in enumerate(rollout.answers):
                    branch = np.concatenate([rollout.openers[k], answer[:-1]])
                    pieces = before + self._extend(place, branch, self._new_spans[r])
                    items.append((r, k, a, _last(pieces, len(answer)), answer))
                    naive += len(rollout.prefix(k)) + len(branch)
        return self._lay_out(items, naive)

    # --- trie -----------------------------------------------------------------------------------------------

    @staticmethod
    def _extend(place: tuple[_Span, int], tokens: np.ndarray, new: list[_Span]) -> list[_Piece]:
        """Walks ``tokens`` down from ``place``, growing one new span where the trie has no such path."""
        span, offset = place
        pieces: list[_Piece] = []
        while len(tokens):
            shared = _common_prefix(span.tokens[offset:], tokens)
            if shared:
                pieces.append(_Piece(span, offset, offset + shared))
                tokens, offset = tokens[shared:], offset + shared
                continue
            key = (offset, int(tokens[0]))
            child = span.children.get(key)
            if child is None:
                child = span.children[key] = _Span(span, offset, tokens)
                new.append(child)
                pieces.append(_Piece(child, 0, len(tokens)))
                break
            span, offset = child, 0
        return pieces

    def _place(self, trunk: list[_Piece], depth: int) -> tuple[_Span, int]:
        """The place of the trunk after ``depth`` tokens."""
        for piece in reversed(trunk):
            inside = depth - piece.span.depth
            if inside > piece.start:
                return piece.span, inside
        return self._root, 0

    # --- rows -----------------------------------------------------------------------------------------------

    def _lay_out(self, items: list[tuple[int, int, int, list[_Piece], np.ndarray]], naive: int) -> PackedLayout:
        spans = [span for owned in self._new_spans for span in owned]
        rows = 0
        for span in spans:
            span.row = rows
            rows += len(span.tokens)
        depths = np.array([s.depth for s in spans], dtype=np.int64)
        starts = np.array([s.row for s in spans], dtype=np.int64)
        lengths = np.array([len(s.tokens) for s in spans], dtype=np.int64)
        ranges, cu_ranges = _ancestor_ranges(spans)
        input_ids = np.concatenate([s.tokens for s in spans]) if spans else np.empty(0, dtype=np.int64)
        positions = np.arange(rows) + np.repeat(depths - starts, lengths)
        pieces = [piece for item in items for piece in item[3]]
        counts = np.array([len(item[4]) for item in items], dtype=np.int64)
        return PackedLayout(
            input_ids=input_ids,
            positions=positions,
            spans=SpanRanges(rows, starts, starts + lengths, depths, ranges, cu_ranges),
            target_rows=rows_of(np.array([(p.span.row + p.start, p.span.row + p.end) for p in pieces])),
            target_ids=np.concatenate([item[4] for item in items]) if items else np.empty(0, dtype=np.int64),
            cu_targets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            item_rollout=np.array([item[0] for item in items], dtype=np.int64),
            item_state=np.array([item[1] for item in items], dtype=np.int64),
            item_alias=np.array([item[2] for item in items], dtype=np.int64),
            trunk_ranges=tuple(
                np.array([(p.span.row + p.start, p.span.row + p.end) for p in trunk], dtype=np.int64).reshape(-1, 2)
                for trunk in self._trunks
            ),
            tokens_naive=naive,
        )


def pack_layout(rollouts: Sequence[Rollout]) -> PackedLayout:
    """The layout of one pack holding exactly these rollouts."""
    builder = LayoutBuilder()
    for rollout in rollouts:
        builder.add(rollout)
    return builder.build()


def pack_sequences(sequences: Iterable[np.ndarray]) -> PackedLayout:
    """The layout of sequences that nothing hangs from: what they have in common from the start on is computed once.

    Args:
        sequences: ``(L,) int64`` ids each. ``trunk_rows(i)`` are the rows of sequence i.
    """
    builder = LayoutBuilder()
    for input_ids in sequences:
        builder.add_sequence(input_ids)
    return builder.build()


def shared_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two token sequences."""
    return _common_prefix(a, b)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def _last(pieces: list[_Piece], count: int) -> list[_Piece]:
    """The last ``count`` tokens of a path."""
    kept: list[_Piece] = []
    for piece in reversed(pieces):
        if count <= 0:
            break
        start = max(piece.start, piece.end - count)
        kept.append(_Piece(piece.span, start, piece.end))
        count -= piece.end - start
    assert count == 0, "a scored answer needs a token before it; Rollout refuses states without one"
    return kept[::-1]


def _ancestor_ranges(spans: list[_Span]) -> tuple[np.ndarray, np.ndarray]:
    """Key ranges of every span: its parent's, then the parent's own rows up to where it hangs."""
    by_span: dict[int, list[tuple[int, int]]] = {}

    def ranges_of(span: _Span) -> list[tuple[int, int]]:
        # iterative: a chain of rollouts that extend each other can be longer than Python's recursion limit
        chain = []
        while id(span) not in by_span and span.parent is not None:
            chain.append(span)
            span = span.parent
        found = by_span.get(id(span), [])
        for child in reversed(chain):
            assert child.parent is not None
            if child.offset:
                start, end = child.parent.row, child.parent.row + child.offset
                if found and found[-1][1] == start:
                    found = [*found[:-1], (found[-1][0], end)]
                else:
                    found = [*found, (start, end)]
            by_span[id(child)] = found
        return found

    per_span = [ranges_of(span) for span in spans]
    flat = np.array([r for ranges in per_span for r in ranges], dtype=np.int64).reshape(-1, 2)
    cu = np.concatenate([[0], np.cumsum([len(r) for r in per_span])]).astype(np.int64)
    return flat, cu
