"""An SGLang server: ``/generate`` with token ids and log-probabilities of the input.

The trunk is sent first, so that the radix cache holds it; then all states in one batched request. The token AT
``logprob_start_len`` comes back without a number, so scoring starts one token before the answer; a start of 0 would
make the server compute every token again. The cache is flushed before every timed call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trace_fast.bench.peers.http_json import SECONDS_TO_CONNECT, check_url, request
from trace_fast.bench.peers.peer import Peer, PeerError, PeerSetup
from trace_fast.rollout import Rollout

WHAT = "SGLang server: trunk cached, all states in one request"


def why_not(setup: PeerSetup) -> str | None:
    if "sglang" not in setup.endpoints:
        return "no endpoint was given (--endpoint sglang=URL)"
    try:
        request(check_url("sglang", setup.endpoints["sglang"]) + "/health", seconds=SECONDS_TO_CONNECT)
    except PeerError as error:
        return str(error)
    return None


def open_peer(setup: PeerSetup) -> SGLang:
    return SGLang(check_url("sglang", setup.endpoints["sglang"]))


class SGLang(Peer):
    own_memory = False

    def __init__(self, url: str) -> None:
        self._url = url

    def prepare(self) -> None:
        request(self._url + "/flush_cache", {}, seconds=SECONDS_TO_CONNECT)

    def score(self, rollout: Rollout) -> np.ndarray:
        answer = rollout.answers[0].tolist()
        contexts = [np.concatenate([rollout.prefix(k), rollout.openers[k]]).tolist() for k in range(rollout.n_states)]
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        request(self._url + "/generate", {"input_ids": rollout.input_ids.tolist(), "sampling_params": sampling})
        answers = request(
            self._url + "/generate",
            {
                "input_ids": [context + answer for context in contexts],
                "sampling_params": sampling,
                "return_logprob": True,
                "logprob_start_len": [len(context) - 1 for context in contexts],
            },
        )
        if not isinstance(answers, list) or len(answers) != len(contexts):
            raise PeerError(f"{self._url}/generate: expected a list of {len(contexts)} answers, got {_kind(answers)}")
        return np.array([self._mean(item, answer) for item in answers])

    def _mean(self, item: Any, answer: list[int]) -> float:
        """Mean over the answer's tokens; what else the server says is checked, not guessed at."""
        scored = item.get("meta_info", {}).get("input_token_logprobs") if isinstance(item, dict) else None
        entries = scored[1:] if isinstance(scored, list) else []
        if [entry[1] for entry in entries] != answer or any(entry[0] is None for entry in entries):
            raise PeerError(
                f"{self._url}/generate: expected input_token_logprobs of the {len(answer)} answer tokens after one "
                f"without a number, got {str(scored)[:120]}"
            )
        return float(np.mean([entry[0] for entry in entries]))


def _kind(value: object) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
