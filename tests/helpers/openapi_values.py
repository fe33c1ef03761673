"""Values for and against the schemas of an OpenAPI document: hypothesis strategies, and what is wrong with an answer.

Both know the part of JSON Schema that `cwtrain_emulator.openapi` uses, and refuse a keyword that they do not know.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]

_KNOWN = {
    "$ref", "additionalProperties", "allOf", "anyOf", "dependentRequired", "enum", "examples", "format", "items",
    "maximum", "maxLength", "minimum", "minItems", "minLength", "not", "oneOf", "pattern", "properties",
    "propertyNames", "required", "type",
}  # fmt: skip
_PLAIN = st.characters(codec="utf-8", exclude_characters="\x00")
_SAFE_KEYS = st.text(st.characters(codec="ascii", categories=["L"]), min_size=9, max_size=12)

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(["", "\ud800", "0", "-1", "x" * 300, "../..", "%00", 2**63, -(2**31) - 1, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
"""Any JSON value."""


class Document:
    """An OpenAPI document. `ids` are UUIDs that mean something to the server, to be used where a UUID is wanted."""

    def __init__(self, document: Mapping[str, Any], ids: tuple[str, ...] = ()) -> None:
        self._document = document
        self._ids = ids

    def operations(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Give the method, the path and the description of each operation."""
        for path, item in self._document["paths"].items():
            for method, operation in item.items():
                yield method.upper(), path, operation

    def resolved(self, schema: Schema) -> Schema:
        """Follow a reference."""
        unknown = set(schema) - _KNOWN
        assert not unknown, f"keywords that this helper does not know: {unknown}"
        while "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    # Values that fit

    def values(self, schema: Schema) -> st.SearchStrategy[Any]:
        """Return a strategy of values that the schema allows."""
        schema = self.resolved(schema)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return st.one_of([self.values(option) for option in schema[word]])
        if "allOf" in schema:
            parts = st.tuples(*(self.values(part) for part in schema["allOf"]))
            return parts.map(lambda found: {key: value for part in found for key, value in part.items()})
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        maker: Callable[[Schema], st.SearchStrategy[Any]] = {
            "object": self._objects,
            "array": self._arrays,
            "string": self._texts,
            "integer": lambda found: st.integers(found["minimum"], found["maximum"]),
            "boolean": lambda _: st.booleans(),
        }[schema["type"]]
        return maker(schema)

    def _objects(self, schema: Schema) -> st.SearchStrategy[Any]:
        if "properties" not in schema:
            keys = st.sampled_from(schema["propertyNames"]["enum"]) if "propertyNames" in schema else _SAFE_KEYS
            return st.dictionaries(keys, self.values(schema["additionalProperties"]), max_size=3)
        required = set(schema.get("required", ()))
        fields = {name: self.values(part) for name, part in schema["properties"].items()}
        made = st.fixed_dictionaries(
            {name: fields[name] for name in fields if name in required},
            optional={name: fields[name] for name in fields if name not in required},
        )
        dependent = schema.get("dependentRequired", {})
        return made.filter(
            lambda found: all(set(needs) <= set(found) for key, needs in dependent.items() if key in found)
        )

    def _arrays(self, schema: Schema) -> st.SearchStrategy[Any]:
        return st.lists(self.values(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)

    def _texts(self, schema: Schema) -> st.SearchStrategy[Any]:
        kind = schema.get("format")
        if kind == "uuid":
            fresh = st.uuids().map(str)
            return st.sampled_from(self._ids) | fresh if self._ids else fresh
        if kind == "date-time":
            moments = st.datetimes(dt.datetime(1980, 1, 1), dt.datetime(2080, 1, 1), timezones=st.just(dt.UTC))
            return moments.map(dt.datetime.isoformat)
        if "pattern" in schema and "minLength" not in schema:
            return st.from_regex(schema["pattern"].replace("$", r"\Z"))
        made = st.text(_PLAIN, min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", 20))
        if "pattern" in schema:
            made = made.map(lambda text: text.replace("/", "_"))
        refused = schema.get("not", {}).get("enum", ())
        return made.filter(lambda text: text not in refused)

    # What does not fit

    def problems(self, value: Any, schema: Schema, where: str = "$") -> list[str]:
        """Return what is wrong with a value, with the place of each problem."""
        schema = self.resolved(schema)
        if "enum" in schema:
            return [] if value in schema["enum"] else [f"{where}: {value!r} is none of {schema['enum']}"]
        for word in ("anyOf", "oneOf"):
            if word in schema:
                found = [self.problems(value, option, where) for option in schema[word]]
                return [] if any(not part for part in found) else found[0]
        kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
        if not isinstance(value, kinds[schema["type"]]) or (schema["type"] == "integer" and isinstance(value, bool)):
            return [f"{where}: {value!r} is no {schema['type']}"]
        if isinstance(value, dict):
            return [*self._object_problems(value, schema, where)]
        if isinstance(value, list):
            few = [f"{where}: too short"] if len(value) < schema.get("minItems", 0) else []
            inner = (self.problems(item, schema["items"], f"{where}[{n}]") for n, item in enumerate(value))
            return [*few, *(problem for found in inner for problem in found)]
        if isinstance(value, str):
            return [*_text_problems(value, schema, where)]
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        return [] if low <= value <= high else [f"{where}: {value} is not within {low}..{high}"]

    def _object_problems(self, value: dict[str, Any], schema: Schema, where: str) -> Iterator[str]:
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{where}: {name} is missing"
        for name, inner in value.items():
            if name in properties:
                yield from self.problems(inner, properties[name], f"{where}.{name}")
            elif schema.get("additionalProperties") is False:
                yield f"{where}: {name} is not described"
            elif isinstance(schema.get("additionalProperties"), dict):
                yield from self.problems(inner, schema["additionalProperties"], f"{where}.{name}")


def _text_problems(value: str, schema: Schema, where: str) -> Iterator[str]:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{where}: has {len(value)} characters"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{where}: {value!r} does not match {schema['pattern']}"
    if schema.get("format") == "date-time":
        try:
            dt.datetime.fromisoformat(value)
        except ValueError:
            yield f"{where}: {value!r} is no time"
    if schema.get("format") == "uuid" and not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value):
        yield f"{where}: {value!r} is no UUID"


@st.composite
def spoiled(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> Any:
    """Draw a JSON value with one part of it left out, added, or replaced by junk."""
    value = draw(values)
    places: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        if isinstance(inner, dict):
            places.extend((inner, key) for key in inner)
            places.append((inner, draw(st.text(max_size=8))))
            for part in inner.values():
                walk(part)
        elif isinstance(inner, list):
            places.extend((inner, number) for number in range(len(inner)))
            for part in inner:
                walk(part)

    walk(value)
    if not places:
        return draw(JUNK)
    parent, key = draw(st.sampled_from(places))
    if isinstance(parent, dict) and key in parent and draw(st.booleans()):
        del parent[key]
    else:
        parent[key] = draw(JUNK)
    return value
