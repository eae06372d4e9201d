"""The engines that are servers, against small ones that speak their protocols: right answers, wrong ones, and none."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from trace_fast.errors import ConfigError
from trace_fast.trainer.engines.engine import FinishReason, Request
from trace_fast.trainer.engines.http import HttpEngine
from trace_fast.trainer.engines.sglang import SglangDialect
from trace_fast.trainer.engines.vllm import VllmDialect

STOP = 99


def vllm_answer(ids, logprobs, finish="stop"):
    content = [{"token": f"token_id:{i}", "logprob": lp, "top_logprobs": []} for i, lp in zip(ids, logprobs)]  # noqa: B905
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
    return {"request_id": "r", "choices": [choice]}


def sglang_answer(ids, logprobs, finish="stop"):
    pairs = [[lp, i, None] for i, lp in zip(ids, logprobs)]  # noqa: B905
    reason = {"type": finish, "matched": STOP} if finish == "stop" else {"type": finish}
    return {"output_ids": ids, "meta_info": {"id": "r", "output_token_logprobs": pairs, "finish_reason": reason}}


KINDS = {
    "vllm": (lambda: VllmDialect(processed_logprobs=True), vllm_answer, "token_ids"),
    "sglang": (SglangDialect, sglang_answer, "input_ids"),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def engine_for(kind, server, **settings):
    return HttpEngine(kind[0](), server.url, **{"max_length": 50, "timeout_s": 5.0, "deadline_s": 10.0} | settings)


def ask(first, **changes):
    return Request(**{"prompt_ids": np.array([first, 2, 3]), "max_new_tokens": 8, "stop_ids": (STOP,)} | changes)


def counting(kind, *, count=2):
    """Continues ``[f, ...]`` with f+1, f+2, ..., STOP, and log-probabilities -f, -f-1/2, ..."""

    def reply(path, body, number):
        first = body[kind[2]][0]
        ids = [*range(first + 1, first + count + 1), STOP]
        return 200, kind[1](ids, [-first - n / 2 for n in range(len(ids))])

    return reply


def test_ids_and_logprobs_come_back_in_order(kind, serve):
    server = serve(counting(kind))
    found = engine_for(kind, server, concurrency=3).generate([ask(first) for first in range(1, 12)])
    for first, generation in enumerate(found, start=1):
        np.testing.assert_array_equal(generation.ids, [first + 1, first + 2, STOP])
        np.testing.assert_array_equal(generation.logprobs, np.float32([-first, -first - 0.5, -first - 1]))
        assert generation.finish is FinishReason.STOP
        assert generation.error is None
    assert len(server.calls) == 11


def test_what_vllm_is_asked(serve):
    server = serve(counting(KINDS["vllm"]))
    engine_for(KINDS["vllm"], server).generate([ask(5, temperature=0.7, top_p=0.9, seed=2**32 - 1, stop_ids=(STOP, 7))])
    (path, body), = server.calls
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [5, 2, 3]
    wanted = {"max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "seed": 2**32 - 1, "stop_token_ids": [STOP, 7]}
    assert body["sampling_params"] == wanted | {"n": 1, "logprobs": 1, "ignore_eos": True, "detokenize": False}
    assert not body["stream"]


def test_what_sglang_is_asked(serve):
    server = serve(counting(KINDS["sglang"]))
    engine_for(KINDS["sglang"], server, max_length=9).generate([ask(5, temperature=0.7, seed=11)])
    (path, body), = server.calls
    assert path == "/generate"
    assert body["input_ids"] == [5, 2, 3]
    assert body["return_logprob"] is True
    wanted = {"max_new_tokens": 6, "temperature": 0.7, "top_p": 1.0, "sampling_seed": 11, "stop_token_ids": [STOP]}
    assert wanted.items() <= body["sampling_params"].items()
    assert body["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize(
    ("dialect", "change", "refused"),
    [
        (VllmDialect(processed_logprobs=False), {"temperature": 0.5}, "--logprobs-mode processed_logprobs"),
        (VllmDialect(processed_logprobs=False), {"top_p": 0.9}, "--logprobs-mode processed_logprobs"),
        (VllmDialect(processed_logprobs=False), {"temperature": 0.0}, None),
        (VllmDialect(processed_logprobs=False), {}, None),
        (VllmDialect(processed_logprobs=True), {"temperature": 0.5, "top_p": 0.9}, None),
        (SglangDialect(), {"top_p": 0.9}, "top_p: expected 1 of a server that reports log-probabilities before top-p"),
        (SglangDialect(), {"temperature": 0.5}, None),
    ],
)
def test_logprobs_of_another_distribution_are_refused(dialect, change, refused, serve):
    kind = KINDS["vllm" if isinstance(dialect, VllmDialect) else "sglang"]
    server = serve(counting(kind))
    (found,) = HttpEngine(dialect, server.url, max_length=50).generate([ask(1, **change)])
    if refused is None:
        assert found.finish is FinishReason.STOP
    else:
        assert found.finish is FinishReason.ERROR
        assert refused in found.error
        assert server.calls == []


def test_a_full_context_is_not_sent(kind, serve):
    server = serve(counting(kind))
    (found,) = engine_for(kind, server, max_length=3).generate([ask(1)])
    assert (found.finish, len(found.ids)) == (FinishReason.LENGTH, 0)
    (found,) = engine_for(kind, server, max_length=2).generate([ask(1)])
    assert found.error == "prompt_ids: expected at most 2 tokens, got 3"
    assert server.calls == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_tried_again_until_it_works(kind, status, serve):
    fine = counting(kind)
    server = serve(lambda path, body, n: (status, {"error": "busy"}) if n < 3 else fine(path, body, n))
    (found,) = engine_for(kind, server).generate([ask(4)])
    assert found.finish is FinishReason.STOP
    assert found.ids.tolist() == [5, 6, STOP]
    assert len(server.calls) == 3
    assert server.calls[0] == server.calls[2]


def test_a_bad_request_is_not_tried_again(kind, serve):
    server = serve(lambda *_: (400, {"error": "prompt\ntoo long"}))
    (found,) = engine_for(kind, server).generate([ask(4)])
    assert found.finish is FinishReason.ERROR
    assert "answered 400" in found.error
    assert "prompt\\ntoo long" in found.error
    assert len(server.calls) == 1


def test_a_server_that_hangs_costs_its_deadline(kind, serve):
    release = threading.Event()
    fine = counting(kind)

    def reply(path, body, number):
        if body[kind[2]][0] == 7:
            release.wait(20)
        return fine(path, body, number)

    server = serve(reply)
    started = time.monotonic()
    found = engine_for(kind, server, timeout_s=0.3, deadline_s=0.8).generate([ask(first) for first in (6, 7, 8)])
    taken = time.monotonic() - started
    release.set()
    assert [g.finish for g in found] == [FinishReason.STOP, FinishReason.ERROR, FinishReason.STOP]
    assert "timed out" in found[1].error.lower()
    assert 0.3 <= taken < 5


def test_an_answer_that_trickles_in_costs_its_timeout(kind, serve):
    """Every byte comes in time, the whole does not."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))

    def trickle():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    for _ in range(100):
                        connection.sendall(b"1\r\n \r\n")
                        time.sleep(0.05)
                except OSError:
                    continue

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    started = time.monotonic()
    (found,) = HttpEngine(kind[0](), url, max_length=50, timeout_s=0.4, deadline_s=0.5).generate([ask(1)])
    assert time.monotonic() - started < 3
    listener.close()
    assert found.finish is FinishReason.ERROR
    assert "in time" in found.error


