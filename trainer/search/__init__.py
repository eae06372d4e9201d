"""The search environment: corpora, indexes over them, and the browser that a policy uses.

``read_corpus`` streams documents; ``build_bm25`` and ``build_vectors`` write an index folder, ``open_index`` opens one
for many callers; ``Browser`` is the state of one episode and turns every call, right or wrong, into an observation.
"""

from trace_fast.trainer.search.browser import Browser, Index, Observation
from trace_fast.trainer.search.corpus import Document, corpus_hash, read_corpus
from trace_fast.trainer.search.index import Hit, SearchIndex, build_bm25, build_vectors, open_index
from trace_fast.trainer.search.retriever import Match, Retriever, SearchError
from trace_fast.trainer.search.service import QueryService
from trace_fast.trainer.search.tools import tool_schemas

__all__ = [
    "Browser",
    "Document",
    "Hit",
    "Index",
    "Match",
    "Observation",
    "QueryService",
    "Retriever",
    "SearchError",
    "SearchIndex",
    "build_bm25",
    "build_vectors",
    "corpus_hash",
    "open_index",
    "read_corpus",
    "tool_schemas",
]
