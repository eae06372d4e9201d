"""Random models of every supported architecture, a few thousand weights each, and random rollouts for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING as CONFIGS
from transformers import AutoModelForCausalLM, PreTrainedModel

from trace_fast.kernels.prefix_attention import why_not
from trace_fast.rollout import Rollout

# The exact attention backends of this machine; "native" is missing where no compiler was (trace-fast info says why).
CPU_BACKENDS = [
    name
    for name in ("native", "torch")
    if why_not(name, device=torch.device("cpu"), dtype=torch.float32) is None
]
VOCABULARY = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # large enough that attention is far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 32}),
    "llama-tied-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "qwen2": ("qwen2", {"head_dim": 64}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "mistral-window": ("mistral", {"head_dim": 48, "sliding_window": 37}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 256,
            "sliding_window": 29,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 100,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 80,
            "sliding_window": 31,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 64,
            "sliding_window": 33,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "granite": ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A randomly initialised model; biases, norms and sinks get random values too, so that dropping one shows."""
    kind, settings = MODELS[name]
    config = CONFIGS[kind](**{**SIZES, **settings, **changes})
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module.to(dtype).eval()


def random_rollout(
    rng: np.random.Generator,
    name: str = "r",
    *,
    prompt: np.ndarray | None = None,
    turns: int = 3,
    tokens: int = 120,
    answers: tuple[int, ...] = (4,),
    opener: int = 3,
    group: str = "g",
    vocabulary: int = VOCABULARY,
) -> Rollout:
    """A finished rollout of random tokens behind ``prompt``; boundaries at random, some may be equal."""
    draw = lambda n: rng.integers(3, vocabulary, n)  # noqa: E731
    prompt = draw(20) if prompt is None else prompt
    ids = np.concatenate([prompt, draw(tokens)])
    cuts = np.sort(rng.integers(len(prompt), len(ids) + 1, turns))
    return Rollout(
        id=name,
        group=group,
        input_ids=ids,
        boundaries=np.concatenate([[len(prompt)], cuts, [len(ids)]]),
        n_turns=turns,
        answers=tuple(draw(n) for n in answers),
        openers=(draw(opener),) * (turns + 2),
    )
