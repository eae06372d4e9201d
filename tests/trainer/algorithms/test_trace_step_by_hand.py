"""One TRACE step recomputed without project code: scores, credit, advantages, loss and the gradient of the head.

The recomputation is plain transformers (one full forward pass a state) and NumPy loops over the equations of METHOD:
Eqs. 5-12, the answer-tail rule and truncated importance sampling, all in float64, on a group of three rollouts and one
of two.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, tiny_model
from transformers import PreTrainedModel

from trace_fast.kernels.token_logprob import token_logprob
from trace_fast.rollout import Rollout
from trace_fast.scorer import Scorer
from trace_fast.trainer.algorithms import TraceConfig, prepare
from trace_fast.trainer.batch import training_batch
from trace_fast.trainer.microbatches import microbatches

TEMPERATURE = 0.9


@pytest.fixture
def rollouts() -> list[Rollout]:
    """Turns, finished or not, and reward of each; actions of 1-4 tokens, observations of 1-5."""
    rng = np.random.default_rng(3)
    made = []
    groups = {"g": [(2, True, 1.1), (3, True, 0.1), (1, False, 0.0)], "h": [(1, True, 0.0), (4, True, 1.0)]}
    for group, members in groups.items():
        prompt, answer = rng.integers(3, VOCABULARY, 6), rng.integers(3, VOCABULARY, 3)
        for i, (turns, finished, reward) in enumerate(members):
            mask, boundaries = [False] * len(prompt), [len(prompt)]
            for _ in range(turns):
                mask += [True] * int(rng.integers(1, 5)) + [False] * int(rng.integers(1, 6))
                boundaries.append(len(mask))
            if finished:
                mask += [True] * int(rng.integers(1, 5))
                boundaries.append(len(mask))
            made.append(
                Rollout(
                    id=f"{group}{i}",
                    group=group,
                    input_ids=np.concatenate([prompt, rng.integers(3, VOCABULARY, len(mask) - len(prompt))]),
                    boundaries=np.array(boundaries),
                    n_turns=turns,
                    answers=(answer,),
                    openers=(np.array([5, 6]),) * len(boundaries),
                    loss_mask=np.array(mask),
                    logprobs=np.zeros(len(mask), dtype=np.float32),
                    reward=reward,
                )
            )
    return made


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@torch.no_grad()
def hidden_states(module: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    return module.model(input_ids=torch.as_tensor(ids)[None], use_cache=False).last_hidden_state[0].numpy()


def token_logprobs(module: PreTrainedModel, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """``(N,)`` log p(ids[t] | ids[:t]); 0 for the first."""
    logits = hidden_states(module, ids) @ module.lm_head.weight.detach().numpy().T / temperature
    rows = log_softmax(logits)
    return np.array([0.0] + [rows[t - 1, ids[t]] for t in range(1, len(ids))])


def scores_by_hand(reference: PreTrainedModel, rollout: Rollout) -> list[float]:
    scores = []
    for boundary, opener in zip(rollout.boundaries, rollout.openers, strict=True):
        ids = np.concatenate([rollout.input_ids[:boundary], opener, rollout.answers[0]])
        scores.append(token_logprobs(reference, ids)[-len(rollout.answers[0]) :].mean())
    return scores


def advantages_by_hand(rollouts: list[Rollout], scores: list[list[float]]) -> list[np.ndarray]:
    """Eps 0.1, K 3, gamma 0.8, lambda 2, alphas 1 and 0.2, answer tail 0.05, population std."""
    made = []
    for rollout, score in zip(rollouts, scores, strict=True):
        group = [other for other in rollouts if other.group == rollout.group]
        rewards = np.array([other.reward for other in group])
        outcome = (rollout.reward - rewards.mean()) / rewards.std()
        T = rollout.n_turns
        delta = [np.log((-score[k] + 0.1) / (-score[k + 1] + 0.1)) for k in range(len(score) - 1)]
        cuts = [*rollout.boundaries[: T + 1], len(rollout.input_ids)]
        advantages = np.zeros(len(rollout.input_ids))
        for k in range(T):
            h = min(k + 2, T - 1)
            weights = [0.8 ** (u - k) for u in range(k, h + 1)]
            reward = sum(w * delta[u] for w, u in zip(weights, range(k, h + 1), strict=True)) / sum(weights)
            if h == T - 1:
                reward += 2.0 * 0.8 ** (T - k) * outcome
            advantages[cuts[k] : cuts[k + 1]] = outcome + 0.2 * reward
        lengths = [len(o.input_ids) - o.boundaries[o.n_turns] for o in group if len(o.boundaries) == o.n_turns + 2]
        if len(rollout.boundaries) == T + 2:
            advantages[cuts[T] :] = 0.05 * np.mean(lengths) / (cuts[T + 1] - cuts[T]) * outcome
        made.append(advantages * rollout.loss_mask)
    return made


def test_scores_advantages_loss_and_gradient_of_the_head(rollouts: list[Rollout]) -> None:
    reference = tiny_model("llama", seed=0).double()
    old_policy, policy = tiny_model("llama", seed=1).double(), tiny_model("llama", seed=1).double()
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():  # a step away from the old policy, so that ratios leave 1 and some are clipped
        head = policy.lm_head.weight
        head += 0.03 * torch.randn(head.shape, generator=random, dtype=torch.float64)
    rng = np.random.default_rng(4)
    old = [token_logprobs(old_policy, rollout.input_ids, TEMPERATURE) for rollout in rollouts]
    for rollout, logprobs in zip(rollouts, old, strict=True):  # the sampler's differ a little; one weight beyond 2
        rollout.logprobs[:] = np.minimum(logprobs + rng.normal(0, 0.2, len(logprobs)), 0)
    rollouts[0].logprobs[6] = old[0][6] - 3.0
    sampler = [rollout.logprobs.astype(np.float64) for rollout in rollouts]

    # By hand.
    scores = [scores_by_hand(reference, rollout) for rollout in rollouts]
    wanted = advantages_by_hand(rollouts, scores)
    weight, loss, gradient = head.detach().numpy(), 0.0, np.zeros(tuple(head.shape))
    clipped = unclipped = capped = 0
    for r, rollout in enumerate(rollouts):
        hidden = hidden_states(policy, rollout.input_ids)
        rows = log_softmax(hidden @ weight.T / TEMPERATURE)
        trained = np.flatnonzero(rollout.loss_mask)
        for t in trained:
            token, advantage = rollout.input_ids[t], wanted[r][t]
            ratio = np.exp(rows[t - 1, token] - old[r][t])
            tis = np.exp(old[r][t] - sampler[r][t])
            capped += tis > 2
            share = min(tis, 2.0) / (len(trained) * len(rollouts))
            loss -= share * min(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
            if (ratio > 1.28 and advantage > 0) or (ratio < 0.8 and advantage < 0):
                clipped += 1
                continue
            unclipped += 1
            of_logits = -np.exp(rows[t - 1])
            of_logits[token] += 1
            gradient -= share * advantage * ratio * np.outer(of_logits, hidden[t - 1]) / TEMPERATURE
    assert clipped > 0 and capped > 0 and unclipped > clipped  # noqa: PT018 - one condition: every branch was taken

    # By the project, in three micro-batches.
    config = TraceConfig()
    scored = Scorer.from_module(reference, None).score(rollouts)
    for score, by_hand in zip(scored, scores, strict=True):
        np.testing.assert_allclose(score.mean_logprobs, by_hand, rtol=1e-9)
    batch = training_batch(rollouts, scored, temperature=TEMPERATURE, dtype=torch.float64)
    batch = batch.with_old_logprobs(torch.from_numpy(np.concatenate(old)))
    batch = prepare(batch, config)
    np.testing.assert_allclose(batch.advantages_N.numpy(), np.concatenate(wanted), rtol=1e-8, atol=1e-12)
    total = 0.0
    micros = microbatches(batch, 60)
    assert len(micros) > 1
    for micro in micros:
        spans = pairwise(micro.cu_tokens_R1.tolist())
        hidden_NH = torch.cat([policy.model(input_ids=micro.input_ids_N[a:b][None])[0][0] for a, b in spans])
        logprobs_L = token_logprob(hidden_NH[micro.rows_L], head, micro.targets_L, temperature=micro.temperature)
        result = micro.loss(logprobs_L, config.loss)
        result.loss.backward()
        total += float(result.loss.detach())
    assert total == pytest.approx(loss, rel=1e-8)
    np.testing.assert_allclose(head.grad.numpy(), gradient, rtol=1e-7, atol=1e-10 * abs(gradient).max())
