"""What is switched on a caller's model, and on torch, for one forward pass, and switched back afterwards.

Part of the Hugging Face seam.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode; every submodule's own mode comes back afterwards."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True


@contextlib.contextmanager
def own_precision(device: torch.device) -> Iterator[None]:
    """Scores are those of the model's dtype, also inside a trainer's mixed-precision region or with its TF32 on."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def attached(module: PreTrainedModel, attention_name: str) -> Iterator[None]:
    """Switches attention (and experts, whose grouped kernels depend on the company) for one forward pass."""
    attention = implementations(module)
    experts = module.get_experts_implementation() if module._can_set_experts_implementation() else None
    with evaluating(module), quiet_transformers():
        try:
            module.set_attn_implementation(attention_name)
            if experts is not None:
                module.set_experts_implementation("eager")
            yield
        finally:
            module.set_attn_implementation(attention)
            if experts is not None:
                module.set_experts_implementation(experts)


def implementations(module: PreTrainedModel) -> dict[str, str]:
    """Attention implementation of the model and of each sub-config, in the form ``set_attn_implementation`` takes."""
    config = module.config
    found = {"": config._attn_implementation or "eager"}
    for key in config.sub_configs:
        sub = getattr(config, key, None)
        if sub is not None:
            found[key] = sub._attn_implementation or "eager"
    return found


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Loading bars and advice of transformers stay off our users' terminals; errors still raise. (The bar of its GGUF
    reader is not its own and obeys TQDM_DISABLE only.)"""
    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
