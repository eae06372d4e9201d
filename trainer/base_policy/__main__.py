"""``python -m trace_fast.trainer.base_policy --seed 0 --out DIR``.

Exit codes: 0 done, 2 nothing made (usage, unknown size, folder not writable).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from trace_fast.errors import TraceFastError
from trace_fast.trainer.base_policy import SIZES, make_base


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trace_fast.trainer.base_policy",
        description="Make a small policy that uses the browser tools in valid format and rarely succeeds.",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything (default: 0)")
    parser.add_argument("--size", default="small", help=f"one of {', '.join(SIZES)} (default: small)")
    parser.add_argument("--steps", type=int, help="on all but the drills (default: those of the size)")
    parser.add_argument("--threads", type=int, help="of torch; the weights depend on it (default: one a core)")
    parser.add_argument("--world", metavar="DIR", help="folder for the corpus and the questions to learn from")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the files; made when missing")
    options = parser.parse_args(arguments)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        record = make_base(
            options.out,
            world=options.world,
            seed=options.seed,
            size=options.size,
            steps=options.steps,
            threads=options.threads,
            report=report,
        )
    except TraceFastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(record, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
