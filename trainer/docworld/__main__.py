"""``python -m trace_fast.trainer.docworld --seed 0 --size small --out DIR``.

Exit codes: 0 done, 2 nothing written (usage, unknown size, folder not writable).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from trace_fast.errors import TraceFastError
from trace_fast.trainer.docworld import SIZES, make_world, write_world


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trace_fast.trainer.docworld",
        description="Write a generated closed world: a corpus, questions of three splits, and a summary.",
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed is another world (default: 0)")
    parser.add_argument("--size", default="small", help=f"one of {', '.join(SIZES)} (default: small)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the files; made when missing")
    options = parser.parse_args(arguments)
    try:
        world = make_world(options.seed, options.size)
        paths = write_world(world, options.out)
    except TraceFastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(world.summary(), indent=2))
    for path in paths.values():
        print(path, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
