"""``trace-fast score``: files of rollouts in, score records out, in input order, durably and resumably."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trace_fast import __version__
from trace_fast.backends import dtype_of, pick_device, resolve
from trace_fast.cli_inputs import Inputs
from trace_fast.cli_ledger import Ledger
from trace_fast.cli_report import check_report_path, report_scores
from trace_fast.cli_terminal import (
    EXIT_DONE,
    EXIT_NOTHING_DONE,
    EXIT_SOME_FAILED,
    Interrupted,
    Interrupts,
    ProgressReporter,
    plural,
    say,
)
from trace_fast.config import Alias, CreditConfig, DType
from trace_fast.credit import TurnCredit, turn_credit
from trace_fast.errors import InputError, OutputError, RolloutError, TraceFastError
from trace_fast.output import RunDescription, encode_record, score_record
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.score_writer import ScoreWriter

ERRORS_IN_MEMORY = 256  # failed records that wait for the next pack before they are written on their own


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """What ``trace-fast score`` was asked to do; field names are the options'."""

    inputs: Inputs
    model: str
    out: str
    dtype: DType = "bfloat16"
    device: str = "auto"
    backend: str = "auto"
    alias: Alias = "max"
    opener: str = "auto"
    credit: CreditConfig = field(default_factory=CreditConfig)
    max_tokens_per_pack: int | None = None
    trunk_logprobs: bool = False
    report: str | None = None
    resume: bool = False
    overwrite: bool = False
    strict: bool = False

    def that_change_numbers(self) -> dict[str, Any]:
        """Plain JSON for ``NAME.run.json``; ``auto`` is resolved, since it may mean something else on the next machine.

        The token budget of a pack is part of it only where packing can change a last bit.

        Raises:
            ConfigError: a device that is not there, an unknown dtype or backend, a backend that cannot run here.
        """
        device = pick_device(self.device)
        chosen = resolve(self.backend, device, dtype_of(self.dtype))
        return {
            "dtype": self.dtype,
            "device": device.type,
            "backend": chosen.arithmetic(dtype_of(self.dtype)),
            **({"max_tokens_per_pack": self.max_tokens_per_pack} if chosen.prefix_attention == "triton" else {}),
            "alias": self.alias,
            "opener": self.opener,
            "trunk_logprobs": self.trunk_logprobs,
            "credit": self.credit.model_dump(),
            **self.inputs.settings(),
        }


