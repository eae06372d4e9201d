"""A small base policy for docworld: a Qwen3 model of about a million parameters with its own tokenizer.

It is made from documents, grounded question answering and undirected tool transcripts of practice worlds, so that it
writes calls in valid format and mostly reads what one page states, but searches without a strategy and rarely succeeds:
what a policy is trained from. Nothing of the experiment's world is in its training text.

    record = make_base("out/base", seed=0)              # also: python -m trace_fast.trainer.base_policy
    frame = frame_of(AutoTokenizer.from_pretrained("out/base"))
    world = experiment_world(0, SIZES["small"])         # the world, tasks and limits that it is made for
    Harness(frame, index, harness_config()).run(tasks_of(world, "train"), engine, seed=0)
"""

from trace_fast.trainer.base_policy.build import make_base, validate, weights_hash
from trace_fast.trainer.base_policy.experiment import experiment_world, harness_config, tasks_of, write_experiment
from trace_fast.trainer.base_policy.settings import SIZES, TEMPLATES, BaseSize
from trace_fast.trainer.base_policy.vocabulary import INSTRUCTIONS, frame_of

__all__ = [
    "INSTRUCTIONS",
    "SIZES",
    "TEMPLATES",
    "BaseSize",
    "experiment_world",
    "frame_of",
    "harness_config",
    "make_base",
    "tasks_of",
    "validate",
    "weights_hash",
    "write_experiment",
]
