"""Text that is safe on a terminal, progress in plain lines, signals held back."""

from __future__ import annotations

import os
import signal

import pytest
import typer

from trace_fast.cli_terminal import (
    Interrupted,
    Interrupts,
    ProgressReporter,
    command_errors,
    plural,
    printable,
    validated,
)
from trace_fast.config import CreditConfig
from trace_fast.errors import ConfigError, InputError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [bold]text[/bold] {x}", "plain [bold]text[/bold] {x}"),
        ("答 é ½", "答 é ½"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\r\nb\tc\x00", "a\\r\\nb\\tc\\x00"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("\u202eabc\u2066\u200b\ufeff", "\\u202eabc\\u2066\\u200b\\ufeff"),
        ("\u2028\u2029\ud800\ue000", "\\u2028\\u2029\\ud800\\ue000"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_printable_escapes_what_could_act_on_a_terminal(text, shown):
    assert printable(text) == shown


def test_printable_shortens_before_it_escapes():
    assert printable("abcdef", 4) == "abc…"
    assert printable("abcd", 4) == "abcd"
    assert printable("\x1b\x1b\x1b", 2) == "\\x1b…"


def test_plural():
    assert [plural(n, "record") for n in (0, 1, 2, 12345)] == ["0 records", "1 record", "2 records", "12,345 records"]


def test_progress_without_a_terminal_is_a_line_every_ten_seconds(capsys):
    times = iter([0.0, 9.9, 10.1, 10.1, 15.0, 20.2, 20.2])
    with ProgressReporter("scored", 100, clock=lambda: next(times)) as progress:
        for _ in range(4):
            progress.advance(10)
    assert capsys.readouterr().err.splitlines() == ["scored 20 of 100 records", "scored 40 of 100 records"]


@pytest.mark.parametrize(("which", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_waits_until_the_block_ends(which, code):
    steps = []
    previous = signal.getsignal(which)

    def body():
        with Interrupts() as interrupts:
            with interrupts.held():
                os.kill(os.getpid(), which)
                steps.append("written whole")
            steps.append("not reached")

    with pytest.raises(Interrupted) as caught:
        body()
    assert steps == ["written whole"]
    assert caught.value.exit_code == code
    assert signal.getsignal(which) is previous


def test_an_error_in_the_block_goes_before_the_signal_and_the_signal_is_not_lost():
    def failing_write(interrupts):
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            raise OSError("full")

    with Interrupts() as interrupts:
        with pytest.raises(OSError, match="full"):
            failing_write(interrupts)
        with pytest.raises(Interrupted):
            interrupts.check()


def test_errors_become_one_safe_line_and_exit_code_2(capsys):
    with pytest.raises(typer.Exit) as caught, command_errors():
        raise InputError("no \x1b[31mfile\nhere")
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == "error: no \\x1b[31mfile\\nhere\n"


def test_defects_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), command_errors():
        1 / 0  # noqa: B018


def test_bad_settings_are_named_as_options():
    with pytest.raises(ConfigError, match=r"--discount: .* got 2; --gap-offset: Input should be greater than 0, got 0"):
        validated(lambda: CreditConfig.model_validate({"gap_offset": 0, "discount": 2}))
