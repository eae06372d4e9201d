"""Sums, minima and maxima over the segments of a flat tensor, by doubling.

One segment is one rollout's turns or one prompt's rollouts. The sums are built from blocks of 1, 2, 4, … entries, so
the number of steps is logarithmic in the longest segment, the rounding error too, and an entry's result depends on the
entries of its own segment and on its place there, on nothing else: a rollout alone and in any batch gives the same
bits. A cumulative sum over the whole batch, differenced at the offsets, would give neither.

Suffixes: N entries of the flat tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Combine = Callable[[Tensor, Tensor], Tensor]


def segment_index(lengths: Tensor, total: int) -> Tensor:
    """``(N,) int64`` segment of each entry, for segments of ``lengths`` entries, N = ``total`` = their sum."""
    segments = torch.arange(lengths.numel(), device=lengths.device)
    return torch.repeat_interleave(segments, lengths.long(), output_size=total)


def offsets(lengths: Tensor) -> Tensor:
    """``(R+1,) int32`` offsets of consecutive segments of ``lengths`` ``(R,)`` entries, from 0 to their sum."""
    cu = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=cu[1:])
    return cu


def prefix_sums(values_N: Tensor, position_N: Tensor, longest: int) -> Tensor:
    """Inclusive running sums within each segment; ``position_N`` counts an entry's predecessors in its segment."""
    total_N, size = values_N, 1
    while size < longest:
        ours, before = total_N[size:], total_N[:-size]
        extended = torch.where(position_N[size:] >= size, ours + before, ours)
        total_N = torch.cat((total_N[:size], extended))
        size *= 2
    return total_N


def suffix_reduce(values_N: Tensor, remaining_N: Tensor, longest: int, combine: Combine) -> Tensor:
    """``combine`` (associative) of each entry and all that follow it in its segment.

    ``remaining_N`` counts the entries from this one to the end of its segment, itself included.
    """
    block_N, size = values_N, 1
    while size < longest:
        block_N = _join(block_N, block_N, remaining_N, size, combine)
        size *= 2
    return block_N


def window_sums(values_N: Tensor, remaining_N: Tensor, longest: int, horizon: int, discount: float) -> Tensor:
    """Sum of discount^j values[i + j] over j < horizon, as far as i's segment goes.

    The window is put together from blocks of powers of two (the binary digits of ``horizon``), nearest entries first,
    so a horizon of any size costs at most 2 log2(longest) steps. ``remaining_N`` as in ``suffix_reduce``; horizon >= 1.
    """
    block_N, size = values_N, 1  # block_N[i]: the window of `size` entries from i on
    window_N, reach = torch.zeros_like(values_N), 0  # window_N[i]: the window of `reach` entries from i on
    while horizon and reach < longest:
        if horizon & 1:
            window_N = _join(window_N, block_N, remaining_N, reach, _discounted_add(discount**reach))
            reach += size
        horizon >>= 1
        if horizon and size < longest:
            block_N = _join(block_N, block_N, remaining_N, size, _discounted_add(discount**size))
        size *= 2
    return window_N


def _discounted_add(factor: float) -> Combine:
    return lambda near, far: near + factor * far


def _join(near_N: Tensor, far_N: Tensor, remaining_N: Tensor, distance: int, combine: Combine) -> Tensor:
    """``combine(near[i], far[i + distance])`` where i + distance is still in i's segment, ``near[i]`` elsewhere."""
    if distance == 0:
        return combine(near_N, far_N)
    ours = near_N[:-distance]
    joined = torch.where(remaining_N[:-distance] > distance, combine(ours, far_N[distance:]), ours)
    return torch.cat((joined, near_N[-distance:]))


class Groups:
    """Entries that share a key, wherever they stand; reductions come back to every member of the group.

    Args:
        keys_N: ``(N,)`` integer keys, in any order.
    """

    def __init__(self, keys_N: Tensor) -> None:
        sorted_N, self._order_N = torch.sort(keys_N, stable=True)
        self._start_N = torch.searchsorted(sorted_N, sorted_N)
        end_N = torch.searchsorted(sorted_N, sorted_N, right=True)
        self._remaining_N = end_N - torch.arange(keys_N.numel(), device=keys_N.device)
        self._longest = int(self._remaining_N.max()) if keys_N.numel() else 0
        self.size_N = self._to_members(end_N - self._start_N)

    def reduce(self, values_N: Tensor, combine: Combine) -> Tensor:
        """``combine`` over each group, members in input order, given to every member."""
        reduced_N = suffix_reduce(values_N[self._order_N], self._remaining_N, self._longest, combine)
        return self._to_members(reduced_N[self._start_N])

    def _to_members(self, sorted_N: Tensor) -> Tensor:
        members_N = torch.empty_like(sorted_N)
        members_N[self._order_N] = sorted_N
        return members_N
