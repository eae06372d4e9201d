"""The frozen reference in another process: ``trace-fast serve`` scores, this asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trace_fast.errors import ConfigError, RolloutError
from trace_fast.formats import rollout_record
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.service import PROTOCOL
from trace_fast.service.wire import score_from_json
from trace_fast.trainer.config import ReferenceConfig
from trace_fast.trainer.engines.http import BadAnswer, JsonClient
from trace_fast.trainer.reference import Scored

_TOKENS = 1 << 20  # of one request, about; its answer holds as many numbers where tokens are scored
_ABOUT_S = 30.0  # for the server to say what it is


class RemoteReference:
    """A reference that a server holds.

    Args:
        vocabulary: ``vocabulary_hash`` of the policy's tokenizer.

    Raises on construction:
        ServerError: no server answers there. BadAnswer: something else does.
        ConfigError: the server scores in another way than ``config`` says, or reads ids as other tokens.
    """

    def __init__(self, config: ReferenceConfig, *, vocabulary: str) -> None:
        assert config.url is not None  # ReferenceConfig
        self._config = config
        self._client = JsonClient(config.url)
        about = self._client.call("/reference", timeout_s=_ABOUT_S, method="GET")
        if not isinstance(about, dict) or not isinstance(about.get("reference"), str):
            raise BadAnswer(f"{config.url}/reference: expected what trace-fast serve answers, got {str(about)[:80]!r}")
        self._hash: str = about["reference"]
        wanted = {"protocol": PROTOCOL, "dtype": config.dtype, "alias": config.alias, "vocabulary": vocabulary}
        for name, value in wanted.items():
            if about.get(name) != value:
                raise ConfigError(
                    f"reference.url: {config.url}: expected a server with {name} {value!r}, got {about.get(name)!r}"
                )

    @property
    def hash(self) -> str:
        """``name@hash`` of weights, config and tokenizer."""
        return self._hash

    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Scores of all states, and with ``kl`` of the written tokens; a rollout that cannot be scored is left out.

        Raises:
            ServerError, BadAnswer: the server did not answer in time, or answered something else.
            ConfigError: it is another reference now.
        """
        scored = Scored([], [], [])
        for part in _parts(rollouts):
            body = {"rollouts": [_question(rollout) for rollout in part], "written_logprobs": self._config.kl}
            answer = self._client.patiently(
                "/score", body, timeout_s=self._config.timeout_s, deadline_s=self._config.deadline_s
            )
            try:
                self._take(answer, part, scored)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise BadAnswer(f"{self._client.url}/score: an answer with missing or odd fields: {error!r}") from error
        return scored

    def _take(self, answer: Any, part: Sequence[Rollout], scored: Scored) -> None:
        if answer["reference"] != self._hash:
            raise ConfigError(
                f"reference.url: {self._client.url}: expected the reference {self._hash} that the run began with, got "
                f"{answer['reference']}"
            )
        found: dict[int, RolloutScore | RolloutError] = {}
        for record in answer["scores"]:
            rollout = part[_index(record, part, found)]
            try:
                found[record["index"]] = score_from_json(
                    record, rollout, reference=self._hash, written=self._config.kl
                )
            except RolloutError as error:
                found[record["index"]] = error
        for record in answer["errors"]:
            rollout = part[_index(record, part, found)]
            found[record["index"]] = RolloutError(
                record["kind"] if record["kind"] in RolloutError.KINDS else "inexact",
                str(record["message"]),
                rollout_id=rollout.id,
                source=rollout.source,
            )
        if len(found) != len(part):
            raise ValueError(f"expected {len(part)} scores and errors, got {len(found)}")
        for index, rollout in enumerate(part):
            result = found[index]
            if isinstance(result, RolloutScore):
                scored.rollouts.append(rollout)
                scored.scores.append(result)
            else:
                scored.errors.append(result)


def _parts(rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    """Runs of rollouts of about ``_TOKENS`` tokens, one rollout at least."""
    part: list[Rollout] = []
    tokens = 0
    for rollout in rollouts:
        if part and tokens + len(rollout.input_ids) > _TOKENS:
            yield part
            part, tokens = [], 0
        part.append(rollout)
        tokens += len(rollout.input_ids)
    if part:
        yield part


def _question(rollout: Rollout) -> dict[str, Any]:
    """What scores depend on, and nothing else of the rollout."""
    bare = replace(rollout, logprobs=None, reward=None, transcript=(), extra={}, notes=())
    return rollout_record(bare)


def _index(record: Any, part: Sequence[Rollout], found: dict[int, Any]) -> int:
    index = record["index"]
    if type(index) is not int or not 0 <= index < len(part) or index in found:
        raise ValueError(f"index: expected one of 0..{len(part) - 1} once, got {index!r}")
    return index
