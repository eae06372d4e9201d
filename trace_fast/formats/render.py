"""A chat to tokens: state prefixes, openers and the policy's mask, through the tokenizer's chat template.

State k is the first m_k messages as the template renders them, then the opener: the generation prompt (thinking
closed) and ``<answer>``. Where the template ends the last message otherwise when a generation prompt follows, the
prefix is cut before that, at a special token. The whole conversation is tokenised once; a prefix reuses its tokens when
the seam is a special token, which cuts the text before anything else looks at it; any other prefix is tokenised by
itself. Both ways give the same ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_fast.errors import RolloutError
from trace_fast.formats.answers import NOTE_OPENER_IDS, Opener, SeamSplitter, answer_ids, encode
from trace_fast.formats.body import Chat
from trace_fast.formats.template import ChatTemplate, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOTE_REWRITES = "template rewrites history"


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokens of a rollout; fields as in ``Rollout``, ``answers`` only where they came as text."""

    input_ids: np.ndarray
    boundaries: np.ndarray
    n_turns: int
    openers: tuple[np.ndarray, ...]
    answers: tuple[np.ndarray, ...] | None
    state_prefixes: tuple[np.ndarray, ...] | None = None
    loss_mask: np.ndarray | None = None
    notes: tuple[str, ...] = ()


