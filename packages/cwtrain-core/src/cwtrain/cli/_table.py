"""Tables for people, of any JSON data: words for headers, units that people use, ids that can be copied whole.

Nothing is cut and no word is broken. Where rows do not fit side by side each becomes a block of lines; text of several
words is folded between them. Without a width (away from a terminal) a row is one line.
"""

from __future__ import annotations

import datetime as dt
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from cwtrain.models.text import duration, printable, size

__all__ = ["Columns", "table"]

Columns: TypeAlias = "Sequence[str] | Mapping[str, Sequence[str]]"
"""The dotted keys that a list's table shows, or those of each list in an object, by the list's own dotted key.

One that ends in ``?`` is left out where there is no room for it. ``key=Header`` names the header.
"""

_GAP: Final = 2
_NARROWEST: Final = 16
"""Columns of text are not folded below this."""
_OUTER: Final = ("spec", "status")
"""What the service wraps a resource's fields in: no words of their own."""
_UNITS: Final = {"bytes": "size", "seconds": "time"}
_SHORT: Final = {"api": "API", "gpu": "GPU", "kv": "KV", "s3": "S3", "uri": "URI", "url": "URL", "urls": "URLs"}
_FIELD: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
"""A key that names a field; any other is data itself, and stays as it is."""
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")

_Path: TypeAlias = tuple[str, ...]


def table(value: Any, columns: Columns = (), *, width: int | None = None, now: dt.datetime | None = None) -> str:
    """Return ``value``, plain JSON data, as lines for a person, at most ``width`` columns wide where words allow it.

    With ``now`` the times in a list are told as ages.
    """
    drawing = _Drawing(columns, width, now)
    return "".join(f"{line.rstrip()}\n" for line in drawing.lines(value))


