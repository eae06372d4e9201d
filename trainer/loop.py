"""The training loop: Algorithm 1 of TRACE, and its baselines.

    for every step:
        sample a group of rollouts for each question        rollout
        score every state with the frozen reference         score
        turn scores and outcomes into token advantages      credit
        update the policy on the clipped objective          update
        give the engine the new weights                     sync

A step is a function of the settings, the weights it begins with and its number: nothing else is carried along, so a run
that is resumed from a checkpoint goes on bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trace_fast.credit import TurnCredit, turn_credit
from trace_fast.errors import TraceFastError
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.trainer.algorithms import TraceConfig, algorithm, prepare
from trace_fast.trainer.batch import TrainingBatch, training_batch
from trace_fast.trainer.checkpoint import Checkpoints, Progress
from trace_fast.trainer.config import TrainConfig
from trace_fast.trainer.data import step_tasks
from trace_fast.trainer.engines.weights import TrainableEngine
from trace_fast.trainer.harness import Harness, Task
from trace_fast.trainer.metrics import Metrics, credit_metrics, rollout_metrics
from trace_fast.trainer.optimizer import Adam
from trace_fast.trainer.parallel import TrainMesh
from trace_fast.trainer.policy import NonFiniteError, Policy
from trace_fast.trainer.reference import FrozenReference, reference_kl
from trace_fast.trainer.run_log import RunLog
from trace_fast.trainer.sampling import SampledGroups, sample_groups
from trace_fast.trainer.stop import StopSignal
from trace_fast.trainer.throughput import step_flops
from trace_fast.trainer.update import UpdateResult, optimizer_batches, update_policy

EVALUATION = 1  # added to the seeds of a run's evaluations, so that they are not those of its steps


@dataclass
class Run:
    """Everything that a run works with, made by ``setup.open_run``; all its processes call ``train`` together."""

    config: TrainConfig
    mesh: TrainMesh
    policy: Policy
    optimizer: Adam
    reference: FrozenReference
    engine: TrainableEngine
    harness: Harness
    examiner: Harness  # with the limits of evaluation
    tasks: Sequence[Task]
    validation: Sequence[Task]
    checkpoints: Checkpoints
    log: RunLog
    stop: StopSignal


@dataclass(frozen=True, slots=True)
class Experience:
    """The rollouts of a step, of all processes, and their scores where the algorithm needs them; ``lost`` are those
    that the engine or the reference failed."""

    rollouts: list[Rollout]
    scores: list[RolloutScore]
    lost: int


class Stopped(Exception):
    """A signal asked the run to stop; what it has done is saved."""


def train(run: Run, *, begin: int = 0) -> bool:
    """Steps ``begin`` .. ``training.steps``; False where a signal stopped it, with what was done saved."""
    steps = max(run.config.training.steps, begin)
    saved = begin if begin else -1
    step = begin
    try:
        while step < steps:
            _stop_if_asked(run)
            if _due(step, run.config.evaluation.every):
                evaluate(run, step)
            _train_step(run, step)
            step += 1
            if step == steps or _due(step, run.config.checkpoint.every):
                _save(run, step)
                saved = step
        if run.config.evaluation.every:
            evaluate(run, steps)
        finished = True
    except Stopped:
        run.log.warn(f"stopping after {step} steps, as a signal asked")
        if saved != step:
            _save(run, step)
        finished = False
    run.checkpoints.wait()
    return finished


def _train_step(run: Run, step: int) -> None:
    with run.log.phase("rollout"):
        sampled = _sample(run, step)
    _stop_if_asked(run)
    with run.log.phase("score"):
        experience = _scored(run, sampled)
    _stop_if_asked(run)
    run.checkpoints.poll()
    with run.log.phase("credit"):
        batch = _batch(run, experience)
        credits = _credits(run, experience)
    run.log.dump(step, experience.rollouts, list(zip(experience.scores, credits, strict=True)))
    try:
        result = _update(run, batch)
    except NonFiniteError as error:
        run.log.dump(step, experience.rollouts, [], always=True)
        run.checkpoints.wait()
        raise NonFiniteError(f"step {step}: {error}; its rollouts are in rollouts/step-{step:06d}.jsonl") from error
    with run.log.phase("sync"):
        sync_engine(run, step + 1)
    metrics = _metrics(run, experience, credits, result)
    run.log.step(step, metrics, total=run.config.training.steps)


def sync_engine(run: Run, version: int) -> None:
    """Gives the engine the policy's weights; every process takes part in gathering them, also when its engine or
    another's fails. Nobody samples before all engines have them."""
    weights = run.policy.weights()

    def update() -> None:
        try:
            run.engine.update_weights(weights, version)
        finally:
            for _ in weights:  # what a failed engine did not take: the others wait for this process's part of it
                pass

    run.mesh.together(update)


