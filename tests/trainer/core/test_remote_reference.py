"""A reference in another process: the same scores, bit for bit, and clear words where it is none."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_world import config
from training_rollouts import build_rollout

from trace_fast.errors import ConfigError, OutputError
from trace_fast.model import load_tokenizer
from trace_fast.rollout import Rollout
from trace_fast.scorer import Scorer
from trace_fast.service import ScoringServer, vocabulary_hash
from trace_fast.trainer.config import ReferenceConfig, read_config
from trace_fast.trainer.engines.http import BadAnswer, ServerError
from trace_fast.trainer.loop import train
from trace_fast.trainer.reference import Reference
from trace_fast.trainer.remote_reference import RemoteReference
from trace_fast.trainer.setup import open_run, read_inputs

CPU = torch.device("cpu")


@contextmanager
def running(server: ScoringServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join()
        server.close()


@pytest.fixture(scope="module")
def base(small_world: Path) -> str:
    return str(small_world / "base")


@pytest.fixture(scope="module")
def server(base: str) -> ScoringServer:
    return ScoringServer(Scorer.from_pretrained(base, dtype="float32"), "127.0.0.1", 0, report=lambda line: None)


@pytest.fixture(scope="module")
def url(server: ScoringServer) -> Iterator[str]:
    with running(server) as address:
        yield address


@pytest.fixture
def rollouts() -> list[Rollout]:
    """Two aliases, no turn at all, an unfinished one, and one whose ids no vocabulary has."""
    made = [
        build_rollout("a", [([5, 6], [7, 8, 9])], [10, 11], reward=1.1),
        build_rollout("b", [], [4], reward=0.1),
        build_rollout("c", [([1], [2]), ([3, 4], [6])], None, reward=0.0),
        build_rollout("bad", [([9_999], [5])], [4], reward=0.0),
    ]
    two = (np.array([20, 21, 22]), np.array([23]))
    made[0] = replace(made[0], answers=two, answer_texts=("one", "two"), extra={"correct": True})
    return made


def settings(url: str, **changes: Any) -> ReferenceConfig:
    return ReferenceConfig.model_validate({"dtype": "float32", "placement": "remote", "url": url} | changes)


def remote(url: str, base: str, **changes: Any) -> RemoteReference:
    return RemoteReference(settings(url, **changes), vocabulary=vocabulary_hash(load_tokenizer(base)))


@pytest.mark.parametrize("kl", [True, False])
def test_scores_are_those_of_a_reference_here_bit_for_bit(
    kl: bool, url: str, base: str, rollouts: list[Rollout]
) -> None:
    here = Reference.load(base, ReferenceConfig(dtype="float32", kl=kl), CPU)
    there = remote(url, base, kl=kl)
    assert there.hash == here.hash
    wanted, found = here.score(rollouts), there.score(rollouts)
    assert found.rollouts == wanted.rollouts == rollouts[:3]
    for score, other in zip(wanted.scores, found.scores, strict=True):
        for name in ("id", "group", "n_turns", "answer", "reward", "model", "source", "extra"):
            assert getattr(score, name) == getattr(other, name), name
        for name in ("boundaries", "mean_logprobs", "alias_mean_logprobs", "alias", "answer_ids"):
            mine, theirs = getattr(score, name), getattr(other, name)
            assert mine.dtype == theirs.dtype, name
            assert np.array_equal(mine, theirs), name
        for mine, theirs in zip(score.token_logprobs, other.token_logprobs, strict=True):
            assert mine.dtype == theirs.dtype == np.float32
            assert np.array_equal(mine, theirs)
        if kl:
            assert score.written_logprobs is not None
            assert other.written_logprobs is not None
            assert len(score.written_logprobs) > 0
            assert np.array_equal(score.written_logprobs, other.written_logprobs)
        else:
            assert score.written_logprobs is other.written_logprobs is None
    assert [(e.kind, e.rollout_id, e.source, e.reason) for e in found.errors] == [
        (e.kind, e.rollout_id, e.source, e.reason) for e in wanted.errors
    ]
    assert [error.rollout_id for error in found.errors] == ["bad"]


def test_many_requests_and_none(
    url: str, base: str, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trace_fast.trainer.remote_reference._TOKENS", 1)
    there = remote(url, base)
    found = there.score(rollouts)
    assert [score.id for score in found.scores] == ["a", "b", "c"]
    assert [error.rollout_id for error in found.errors] == ["bad"]
    assert there.score([]).scores == []


def test_a_run_with_a_remote_reference_is_the_run_with_one_here(
    url: str, small_world: Path, tmp_path: Path
) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    clocked = ("seconds/", "update_tokens_per_second")
    for name, changes in (("here", []), ("there", ["reference.placement=remote", f"reference.url={url}"])):
        path = tmp_path / f"{name}.toml"
        path.write_text(config(small_world, tmp_path / name))
        read = read_config(str(path), ["training.steps=2", "evaluation.every=0", *changes])
        with open_run(read, read_inputs(read, resume=False)) as (run, begin):
            assert train(run, begin=begin)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found[name] = [
            {key: value for key, value in json.loads(line).items() if not key.startswith(clocked)} for line in lines
        ]
    assert found["here"] == found["there"]
    assert "turn_credit" in found["there"][1]
    read = read_config(str(tmp_path / "there.toml"), ["training.steps=3", "evaluation.every=0"])
    with open_run(read, read_inputs(read, resume=True)) as (_, begin):  # the reference is the same one
        assert begin == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "expected a server with dtype 'bfloat16', got 'float32'"),
        ({"alias": "mean"}, "expected a server with alias 'mean', got 'max'"),
    ],
)
def test_a_server_that_scores_in_another_way_is_refused(
    changes: dict[str, str], message: str, url: str, base: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        remote(url, base, **changes)
    with pytest.raises(ConfigError, match="expected a server with vocabulary 'other'"):
        RemoteReference(settings(url), vocabulary="other")


def test_no_server_is_named_and_waited_for_no_longer_than_asked(
    url: str, base: str, rollouts: list[Rollout], server: ScoringServer
) -> None:
    with pytest.raises(ServerError, match=r"http://127.0.0.1:9/reference"):
        remote("http://127.0.0.1:9", base)
    there = remote(url, base, deadline_s=0.3)
    with pytest.raises(OutputError, match="cannot listen there"):
        ScoringServer(server._scorer, "127.0.0.1", int(url.rpartition(":")[2]), report=lambda line: None)
    there._client.url = "http://127.0.0.1:9"
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"http://127.0.0.1:9/score"):
        there.score(rollouts[:1])
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer: answer | {"reference": "other@1"}, "that the run began with, got other@1"),
        (lambda answer: answer | {"scores": answer["scores"][1:]}, "expected 3 scores and errors, got 2"),
        (lambda answer: answer | {"scores": answer["scores"] * 2}, "index: expected one of 0..2 once, got 0"),
        (lambda answer: answer | {"scores": [{"index": True}]}, "index: expected one of 0..2 once, got True"),
        (lambda answer: answer | {"scores": [s | {"alias": [5, 5, 5]} for s in answer["scores"]]}, "alias: expected"),
        (lambda answer: answer | {"scores": [s | {"mean_logprobs": []} for s in answer["scores"]]}, "mean_logprobs"),
        (lambda answer: answer | {"scores": [s | {"written_logprobs": None} for s in answer["scores"]]}, "written_log"),
        (lambda answer: {"reference": answer["reference"]}, "KeyError"),
        (lambda answer: [], "TypeError"),
    ],
)
def test_an_answer_that_is_none_is_never_a_score(
    change: Any, message: str, url: str, base: str, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = remote(url, base)
    honest = there._client.patiently
    monkeypatch.setattr(there._client, "patiently", lambda *a, **k: change(honest(*a, **k)))
    with pytest.raises((BadAnswer, ConfigError)) as caught:
        there.score(rollouts[:3])
    assert message in str(caught.value)


def test_a_positive_number_costs_its_rollout(
    url: str, base: str, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = remote(url, base)
    honest = there._client.patiently

    def positive(*arguments: Any, **options: Any) -> Any:
        answer = honest(*arguments, **options)
        answer["scores"][1]["mean_logprobs"][0] = 0.5
        return answer

    monkeypatch.setattr(there._client, "patiently", positive)
    found = there.score(rollouts[:3])
    assert [score.id for score in found.scores] == ["a", "c"]
    assert [(error.rollout_id, error.kind) for error in found.errors] == [("b", "non_finite")]


def asked(url: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("GET", "/", None, 404, "expected GET /reference or POST /score, got GET /"),
        ("POST", "/reference", b"{}", 404, "got POST /reference"),
        ("POST", "/score", b"{", 400, "JSON"),
        ("POST", "/score", b"\xff", 400, "UTF-8"),
        ("POST", "/score", b"[" * 100_000, 400, "nest"),
        ("POST", "/score", b"[]", 400, "expected an object with rollouts"),
        ("POST", "/score", b'{"rollouts": {}}', 400, "expected an object with rollouts"),
        ("POST", "/score", b'{"rollouts": [], "written_logprobs": 1}', 400, "written_logprobs (a boolean)"),
    ],
)
def test_what_is_no_request_is_refused_and_the_server_goes_on(
    method: str, path: str, body: bytes | None, status: int, message: str, url: str
) -> None:
    found, answer = asked(url, method, path, body)
    assert found == status
    assert message in answer["error"]
    assert asked(url, "GET", "/reference")[0] == 200


def test_records_that_are_none_are_errors_beside_good_ones(url: str) -> None:
    good = {"id": "g", "input_ids": [5, 6, 7], "boundaries": [3], "opener_ids": [8], "answer_ids": [[9]]}
    records = [3, good, {"id": "x"}, good | {"boundaries": [9]}, good | {"answer_ids": [[]]}]
    status, answer = asked(url, "POST", "/score", json.dumps({"rollouts": records}).encode())
    assert status == 200
    assert [score["index"] for score in answer["scores"]] == [1]
    assert [error["index"] for error in answer["errors"]] == [0, 2, 3, 4]
    assert all(error["kind"] in ("format", "boundary", "answer") for error in answer["errors"])
    assert answer["scores"][0]["mean_logprobs"][0] < 0


def test_a_body_without_a_length_or_with_a_huge_one_is_not_read(url: str) -> None:
    for length in ("x", str(1 << 31), "-1"):
        connection = HTTPConnection(url.removeprefix("http://"), timeout=30)
        connection.putrequest("POST", "/score", skip_accept_encoding=True)
        connection.putheader("Content-Length", length)
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        assert "expected a Content-Length of at most" in json.loads(response.read())["error"]
        connection.close()
    assert asked(url, "GET", "/reference")[0] == 200


def test_the_settings_name_a_server_where_one_is_meant_and_nowhere_else() -> None:
    for given in ({"placement": "remote"}, {"url": "http://localhost:1"}):
        with pytest.raises(ValueError, match="expected a url where placement is 'remote', and nowhere else"):
            ReferenceConfig.model_validate(given)
    with pytest.raises(ValueError, match="the server has its own"):
        ReferenceConfig.model_validate({"placement": "remote", "url": "http://localhost:1", "path": "other"})


def test_the_command_serves_until_a_signal(base: str) -> None:
    command = [sys.executable, "-m", "trace_fast", "serve", "--model", base, "--port", "0", "--dtype", "float32"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if " answers at http://" in line)
        with urllib.request.urlopen(line.split()[-1] + "/reference", timeout=30) as answer:
            about = json.load(answer)
        assert line.startswith(about["reference"])
        assert (about["dtype"], about["alias"], about["protocol"]) == ("float32", "max", 2)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143
