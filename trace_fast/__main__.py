"""``python -m trace_fast``: the command line, for launchers that start modules (``torchrun -m trace_fast train``)."""

from trace_fast.cli import app

if __name__ == "__main__":
    app()
