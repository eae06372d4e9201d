"""Fixtures that the tests of several ops share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """``torch.empty`` gives NaN (integers: their largest): what nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Defect:
    """Something that compiled code must not be handed: what makes it of a good tensor, and what is said about it."""

    spoil: Callable[[Tensor], Tensor]
    expected: str  # regular expression

    def affects(self, tensor: Tensor) -> bool:
        """Every address is aligned for elements of one byte."""
        return self.spoil is not _misaligned or tensor.element_size() > 1


def _misaligned(tensor: Tensor) -> Tensor:
    """The same numbers one byte further on."""
    bytes_ = tensor.contiguous().view(-1).view(torch.uint8)
    shifted = torch.frombuffer(bytearray(1 + len(bytes_)), dtype=tensor.dtype, offset=1)
    assert shifted.data_ptr() % tensor.element_size() == 1
    shifted.view(torch.uint8).copy_(bytes_)
    return shifted.view(tensor.shape)


def _strided(tensor: Tensor) -> Tensor:
    """The same numbers, every second element of memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


DEFECTS = {
    "misaligned": Defect(_misaligned, r"memory aligned to its elements of \d bytes, got an address that is 1 beyond"),
    "on another device": Defect(lambda tensor: tensor.to("meta"), "a tensor on cpu, got meta"),
    "not contiguous": Defect(_strided, r"a contiguous (tensor|last axis), got stride"),
}


@pytest.fixture(params=DEFECTS.keys())
def defect(request: pytest.FixtureRequest) -> Defect:
    """Each of ``DEFECTS``; a test that is about one names it with ``indirect=True``."""
    return DEFECTS[request.param]
