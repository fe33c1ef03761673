"""JSON of other people's files, read strictly: UTF-8, no key twice, no NaN, nothing that could not be written again."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from cwtrain.snapshots._sniff import describe_content

MAX_JSON_BYTES = 100_000_000
"""Largest header or index that is read: the limit of the reference reader of safetensors."""


def parse_json(raw: bytes) -> Any:
    """Return the JSON value in ``raw``. Raises ValueError that says what is wrong."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        if what := describe_content(raw):
            raise ValueError(what) from None
        cut = " (cut off?)" if "Unterminated" in error.msg or error.pos >= len(text.rstrip()) else ""
        what = error.msg.removesuffix(" starting at").lower()
        raise ValueError(f"is not JSON{cut}: {what} at byte {len(text[: error.pos].encode())}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"has the key {double!r} twice")
    return result


def _constant(name: str) -> NoReturn:
    raise ValueError(f"has the value {name}, which is not JSON")


def may_hold_half_characters(raw: bytes) -> bool:
    """Return whether a string in the JSON ``raw`` can be one that is not ``encodable``: only an escape spells that."""
    return b"\\u" in raw


def encodable(text: str) -> bool:
    """Return whether ``text`` is real Unicode; JSON can spell halves of a character that no file can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
