"""Initial weights with which copying is learned at once instead of after millions of tokens.

A decoder copies with two heads in a row: one that looks at the previous token, and one that looks for the place where
what comes before equals the present token, and writes what stands there. Small models find this pair late. Here the
first head of the first two layers starts as a rough draft of it; everything is trained from there.

- All embeddings share channel 0 (a tied head gives it the same logit everywhere, so it changes no probability). Queries
  and keys that read it alone are constant, and rotary positions make their product peak at distance 1.
- That head writes a projection P of the previous token into directions R. In the next layer queries are P of the
  present token and keys are R's content, in the slowly rotating channels, so equal tokens match at any distance.
- The matching head writes a projection of what it reads back in its own directions, which raises that token's logit.

Shapes: D hidden size, H head size. Pair j of a head is its channels j and j + H/2, rotated by theta_j a position.
"""

from __future__ import annotations

import torch
from transformers import Qwen3ForCausalLM

_SHARED = 4.0  # the shared channel, in standard deviations of the others
_FAST = 6  # pairs that tell distances apart
_SHARP = 4.0  # scale of queries of the head that looks back
_MATCH = 2.0  # and of the one that matches
_WRITTEN = 0.1  # gain of what the two heads write: above embeddings of std 0.02


@torch.no_grad()
def draft_copying(model: Qwen3ForCausalLM, generator: torch.Generator) -> None:
    """Writes the two heads into ``model``: two layers at least, no bias, and D > 1.5 H."""
    config = model.config
    head_dim = config.head_dim
    half = head_dim // 2
    std = config.initializer_range
    model.model.embed_tokens.weight[:, 0] = _SHARED * std

    # Orthonormal directions that leave the shared channel alone. Matching uses the slow half of a head's channels.
    slow = half // 2
    assert config.hidden_size > 3 * half, config.hidden_size
    square = torch.randn(config.hidden_size - 1, 3 * half, generator=generator)
    directions = torch.zeros(3 * half, config.hidden_size)
    directions[:, 1:] = torch.linalg.qr(square).Q.T
    written_HD, content_HD = torch.zeros(2, head_dim, config.hidden_size)
    for first in (slow, half + slow):
        rows = first - slow if first < half else slow
        written_HD[first : first + slow] = directions[rows : rows + slow]
        content_HD[first : first + slow] = directions[half + rows : half + rows + slow]
    copied_HD = directions[half : half + head_dim]
    back, match = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    theta = model.model.rotary_emb.inv_freq[:_FAST].float()

    for projected in (back.q_proj, back.k_proj):
        projected.weight[:head_dim] = 0.0
    back.q_proj.weight[:_FAST, 0] = 1.0
    back.k_proj.weight[:_FAST, 0] = torch.cos(theta)
    back.k_proj.weight[half : half + _FAST, 0] = torch.sin(theta)
    back.q_norm.weight.fill_(_SHARP)
    back.v_proj.weight[:head_dim] = content_HD
    back.o_proj.weight[:, :head_dim] = _WRITTEN * written_HD.T
    match.q_proj.weight[:head_dim] = content_HD
    match.k_proj.weight[:head_dim] = written_HD
    match.q_norm.weight.fill_(_MATCH)
    match.v_proj.weight[:head_dim] = copied_HD
    match.o_proj.weight[:, :head_dim] = _WRITTEN * copied_HD.T
