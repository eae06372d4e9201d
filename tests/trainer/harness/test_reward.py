"""Normalisers, answer blocks and the reward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_fast.errors import ConfigError
from trace_fast.trainer.harness import exact_match, judge, normalise_squad, normalise_strict
from trace_fast.trainer.harness.reward import answer_blocks, well_formed


@pytest.mark.parametrize(
    ("text", "squad", "strict"),
    [
        ("The  Rhine.", "rhine", "rhine"),
        ("22.0", "220", "22.0"),
        ("-5", "5", "-5"),
        ("\u22125", "\u22125", "-5"),
        ("1,000", "1000", "1000"),
        ("1,00", "100", "1 00"),
        ("1,234,567.5", "12345675", "1234567.5"),
        (".5", "5", ".5"),
        ("-.5", "5", "-.5"),
        ("3.", "3", "3"),
        ("C++", "c", "c++"),
        ("C#", "c", "c#"),
        ("50%", "50", "50%"),
        ("O'Hara", "ohara", "ohara"),
        ("O\u2019Hara", "o\u2019hara", "ohara"),
        ("U.S.", "us", "us"),
        ("1990-1995", "19901995", "1990 1995"),
        ("well-known", "wellknown", "well known"),
        ("A", "", "a"),
        ("The The", "", "the"),
        ("?", "", "?"),
        ("Straße", "straße", "strasse"),
        ("２０", "２０", "20"),
        ("Ⅻ", "ⅻ", "xii"),
        ("e\u0301t\u00e9", "e\u0301t\u00e9", "\u00e9t\u00e9"),
        ("«Zoë», said", "«zoë» said", "zoë said"),
        ("東京。", "東京。", "東京"),
        ("an apple, a pear", "apple pear", "apple a pear"),
    ],
)
def test_normal_forms(text: str, squad: str, strict: str) -> None:
    assert normalise_squad(text) == squad
    assert normalise_strict(text) == strict


@given(st.text(max_size=30))
def test_strict_is_never_empty_and_has_single_spaces(text: str) -> None:
    normal = normalise_strict(text)
    assert bool(normal) == bool(text.strip())
    assert normal == " ".join(normal.split())


@pytest.mark.parametrize(
    ("prediction", "golds", "squad", "strict"),
    [
        ("the rhine", ["Rhine"], True, True),
        ("Bern", ["Basel", "bern."], True, True),
        ("220", ["22.0"], True, False),
        ("5", ["-5"], True, False),
        ("22.0", ["22.0"], True, True),
        ("the", ["A"], False, False),
        ("a", ["A"], True, True),
        ("!", ["?"], False, False),
        ("", ["A"], False, False),
        (" ", ["x"], False, False),
    ],
)
def test_exact_match_of_any_gold(prediction: str, golds: list[str], squad: bool, strict: bool) -> None:
    assert exact_match(prediction, golds, "squad") is squad
    assert exact_match(prediction, golds, "strict") is strict


def test_unusable_golds_and_normalisers_are_refused() -> None:
    for golds in ([], [""], ["x", " "]):
        with pytest.raises(ConfigError, match="answers: expected at least one gold answer"):
            exact_match("x", golds, "squad")
    with pytest.raises(ConfigError, match="normaliser: expected one of squad, strict, got 'em'"):
        exact_match("x", ["x"], "em")


@pytest.mark.parametrize(
    ("text", "blocks", "valid"),
    [
        ("<answer>x</answer>", ["x"], True),
        ("so <answer>\n x y \n</answer> done", ["x y"], True),
        ("<answer>x</answer> no: <answer>y</answer>", ["x", "y"], True),
        ("<answer></answer>", [""], False),
        ("<answer>x", [], False),
        ("x</answer>", [], False),
        ("<answer>x<answer>y</answer>", ["y"], False),
        ("<answer>x</answer></answer>", ["x"], False),
        ("<Answer>x</Answer>", [], False),
    ],
)
def test_answer_blocks(text: str, blocks: list[str], valid: bool) -> None:
    assert answer_blocks(text) == blocks
    assert well_formed(text) is valid


@pytest.mark.parametrize(
    ("prediction", "valid", "reward"),
    [("Rhine", True, 1.1), ("Rhine", False, 1.0), ("Aare", True, 0.1), ("Aare", False, 0.0), (None, False, 0.0)],
)
def test_reward_is_outcome_and_format(prediction: str | None, valid: bool, reward: float) -> None:
    verdict = judge(prediction, valid, ["Rhine"], normaliser="squad", outcome_coefficient=1.0, format_score=0.1)
    assert verdict.reward == pytest.approx(reward, abs=1e-15)
    assert verdict.correct == (prediction == "Rhine")
    assert verdict.format_valid is valid
