"""The peers that are servers, against loopback servers that answer as SGLang and vLLM do, from the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trace_fast.bench.peers import PEERS, PeerError
from trace_fast.rollout import Rollout

FLOAT32 = 1e-5  # the servers answer with the float32 model's numbers


def test_sglang_gives_the_oracles_numbers_and_uses_the_cache(
    serve: Callable[[str], Any], setup_for: Callable[..., Any], rollout: Rollout, truth_S: np.ndarray
) -> None:
    server = serve("sglang")
    setup = setup_for(sglang=server.url + "/")
    assert PEERS["sglang"].why_not(setup) is None
    peer = PEERS["sglang"].open_peer(setup)
    peer.prepare()
    np.testing.assert_allclose(peer.score(rollout), truth_S, rtol=0, atol=FLOAT32)
    paths = [path for path, _ in server.calls]
    assert paths == ["/health", "/flush_cache", "/generate", "/generate"]
    trunk, states = server.calls[2][1], server.calls[3][1]
    assert trunk["input_ids"] == rollout.input_ids.tolist()
    openers = [len(o) for o in rollout.openers]
    # one token before the answer: that token has no number, the answer's first has
    assert states["logprob_start_len"] == [int(b) + o - 1 for b, o in zip(rollout.boundaries, openers, strict=True)]
    assert min(states["logprob_start_len"]) > 0


def test_vllm_gives_the_oracles_numbers_whatever_the_order_of_choices(
    serve: Callable[[str], Any], setup_for: Callable[..., Any], rollout: Rollout, truth_S: np.ndarray
) -> None:
    setup = setup_for(vllm=serve("vllm").url)
    assert PEERS["vllm"].why_not(setup) is None
    np.testing.assert_allclose(PEERS["vllm"].open_peer(setup).score(rollout), truth_S, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_a_server_that_is_not_there_is_absent_with_the_reason(name: str, setup_for: Callable[..., Any]) -> None:
    assert PEERS[name].why_not(setup_for()) == f"no endpoint was given (--endpoint {name}=URL)"
    reason = PEERS[name].why_not(setup_for(**{name: "http://127.0.0.1:9"}))
    assert reason is not None
    assert reason.startswith("cannot reach http://127.0.0.1:9/")


def test_what_a_server_refuses_is_reported_with_its_words(
    serve: Callable[[str], Any], setup_for: Callable[..., Any], rollout: Rollout
) -> None:
    server = serve("sglang")
    server.replies["/generate"] = (400, {"error": "the input is too long"})
    with pytest.raises(PeerError, match=r"/generate answered 400 .*the input is too long"):
        PEERS["sglang"].open_peer(setup_for(sglang=server.url)).score(rollout)


@pytest.mark.parametrize("entries", [[], [[None, 5, None]], [[None, 1, None]] + [[-0.5, 3, None]] * 5, None])
def test_sglangs_numbers_for_other_tokens_are_not_taken(
    serve: Callable[[str], Any], setup_for: Callable[..., Any], rollout: Rollout, entries: Any
) -> None:
    server = serve("sglang")
    reply = [{"meta_info": {"input_token_logprobs": entries}}] * rollout.n_states
    server.replies["/generate"] = (200, reply)
    with pytest.raises(PeerError, match="expected input_token_logprobs of the 5 answer tokens"):
        PEERS["sglang"].open_peer(setup_for(sglang=server.url)).score(rollout)


@pytest.mark.parametrize(
    ("path", "reply", "message"),
    [
        ("/v1/completions", {"choices": []}, "expected 6 choices"),
        ("/v1/completions", {"choices": [{"index": k, "prompt_logprobs": None} for k in range(6)]}, "by id"),
        ("/v1/completions", {"choices": [{"index": k, "prompt_logprobs": [{"1": {}}] * 9} for k in range(6)]}, "by id"),
        ("/v1/models", {"data": []}, "expected the list of served models"),
    ],
)
def test_vllm_answers_of_another_form_are_errors(
    serve: Callable[[str], Any], setup_for: Callable[..., Any], rollout: Rollout, path: str, reply: Any, message: str
) -> None:
    server = serve("vllm")
    server.replies[path] = (200, reply)
    with pytest.raises(PeerError, match=message):
        PEERS["vllm"].open_peer(setup_for(vllm=server.url)).score(rollout)
