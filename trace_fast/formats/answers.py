"""Text to ids where it matters most: the opener and the gold answer after it.

Opener and answer are tokenised together, as a model that writes the answer after the opener would have them, and
split at the seam. Where one token spans the seam there is no exact split, and the record is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_fast.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_TAG = "<answer>"
NOTE_NEWLINE = "opener auto: '<answer>' and a line break, since this tokenizer joins '>' with letters or digits"
NOTE_OPENER_IDS = "gold answer tokenised by itself, since the opener came as token ids"
_SHOWN = 24  # characters of a piece that a message repeats

Opener = str | tuple[int, ...]


def check_opener(opener: str | Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> Opener:
    """The opener as text, ``auto`` resolved for the tokenizer, or as a tuple of ids; raises ``ConfigError``."""
    if isinstance(opener, str):
        return auto_opener(tokenizer) if opener == "auto" else opener
    ids = tuple(int(i) if isinstance(i, np.integer) else i for i in opener)
    bad = next((i for i in ids if type(i) is not int or i < 0), None)
    if bad is not None:
        raise ConfigError(f"opener: expected text or token ids (integers >= 0), got {bad!r} among the ids")
    return ids


def auto_opener(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """``<answer>``; with a line break where the vocabulary has tokens such as ``>F``.

    With Qwen's vocabulary one word in five would otherwise merge with the tag and could not be scored. The choice
    follows from the tokenizer alone, so that all records of a model are conditioned alike.
    """
    if tokenizer is None:
        return ANSWER_TAG
    joins = any(token[:1] == ">" and token[1:2].isalnum() for token in tokenizer.get_vocab())
    return ANSWER_TAG + "\n" if joins else ANSWER_TAG


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """``(n,) int64`` ids of ``text`` alone, nothing added."""
    ids: Any = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int64)


class SeamSplitter:
    """Tokenises openers with answers for one tokenizer; what it has seen it remembers, within bounds."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._openers: dict[str, np.ndarray] = {}

    def opener(self, text: str) -> np.ndarray:
        """``(o,) int64`` ids of an opener."""
        if text not in self._openers:
            if len(self._openers) >= 64:  # openers differ with the template's state only; a flood is a rewrite
                self._openers.clear()
            self._openers[text] = encode(self._tokenizer, text)
        return self._openers[text]

    def answer(self, opener: str, answer: str) -> np.ndarray:
        """``(a,) int64`` ids of ``answer`` as they follow ``opener``.

        Raises:
            RolloutError: kind ``seam`` when the ids of the opener are not the beginning of the ids of both together.
        """
        head = self.opener(opener)
        both = encode(self._tokenizer, opener + answer)
        if len(both) > len(head) and np.array_equal(both[: len(head)], head):
            return both[len(head) :]
        raise RolloutError("seam", self._reason(opener, answer, head, both))

    def _reason(self, opener: str, answer: str, head: np.ndarray, both: np.ndarray) -> str:
        limit = min(len(head), len(both))
        differs = np.flatnonzero(head[:limit] != both[:limit])
        at = int(differs[0]) if len(differs) else limit
        token: str | None = None
        if self._tokenizer.is_fast:
            offsets = self._tokenizer(opener + answer, add_special_tokens=False, return_offsets_mapping=True)
            spans: Any = offsets["offset_mapping"]
            spanning = next((i for i, (s, e) in enumerate(spans) if s < len(opener) < e), None)
            if spanning is not None:
                at = spanning
                token = (opener + answer)[spans[at][0] : spans[at][1]]
        if token is None and at < len(both):
            token = str(self._tokenizer.convert_ids_to_tokens(int(both[at])))
        shown = answer if len(answer) <= _SHOWN else answer[:_SHOWN] + "..."
        return (
            f"the opener ends in {opener[-_SHOWN:]!r} and the gold answer begins with {shown!r}, but the tokenizer "
            f"puts one token ({token!r}) across the seam, so the answer has no log-probability of its own; give "
            "another opener (--opener), or the answer's ids (answer_ids)"
        )


def answer_ids(splitter: SeamSplitter, openers: Sequence[str], texts: Sequence[str]) -> tuple[np.ndarray, ...]:
    """Ids of every alias after the (distinct) openers of a rollout.

    Raises:
        RolloutError: kind ``seam``; the alias is named, also when it tokenises differently after two openers.
    """
    distinct = list(dict.fromkeys(openers))
    aliases: list[np.ndarray] = []
    for i, text in enumerate(texts):
        try:
            variants = [splitter.answer(opener, text) for opener in distinct]
        except RolloutError as error:
            raise RolloutError("seam", f"answer {i} ({text[:_SHOWN]!r}): {error.reason}") from None
        if any(not np.array_equal(variants[0], variant) for variant in variants[1:]):
            raise RolloutError(
                "seam",
                f"answer {i} ({text[:_SHOWN]!r}) tokenises differently after the openers of different states; give "
                "another opener (--opener), or the answer's ids (answer_ids)",
            )
        aliases.append(variants[0])
    return tuple(aliases)
