"""Settings with which a credit or an advantage could overflow or vanish are refused where they are set, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from trace_fast import config
from trace_fast.cli import build_app
from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.kernels.turn_credit.checks import LARGEST_SETTING


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CreditConfig(gap_offset=1e-320), "gap_offset.*expected at least 2.23e-308"),
        (lambda: CreditConfig(gap_offset=1e10), "gap_offset.*less than or equal to 1000000000"),
        (lambda: CreditConfig(terminal_scale=1e39), "terminal_scale.*less than or equal to 1000000000"),
        (lambda: AdvantageConfig(alpha_out=1e39), "alpha_out.*less than or equal to 1000000000"),
        (lambda: AdvantageConfig(alpha_turn=1e39), "alpha_turn.*less than or equal to 1000000000"),
        (lambda: AdvantageConfig(answer_tail_scale=1e39), "answer_tail_scale.*less than or equal to 1000000000"),
    ],
)
def test_a_setting_out_of_range_is_refused_at_once(build: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        build()


def test_the_limit_is_that_of_the_op() -> None:
    assert config.LARGEST == LARGEST_SETTING


def test_the_command_line_says_it_once_and_reads_no_record(tmp_path: Path) -> None:
    records = tmp_path / "in.jsonl"
    records.write_text("{}\n" * 3)
    arguments = ["score", str(records), "--model", "none", "--out", str(tmp_path / "out.jsonl")]
    result = CliRunner().invoke(build_app(), [*arguments, "--gap-offset", "1e-320"], catch_exceptions=False)
    assert result.exit_code == 2
    assert result.stderr.count("error:") == 1
    assert "--gap-offset: Value error, expected at least 2.23e-308" in " ".join(result.stderr.split())
    assert not list(tmp_path.glob("out*"))
