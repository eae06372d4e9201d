"""Next-token training of the small policy: batches of about equal lengths, and a cosine schedule a stage.

Loss of a batch: sum_t w_t * nll_t / sum_t w_t (nats), over all of its tokens, padding excluded by weight 0. Matrix
products run in bfloat16 under autocast, parameters and their update in float32. Deterministic: the same examples, seed
and number of threads give the same weights.

Shapes: B examples, L tokens (padded), N = tokens with a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen3Config, Qwen3ForCausalLM

from trace_fast.trainer.base_policy.examples import Example
from trace_fast.trainer.base_policy.initial import draft_copying
from trace_fast.trainer.base_policy.settings import HEAD_DIM, MAX_POSITIONS, ROPE_THETA, BaseSize
from trace_fast.trainer.docworld.dice import Dice

_WARMUP = 0.04  # of the steps
_FINAL_RATE = 0.05  # of the highest
_WINDOW = 32  # batches whose examples are sorted by length together
_REPORT = 100  # steps
_MUON_RATE = 5.0  # times the rate of AdamW

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """Args: ids_BL: ``int64``, padded on the right. weights_BL: ``float32``, 0 for padding."""

    ids_BL: torch.Tensor
    weights_BL: torch.Tensor


def new_model(size: BaseSize, vocabulary: int, pad: int, end: int, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 model with a tied head, its weights random but for the draft of ``initial``."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=pad,
        eos_token_id=end,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    draft_copying(model, torch.Generator().manual_seed(seed))
    return model


def batches(examples: Sequence[Example], tokens: int, pad: int, dice: Dice) -> Iterator[Batch]:
    """All examples once, in random batches of at most ``tokens`` ids with padding (one example at least)."""
    order = dice.shuffled(range(len(examples)))
    mean = sum(len(example.ids) for example in examples) / max(len(examples), 1)
    window = max(int(_WINDOW * tokens / max(mean, 1)), 1)
    made: list[list[int]] = []
    for start in range(0, len(order), window):
        made += _by_length(sorted(order[start : start + window], key=lambda i: len(examples[i].ids)), examples, tokens)
    for numbers in dice.shuffled(made):
        yield _padded([examples[i] for i in numbers], pad)


def _endless(examples: Sequence[Example], tokens: int, pad: int, dice: Dice) -> Iterator[Batch]:
    assert examples
    while True:
        yield from batches(examples, tokens, pad, dice)


def _by_length(order: Sequence[int], examples: Sequence[Example], tokens: int) -> list[list[int]]:
    made: list[list[int]] = [[]]
    for number in order:  # lengths grow, so the last one decides the padding
        if made[-1] and (len(made[-1]) + 1) * len(examples[number].ids) > tokens:
            made.append([])
        made[-1].append(number)
    return made


def _padded(examples: Sequence[Example], pad: int) -> Batch:
    length = max(len(example.ids) for example in examples)
    ids_BL = torch.full((len(examples), length), pad)
    weights_BL = torch.zeros(len(examples), length)
    for row, example in enumerate(examples):
        ids_BL[row, : len(example.ids)] = torch.from_numpy(example.ids)
        weights_BL[row, : len(example.ids)] = torch.from_numpy(example.weights)
    return Batch(ids_BL, weights_BL)


def batch_loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """The weighted mean of the negative log-probabilities, a float32 scalar (nats)."""
    targets_BL, weights_BL = batch.ids_BL[:, 1:], batch.weights_BL[:, 1:]
    kept_BL = weights_BL > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden_BLD = model.model(input_ids=batch.ids_BL, use_cache=False).last_hidden_state
        logits_NV = model.lm_head(hidden_BLD[:, :-1][kept_BL])
    nll_N = cross_entropy(logits_NV.float(), targets_BL[kept_BL], reduction="none")
    weights_N = weights_BL[kept_BL]
    return (nll_N * weights_N).sum() / weights_N.sum()


def train(
    model: Qwen3ForCausalLM,
    examples: Sequence[Example],
    *,
    steps: int,
    size: BaseSize,
    dice: Dice,
    report: Report,
) -> list[float]:
    """Trains in place for ``steps`` steps, over the examples as often as that takes; returns the losses."""
    pad = model.config.pad_token_id
    assert isinstance(pad, int)
    optimisers = _optimisers(model, size.rate)
    schedules = [LambdaLR(optimiser, lambda step: _rate(step, steps)) for optimiser in optimisers]
    model.train()
    losses: list[float] = []
    tokens = 0
    for batch in islice(_endless(examples, size.batch, pad, dice), steps):
        loss = batch_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        tokens += batch.ids_BL.numel()
        if len(losses) % _REPORT == 0 or len(losses) == steps:
            recent = losses[-_REPORT:]
            report(f"step {len(losses)}/{steps}: loss {sum(recent) / len(recent):.3f}, {tokens:,} tokens")
    model.eval()
    return losses


def _optimisers(model: Qwen3ForCausalLM, rate: float) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms: copying is learned far sooner so."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return (
        torch.optim.Muon(matrices, lr=_MUON_RATE * rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    )


def _rate(step: int, steps: int) -> float:
    """Share of the highest learning rate: a linear rise, then half a cosine."""
    warmup = max(_WARMUP * steps, 1.0)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    way = min((step - warmup) / max(steps - warmup, 1.0), 1.0)
    return _FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * way))
