"""SmolLM2-135M on real rollouts, against one naive float64 pass a state. One load, one naive pass, shared by all."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch

import trace_fast as tf

# file below the folder of real rollouts -> number of a short rollout in it; five publishers, four formats, T = 0 to 2
CHOSEN = {
    "fireact_react/gpt-3.5-ft.json": 4,
    "verifiers_evals/math-python--gpt-4.1-mini.dbaac595.jsonl": 3,
    "reflexion_react_log/base_block0034.txt": 0,
    "search_r1_text/sft_fixed_vllm_100.jsonl": 0,
    "livemcpbench_messages/claude-sonnet-4.subset.json": 5,
}


@dataclass(frozen=True)
class Naive:
    """One pass a state: ``answers[k]`` token log-probabilities of the gold answer, ``trunk`` those of the rollout."""

    answers: list[np.ndarray]
    trunk: np.ndarray

    @property
    def means(self) -> np.ndarray:
        return np.array([answer.mean() for answer in self.answers])


def naive(module: torch.nn.Module, rollout: tf.Rollout) -> Naive:
    (answer,) = rollout.answers
    tokens = len(rollout.input_ids)
    assert rollout.boundaries[-1] == tokens  # so the last state's pass begins with the whole rollout
    states = [np.concatenate([rollout.prefix(k), rollout.openers[k], answer]) for k in range(rollout.n_states)]
    last = oracle.sequence_logprobs(module, states[-1])
    answers = [last_logprobs(module, ids, len(answer)) for ids in states[:-1]]
    return Naive([*answers, last[-len(answer) :]], last[: tokens - 1])


@torch.no_grad()
def last_logprobs(module: torch.nn.Module, ids: np.ndarray, count: int) -> np.ndarray:
    """As ``oracle.sequence_logprobs``, of the last tokens only: a float64 head over 49,152 tokens takes its time."""
    logits = module(input_ids=torch.as_tensor(ids)[None], use_cache=False, logits_to_keep=count + 1).logits[0, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = torch.as_tensor(ids[-count:])
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].double().numpy()


@pytest.fixture(scope="module")
def scorer(smollm2_gguf: Path) -> tf.Scorer:
    return tf.Scorer.from_pretrained(str(smollm2_gguf), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def rollouts(shared_data: Path, scorer: tf.Scorer) -> list[tf.Rollout]:
    found = []
    for name, number in CHOSEN.items():
        read = tf.read_rollouts(shared_data / name, scorer.tokenizer, errors=lambda error: None)
        found.append(list(read)[number])
    return found


@pytest.fixture(scope="module")
def truth(scorer: tf.Scorer, rollouts: list[tf.Rollout]) -> list[Naive]:
    module = oracle.double_precision(scorer.model.module)
    return [naive(module, rollout) for rollout in rollouts]


@pytest.fixture(scope="module")
def scores(scorer: tf.Scorer, rollouts: list[tf.Rollout]) -> list[tf.RolloutScore]:
    return scorer.score(rollouts, trunk_logprobs=True)


def test_float32_is_within_1e4_nats_of_the_naive_float64_pass(
    rollouts: list[tf.Rollout], truth: list[Naive], scores: list[tf.RolloutScore]
) -> None:
    assert [r.n_turns for r in rollouts] == [0, 1, 2, 2, 2]
    for rollout, wanted, score in zip(rollouts, truth, scores, strict=True):
        np.testing.assert_allclose(score.mean_logprobs, wanted.means, rtol=0, atol=1e-4, err_msg=rollout.source)
        assert score.answer_ids.tolist() == rollout.answers[0].tolist()
        for found, each in zip(score.token_logprobs, wanted.answers, strict=True):
            np.testing.assert_allclose(found, each, rtol=0, atol=3e-4, err_msg=rollout.source)
        assert (score.mean_logprobs < 0).all()
    assert np.ptp(np.concatenate([w.means for w in truth])) > 3, "the states must differ for a mistake to show"


def test_float32_trunk_logprobs(truth: list[Naive], scores: list[tf.RolloutScore]) -> None:
    for wanted, score in zip(truth, scores, strict=True):
        assert score.trunk_logprobs is not None
        np.testing.assert_allclose(score.trunk_logprobs, wanted.trunk, rtol=0, atol=3e-4)


def test_packing_real_rollouts_changes_no_bit(
    scorer: tf.Scorer, rollouts: list[tf.Rollout], scores: list[tf.RolloutScore]
) -> None:
    for rollout, score in list(zip(rollouts, scores, strict=True))[:3]:
        alone = scorer.score([rollout], trunk_logprobs=True)[0]
        np.testing.assert_array_equal(alone.mean_logprobs, score.mean_logprobs)
        np.testing.assert_array_equal(alone.trunk_logprobs, score.trunk_logprobs)


def test_bfloat16_is_no_further_from_the_truth_than_the_naive_bfloat16_pass(
    scorer: tf.Scorer, rollouts: list[tf.Rollout], truth: list[Naive]
) -> None:
    """Over every answer token of every state, and every token, of two rollouts; in quantiles of some 1,500 errors."""
    module = copy.deepcopy(scorer.model.module).bfloat16()
    pack, wanted_pack = rollouts[2:4], truth[2:4]
    found = tf.Scorer.from_module(module, scorer.tokenizer).score(pack, trunk_logprobs=True)
    ours, theirs = [], []
    for rollout, wanted, score in zip(pack, wanted_pack, found, strict=True):
        plain = naive(module, rollout)
        ours += [score.trunk_logprobs - wanted.trunk]
        theirs += [plain.trunk - wanted.trunk]
        ours += [a - b for a, b in zip(score.token_logprobs, wanted.answers, strict=True)]
        theirs += [a - b for a, b in zip(plain.answers, wanted.answers, strict=True)]
    mine, other = np.abs(np.concatenate(ours)), np.abs(np.concatenate(theirs))
    assert len(mine) > 1450
    for quantile in (0.5, 0.75, 0.9, 0.95, 0.99):
        assert np.quantile(mine, quantile) <= np.quantile(other, quantile), quantile
