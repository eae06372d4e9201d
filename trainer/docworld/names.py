"""Invented names, built from syllables: every kind of thing has its own endings, and no name is given twice.

People share family names, so that a search for one finds namesakes too. Titles of works are made of common words.
"""

from __future__ import annotations

from trace_fast.errors import ConfigError
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.docworld.schema import Kind

_STARTS = (
    "Bal", "Bren", "Cor", "Dal", "Dor", "Fen", "Gar", "Hul", "Jor", "Kel", "Kor", "Lum", "Mog", "Nor",
    "Ol", "Pel", "Quen", "Rav", "Sib", "Tal", "Tor", "Ul", "Vel", "Vor", "Wen", "Yar", "Zan", "Zil",
)  # fmt: skip
_MIDDLES = ("a", "e", "i", "o", "u", "an", "ar", "el", "en", "il", "in", "or", "ul", "am", "os", "et")
_ENDS = {
    "land": ("avia", "eria", "onia", "ustan", "umark"),
    "city": ("burg", "dal", "ford", "gate", "haven", "mouth", "port", "stead", "ton", "wall"),
    "given": ("do", "ka", "lin", "mo", "na", "ris", "sa", "tu", "vi", "zo"),
    "family": ("brak", "dane", "fell", "gast", "holm", "kess", "lund", "mond", "rath", "strand", "varn", "wick"),
    "company": ("bex", "dix", "gax", "lex", "mex", "nix", "rox", "tex", "vix", "zex"),
    "prize": ("bur", "dir", "gur", "mur", "nur", "sur"),
}
_TRADE_NAMES = ("Company", "House", "Line", "Mills", "Press", "Works")
_ADJECTIVES = (
    "Amber", "Bitter", "Blue", "Bright", "Broken", "Cold", "Dark", "Distant", "Empty", "First", "Golden", "Green",
    "Hidden", "Last", "Long", "Lost", "Narrow", "Old", "Quiet", "Red", "Silver", "Slow", "Wide", "Wild",
)  # fmt: skip
_NOUNS = (
    "Bell", "Bird", "Boat", "Bridge", "Door", "Feather", "Fire", "Forest", "Garden", "Harbour", "Island", "Lamp",
    "Letter", "Mirror", "Moon", "Mountain", "Night", "Orchard", "River", "Road", "Stone", "Storm", "Tower", "Winter",
)  # fmt: skip
_TRIES = 2000


class NameMaker:
    """Gives out names, each once. People draw from shared family names: about one for three persons."""

    def __init__(self, dice: Dice, *, persons: int) -> None:
        self._dice = dice
        self._taken: set[str] = set()  # asked for membership only: its order never matters
        self._given = self._pool("given", 24 + persons // 12)
        self._family = self._pool("family", 4 + persons // 3)

    def make(self, kind: Kind) -> str:
        """A new name.

        Raises:
            ConfigError: the syllables are used up; the world is too large.
        """
        for _ in range(_TRIES):
            name = self._draft(kind)
            if name not in self._taken:
                self._taken.add(name)
                return name
        raise ConfigError(f"docworld size: expected a world with names for all, ran out of those of kind {kind}")

    def _draft(self, kind: Kind) -> str:
        dice = self._dice
        if kind == "person":
            return f"{dice.pick(self._given)} {dice.pick(self._family)}"
        if kind == "work":
            return self._title()
        word = self._word(kind)
        if kind == "company":
            return f"{word} {dice.pick(_TRADE_NAMES)}"
        return f"{word} Prize" if kind == "prize" else word

    def _word(self, ends: str) -> str:
        return self._dice.pick(_STARTS) + self._dice.pick(_MIDDLES) + self._dice.pick(_ENDS[ends])

    def _pool(self, ends: str, size: int) -> tuple[str, ...]:
        """At most ``size`` different words; fewer when the syllables do not give more."""
        words: dict[str, None] = {}
        for _ in range(10 * size + _TRIES):
            if len(words) == size:
                break
            words[self._word(ends)] = None
        return tuple(words)

    def _title(self) -> str:
        adjective, noun = self._dice.pick(_ADJECTIVES), self._dice.pick(_NOUNS)
        other = self._dice.pick(_NOUNS)
        shape = self._dice.weighted((0, 1, 2), (3, 1, 1))
        if shape == 0 or noun == other:
            return f"The {adjective} {noun}"
        return f"The {noun} and the {adjective} {other}" if shape == 1 else f"The {adjective} {noun} of the {other}"
