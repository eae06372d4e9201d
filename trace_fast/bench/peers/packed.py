"""Trunk and all branches as one sequence, for the peers that describe visibility by a mask.

Row q sees row k when both belong to the same owner (the trunk, or one branch) and k does not come later, or when k is
a trunk row before the boundary of q's branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from trace_fast.bench.peers.peer import branch, mean_logprob, on
from trace_fast.rollout import Rollout

TRUNK = -1


@dataclass(frozen=True)
class Packed:
    """N rows: ids, true positions, owner (``TRUNK`` or the state's number), and how many trunk rows a branch row sees
    (0 for trunk rows); the rows that score an answer, ``(S * A,)`` in order of the states."""

    ids_N: np.ndarray
    positions_N: np.ndarray
    owner_N: np.ndarray
    reach_N: np.ndarray
    answer_rows: np.ndarray


def pack(rollout: Rollout) -> Packed:
    """The rows of one rollout."""
    trunk = len(rollout.input_ids)
    branches = [branch(rollout, k) for k in range(rollout.n_states)]
    lengths = np.array([len(b) for b in branches])
    ends = trunk + np.cumsum(lengths)
    answer = len(rollout.answers[0])
    return Packed(
        ids_N=np.concatenate([rollout.input_ids, *branches]),
        positions_N=np.concatenate(
            [np.arange(trunk), *(b + np.arange(n) for b, n in zip(rollout.boundaries, lengths, strict=True))]
        ),
        owner_N=np.repeat(np.arange(TRUNK, len(branches)), [trunk, *lengths]),
        reach_N=np.concatenate([np.zeros(trunk, dtype=np.int64), np.repeat(rollout.boundaries, lengths)]),
        answer_rows=(ends[:, None] - answer + np.arange(answer)).reshape(-1),
    )


def packed_scores(module: PreTrainedModel, rollout: Rollout, packed: Packed, mask: object) -> np.ndarray:
    """``(S,)`` from one forward under ``mask``; logits of answer rows only."""
    keep = torch.as_tensor(packed.answer_rows)
    logits = module(
        input_ids=on(module, packed.ids_N),
        position_ids=on(module, packed.positions_N),
        attention_mask=mask,
        use_cache=False,
        logits_to_keep=keep.to(on(module, packed.ids_N).device),
    ).logits[0]
    answer = rollout.answers[0]
    return np.array([mean_logprob(part, answer) for part in logits.split(len(answer))])
