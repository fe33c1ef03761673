"""proto3 JSON, read strictly and written sparsely.

`Reader` takes one message of a request apart and collects every problem, so that a refusal names them all. As in any
proto3 JSON reader a field may come as lowerCamelCase or snake_case, null means absent, an enum may be a name or a
number, an integer may be a string, and unknown fields are ignored. Names of enums are taken in any case, and with or
without their prefix.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cwtrain_emulator.api.errors import Violation

__all__ = ["ENUMS", "Reader", "enum_json", "pruned", "timestamp"]

ENUMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "SnapshotType": ("SNAPSHOT_TYPE_", ("UNSPECIFIED", "FULL", "INCREMENTAL")),
    "CompressionFormat": ("COMPRESSION_FORMAT_", ("UNSPECIFIED", "ZSTD")),
    "ChecksumFormat": ("CHECKSUM_FORMAT_", ("UNSPECIFIED", "ADLER32")),
    "PromptCachePolicy": ("PROMPT_CACHE_POLICY_", ("UNSPECIFIED", "RESET_ALL", "PRESERVE")),
    "TransitionMode": ("TRANSITION_MODE_", ("UNSPECIFIED", "ASYNC")),
    "ApiType": ("API_TYPE_", ("UNSPECIFIED", "OPENAI")),
    "CapacityType": ("CAPACITY_TYPE_", ("UNSPECIFIED", "CUSTOMER", "MANAGED")),
    "CapacityClass": ("CAPACITY_CLASS_", ("UNSPECIFIED", "RESERVED", "ON_DEMAND")),
}
"""Each enum of a request: its prefix on the wire, and its members in the order of their numbers."""

_INT32 = 2**31
_MISSING = object()


class Reader:
    """One JSON object of a request; problems go to the list that all readers of the request share."""

    def __init__(self, values: Mapping[str, Any], problems: list[Violation], *, path: str = "") -> None:
        self._values = values
        self._path = path
        self.problems = problems

    def problem(self, name: str, what: str) -> None:
        """Note that the field `name` is wrong."""
        self.problems.append((self._at(name), what))

    def has(self, name: str) -> bool:
        """Return True when the field is there and not null."""
        return self._get(name) is not _MISSING

    def text(self, name: str, *, required: bool = False) -> str:
        """Return a string field; empty when absent."""
        value = self._get(name)
        if value is _MISSING or value == "":
            if required:
                self.problem(name, "is required")
            return ""
        return value if self._is_text(value, name) else ""

    def flag(self, name: str) -> bool:
        """Return a boolean field; False when absent."""
        value = self._get(name)
        if value is _MISSING:
            return False
        if not isinstance(value, bool):
            self.problem(name, "must be true or false")
            return False
        return value

    def integer(self, name: str) -> int:
        """Return an int32 field; 0 when absent."""
        value = self._get(name)
        if value is _MISSING:
            return 0
        number = as_int32(value)
        if number is None:
            self.problem(name, "must be a 32-bit integer")
            return 0
        return number

    def enum(self, name: str, enum: str) -> str:
        """Return an enum field as its bare name; UNSPECIFIED when absent or 0."""
        value = self._get(name)
        return "UNSPECIFIED" if value is _MISSING else self._enum(value, name, enum)

    def enums(self, name: str, enum: str) -> list[str]:
        """Return a repeated enum field as bare names."""
        return [self._enum(value, f"{name}[{index}]", enum) for index, value in enumerate(self._list(name))]

    def texts(self, name: str) -> list[str]:
        """Return a repeated string field."""
        values = self._list(name)
        return [value for index, value in enumerate(values) if self._is_text(value, f"{name}[{index}]")]

    def text_map(self, name: str) -> dict[str, str]:
        """Return a map of strings."""
        value = self._get(name)
        if value is _MISSING:
            return {}
        if not isinstance(value, Mapping):
            self.problem(name, "must be an object of strings")
            return {}
        return {
            key: item
            for key, item in value.items()
            if self._is_text(key, name) and self._is_text(item, f"{name}[{key[:100]!r}]")
        }

    def message(self, name: str, *, required: bool = False) -> Reader:
        """Return a reader for a nested message; an empty one when it is absent.

        One problem is enough for a message that is missing or no object: its fields' own are not noted then.
        """
        value = self._get(name)
        if isinstance(value, Mapping):
            return Reader(value, self.problems, path=self._at(name))
        if value is not _MISSING:
            self.problem(name, "must be an object")
        elif required:
            self.problem(name, "is required")
        else:
            return Reader({}, self.problems, path=self._at(name))
        return Reader({}, [], path=self._at(name))

    def _list(self, name: str) -> Sequence[Any]:
        value = self._get(name)
        if value is _MISSING:
            return ()
        if not isinstance(value, list):
            self.problem(name, "must be a list")
            return ()
        return value

    def _enum(self, value: object, name: str, enum: str) -> str:
        prefix, members = ENUMS[enum]
        if isinstance(value, str) and value.upper().removeprefix(prefix) in members:
            return value.upper().removeprefix(prefix)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(members):
            return members[value]
        self.problem(name, f"must be one of {', '.join(prefix + member for member in members)}")
        return "UNSPECIFIED"

    def _is_text(self, value: object, name: str) -> bool:
        if not isinstance(value, str):
            self.problem(name, "must be a string")
            return False
        if any("\ud800" <= character <= "\udfff" for character in value):
            self.problem(name, "is not valid Unicode")
            return False
        return True

    def _get(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            value = self._values.get(re.sub("([A-Z])", lambda match: f"_{match[1].lower()}", name))
        return _MISSING if value is None else value

    def _at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def as_int32(value: object) -> int | None:
    """Return the 32-bit integer that a JSON value (a number, or a string of one) means, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,10}", value):
        value = int(value)
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, int) and -_INT32 <= value < _INT32:
        return value
    return None


def enum_json(enum: str, member: str) -> str | None:
    """Return an enum's name on the wire; None, which `pruned` leaves out, for the zero value."""
    return None if member == "UNSPECIFIED" else ENUMS[enum][0] + member


def pruned(values: Mapping[str, Any], *, keep: Sequence[str] = ()) -> dict[str, Any]:
    """Return `values` without zero values (None, "", 0, False, empty lists and maps), which proto3 JSON may leave out.

    Fields named in `keep`, and messages that the caller built, stay as they are.
    """
    return {
        name: value
        for name, value in values.items()
        if name in keep
        or not (value is None or value is False or value == "" or value == 0 or value == [] or value == {})
    }


def timestamp(seconds: float | None) -> str | None:
    """Return a time in RFC 3339, in UTC with microseconds; None for None."""
    if seconds is None:
        return None
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