class _Drawing:
    def __init__(self, columns: Columns, width: int | None, now: dt.datetime | None) -> None:
        self._columns = columns
        self._width = width
        self._now = now

    def lines(self, value: Any) -> Iterator[str]:
        match value:
            case Mapping():
                yield from self._fields(value, (), 0)
            case list() if any(isinstance(item, Mapping) for item in value):
                yield from self._list(value, (), 0)
            case list():
                yield from (self._cell((), item) for item in value)
            case _:
                yield self._cell((), value)

    # Objects ---------------------------------------------------------------------------------------------------------

    def _fields(self, value: Mapping[str, Any], path: _Path, indent: int) -> Iterator[str]:
        """Yield an object: its own fields first, then what is in them, under a title each."""
        plain, nested = _sorted_out(value)
        labels = _labels([key for key, _ in plain])
        broad = max((_cells(label) for label in labels), default=0)
        for label, (key, item) in zip(labels, plain, strict=True):
            # Sentences stand in lines of their own; words are listed.
            texts = (
                item if isinstance(item, list) and any(isinstance(one, str) and " " in one for one in item) else [item]
            )
            for number, one in enumerate(texts):
                text = self._cell((*path, *key), one) or ("none" if one == [] or one == {} else "-")
                yield from self._field("" if number else label, text, broad, indent)
        first = not plain
        for key, item in nested:
            if not first and not indent:
                yield ""
            first = False
            yield f"{'':{indent}}{_title(key)}"
            here = (*path, *key)
            if isinstance(item, Mapping):
                yield from self._fields(item, here, indent + _GAP)
            else:
                yield from self._list(item, here, indent + _GAP)

    def _field(self, label: str, text: str, broad: int, indent: int) -> Iterator[str]:
        head = f"{'':{indent}}{_padded(label, broad)}{'':{_GAP}}"
        room = None if self._width is None else self._width - _cells(head)
        if room is not None and _longest_word(text) > room:  # on a line of its own there is more
            yield head
            head = " " * (indent + _GAP)
            room = self._width - _cells(head) if self._width is not None else None
        first, *more = _folded(text, room)
        yield head + first
        yield from (f"{'':{_cells(head)}}{line}" for line in more)

    # Lists of objects ------------------------------------------------------------------------------------------------

    def _list(self, items: Sequence[Any], path: _Path, indent: int) -> Iterator[str]:
        rows = [_flat(item) for item in items]
        chosen = self._chosen(path)
        if chosen:
            names = [spec.removesuffix("?").partition("=")[0] for spec in chosen]
            keys = [tuple(name.split(".")) for name in names]
            own = [spec.removesuffix("?").partition("=")[2] for spec in chosen]
            may_go = [spec.endswith("?") for spec in chosen]
            headers = [given or label for given, label in zip(own, _labels(keys), strict=True)]
        else:
            keys = list(dict.fromkeys(key for row in rows for key, item in row.items() if not _is_table(item)))
            headers, may_go = _labels(keys), [False] * len(keys)
        cells = [[self._cell((*path, *key), row.get(key), listed=True) for key in keys] for row in rows]
        width = None if self._width is None else self._width - indent
        shown = _layout(headers, cells, may_go, width)
        if shown is None:
            for number, item in enumerate(items):
                if number:
                    yield ""
                item = dict(item) if isinstance(item, Mapping) else {"value": item}
                if chosen:
                    kept = [[_padded(one, 0), cell] for one, cell in zip(headers, cells[number], strict=True)]
                    broad = max(_cells(label) for label, _ in kept)
                    for label, cell in kept:
                        yield from self._field(label, cell or "-", broad, indent)
                else:
                    yield from self._fields(item, path, indent)
            return
        yield from (f"{'':{indent}}{line}" for line in shown)
        if not chosen:
            yield from self._inner(items, rows, path, indent)

    def _inner(
        self, items: Sequence[Any], rows: Sequence[Mapping[_Path, Any]], path: _Path, indent: int
    ) -> Iterator[str]:
        """Yield the tables that lie in the rows, under titles that say whose they are."""
        for item, row in zip(items, rows, strict=True):
            for key, inner in row.items():
                if _is_table(inner):
                    yield ""
                    yield f"{'':{indent}}{_title(key)} of {_name_of(item)}"
                    yield from self._list(inner, (*path, *key), indent + _GAP)

    def _chosen(self, path: _Path) -> Sequence[str]:
        if isinstance(self._columns, Mapping):
            return self._columns.get(".".join(path), ())
        return () if path else self._columns

    # Values ----------------------------------------------------------------------------------------------------------

    def _cell(self, path: _Path, value: Any, *, listed: bool = False) -> str:
        match value:
            case None:
                return ""
            case bool():
                return "yes" if value else "no"
            case int() | float():
                return _number(path, value)
            case str() if _TIME.fullmatch(value):
                return self._time(value, listed=listed)
            case str():
                return printable(value)
            case list():
                return ", ".join(
                    f"({self._cell(path, item)})" if isinstance(item, list) else self._cell(path, item)
                    for item in value
                )
            case Mapping():
                return ", ".join(f"{_title((key,))} {self._cell((*path, key), item)}" for key, item in value.items())
            case _:
                return printable(str(value))

    def _time(self, text: str, *, listed: bool) -> str:
        try:
            when = dt.datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(dt.UTC)
        except ValueError:
            return printable(text)
        told = f"{when:%Y-%m-%d %H:%M:%S} UTC"
        if self._now is None:
            return told
        age = (self._now - when).total_seconds()
        words = f"{_roughly(age)} ago" if age >= 0 else f"in {_roughly(-age)}"
        return words if listed else f"{told} ({words})"


def _roughly(seconds: float) -> str:
    """Return a duration in its largest unit only."""
    return " ".join(duration(round(seconds)).split()[:2])


def _number(path: _Path, value: float) -> str:
    """Return a number in the unit that its key names, or the key of what it lies in."""
    for key in reversed(path):
        words = _words(key).split()
        if words and words[-1] == "bytes":
            return size(value)
        if words and words[-1] == "seconds":
            return duration(value)
        if words and words[-1] == "second":  # a rate
            return f"{value:g}"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


# Words ---------------------------------------------------------------------------------------------------------------


def _words(key: str) -> str:
    """Return a key of JSON in words: ``snapshot_chain`` and ``snapshotChain`` are snapshot chain."""
    if key.isupper() or not _FIELD.fullmatch(key):  # a variable's name, an enum's value; a file's name, a tensor's
        return printable(key)
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", key).split("_")
    text = " ".join(part if part.isupper() else part[:1].lower() + part[1:] for part in parts if part)
    return printable(text or key)


def _title(key: _Path) -> str:
    text = " ".join(_words(part) for part in key if part not in _OUTER) or _words(key[-1])
    if text in _UNITS:
        return _UNITS[text]
    text = " ".join(_SHORT.get(word, word) for word in text.split(" "))
    for unit, instead in ((" bytes", " size"), (" seconds", "")):
        if text.endswith(unit):
            return text.removesuffix(unit) + ("" if text == "size bytes" else instead)
    if re.fullmatch(r"\w+ed at", text):
        return text.removesuffix(" at")
    return re.sub(r"\bhot load(s?)\b", r"hot-load\1", text)


