"""Rollout text is hostile: what cannot be seen becomes visible, and nothing in it can end a script element."""

from __future__ import annotations

import json
import re
from typing import Any

# Controls (all of C0 but tab and newline, DEL, C1), format characters (zero-width, bidi, soft hyphen, invisible
# operators, tags), letters that draw nothing (Hangul fillers), line and paragraph separators, supplementary
# variation selectors, and surrogates, which in a Python string are always unpaired.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)

# Characters that could end a script element, start a comment or a character reference, or a line in old parsers.
_JSON_ESCAPES = tuple((c, f"\\u{ord(c):04x}") for c in "<>&\u2028\u2029")


def visible(text: str) -> str:
    """``text`` with every invisible or direction-changing character written out, as in ``⟦U+202E⟧``.

    Tab and newline stay; ``\\r\\n`` is a newline. The result always encodes as UTF-8.
    """
    return _HIDDEN.sub(lambda match: f"⟦U+{ord(match[0]):04X}⟧", text.replace("\r\n", "\n"))


def label(text: str, limit: int = 400) -> str:
    """``visible(text)`` for a heading or a table cell: middle cut out, and counted, beyond ``limit`` characters."""
    if len(text) > limit:
        head, tail = text[: limit * 3 // 4], text[-(limit // 4) :]
        text = f"{head} […{len(text) - len(head) - len(tail):,} characters…] {tail}"
    return visible(text)


def embed_json(value: Any) -> str:
    """JSON that is safe inside ``<script type="application/json">``; NaN and infinities are refused."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escape in _JSON_ESCAPES:
        text = text.replace(character, escape)
    return text
