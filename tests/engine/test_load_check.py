"""What the check on loading must notice: a model whose arithmetic this seam would not reproduce is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import MODELS, SIZES, tiny_model
from transformers import CONFIG_MAPPING as CONFIGS
from transformers import AutoModelForCausalLM

import trace_fast as tf
from trace_fast.model import ReferenceModel


def test_a_window_that_exists_in_the_mask_only() -> None:
    """Phi-MoE tells its attention function no window; without a mask it would see everything, silently."""
    config = CONFIGS["phimoe"](**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=64)
    module = AutoModelForCausalLM.from_config(config)
    with pytest.raises(tf.ModelError, match=r"expected layer 0 to pass the window 64 of its config .*, got None"):
        tf.Scorer.from_module(module, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("drop", ["softcap", "scaling", "s_aux"])
def test_an_attention_that_drops_what_it_is_given(
    drop: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same check that would notice an argument under another name: here one is withheld on purpose."""
    import trace_fast.model_attention as seam

    module = tiny_model("gpt-oss" if drop == "s_aux" else "gemma2", dtype)
    tf.Scorer.from_module(module, None)
    known = seam._attention

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        return known(*args, **{**kwargs, drop: None})

    monkeypatch.setitem(seam.AttentionInterface._global_mapping, seam.ATTENTION_NAME, forgetful)
    with pytest.raises(tf.ModelError, match=r"hidden states .* differ from the model's own"):
        tf.Scorer.from_module(module, None)


def test_an_unknown_factor_on_the_logits() -> None:
    module = tiny_model("llama", torch.bfloat16)
    head = module.lm_head.forward
    module.lm_head.forward = lambda hidden: head(hidden) * 1.1
    with pytest.raises(tf.ModelError, match=r"its logits are not softcap\(scale \* head\(hidden\)\)"):
        ReferenceModel.of(module)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_supported_models_pass_with_any_weights(name: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        assert ReferenceModel.of(tiny_model(name, dtype, seed=seed)).spec.n_layers == 3
