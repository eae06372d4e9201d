"""The ReAct harness: episodes of reasoning, one browser call a turn, and a final answer, as rollouts in token ids.

``Harness(ChatFrame(tokenizer), index, HarnessConfig()).run(tasks, engine, seed=0, samples=8)`` gives rollouts that the
scorer, the credit and the trainer take as they are.
"""

from trace_fast.trainer.harness.config import HarnessConfig
from trace_fast.trainer.harness.episode import RESULT_KEYS, Episode, StopReason, Task
from trace_fast.trainer.harness.frame import ChatFrame
from trace_fast.trainer.harness.reward import Verdict, exact_match, judge, normalise_squad, normalise_strict
from trace_fast.trainer.harness.run import Harness

__all__ = [
    "RESULT_KEYS",
    "ChatFrame",
    "Episode",
    "Harness",
    "HarnessConfig",
    "StopReason",
    "Task",
    "Verdict",
    "exact_match",
    "judge",
    "normalise_squad",
    "normalise_strict",
]
