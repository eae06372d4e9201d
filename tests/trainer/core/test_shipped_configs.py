"""Every config that the project ships is accepted, and fits the number of processes that its first lines name."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_fast.trainer.config import read_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PROCESSES = {
    "docworld": (1, (1, 1, 1)),
    "qwen3-0.6b-1gpu": (1, (1, 1, 1)),
    "qwen3-4b-8gpu": (8, (1, 4, 2)),
    "qwen3-30b-a3b-32gpu": (32, (2, 16, 1)),
}


def test_all_of_them_are_looked_at() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(PROCESSES)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_shipped_config_is_accepted(name: str) -> None:
    config = read_config(str(CONFIGS / f"{name}.toml"))
    n, sizes = PROCESSES[name]
    assert config.parallel.sizes(n) == sizes


def test_the_paper_run_keeps_the_papers_values() -> None:
    """TRACE, Tables 3-4."""
    config = read_config(str(CONFIGS / "qwen3-30b-a3b-32gpu.toml"))
    training, harness, adam = config.training, config.harness, config.optimizer
    assert (training.prompts, training.samples, training.global_batch) == (64, 8, 128)
    assert (harness.max_tokens, harness.max_response_tokens, harness.max_turns) == (48_000, 4_096, 60)
    assert (harness.observation_tokens, harness.timeout_s, harness.temperature, harness.top_p) == (2_048, 240, 1, 1)
    limits = config.evaluation.harness
    assert (limits.max_tokens, limits.max_response_tokens, limits.max_turns) == (72_000, 8_192, 80)
    assert (adam.lr, adam.betas, adam.weight_decay, adam.offload) == (1e-6, (0.9, 0.98), 0.01, True)
    assert config.algorithm.name == "trace"
    credit, advantage, loss = config.algorithm.credit, config.algorithm.advantage, config.algorithm.loss
    assert (credit.horizon, credit.discount, credit.gap_offset, credit.terminal_scale) == (3, 0.8, 0.1, 2.0)
    assert (advantage.alpha_out, advantage.alpha_turn, advantage.answer_tail_scale) == (1.0, 0.2, 0.05)
    assert (loss.clip_low, loss.clip_high, loss.tis_cap, loss.aggregation) == (0.20, 0.28, 2.0, "rollout_mean")
    assert config.engine.concurrency == 64