def test_a_server_that_dies_mid_batch_costs_its_rollouts(kind, serve):
    fine = counting(kind)
    server = serve(lambda path, body, n: fine(path, body, n) if n <= 3 else None)  # hangs up from the fourth on
    engine = engine_for(kind, server, concurrency=1, deadline_s=0.4, timeout_s=0.4)
    found = engine.generate([ask(n) for n in range(5)])
    assert [g.finish for g in found] == [FinishReason.STOP] * 3 + [FinishReason.ERROR] * 2
    server.stop()
    found = engine_for(kind, server, deadline_s=0.5, timeout_s=0.5).generate([ask(n) for n in range(4)])
    assert [g.finish for g in found] == [FinishReason.ERROR] * 4
    assert all("refused" in g.error for g in found)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"{not json", "expected JSON"),
        (b"", "an answer with missing or odd fields"),
        ({}, "an answer with missing or odd fields"),
        ([], "an answer with missing or odd fields"),
        (([5, STOP], [-1.0]), "log-probabilit"),
        (([5, STOP], [-1.0, 0.5]), "expected finite log-probabilities <= 0, got 0.5 at id 1"),
        (([5, STOP], [-1.0, float("-inf")]), "expected finite log-probabilities <= 0, got -inf at id 1"),
        (([5, STOP], [float("nan"), -1.0]), "expected finite log-probabilities <= 0, got nan at id 0"),
        (([5, STOP], [-1.0, None]), "an answer with missing or odd fields"),
        (([], []), "expected 1..8 token ids"),
        (([-5, STOP], [-1.0, -1.0]), "expected 1..8 token ids"),
        ((list(range(9)), [-1.0] * 9, "length"), "expected 1..8 token ids >= 0, got 9"),
        (([STOP, 5], [-1.0, -1.0]), "expected nothing after the stop id 99, got 1 more"),
        (([5, 6], [-1.0, -1.0], "abort"), "the server ended the request with 'abort"),
    ],
)
def test_answers_that_are_not_believed(kind, answer, message, serve):
    fine = counting(kind)

    def reply(path, body, number):
        if body[kind[2]][0] == 7:
            return 200, kind[1](*answer) if isinstance(answer, tuple) else answer
        return fine(path, body, number)

    found = engine_for(kind, serve(reply)).generate([ask(first) for first in (6, 7, 8)])
    assert [g.finish for g in found] == [FinishReason.STOP, FinishReason.ERROR, FinishReason.STOP]
    assert message in found[1].error
    assert len(found[1].ids) == len(found[1].logprobs) == 0


