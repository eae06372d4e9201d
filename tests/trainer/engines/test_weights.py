"""Weight updates: the folder that is written, and what servers are asked for, against small servers."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from trace_fast.errors import ConfigError, OutputError
from trace_fast.trainer.engines.http import HttpEngine, JsonClient, ServerError
from trace_fast.trainer.engines.sglang import SglangDialect, SglangGroup, SglangWeights
from trace_fast.trainer.engines.vllm import VllmGroup, VllmWeights
from trace_fast.trainer.engines.weights import Bystander, DiskWeights, NcclWeights, buckets


def agreeing(path, body, number):
    if path == "/get_world_size":
        return 200, {"world_size": 2}
    if path == "/get_server_info":
        return 200, {"tp_size": 2}
    return 200, {"success": True, "message": "fine"}


class FakeGroup:
    """Keeps what is sent; the first tensor of a bucket is only sent once the server was told of it."""

    def __init__(self, told=None):
        self.joined = None
        self.sent = []
        self._told = told

    def join(self, address, port, world_size):
        self.joined = (address, port, world_size)

    def broadcast(self, tensor):
        assert self._told is None or self._told.wait(5)
        self.sent.append(tensor)


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    tiny_model("qwen3").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_the_folder_written_is_a_model(serve, tmp_path, model_folder):
    server = serve(agreeing)
    new = tiny_model("qwen3", seed=3)
    size = sum(p.numel() for p in new.parameters()) * 4
    sink = DiskWeights(
        SglangWeights(JsonClient(server.url)), tmp_path / "out", model_folder, keep=2, shard_bytes=size // 3
    )
    for version in (9, 10, 11):
        sink.update_weights(new.state_dict().items(), version)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["step-10", "step-11"]
    folder = tmp_path / "out" / "step-11"
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert len(list(folder.glob("model-*-of-*.safetensors"))) >= 3
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for (name, a), b in zip(new.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert server.calls[-3:] == [
        ("/pause_generation", {"mode": "abort"}),
        ("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "11"}),
        ("/continue_generation", {}),
    ]


def test_the_same_version_again_replaces_it(serve, tmp_path, model_folder):
    sink = DiskWeights(VllmWeights(JsonClient(serve(agreeing).url)), tmp_path / "out", model_folder)
    for value in (1.0, 2.0):
        sink.update_weights([("a", torch.full((3,), value))], 5)
    (file,) = (tmp_path / "out" / "step-5").glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        assert tensors.get_tensor("a").tolist() == [2.0] * 3


def test_tied_and_strided_weights_are_written_as_they_are(serve, tmp_path, model_folder):
    sink = DiskWeights(VllmWeights(JsonClient(serve(agreeing).url)), tmp_path / "out", model_folder)
    base = torch.arange(12.0).view(3, 4)
    sink.update_weights([("a", base), ("b", base), ("c", base.t()[1:])], 5)
    (file,) = (tmp_path / "out" / "step-5").glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        assert torch.equal(tensors.get_tensor("b"), base)
        assert torch.equal(tensors.get_tensor("c"), base.t()[1:])


def test_what_breaks_off_leaves_no_folder(serve, tmp_path, model_folder):
    server = serve(agreeing)
    sink = DiskWeights(SglangWeights(JsonClient(server.url)), tmp_path / "out", model_folder)

    def broken():
        yield "a", torch.zeros(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sink.update_weights(broken(), 5)
    assert list((tmp_path / "out").iterdir()) == []
    assert server.calls == []
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write the weights"):
        DiskWeights(SglangWeights(JsonClient(server.url)), tmp_path / "file", model_folder).update_weights([], 1)


def test_how_vllm_loads_a_folder(serve, tmp_path, model_folder):
    server = serve(agreeing)
    DiskWeights(VllmWeights(JsonClient(server.url)), tmp_path, model_folder).update_weights([("a", torch.zeros(3))], 4)
    path = str((tmp_path / "step-4").resolve())
    assert server.calls == [
        ("/pause?mode=abort", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ]


def weights():
    return [("a", torch.zeros(5, 2)), ("b", torch.ones(3, dtype=torch.bfloat16)), ("c", torch.full((100,), 2.0))]


def test_how_vllm_receives_weights(serve):
    server = serve(agreeing)
    group = FakeGroup()
    sink = NcclWeights(VllmWeights(JsonClient(server.url)), group, address="10.0.0.1", port=29600, bucket_bytes=64)
    sink.update_weights(iter(weights()), 8)
    place = {"master_address": "10.0.0.1", "master_port": 29600, "rank_offset": 1, "world_size": 3}
    update = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[5, 2], [3]]}
    rest = {"names": ["c"], "dtype_names": ["float32"], "shapes": [[100]]}
    round_of_calls = [
        ("/pause?mode=abort", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": update}),
        ("/update_weights", {"update_info": rest}),
        ("/finish_weight_update", {"weight_version": "8"}),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ]
    joining = [("/get_world_size", None), ("/init_weight_transfer_engine", {"init_info": place})]
    assert server.calls == joining + round_of_calls
    assert group.joined == ("10.0.0.1", 29600, 3)
    for sent, (_, tensor) in zip(group.sent, weights(), strict=True):
        assert torch.equal(sent, tensor)
        assert sent.dtype == tensor.dtype
    sink.update_weights(weights(), 9)
    assert Counter(path for path, _ in server.calls)["/init_weight_transfer_engine"] == 1  # joined once


def test_how_sglang_receives_weights_while_they_are_sent(serve):
    told, sent = threading.Event(), threading.Event()

    def reply(path, body, number):
        if path == "/update_weights_from_distributed":
            told.set()
            assert sent.wait(5)  # as NCCL does: the call returns when the tensors are there
        return agreeing(path, body, number)

    class Group(FakeGroup):
        def broadcast(self, tensor):
            super().broadcast(tensor)
            if len(self.sent) == 3:
                sent.set()

    server = serve(reply)
    group = Group(told)
    sink = NcclWeights(SglangWeights(JsonClient(server.url)), group, address="10.0.0.1", port=29600)
    sink.update_weights(weights(), 8)
    place = {"master_address": "10.0.0.1", "master_port": 29600, "group_name": "trace_fast", "backend": "nccl"}
    update = {"names": ["a", "b", "c"], "dtypes": ["float32", "bfloat16", "float32"], "shapes": [[5, 2], [3], [100]]}
    assert server.calls == [
        ("/get_server_info", None),
        ("/init_weights_update_group", {**place, "rank_offset": 1, "world_size": 3}),
        ("/pause_generation", {"mode": "abort"}),
        ("/update_weights_from_distributed", {**update, "group_name": "trace_fast", "flush_cache": True}),
        ("/update_weight_version", {"new_version": "8", "abort_all_requests": False}),
        ("/continue_generation", {}),
    ]
    assert len(group.sent) == 3


@pytest.mark.parametrize(
    ("refusal", "message"),
    [((200, {"success": False, "message": "shape of a"}), "shape of a"), ((500, {"error": "no"}), "answered 500")],
)
def test_a_server_that_refuses_weights_is_not_resumed(refusal, message, serve):
    server = serve(lambda path, *rest: refusal if "distributed" in path else agreeing(path, *rest))
    sink = NcclWeights(SglangWeights(JsonClient(server.url)), FakeGroup(), address="h", port=1)
    with pytest.raises(ServerError, match=message):
        sink.update_weights(weights(), 8)
    assert server.calls[-1][0] == "/update_weights_from_distributed"


def test_an_engine_hands_weights_on_or_lets_them_pass(serve):
    given = []

    class Sink:
        def update_weights(self, weights, version):
            given.append((list(weights), version))

    url = serve(agreeing).url
    HttpEngine(SglangDialect(), url, max_length=8, weights=Sink()).update_weights(weights(), 3)
    assert given[0][1] == 3
    assert len(given[0][0]) == 3
    passing = iter(weights())
    HttpEngine(SglangDialect(), url, max_length=8).update_weights(passing, 4)
    assert list(passing) == []  # consumed: gathering them may need every process
    passing = iter(weights())
    Bystander().update_weights(passing, 4)
    assert list(passing) == []


def test_buckets():
    found = list(buckets(iter(weights()), 46))
    assert [[name for name, _ in bucket] for bucket in found] == [["a", "b"], ["c"]]
    assert list(buckets([], 5)) == []


@pytest.mark.parametrize(("group", "package"), [(VllmGroup, "vllm"), (SglangGroup, "sglang")])
def test_a_transport_whose_package_is_missing(group, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"needs the package {package}"):
        group(torch.device("cpu"))


def test_a_model_without_config(tmp_path, serve):
    with pytest.raises(ConfigError, match=r"model: expected a folder with config\.json"):
        DiskWeights(SglangWeights(JsonClient(serve(agreeing).url)), tmp_path, tmp_path)
