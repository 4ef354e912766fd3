"""A parser of Hjson, which DeepSpeed accepts: JSON with comments, unquoted keys and strings, and
optional or trailing commas.
"""

from __future__ import annotations

import json
import re

from hf_zero.logging import JsonObject

# tokens of Hjson
_SPACE = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_KEY = re.compile(r"[^\s,:\[\]{}'\"]+")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_SINGLE = re.compile(r"'(?:[^'\\\n]|\\.)*'")
_BARE = re.compile(r"[^\n]*")
_WORD = re.compile(
    r"(true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)[ \t\r]*(?=[,\]}#\n]|//|/\*|$)"
)


class HjsonError(ValueError):
    """A syntax error in Hjson text at offset ``position``."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def parse_hjson(text: str) -> object:
    """Parse the value in ``text``; an object at the top may omit its braces. Raises HjsonError for
    invalid Hjson and for duplicate keys in one object.
    """
    reader = _Reader(text)
    reader.skip()
    value = reader.value() if text[reader.at : reader.at + 1] in ("{", "[") else reader.members("")
    reader.skip()
    if reader.at < len(text):
        raise HjsonError("more than one value", reader.at)
    return value


class _Reader:
    """A cursor at offset ``at`` of ``text``."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0

    def skip(self) -> None:
        """Skip whitespace and comments."""
        self._take(_SPACE)

    def value(self) -> object:
        char = self._text[self.at : self.at + 1]
        if char == "{":
            self.at += 1
            return self.members("}")
        if char == "[":
            self.at += 1
            return self._items()
        if self._text.startswith("'''", self.at):
            return self._block()
        if char in ('"', "'"):
            return self._string()
        if char in ("", ",", ":", "]", "}"):
            raise HjsonError(f"a value is missing before {char or 'the end'!r}", self.at)
        word = _WORD.match(self._text, self.at)
        if word:
            self.at = word.end(1)
            return json.loads(word[1])
        return self._take(_BARE).strip()

    def members(self, end: str) -> dict[str, object]:
        """Parse the members of an object up to and including ``end``."""
        values: JsonObject = {}
        while not self._ends(end):
            start = self.at
            key = self._string() if self._text[start] in "\"'" else self._take(_KEY)
            self.skip()
            if not key or self._text[self.at : self.at + 1] != ":":
                raise HjsonError("a key and a colon are expected", start)
            if key in values:
                raise HjsonError(f"the key {key!r} occurs twice in one section", start)
            self.at += 1
            self.skip()
            values[key] = self.value()
        return values

    def _items(self) -> list[object]:
        items = []
        while not self._ends("]"):
            items.append(self.value())
        return items

    def _ends(self, end: str) -> bool:
        """Skip a comma; return whether ``end`` follows, and skip it. "" is the end of the text."""
        self.skip()
        if self._text[self.at : self.at + 1] == ",":
            self.at += 1
            self.skip()
        if self.at >= len(self._text):
            if end:
                raise HjsonError(f"{end!r} is missing", self.at)
            return True
        if end and self._text[self.at] == end:
            self.at += 1
            return True
        return False

    def _string(self) -> str:
        start, single = self.at, self._text[self.at] == "'"
        quoted = self._take(_SINGLE if single else _QUOTED)
        if not quoted:
            raise HjsonError("a quote is not closed", start)
        if single:
            inner = quoted[1:-1].replace("\\'", "'").replace('"', '\\"')
            quoted = f'"{inner}"'
        try:
            return str(json.loads(quoted))
        except json.JSONDecodeError:
            raise HjsonError("a string has an escape that there is not", start) from None

    def _block(self) -> str:
        """Parse a multi-line string between triple quotes."""
        end = self._text.find("'''", self.at + 3)
        if end < 0:
            raise HjsonError("three quotes are not closed", self.at)
        lines = self._text[self.at + 3 : end].strip().split("\n")
        self.at = end + 3
        return "\n".join(line.strip() for line in lines)

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match[0]
