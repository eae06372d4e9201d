"""A vLLM server: ``/v1/completions`` with ``prompt_logprobs``.

vLLM computes every token of a prompt whose log-probabilities are asked for, whatever its prefix cache holds; a request
carries all states, and the server batches them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trace_fast.bench.peers.http_json import SECONDS_TO_CONNECT, check_url, request
from trace_fast.bench.peers.peer import Peer, PeerError, PeerSetup
from trace_fast.rollout import Rollout

WHAT = "vLLM server: prompt_logprobs of every state's sequence"


def why_not(setup: PeerSetup) -> str | None:
    if "vllm" not in setup.endpoints:
        return "no endpoint was given (--endpoint vllm=URL)"
    try:
        _served_model(check_url("vllm", setup.endpoints["vllm"]))
    except PeerError as error:
        return str(error)
    return None


def open_peer(setup: PeerSetup) -> VLLM:
    return VLLM(check_url("vllm", setup.endpoints["vllm"]))


def _served_model(url: str) -> str:
    answer = request(url + "/v1/models", seconds=SECONDS_TO_CONNECT)
    try:
        return str(answer["data"][0]["id"])
    except (TypeError, LookupError) as error:
        raise PeerError(f"{url}/v1/models: expected the list of served models, got {str(answer)[:120]}") from error


class VLLM(Peer):
    own_memory = False

    def __init__(self, url: str) -> None:
        self._url, self._model = url, _served_model(url)

    def score(self, rollout: Rollout) -> np.ndarray:
        answer = rollout.answers[0].tolist()
        prompts = [
            [*rollout.prefix(k).tolist(), *rollout.openers[k].tolist(), *answer] for k in range(rollout.n_states)
        ]
        body = {
            "model": self._model,
            "prompt": prompts,
            "max_tokens": 1,  # the least it takes
            "temperature": 0.0,
            "prompt_logprobs": 0,  # the prompt's own tokens, no others
        }
        reply = request(self._url + "/v1/completions", body)
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or len(choices) != len(prompts):
            raise PeerError(f"{self._url}/v1/completions: expected {len(prompts)} choices, got {str(reply)[:120]}")
        ordered = sorted(choices, key=lambda choice: int(choice["index"]))
        return np.array([self._mean(choice, answer) for choice in ordered])

    def _mean(self, choice: dict[str, Any], answer: list[int]) -> float:
        """Mean over the answer's tokens, each found under its own id."""
        entries = (choice.get("prompt_logprobs") or [])[-len(answer) :]
        try:
            return float(np.mean([entry[str(t)]["logprob"] for t, entry in zip(answer, entries, strict=True)]))
        except (TypeError, LookupError, ValueError) as error:
            raise PeerError(
                f"{self._url}/v1/completions: expected prompt_logprobs of the {len(answer)} answer tokens by id, "
                f"got {str(entries)[:120]}"
            ) from error