class ChatRenderer:
    """Renders chats for one tokenizer and one opener setting.

    Args:
        opener: text that follows the generation prompt (thinking closed), or ids that are the whole opener.

    Raises:
        RolloutError: kind ``template``: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, opener: Opener, splitter: SeamSplitter) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._opener = opener
        self._splitter = splitter
        cutting = _cutting_tokens(tokenizer)
        self._cutting = frozenset(cutting.values())
        longest_first = sorted(cutting, key=len, reverse=True)
        self._cut_at = re.compile("|".join(map(re.escape, longest_first))) if cutting else None

    def render(self, chat: Chat, answers: Sequence[str] | None) -> Rendered:
        """The tokens of a chat; ``answers`` are the gold answer's spellings, None when they came as ids.

        Raises:
            RolloutError: kinds ``template`` and ``seam``; ``format`` for a chat that begins with the policy.
        """
        turns = chat.turns()
        if turns.ends[0] == 0:
            raise RolloutError("format", "expected a message before the policy's first one (a prompt), got none")
        messages, notes = self._template.adapt(chat.messages, chat.tools)
        texts = _Texts(self._template, messages, chat.tools)
        states = [self._state(texts, end) for end in turns.ends]
        full = texts.at(len(messages))
        ids, offsets = self._encode_full(full)

        prefixes = [self._prefix(text, full, ids, offsets) for text, _ in states]
        nested = all(len(p) <= len(ids) and np.array_equal(p, ids[: len(p)]) for p in prefixes)
        openers, answer_tokens, more = self._openers([opener for _, opener in states], answers)
        mask = self._mask(texts, turns.ends[0], full, offsets) if nested else None
        notes = (*chat.notes, *notes, *more) + (() if nested else (NOTE_REWRITES,))
        return Rendered(
            input_ids=ids,
            boundaries=np.asarray([len(p) for p in prefixes], dtype=np.int64),
            n_turns=turns.n_turns,
            openers=openers,
            answers=answer_tokens,
            state_prefixes=None if nested else tuple(prefixes),
            loss_mask=mask,
            notes=notes,
        )

    def _state(self, texts: _Texts, end: int) -> tuple[str, str]:
        """``(prefix, opener)`` text of the state after ``end`` messages."""
        prefix = texts.at(end)
        prompted = texts.prompted(end, closed=self._template.closes_thinking)
        common = _common_prefix(prefix, prompted)
        cut = common if common == len(prefix) else self._cut_before(prompted, common)
        ending = self._opener if isinstance(self._opener, str) else ""
        return prompted[:cut], prompted[cut:] + self._template.closing(prompted[common:]) + ending

    def _cut_before(self, text: str, limit: int) -> int:
        """Where text can be cut into prefix and opener at or before ``limit`` with the ids of the whole: at a special
        token, or else at its end."""
        cuts = [match.start() for match in self._cut_at.finditer(text)] if self._cut_at is not None else []
        return max((cut for cut in cuts if 0 < cut <= limit), default=len(text))

    def _openers(
        self, texts: list[str], answers: Sequence[str] | None
    ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...] | None, tuple[str, ...]]:
        if not isinstance(self._opener, str):
            ids = np.asarray(self._opener, dtype=np.int64)
            alone = None if answers is None else tuple(encode(self._tokenizer, text) for text in answers)
            return (ids,) * len(texts), alone, () if answers is None else (NOTE_OPENER_IDS,)
        openers = tuple(self._splitter.opener(text) for text in texts)
        return openers, None if answers is None else answer_ids(self._splitter, texts, answers), ()

    # --- tokens -------------------------------------------------------------------------------------------------

    def _encode_full(self, text: str) -> tuple[np.ndarray, np.ndarray | None]:
        """``(n,)`` ids and ``(n, 2)`` character offsets; no offsets from slow tokenizers."""
        if not self._tokenizer.is_fast:
            return encode(self._tokenizer, text), None
        encoded: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        return ids, np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)

    def _prefix(self, text: str, full: str, ids: np.ndarray, offsets: np.ndarray | None) -> np.ndarray:
        """Ids of one prefix, the same as tokenising it alone."""
        if offsets is not None and full.startswith(text):
            if len(text) == len(full):
                return ids
            at = int(np.searchsorted(offsets[:, 0], len(text), side="left"))
            cut = at < len(ids) and int(offsets[at, 0]) == len(text) and int(ids[at]) in self._cutting
            if cut and (at == 0 or int(offsets[at - 1, 1]) <= len(text)):
                return ids[:at]
        return encode(self._tokenizer, text)

    def _mask(self, texts: _Texts, first: int, full: str, offsets: np.ndarray | None) -> np.ndarray | None:
        """``(n,) bool`` tokens that the policy wrote: each assistant message from the end of its generation prompt to
        its end-of-turn token; None where texts are not prefixes of each other or offsets are unknown."""
        if offsets is None:
            return None
        mask = np.zeros(len(offsets), dtype=bool)
        for i, message in enumerate(texts.messages):
            if message["role"] != "assistant" or i < first:
                continue
            prompted, after = texts.prompted(i, closed=False), texts.at(i + 1)
            if not full.startswith(after):
                return None
            start = max(_common_prefix(prompted, after), _common_prefix(texts.at(i), after))
            end = len(after.rstrip())
            mask |= (offsets[:, 0] >= start) & (offsets[:, 0] < end)
        return mask


class _Texts:
    """Rendered beginnings of one conversation, each rendered once."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: list[Any] | None) -> None:
        self._template = template
        self.messages = messages
        self._tools = tools
        self._plain: dict[int, str] = {}
        self._prompted: dict[tuple[int, bool], str] = {}

    def at(self, end: int) -> str:
        """The first ``end`` messages."""
        if end not in self._plain:
            self._plain[end] = self._template.render(self.messages[:end], self._tools, prompt=False)
        return self._plain[end]

    def prompted(self, end: int, *, closed: bool) -> str:
        """The first ``end`` messages and the generation prompt; ``closed`` asks the template to close thinking."""
        key = (end, closed)
        if key not in self._prompted:
            thinking = False if closed else None
            self._prompted[key] = self._template.render(
                self.messages[:end], self._tools, prompt=True, thinking=thinking
            )
        return self._prompted[key]


def _common_prefix(a: str, b: str) -> int:
    """Length of what two texts begin with in common, by bisection: comparing slices is far faster than characters."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _cutting_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Added tokens (text -> id) that cut the text before them exactly: found in the raw text, taking no space along."""
    if not tokenizer.is_fast:
        return {}
    added = tokenizer.added_tokens_decoder.items()
    if any(token.rstrip for _, token in added):
        return {}  # one before the seam could take the white space after it along
    plain = (pair for pair in added if not (pair[1].lstrip or pair[1].single_word or pair[1].normalized))
    return {token.content: number for number, token in plain}
