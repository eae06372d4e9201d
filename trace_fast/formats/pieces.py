"""Text segments to tokens: each piece by itself, so that every boundary is a token edge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trace_fast.formats.answers import encode
from trace_fast.formats.body import Pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenise_pieces(
    tokenizer: PreTrainedTokenizerBase, pieces: Pieces
) -> tuple[np.ndarray, np.ndarray, int, np.ndarray]:
    """``(input_ids, boundaries, n_turns, loss_mask)`` of text segments.

    Nothing is added but one beginning-of-sequence token, where the tokenizer adds one by itself and the text does
    not start with it. The mask is True on assistant segments.
    """
    turns = pieces.turns()
    ids = [encode(tokenizer, step.text) for step in pieces.steps]
    mask = [np.full(len(piece), step.role == "assistant") for piece, step in zip(ids, pieces.steps, strict=True)]
    bos = _bos(tokenizer, "".join(step.text for step in pieces.steps[:8]))
    ends = len(bos) + np.concatenate([[0], np.cumsum([len(piece) for piece in ids], dtype=np.int64)])
    return (
        np.concatenate([bos, *ids]),
        ends[list(turns.ends)].astype(np.int64),
        turns.n_turns,
        np.concatenate([np.zeros(len(bos), dtype=bool), *mask]),
    )


def _bos(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    bos = tokenizer.bos_token_id
    none = np.empty(0, dtype=np.int64)
    if bos is None or text.startswith(str(tokenizer.bos_token)):
        return none
    with_special = tokenizer("a", verbose=False)["input_ids"]
    adds = len(with_special) > 0 and with_special[0] == bos
    return np.asarray([bos], dtype=np.int64) if adds else none
