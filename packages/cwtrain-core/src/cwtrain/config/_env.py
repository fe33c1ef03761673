"""From the environment to attrs classes: aliases, checks, and all problems at once.

A class says where its fields come from in their metadata::

    @attrs.frozen(kw_only=True)
    class HotLoadConfig:
        timeout: float = attrs.field(
            default=1800.0,
            converter=positive_seconds,
            metadata=env("CWTRAIN_HOTLOAD_TIMEOUT", help="seconds for one hot-load"),
        )

        @classmethod
        def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> Self:
            return load(cls, environ, overrides)

Precedence: argument, then environment (first name that is set and not blank), then default. A converter or validator
refuses a value by raising ``ConfigError`` (or ``ValueError``) without the value in its text; ``load`` adds the
variable's name, the value (never of a secret) and the meaning. Validators must not look at the instance.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from cwtrain.errors import ConfigError

__all__ = [
    "UNSET",
    "EnvVar",
    "boolean",
    "env",
    "env_vars",
    "find",
    "json_object",
    "load",
    "positive_seconds",
    "sources",
    "whole_number",
]

T = TypeVar("T")

UNSET: Any = object()
"""A parser's answer for "this variable says nothing, ask the next one"."""

_KEY = "cwtrain.env"
_SHOWN = 120
_USER_INFO = re.compile(r"(?<=//)[^/@\s]*@")


@attrs.frozen(kw_only=True)
class EnvVar:
    """Where a field comes from: names in order, what it means, how each name's text is read."""

    names: tuple[str, ...]
    help: str
    secret: bool = False
    parse: Mapping[str, Callable[[str], Any]] = attrs.field(factory=dict)


def env(
    *names: str,
    help: str,  # noqa: A002
    secret: bool = False,
    parse: Callable[[str], Any] | Mapping[str, Callable[[str], Any]] | None = None,
) -> dict[str, EnvVar]:
    """Return field metadata: read ``names`` in order; ``parse`` turns text into a value (one for all, or by name).

    Without ``parse`` the field's converter gets the text, stripped.
    """
    by_name = dict(parse) if isinstance(parse, Mapping) else {name: parse for name in names if parse}
    return {_KEY: EnvVar(names=names, help=help, secret=secret, parse=by_name)}


def env_vars(cls: type[Any]) -> dict[str, EnvVar]:
    """Return the fields of ``cls`` that come from the environment, in order."""
    return {field.name: field.metadata[_KEY] for field in attrs.fields(cls) if _KEY in field.metadata}


def find(var: EnvVar, environ: Mapping[str, str]) -> tuple[str, Any] | None:
    """Return (name, value) of the first variable that is set, not blank and says something; None without one.

    Raises ``ConfigError`` for text that cannot be read.
    """
    for name in var.names:
        text = environ.get(name, "").strip()
        if not text:
            continue
        try:
            value = var.parse.get(name, str)(text)
        except ValueError as exc:
            raise _refused(_label(name, text, secret=var.secret), exc, var.help) from exc
        if value is not UNSET:
            return name, value
    return None


def load(cls: type[T], environ: Mapping[str, str] | None = None, overrides: Mapping[str, object] | None = None) -> T:
    """Return ``cls`` filled from ``overrides``, then ``environ`` (``os.environ``), then defaults.

    An override that is None or blank counts as not given. Raises ``ConfigError`` with every problem.
    """
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in (overrides or {}).items() if _is_given(value)}
    fields = {field.name: field for field in attrs.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(overrides or {}) - set(fields)):
        raise TypeError(f"{cls.__name__} has no field {', '.join(unknown)}")
    values: dict[str, Any] = {}
    problems: list[ConfigError] = []
    for name, field in fields.items():
        var: EnvVar | None = field.metadata.get(_KEY)
        help_text = var.help if var else ""
        try:
            if name in given:
                label, value = _label(name, given[name], secret=var is not None and var.secret), given[name]
            elif var and (found := find(var, environ)):
                label, value = _label(found[0], environ[found[0]], secret=var.secret), found[1]
            elif field.default is attrs.NOTHING:
                raise _missing(name, var)
            else:
                continue
            values[name] = _checked(field, value, label, help_text)
        except ConfigError as problem:
            problems.append(problem)
    if problems:
        raise _together(cls, problems)
    return cls(**values)