def _labels(keys: Sequence[_Path]) -> list[str]:
    """Return a label for each key: its last word or words, and more where that says the same twice."""
    short = [_title(key[-1:]) for key in keys]
    return [
        name if short.count(name) == 1 else _title(key) for name, key in zip(short, keys, strict=True)
    ]  # fmt: skip


def _name_of(item: Any) -> str:
    found = _flat(item)
    for last in ("name", "identity", "id"):
        for key, value in found.items():
            if key[-1] == last and value:
                return printable(str(value))
    return "the row above"


# Shapes --------------------------------------------------------------------------------------------------------------


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _sorted_out(value: Mapping[str, Any]) -> tuple[list[tuple[_Path, Any]], list[tuple[_Path, Any]]]:
    """Return what stands in a line, and what needs lines of its own; the service's wrapping is taken off."""
    plain: list[tuple[_Path, Any]] = []
    nested: list[tuple[_Path, Any]] = []
    for key, item in value.items():
        if isinstance(item, Mapping) and item and key in _OUTER:
            inner_plain, inner_nested = _sorted_out(item)
            plain += [((key, *path), one) for path, one in inner_plain]
            nested += [((key, *path), one) for path, one in inner_nested]
        elif (isinstance(item, Mapping) and item) or _is_table(item):
            nested.append(((key,), item))
        else:
            plain.append(((key,), item))
    return plain, nested


def _flat(value: Any) -> dict[_Path, Any]:
    """Return nested objects as one mapping from paths to what is no object."""
    if not isinstance(value, Mapping):
        return {("value",): value}
    flat: dict[_Path, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= {(str(key), *path): one for path, one in _flat(item).items()}
        else:
            flat[(str(key),)] = item
    return flat


# Layout --------------------------------------------------------------------------------------------------------------


def _layout(
    headers: Sequence[str], rows: Sequence[Sequence[str]], may_go: Sequence[bool], width: int | None
) -> list[str] | None:
    """Return the lines of a table, or None where it does not fit into ``width``."""
    shown = list(range(len(headers)))
    while True:
        columns = [[headers[at], *(row[at] for row in rows)] for at in shown]
        widths = _widths(columns, width)
        if widths is not None:
            break
        out = [at for at in shown if may_go[at]]
        if not out:
            return None
        shown.remove(out[-1])
    head = _row([headers[at] for at in shown], widths)
    rule = "─" * (sum(widths) + _GAP * (len(widths) - 1))
    return [*head, rule, *(line for row in rows for line in _row([row[at] for at in shown], widths))]


def _row(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    folded = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
    tall = max(map(len, folded), default=0)
    return [
        (" " * _GAP).join(
            _padded(lines[at] if at < len(lines) else "", width)
            for lines, width in zip(folded, widths, strict=True)
        )
        for at in range(tall)
    ]  # fmt: skip


def _widths(columns: Sequence[Sequence[str]], width: int | None) -> list[int] | None:
    """Return how wide each column is, None where they do not fit."""
    wanted = [max(map(_cells, column)) for column in columns]
    if width is None:
        return wanted
    room = width - _GAP * (len(columns) - 1)
    least = [
        min(want, max(_NARROWEST, max(map(_longest_word, column))))
        for want, column in zip(wanted, columns, strict=True)
    ]  # fmt: skip
    if sum(least) > room:
        return None
    given, left = list(least), room - sum(least)
    while left > 0 and given != wanted:  # a column more to the one that is folded most
        at = max(range(len(given)), key=lambda one: wanted[one] / max(given[one], 1) if given[one] < wanted[one] else 0)
        given[at] += 1
        left -= 1
    return given


def _folded(text: str, width: int | None) -> list[str]:
    """Return ``text`` in lines of whole words; a word that is wider than ``width`` stays whole."""
    if width is None or _cells(text) <= width:
        return [text]
    room = max(width, _NARROWEST)
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]


def _longest_word(text: str) -> int:
    return max(map(_cells, text.split(" ")), default=0)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _cells(text))


def _cells(text: str) -> int:
    """Return how many columns of a terminal ``text`` takes."""
    if text.isascii():
        return len(text)
    return sum(_cell_of(text))


def _cell_of(text: Iterable[str]) -> Iterator[int]:
    for char in text:
        if unicodedata.combining(char):
            yield 0
        else:
            yield 2 if unicodedata.east_asian_width(char) in "WF" else 1
