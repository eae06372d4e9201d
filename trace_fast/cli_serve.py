"""``trace-fast serve``: scores for other processes."""

from __future__ import annotations

from trace_fast.cli_terminal import say
from trace_fast.config import Alias
from trace_fast.model_context import quiet_transformers
from trace_fast.scorer import Scorer
from trace_fast.service import ScoringServer


def run_serve(
    model: str,
    *,
    host: str,
    port: int,
    dtype: str,
    device: str,
    backend: str,
    alias: Alias,
    max_tokens_per_pack: int | None,
) -> None:
    """Loads the model and answers requests until a signal ends it.

    Raises:
        ConfigError, ModelError: the model cannot be loaded. OutputError: nothing can listen there.
    """
    with quiet_transformers():
        scorer = Scorer.from_pretrained(
            model,
            dtype=dtype,
            device=device,
            backend=backend,
            alias=alias,
            max_tokens_per_pack=max_tokens_per_pack,
        )
        server = ScoringServer(scorer, host, port, report=say)
        say(f"{scorer.reference} answers at {server.url}")
        try:
            server.serve()
        finally:
            server.close()