class PackResultLike(Protocol):
    """One scored pack, as ``trace_fast.scorer.PackResult`` has it."""

    @property
    def scores(self) -> Sequence[RolloutScore]: ...
    @property
    def rollouts(self) -> Sequence[Rollout]: ...
    @property
    def tokens_unique(self) -> int: ...
    @property
    def tokens_naive(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class ScorerLike(Protocol):
    """What this command needs of ``trace_fast.Scorer``."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def reference(self) -> str: ...

    def iter_packs(
        self,
        rollouts: Iterable[Rollout],
        *,
        trunk_logprobs: bool = False,
        errors: Callable[[RolloutError], None] | None = None,
    ) -> Iterator[PackResultLike]: ...


OpenScorer = Callable[[ScoreSettings], ScorerLike]


def open_scorer(settings: ScoreSettings) -> ScorerLike:
    """The real scorer. Raises ``ModelError`` when the model cannot be loaded."""
    from trace_fast.scorer import Scorer

    return Scorer.from_pretrained(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        backend=settings.backend,
        alias=settings.alias,
        max_tokens_per_pack=settings.max_tokens_per_pack,
    )


@dataclass(slots=True)
class ScoreSummary:
    """Counts of one run. ``n_scored`` and ``n_failed`` are of this run alone, ``earlier_*`` of those it resumed."""

    n_scored: int = 0
    n_failed: int = 0
    earlier_scored: int = 0
    earlier_failed: int = 0
    unreadable: int = 0
    stopped: bool = False  # at the first failure, as --strict asks
    broken_off: bool = False  # by the disk: not all scores, or no report, could be written
    notes: Counter[str] = field(default_factory=Counter)
    several_answers: int = 0
    states: int = 0
    states_of_other_alias: int = 0
    tokens_naive: int = 0
    tokens_unique: int = 0
    packs: int = 0
    model_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Tokens that one pass a state would forward, over tokens forwarded (1.0 when nothing was)."""
        return self.tokens_naive / self.tokens_unique if self.tokens_unique else 1.0

    @property
    def exit_code(self) -> int:
        if self.unreadable and not (self.n_scored or self.n_failed or self.earlier_scored or self.earlier_failed):
            return EXIT_NOTHING_DONE
        failed = self.n_failed or self.earlier_failed or self.unreadable or self.stopped or self.broken_off
        return EXIT_SOME_FAILED if failed else EXIT_DONE

    def add_pack(self, pack: PackResultLike) -> None:
        self.packs += 1
        self.tokens_naive += pack.tokens_naive
        self.tokens_unique += pack.tokens_unique
        self.model_seconds += pack.seconds
        for rollout in pack.rollouts:
            self.notes.update(set(rollout.notes))
        for score in pack.scores:
            if score.alias_mean_logprobs.shape[1] > 1:
                self.several_answers += 1
                self.states += len(score.alias)
                self.states_of_other_alias += int((score.alias != 0).sum())

    def lines(self) -> list[str]:
        """The summary as people read it. Token counts are counted, seconds measured; nothing is extrapolated."""
        head = f"{plural(self.n_scored, 'record')} scored, {self.n_failed:,} failed"
        if self.earlier_scored or self.earlier_failed:
            head += f" (and in earlier runs {self.earlier_scored:,} scored, {self.earlier_failed:,} failed)"
        lines = [head]
        lines += [f"note: {plural(count, 'record')}: {note}" for note, count in self.notes.most_common()]
        if self.several_answers:
            lines.append(
                f"{plural(self.several_answers, 'record')} with several gold answers; another than the first was the "
                f"best at {self.states_of_other_alias:,} of {plural(self.states, 'state')}"
            )
        if self.tokens_unique:
            lines.append(
                f"tokens: {self.tokens_naive:,} for one pass a state, {self.tokens_unique:,} forwarded "
                f"({self.ratio:.1f} times fewer)"
            )
        lines.append(
            f"{plural(self.packs, 'pack')}, {self.model_seconds:.1f} s in the model, {self.seconds:.1f} s in all"
        )
        if self.stopped:
            lines.append("stopped at the first failure (--strict)")
        return lines


class _ScoreRun:
    """One run of the command: reads, scores and writes, and counts on the way."""

    def __init__(self, settings: ScoreSettings, writer: ScoreWriter, interrupts: Interrupts) -> None:
        self.settings = settings
        self.writer = writer
        self.interrupts = interrupts
        self.summary = ScoreSummary()
        self.ledger = Ledger(strict=settings.strict)
        self.records_for_report: list[bytes] = []  # only when they go to a pipe and cannot be read back

    def score(self, scorer: ScorerLike, outcomes: Mapping[str, float | None], progress: ProgressReporter) -> None:
        rollouts = self._rollouts(scorer, progress)
        packs = scorer.iter_packs(
            rollouts,
            trunk_logprobs=self.settings.trunk_logprobs,
            errors=lambda error: self._failed_between_packs(error, progress),
        )
        for pack in packs:
            self.summary.add_pack(pack)
            for score, credit in self._credits(pack.scores, outcomes):
                self._encode(score, credit)
            self._commit(progress)
            if self.ledger.closed:
                return
        self._commit(progress)
        self.ledger.check_empty()

    def _rollouts(self, scorer: ScorerLike, progress: ProgressReporter) -> Iterator[Rollout]:
        """What is still to be scored, in input order; unreadable files are reported and passed over."""
        reading = self.settings.inputs.rollouts(
            scorer.tokenizer,
            opener=self.settings.opener,
            errors=lambda error: self._failed_between_packs(error, progress),
            unreadable=lambda error: self._unreadable(error, progress),
        )
        for rollout in reading:
            if self.ledger.stopping:
                return
            if rollout.source not in self.writer.done:
                self.ledger.read(rollout.source)
                yield rollout

    def _failed_between_packs(self, error: RolloutError, progress: ProgressReporter) -> None:
        """A record that cannot be read, or that the scorer refuses before or after the model's pass."""
        self._failed(error)
        # They would pile up in memory, and be lost by a kill, where a file holds little else.
        if self.ledger.n_failed_waiting >= ERRORS_IN_MEMORY:
            self._commit(progress)

    def _failed(self, error: RolloutError) -> None:
        if error.source not in self.writer.done:
            self.ledger.failed(error)

    def _unreadable(self, error: InputError, progress: ProgressReporter) -> None:
        self.summary.unreadable += 1
        self.ledger.stopping = self.ledger.stopping or self.settings.strict
        progress.say(f"error: {error}")

    def _credits(
        self, scores: Sequence[RolloutScore], outcomes: Mapping[str, float | None]
    ) -> list[tuple[RolloutScore, TurnCredit]]:
        """Scores with their credit; a score that has none (its numbers overflow) fails alone.

        Raises:
            InputError: a record has a reward now and had none in the pass over the groups, or the reverse.
        """
        advantages = [outcomes.get(score.source) for score in scores]
        for score, advantage in zip(scores, advantages, strict=True):
            if (score.reward is None) != (advantage is None):
                raise InputError(
                    f"{score.source.rpartition(':')[0]}: expected the file to stay as it is while it is scored, but "
                    f"the reward of record {score.source} has changed since the groups' rewards were read; score it "
                    "again with --overwrite once nothing writes to it"
                )
        try:
            credits = turn_credit(scores, self.settings.credit, outcome_advantages=advantages)
        except TraceFastError as error:
            if len(scores) > 1:
                return [pair for score in scores for pair in self._credits([score], outcomes)]
            reason = error.reason if isinstance(error, RolloutError) else str(error)
            self._failed(RolloutError("non_finite", reason, rollout_id=scores[0].id, source=scores[0].source))
            return []
        return list(zip(scores, credits, strict=True))

    def _encode(self, score: RolloutScore, credit: TurnCredit) -> None:
        try:
            line = encode_record(score_record(score, credit))
        except RolloutError as error:
            self._failed(error)
        else:
            self.ledger.scored(score.source, line)

    def _commit(self, progress: ProgressReporter) -> None:
        """Writes what is ready; a signal waits until it is on disk."""
        scores, errors = self.ledger.pop_ready()
        if not scores and not errors:
            self.interrupts.check()
            return
        with self.interrupts.held():
            self.writer.write(scores, [encode_record(error.to_record()) for error in errors])
            self.summary.n_scored += len(scores)
            self.summary.n_failed += len(errors)
            if self.settings.report is not None and self.writer.to_stdout:
                self.records_for_report += scores
        for error in errors:
            progress.say(f"failed: {error}")
        progress.advance(len(scores) + len(errors))


def run_score(
    settings: ScoreSettings, *, interrupts: Interrupts, open_scorer: OpenScorer = open_scorer
) -> ScoreSummary:
    """Scores every record of the inputs that the output does not hold yet, and prints the summary on stderr.

    Args:
        interrupts: active signal handling; held back while a batch is written.
        open_scorer: makes the scorer once everything cheap has been checked.

    Raises:
        TraceFastError: nothing could be done (``OutputError``, ``InputError``, ``ModelError``, ``ConfigError``).
        Interrupted: a signal came; the output holds whole records only and the message says how to go on.
    """
    started = time.monotonic()
    writer = ScoreWriter(settings.out, resume=settings.resume, overwrite=settings.overwrite)
    settings.inputs.check(*writer.files, settings.report)
    if settings.report is not None:
        check_report_path(settings.report, settings.out, overwrite=settings.overwrite or settings.resume)
    numbers = settings.that_change_numbers()
    outcomes = settings.inputs.outcome_advantages(settings.credit.std)
    scorer = open_scorer(settings)
    run = RunDescription(__version__, scorer.reference, settings.inputs.describe(), numbers)
    with writer:
        writer.begin(run)
        work = _ScoreRun(settings, writer, interrupts)
        summary = work.summary
        summary.earlier_scored, summary.earlier_failed = writer.n_scored, writer.n_failed
        try:
            with ProgressReporter("scored", max(0, len(outcomes) - len(writer.done))) as progress:
                work.score(scorer, outcomes, progress)
        except Interrupted:
            _say_how_to_resume(writer)
            raise
        except OutputError as error:
            if not (summary.n_scored or summary.n_failed):
                raise
            say(f"error: {error}")
            _say_how_to_resume(writer)
            summary.broken_off = True
    summary.stopped = work.ledger.stopping
    summary.seconds = time.monotonic() - started
    for line in summary.lines():
        say(line)
    if summary.n_failed + summary.earlier_failed and not writer.to_stdout:
        say(f"failed records: {writer.errors_path}")
    if settings.report is not None and not summary.broken_off:
        _report(settings.report, work, run)
    return summary


def _report(path: str, work: _ScoreRun, run: RunDescription) -> None:
    """The report of a finished run; when it cannot be written, the scores are still there and the exit code is 1."""
    settings, writer = work.settings, work.writer
    try:
        report_scores(
            path,
            work.records_for_report if writer.to_stdout else Path(settings.out),
            settings.inputs,
            run=run.to_json(),
            secured_threshold=settings.credit.secured_threshold,
            unreadable=lambda error: None,  # said when it was scored
        )
    except TraceFastError as error:
        say(f"error: {error}")
        say("the scores are complete; trace-fast report writes the report from them")
        work.summary.broken_off = True
    else:
        say(f"report: {path}")


def _say_how_to_resume(writer: ScoreWriter) -> None:
    records = plural(writer.n_scored, "whole record")
    if writer.to_stdout:
        say(f"{records} went to standard output; only a file can be resumed")
    else:
        say(f"{records} in {writer.path}; the same command with --resume (and without --overwrite) continues")
