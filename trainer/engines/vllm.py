"""What a vLLM server is told and what it says.

Rollouts go to its token endpoint, ``POST /inference/v1/generate``. Its log-probabilities are those of the model before
temperature and top-p, unless it was started with ``--logprobs-mode processed_logprobs``. Weights: a folder through
``/collective_rpc``, or its own NCCL transfer in four calls (``/init_weight_transfer_engine`` once, then
``/start_weight_update``, ``/update_weights``, ``/finish_weight_update``), for which the server needs
``--weight-transfer-config '{"backend": "nccl"}'``; both need ``VLLM_SERVER_DEV_MODE=1``.
Written for vLLM 0.26 to 0.32, from its documentation and source.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trace_fast.errors import ConfigError
from trace_fast.trainer.engines.engine import Request
from trace_fast.trainer.engines.http import Answer, BadAnswer, JsonClient
from trace_fast.trainer.engines.weights import Meta


class VllmDialect:
    """Args: processed_logprobs: whether the server was started with ``--logprobs-mode processed_logprobs``."""

    path = "/inference/v1/generate"

    def __init__(self, *, processed_logprobs: bool) -> None:
        self._processed = processed_logprobs

    def refuses(self, request: Request) -> str | None:
        if self._processed or request.temperature == 0 or (request.temperature, request.top_p) == (1, 1):
            return None
        return (
            "temperature, top_p: expected 1 and 1 of a server that reports log-probabilities before both, got "
            f"{request.temperature} and {request.top_p}; start it with --logprobs-mode processed_logprobs and say so"
        )

    def body(self, request: Request, max_new_tokens: int) -> dict[str, Any]:
        return {
            "token_ids": request.prompt_ids.tolist(),
            "stream": False,
            "sampling_params": {
                "n": 1,
                "max_tokens": max_new_tokens,
                "temperature": float(request.temperature),
                "top_p": float(request.top_p),
                "seed": int(request.seed),
                "stop_token_ids": [int(i) for i in request.stop_ids],
                "ignore_eos": True,  # only what the request names ends it
                "logprobs": 1,
                "detokenize": False,
            },
        }

    def read(self, answer: Any) -> Answer:
        (choice,) = answer["choices"]
        ids = choice["token_ids"]
        content = choice["logprobs"]["content"]
        for token, entry in zip(ids, content, strict=False):  # that there are as many is checked with the rest
            name = entry["token"]
            if name.startswith("token_id:") and name != f"token_id:{token}":
                raise BadAnswer(f"expected the log-probability of id {token}, got that of {name}")
        return Answer([int(i) for i in ids], [float(e["logprob"]) for e in content], str(choice["finish_reason"]))


class VllmWeights:
    """Weight updates of a vLLM server; see ``weights.WeightServer``."""

    def __init__(self, client: JsonClient, *, timeout_s: float = 600.0) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def world_size(self) -> int:
        return int(self._call("/get_world_size", method="GET")["world_size"])

    def load(self, folder: Path, version: int) -> None:
        self._call("/pause?mode=abort")
        self._call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self._call("/reset_prefix_cache")
        self._call("/resume")

    def join(self, address: str, port: int, rank_offset: int, world_size: int) -> None:
        place = {"master_address": address, "master_port": port}
        self._call(
            "/init_weight_transfer_engine",
            {"init_info": {**place, "rank_offset": rank_offset, "world_size": world_size}},
        )

    def begin(self) -> None:
        self._call("/pause?mode=abort")
        self._call("/start_weight_update")

    def receive(self, metas: Sequence[Meta]) -> None:
        names, dtypes, shapes = ([getattr(m, key) for m in metas] for key in ("name", "dtype", "shape"))
        self._call("/update_weights", {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}})

    def finish(self, version: int) -> None:
        self._call("/finish_weight_update", {"weight_version": str(version)})
        self._call("/reset_prefix_cache")
        self._call("/resume")

    def _call(self, path: str, body: object | None = None, *, method: str = "POST") -> Any:
        return self._client.call(path, body, timeout_s=self._timeout_s, method=method)


class VllmGroup:
    """The trainer's end of vLLM's NCCL group, made by vLLM's own classes, which must be installed here too.

    Raises:
        ConfigError: vLLM is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("weights: vLLM's NCCL transfer needs the package vllm in the trainer's environment too")
        self._device = device
        self._group: Any = None

    def join(self, address: str, port: int, world_size: int) -> None:
        stores = importlib.import_module("vllm.distributed.utils")
        communicators = importlib.import_module("vllm.distributed.device_communicators.pynccl")
        store = stores.StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=world_size)
        self._group = communicators.PyNcclCommunicator(store, device=self._device)

    def broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor.to(self._device).contiguous(), src=0)
