"""What an SGLang server is told and what it says.

Rollouts go to ``POST /generate``; ids and log-probabilities are read from the same pairs,
``meta_info.output_token_logprobs``. They are those after temperature and before top-p, so requests with top-p are
refused. Seeds count where the server runs with ``--enable-deterministic-inference``. The server ends at its own end
tokens too: it has no switch that keeps ``stop_token_ids`` alone. Weights: a folder (``/update_weights_from_disk``), or
its own NCCL group (``/init_weights_update_group`` once, then ``/update_weights_from_distributed``).
Written for SGLang 0.5, from its documentation and source.
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
from trace_fast.trainer.engines.http import Answer, BadAnswer, JsonClient, ServerError
from trace_fast.trainer.engines.weights import Meta

GROUP_NAME = "trace_fast"


class SglangDialect:
    """See the module."""

    path = "/generate"

    def refuses(self, request: Request) -> str | None:
        if request.top_p == 1 or request.temperature == 0:
            return None
        return f"top_p: expected 1 of a server that reports log-probabilities before top-p, got {request.top_p}"

    def body(self, request: Request, max_new_tokens: int) -> dict[str, Any]:
        return {
            "input_ids": request.prompt_ids.tolist(),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": float(request.temperature),
                "top_p": float(request.top_p),
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "sampling_seed": int(request.seed),
                "stop_token_ids": [int(i) for i in request.stop_ids],
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            },
        }

    def read(self, answer: Any) -> Answer:
        meta = answer["meta_info"]
        pairs = meta["output_token_logprobs"]
        ids = [int(pair[1]) for pair in pairs]
        given = answer.get("output_ids")
        if given is not None and list(given) != ids:
            raise BadAnswer(f"expected a log-probability of each of {len(given)} output ids, got {len(ids)} of others")
        finish = meta["finish_reason"]
        kind = finish["type"] if isinstance(finish, dict) else str(finish)
        if kind not in ("stop", "length") and isinstance(finish, dict):
            kind = f"{kind}: {finish.get('message', '')}"
        return Answer(ids, [float(pair[0]) for pair in pairs], kind)


class SglangWeights:
    """Weight updates of an SGLang server; see ``weights.WeightServer``."""

    def __init__(self, client: JsonClient, *, timeout_s: float = 600.0) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def world_size(self) -> int:
        info = self._client.call("/get_server_info", timeout_s=self._timeout_s, method="GET")
        return int(info["tp_size"]) * int(info.get("pp_size", 1))

    def load(self, folder: Path, version: int) -> None:
        self._call("/pause_generation", {"mode": "abort"})
        self._call("/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)})
        self._call("/continue_generation", {})

    def join(self, address: str, port: int, rank_offset: int, world_size: int) -> None:
        place = {"master_address": address, "master_port": port, "group_name": GROUP_NAME, "backend": "nccl"}
        self._call("/init_weights_update_group", {**place, "rank_offset": rank_offset, "world_size": world_size})

    def begin(self) -> None:
        self._call("/pause_generation", {"mode": "abort"})

    def receive(self, metas: Sequence[Meta]) -> None:
        names, dtypes, shapes = ([getattr(m, key) for m in metas] for key in ("name", "dtype", "shape"))
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": GROUP_NAME, "flush_cache": True}
        self._call("/update_weights_from_distributed", body)

    def finish(self, version: int) -> None:
        self._call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._call("/continue_generation", {})

    def _call(self, path: str, body: object) -> None:
        answer = self._client.call(path, body, timeout_s=self._timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerError(f"{self._client.url}{path}: {answer.get('message', 'refused')}")


class SglangGroup:
    """The trainer's end of SGLang's group, made by SGLang's own function, which must be installed here too.

    Raises:
        ConfigError: SGLang is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError("weights: SGLang's NCCL group needs the package sglang in the trainer's environment too")
        self._device = device
        self._group: Any = None

    def join(self, address: str, port: int, world_size: int) -> None:
        self._group = importlib.import_module("sglang.srt.utils").init_custom_process_group(
            backend="nccl", init_method=f"tcp://{address}:{port}", world_size=world_size, rank=0, group_name=GROUP_NAME
        )

    def broadcast(self, tensor: Tensor) -> None:
        torch.distributed.broadcast(tensor.to(self._device).contiguous(), src=0, group=self._group)