def test_logprobs_of_other_ids_are_not_believed(serve):
    wrong = vllm_answer([5, STOP], [-1.0, -2.0])
    wrong["choices"][0]["token_ids"] = [6, STOP]
    (found,) = engine_for(KINDS["vllm"], serve(lambda *_: (200, wrong))).generate([ask(1)])
    assert "expected the log-probability of id 6, got that of token_id:5" in found.error
    wrong = sglang_answer([5, STOP], [-1.0, -2.0])
    wrong["output_ids"] = [5, 6, STOP]
    (found,) = engine_for(KINDS["sglang"], serve(lambda *_: (200, wrong))).generate([ask(1)])
    assert "expected a log-probability of each of 3 output ids, got 2 of others" in found.error


def test_reasons_to_stop(kind, serve):
    """An end token of the server's own is no end that the request named."""
    answers = {1: ([5, STOP], "stop"), 2: ([5, 6], "length"), 3: ([5, 42], "stop"), 4: ([5, STOP], "length")}

    def reply(path, body, number):
        ids, finish = answers[body[kind[2]][0]]
        return 200, kind[1](ids, [-1.0] * len(ids), finish)

    found = engine_for(kind, serve(reply)).generate([ask(first) for first in answers])
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert [g.finish for g in found] == [stop, length, length, stop]


def test_concurrency_is_limited(kind, serve):
    fine = counting(kind)

    def reply(path, body, number):
        time.sleep(0.05)
        return fine(path, body, number)

    server = serve(reply)
    found = engine_for(kind, server, concurrency=3).generate([ask(first) for first in range(1, 10)])
    assert all(g.finish is FinishReason.STOP for g in found)
    assert 2 <= server.most_under_way <= 3


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", ""])
def test_urls_that_are_none(url):
    with pytest.raises(ConfigError, match="url: expected one such as http://localhost:30000"):
        HttpEngine(SglangDialect(), url, max_length=8)


@pytest.mark.parametrize("change", [{"max_length": 0}, {"concurrency": 0}, {"timeout_s": 0}, {"deadline_s": 1.0}])
def test_settings_that_cannot_be(change):
    with pytest.raises(ConfigError, match="engine: expected max_length"):
        HttpEngine(SglangDialect(), "http://localhost:1", **{"max_length": 8} | change)
