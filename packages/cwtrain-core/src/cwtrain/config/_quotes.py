"""What others say, fit for a message of ours: without secrets, on one line, and cut. In this order: what is cut first
may end in the middle of a secret, which is then not known again.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote as percent_encoded

__all__ = ["QUOTE_CHARS", "Scrubber", "quote"]

QUOTE_CHARS = 500
"""At most this much of an answer is quoted in an error."""
_SHORTEST_SECRET = 4  # a shorter one hides nothing, and taking it out would spoil every text
_PIECE = 8
"""So many letters and digits in a row of a secret are hidden, whatever stands between them."""
_SEARCHED = 1 << 18
"""Characters of a text that are searched for pieces; whole secrets are found in all of it."""
_MARKS = re.compile(r"[\W_]+")


class Scrubber:
    """Takes secrets out of text that a server may have echoed: whole, in part, broken over lines, or encoded.

    ``secrets`` are found as they are, and by any piece of 8 letters or digits, also of their JSON, HTML, URL, base64
    and hexadecimal spellings; ``whole`` only as a whole (a header of the user's may be an ordinary word).
    """

    def __init__(self, secrets: Iterable[str], *, whole: Iterable[str] = (), shortest: int = _SHORTEST_SECRET) -> None:
        secrets = [secret for secret in secrets if len(secret) >= shortest]
        every = [*secrets, *(secret for secret in whole if len(secret) >= shortest)]
        spellings = {way(secret) for secret in every for way in _WAYS}
        longest_first = sorted(spellings, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._pieces = frozenset(
            text[start : start + _PIECE]
            for secret in secrets
            for spelled in _spellings(secret)
            for text in [_squeezed(spelled)]
            for start in range(len(text) - _PIECE + 1)
        )

    def text(self, text: str) -> str:
        """Return ``text`` with every secret replaced."""
        if self._pattern is None:
            return text
        text = self._pattern.sub("***", text)
        if len(text) < _PIECE:
            return text
        squeezed = _squeezed(text[:_SEARCHED])
        return self._without_pieces(text) if any(piece in squeezed for piece in self._pieces) else text

    def data(self, value: Any) -> Any:
        """Return JSON data with every secret replaced."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.data(item) for item in value]
        if isinstance(value, dict):
            return {self.text(str(key)): self.data(item) for key, item in value.items()}
        return value

    def _without_pieces(self, text: str) -> str:
        places = [place for place, char in enumerate(text[:_SEARCHED]) if not _MARKS.match(char)]
        squeezed = "".join(_lower(text[place]) for place in places)
        parts, done, start = [], 0, 0
        while start <= len(squeezed) - _PIECE:
            if squeezed[start : start + _PIECE] not in self._pieces:
                start += 1
                continue
            end = start + _PIECE
            while end < len(squeezed) and squeezed[end - _PIECE + 1 : end + 1] in self._pieces:
                end += 1
            parts += [text[done : places[start]], "***"]
            done, start = places[end - 1] + 1, end
        return "".join([*parts, text[done:]])


def quote(text: str, limit: int = QUOTE_CHARS) -> str:
    """Return ``text`` on one line, without control characters, and at most ``limit`` characters long."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


_WAYS = (
    str,
    lambda text: json.dumps(text)[1:-1],
    html.escape,
    lambda text: percent_encoded(text, safe=""),
)


def _spellings(secret: str) -> list[str]:
    raw = secret.encode("utf-8", "surrogatepass")
    twice = percent_encoded(percent_encoded(secret, safe=""), safe="")
    # In base64 of a longer text, such as `user:secret`, it begins at any of three places; its edges depend on the rest.
    shifted = [base64.b64encode(b"\0" * shift + raw).decode().rstrip("=")[edge:-1] for shift, edge in _EDGES]
    return [*(way(secret) for way in _WAYS), twice, raw.hex(), *shifted]


_EDGES = ((0, 0), (1, 2), (2, 3))


def _squeezed(text: str) -> str:
    text = _MARKS.sub("", text)
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(map(_lower, text))


def _lower(char: str) -> str:
    lower = char.lower()
    return lower if len(lower) == 1 else char
