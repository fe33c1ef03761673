"""Sizes, durations and names as people read them; nothing that is shown can move a terminal's cursor."""

from __future__ import annotations

import re

__all__ = ["duration", "printable", "printable_lines", "size"]

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def printable(text: str) -> str:
    """Return ``text`` with everything that is no printable character spelt out, as in ``\\x1b`` and ``\\n``.

    Control characters, also those above 127, marks that change the direction of writing, and halves of characters: what
    a file or a server calls something must not be able to act on a terminal, or to look like a line of ours.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spelt(char) for char in text)


def _spelt(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def printable_lines(text: str) -> str:
    """Return ``text`` as ``printable`` does, but for its lists: a line end before two blanks or a dash stays one.

    Those are ours. Any other may come out of a name, and would let it pass for a line of its own.
    """
    if text.isprintable():
        return text
    return "".join(part if part == "\n" else printable(part) for part in re.split(r"(\n(?=  |-))", text))


def size(count: float) -> str:
    """Return a number of bytes in words: ``512 B``, ``14.8 KiB``, ``1.25 GiB``."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        # As it will be rounded, so that nothing is told as 1024 KiB.
        if abs(value) < 1023.95 or unit == "PiB":
            break
    return f"{value:.2f} {unit}" if abs(value) < 10 and unit not in ("KiB", "MiB") else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Return a number of seconds in words: ``3 ms``, ``0.48 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995 and seconds != int(seconds):
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        unit, word, part, part_word = _MINUTE, "min", 1, "s"
    elif whole < _DAY:
        unit, word, part, part_word = _HOUR, "h", _MINUTE, "min"
    else:
        unit, word, part, part_word = _DAY, "d", _HOUR, "h"
    count, rest = whole // unit, whole % unit // part
    return f"{count} {word} {rest} {part_word}" if rest else f"{count} {word}"
