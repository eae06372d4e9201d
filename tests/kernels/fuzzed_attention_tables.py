"""A program: the C++ attention with 500 block tables of which entries are changed at random.

Usage: ``fuzzed_attention_tables.py FILE_OF_THE_NATIVE_MODULE``. Every table is refused by name, or runs and writes to
its outputs alone. Prints how many were refused and how many ran.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import torch
from span_trees import tree
from torch import Tensor

from trace_fast.kernels.prefix_attention.native_plan import plan_blocks

TRIES = 500
NAMES = ("block_rows", "path_blocks", "spans")
EXTREMES = (2**63 - 1, -(2**63), 2**62, 2**40, 2**31, -1, 0, 1)
MARGIN, PATTERN = 4096, 77.0  # elements around an output, and what they hold


def load(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("_native", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def between_margins(*shape: int) -> tuple[Tensor, Tensor]:
    """An output, and the larger tensor that it lies in."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 2 * MARGIN,), PATTERN)
    return whole[MARGIN : MARGIN + size].view(shape), whole


def changed(table: Tensor, random: torch.Generator) -> Tensor:
    """Up to three entries become neighbours of what they were, others of the table, or extremes; or the end is cut."""

    def draw(end: int) -> int:
        return int(torch.randint(0, max(end, 1), (), generator=random))

    table = table.clone()
    flat = table.view(-1)
    for _ in range(draw(4) if len(flat) else 0):
        at = draw(len(flat))
        flat[at] = (int(flat[at]) + draw(7) - 3, int(flat[draw(len(flat))]), EXTREMES[draw(len(EXTREMES))])[draw(3)]
    return table[: len(table) - draw(3)] if draw(8) == 0 else table


def main() -> None:
    module = load(sys.argv[1])
    random = torch.Generator().manual_seed(0)
    refusals = []
    for trial in range(TRIES):
        spans = tree(trial, longest=90)
        plan = plan_blocks(spans)
        tables = {name: torch.from_numpy(getattr(plan, name)) for name in NAMES}
        name = NAMES[trial % len(NAMES)]
        tables[name] = changed(tables[name], random)
        rows = spans.n_rows
        query, key, value = (torch.randn(rows, heads, 16, generator=random) for heads in (4, 2, 2))
        (out, whole_out), (lse, whole_lse) = between_margins(rows, 4, 16), between_margins(rows, 4)
        code_paths = module.prefix_attention_kernels("torch.float32")
        try:
            module.prefix_attention(
                query, key, value, out, lse, *tables.values(), 0.3, trial % 5, 0.0, None, 1 + trial % 2,
                code_paths[trial % len(code_paths)],
            )  # fmt: skip
        except ValueError as error:
            refusals.append(str(error))
        for whole in (whole_out, whole_lse):
            assert (whole[:MARGIN] == PATTERN).all(), f"trial {trial} wrote before its output"
            assert (whole[-MARGIN:] == PATTERN).all(), f"trial {trial} wrote behind its output"
    assert all(re.match(rf"({'|'.join(NAMES)}): expected .*, got ", message) for message in refusals), refusals
    print(len(refusals), TRIES - len(refusals))


if __name__ == "__main__":
    main()