def evaluate(run: Run, step: int) -> Metrics:
    """Metrics of the policy on the validation questions, after ``step`` steps."""
    settings = run.config.evaluation
    tasks = run.validation[: settings.questions]
    own = tasks[run.mesh.rank :: run.mesh.n_ranks]
    sampled = run.mesh.together(
        lambda: sample_groups(
            own,
            run.examiner,
            run.engine,
            seed=_seed(run, EVALUATION),
            samples=settings.samples,
            attempts=run.config.training.attempts,
            stop=lambda: run.stop.requested,
        )
    )
    _stop_if_asked(run)
    parts = run.mesh.gather_objects((sampled.rollouts, len(sampled.failures)))
    metrics = rollout_metrics([rollout for part in parts for rollout in part[0]], by=settings.by)
    metrics["lost_rollouts"] = sum(part[1] for part in parts)
    run.log.evaluation(step, metrics)
    return metrics


def _sample(run: Run, step: int) -> SampledGroups:
    """This process's share of the step's groups, whole."""
    settings = run.config.training
    tasks = step_tasks(run.tasks, step, settings.prompts, settings.seed)
    return run.mesh.together(
        lambda: sample_groups(
            tasks[run.mesh.rank :: run.mesh.n_ranks],
            run.harness,
            run.engine,
            seed=_seed(run, 2 + step),
            samples=settings.samples,
            attempts=settings.attempts,
            incomplete=settings.incomplete_groups,
            stop=lambda: run.stop.requested,
        )
    )


def _scored(run: Run, sampled: SampledGroups) -> Experience:
    """The rollouts of all processes, with their scores where the algorithm needs them."""
    rollouts, scores = sampled.rollouts, list[RolloutScore]()
    lost = [f"{failure.id}: {failure.error}" for failure in sampled.failures]
    if algorithm(run.config.algorithm.name).needs_scores:
        scored = run.mesh.together(lambda: run.reference.score(sampled.rollouts))
        if run.config.training.incomplete_groups == "drop":
            scored = scored.complete_groups(sampled.rollouts)
        rollouts, scores = scored.rollouts, scored.scores
        lost += map(str, scored.errors)
    parts = run.mesh.gather_objects((rollouts, scores, lost))
    everywhere = [message for part in parts for message in part[2]]
    experience = Experience(
        rollouts=[rollout for part in parts for rollout in part[0]],
        scores=[score for part in parts for score in part[1]],
        lost=len(everywhere),
    )
    if everywhere:
        run.log.warn(f"{len(everywhere)} rollouts were lost, the first: {everywhere[0]}")
    if not experience.rollouts:
        raise TraceFastError(f"expected rollouts to train on, but all were lost; the first: {everywhere[0]}")
    return experience


def _batch(run: Run, experience: Experience) -> TrainingBatch:
    harness = run.config.harness
    batch = training_batch(
        experience.rollouts, experience.scores or None, temperature=harness.temperature, top_p=harness.top_p
    )
    return prepare(batch, run.config.algorithm)


def _credits(run: Run, experience: Experience) -> list[TurnCredit]:
    """Credit by rollout, for metrics and reports."""
    if not isinstance(run.config.algorithm, TraceConfig):
        return []
    return turn_credit(experience.scores, run.config.algorithm.credit)


def _update(run: Run, batch: TrainingBatch) -> UpdateResult:
    settings = run.config.training
    with run.log.phase("old_logprobs"):
        if len(optimizer_batches(batch, settings.global_batch)) > 1:
            batch = batch.with_old_logprobs(run.policy.batch_logprobs(batch, settings.microbatch_tokens))
    with run.log.phase("update"):
        return update_policy(
            run.policy,
            run.optimizer,
            batch,
            run.config.algorithm.loss,
            global_batch=settings.global_batch,
            budget=settings.microbatch_tokens,
        )


def _metrics(run: Run, experience: Experience, credits: list[TurnCredit], result: UpdateResult) -> Metrics:
    metrics = rollout_metrics(experience.rollouts) | result.metrics
    metrics |= {"lost_rollouts": experience.lost, "optimizer_steps": run.optimizer.steps}
    if credits:
        metrics |= credit_metrics(credits)
        kl = reference_kl(experience.rollouts, experience.scores)
        metrics |= {} if kl is None else {"kl_to_reference": kl}
    seconds = run.log.seconds["update"]
    metrics["update_tokens_per_second"] = result.tokens / seconds
    if run.config.logging.peak_tflops is not None:
        peak = run.config.logging.peak_tflops * 1e12 * run.mesh.n_ranks
        metrics["mfu"] = step_flops(run.policy.spec, experience.rollouts, passes=3) / (seconds * peak)
    return metrics


def _save(run: Run, step: int) -> None:
    progress = Progress(step, run.optimizer.steps, run.reference.hash, run.config.deciding())
    with run.log.phase("checkpoint"):
        run.checkpoints.save(progress, run.policy, run.optimizer)


def _stop_if_asked(run: Run) -> None:
    if run.mesh.any_rank(run.stop.requested):
        raise Stopped


def _seed(run: Run, number: int) -> int:
    """Of one sampling phase of one process."""
    return (run.config.training.seed * 1_000_003 + number) * run.mesh.n_ranks + run.mesh.rank


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