def sources(
    cls: type[Any], environ: Mapping[str, str] | None = None, overrides: Mapping[str, object] | None = None
) -> dict[str, str]:
    """Return for each field where ``load`` takes it from: ``argument``, a variable's name, or ``default``."""
    environ = os.environ if environ is None else environ
    found: dict[str, str] = {}
    for name, var in env_vars(cls).items():
        if _is_given((overrides or {}).get(name)):
            found[name] = "argument"
            continue
        try:
            hit = find(var, environ)
        except ConfigError:  # a source that cannot be read is still the source
            hit = next((n, None) for n in var.names if environ.get(n, "").strip())
        found[name] = hit[0] if hit else "default"
    return found


# Converters ----------------------------------------------------------------------------------------------------------


def boolean(value: object) -> bool:
    """Return True for 1, true, yes, on and False for 0, false, no, off."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ConfigError("must be 1 or 0")


def positive_seconds(value: object) -> float:
    """Return ``value`` as a finite number above zero."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise ConfigError("must be a finite number of seconds above 0")
    return number


def whole_number(minimum: int, maximum: int | None = None) -> Callable[[object], int]:
    """Return a converter to an integer from ``minimum`` to ``maximum``."""
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def convert(value: object) -> int:
        try:
            number = int(value) if isinstance(value, int) and not isinstance(value, bool) else int(str(value).strip())
        except ValueError:
            number = minimum - 1
        if number < minimum or (maximum is not None and number > maximum):
            raise ConfigError(f"must be a whole number {limits}")
        return number

    return convert


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that ``text`` is."""
    try:
        value = json.loads(text)
    except ValueError as exc:
        where = f": {exc.msg} at character {exc.pos}" if isinstance(exc, json.JSONDecodeError) else ""
        raise ConfigError(f"must be a JSON object{where}") from None
    if not isinstance(value, dict):
        raise ConfigError("must be a JSON object")
    return value


# Messages ------------------------------------------------------------------------------------------------------------


def _is_given(value: object) -> bool:
    return value is not None and not (isinstance(value, str) and not value.strip())


def _label(name: str, value: object, *, secret: bool) -> str:
    if secret:
        return name
    text = _USER_INFO.sub("***@", repr(value))
    return f"{name}={text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"


def _checked(field: attrs.Attribute[Any], value: Any, label: str, help_text: str) -> Any:
    try:
        if field.converter is not None:
            value = field.converter(value)  # type: ignore[operator]
        if field.validator is not None:
            field.validator(None, field, value)
    except ValueError as exc:
        raise _refused(label, exc, help_text) from exc
    return value


def _refused(label: str, exc: ValueError, help_text: str) -> ConfigError:
    meaning = f" ({help_text})" if help_text else ""
    hint = getattr(exc, "hint", None) or f"correct {label.partition('=')[0]}, or leave it out"
    return ConfigError(f"{label} {exc}{meaning}", hint=hint)


def _missing(name: str, var: EnvVar | None) -> ConfigError:
    where = " or ".join(var.names) if var else name
    return ConfigError(f"{where} is not set" + (f" ({var.help})" if var else ""), hint=f"set {where}")


def _together(cls: type[Any], problems: list[ConfigError]) -> ConfigError:
    texts = [problem.message for problem in problems]
    hints = list(dict.fromkeys(problem.hint for problem in problems if problem.hint))
    message = texts[0] if len(texts) == 1 else f"{len(texts)} settings cannot be used:\n  " + "\n  ".join(texts)
    return ConfigError(message, problems=texts, hint="; ".join(hints) or None)
