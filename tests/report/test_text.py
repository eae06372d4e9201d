"""Hidden characters become visible, and embedded JSON cannot leave its script element."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_fast.report.text import embed_json, label, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain {{7*7}} {% x %} <b>&amp;", "plain {{7*7}} {% x %} <b>&amp;"),
        ("tab\tline\nCRLF\r\nend", "tab\tline\nCRLF\nend"),
        ("\r", "⟦U+000D⟧"),
        ("nul\0esc\x1b[31m", "nul⟦U+0000⟧esc⟦U+001B⟧[31m"),
        ("\x7f\x85\x9b", "⟦U+007F⟧⟦U+0085⟧⟦U+009B⟧"),
        ("user\u202egnp.exe", "user⟦U+202E⟧gnp.exe"),
        ("\u2066a\u2069\u200f\u061c", "⟦U+2066⟧a⟦U+2069⟧⟦U+200F⟧⟦U+061C⟧"),
        ("a\u200bb\ufeffc\u00add", "a⟦U+200B⟧b⟦U+FEFF⟧c⟦U+00AD⟧d"),
        ("\ud800x\udc00", "⟦U+D800⟧x⟦U+DC00⟧"),
        ("\u2028\u2029", "⟦U+2028⟧⟦U+2029⟧"),
        ("\U000e0041\u3164", "⟦U+E0041⟧⟦U+3164⟧"),
        ("中文 עברית ü 😀 \u00a0", "中文 עברית ü 😀 \u00a0"),
    ],
)
def test_hidden_characters_are_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_every_control_format_and_surrogate_character_is_written_out() -> None:
    kept = {
        hex(code)
        for code in range(0x110000)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and visible(chr(code)) == chr(code)
    }
    assert kept == {"0x9", "0xa"}


def test_label_says_how_much_it_left_out() -> None:
    shown = label("a" * 300 + "b" * 1000 + "c" * 100, limit=400)
    assert shown == "a" * 300 + " […1,000 characters…] " + "c" * 100
    assert label("x" * 400, limit=400) == "x" * 400


@given(st.text(st.characters(exclude_categories=()) | st.sampled_from('<>&\u2028\u2029"\\/')))
def test_embedded_json_is_the_same_text_and_holds_no_markup(text: str) -> None:
    embedded = embed_json([visible(text)])
    assert json.loads(embedded) == [visible(text)]
    assert not set(embedded) & set("<>&\u2028\u2029")
    embedded.encode()  # no lone surrogate is left


def test_embedded_json_refuses_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed_json([float("nan")])
