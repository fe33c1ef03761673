"""Parameter types and options that several commands share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

__all__ = [
    "IDENTITY",
    "SECONDS",
    "TEXT",
    "deployment_option",
    "load_spec",
    "no_wait_option",
    "spec_option",
    "timeout_option",
    "wait_option",
]

_F = TypeVar("_F", bound=Callable[..., Any])

if TYPE_CHECKING:
    _FloatType = click.ParamType[float]
    _StrType = click.ParamType[str]
else:  # older click's types take no parameter
    _FloatType = _StrType = click.ParamType


class _Seconds(_FloatType):
    """A finite number of seconds above zero."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            self.fail(f"{value!r} is no finite number of seconds above 0", param, ctx)
        return seconds


class _Text(_StrType):
    """Any text but a blank one, without blanks around it."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        if not text:
            self.fail("is blank", param, ctx)
        return text


class _Identity(_StrType):
    """An identity that a snapshot may be published under."""

    name = "identity"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from cwtrain.errors import SnapshotError
        from cwtrain.snapshots.identity import check_identity

        try:
            return check_identity(str(value))
        except SnapshotError as exc:
            self.fail(f"{exc}; {exc.hint}" if exc.hint else str(exc), param, ctx)


SECONDS: Final = _Seconds()
TEXT: Final = _Text()
IDENTITY: Final = _Identity()


def timeout_option(default: int, help: str) -> Callable[[_F], _F]:  # noqa: A002 - click's own word
    """Return ``--timeout`` with a default in seconds."""
    return click.option("--timeout", type=SECONDS, default=default, show_default=True, help=help)


def wait_option(help: str) -> Callable[[_F], _F]:  # noqa: A002
    """Return ``--wait``."""
    return click.option("--wait", is_flag=True, help=help)


def no_wait_option(function: _F) -> _F:
    """Add ``--no-wait``, which the function gets as ``wait=False``."""
    return click.option(
        "--no-wait", "wait", flag_value=False, default=True, help="Return as soon as the service has accepted it."
    )(function)


def deployment_option(
    *,
    required: bool = True,
    by_environment: bool = True,
    help: str = "The deployment.",  # noqa: A002 - click's own word
) -> Callable[[_F], _F]:
    """Return ``--deployment``, a name or an id; without it, ``by_environment``, the variable of the trainers' hooks."""
    return click.option(
        "--deployment",
        "deployment_id",
        type=TEXT,
        required=required,
        metavar="NAME_OR_ID",
        help=help,
        envvar="CWTRAIN_HOTLOAD_DEPLOYMENT_ID" if by_environment else None,
        show_envvar=by_environment,
    )


def spec_option(what: str, *, required: bool = True) -> Callable[[_F], _F]:
    """Return ``--file``, given to the function as ``file``: a path, or ``-`` for standard input."""
    return click.option(
        "--file",
        "file",
        type=click.Path(exists=True, dir_okay=False, allow_dash=True),
        required=required,
        metavar="PATH",
        help=f"JSON file with the {what}; - reads standard input.",
    )


# Values that the service takes as they are, whatever they look like.
_FREE = ("$.runtime.engineConfig", "$.runtime.engineEnv")
_PLACEHOLDER = re.compile(r"<[^<>\s][^<>]*>")


def load_spec(path: str) -> dict[str, Any]:
    """Return the JSON object in the file at ``path``; ``-`` is standard input.

    Raises ``click.BadParameter`` for anything but a JSON object and for values that still are a ``<placeholder>``,
    naming each by its JSON path.
    """
    where = "standard input" if path == "-" else path
    try:
        with click.open_file(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
        spec = json.loads(text, parse_constant=_no_constant)
        json.dumps(spec, ensure_ascii=False).encode()  # half a character, spelt as an escape, is no text either
    except UnicodeError as exc:
        raise _bad_file(f"{where} is not UTF-8 text") from exc
    except json.JSONDecodeError as exc:
        raise _bad_file(f"{where} is not JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}") from exc
    except (ValueError, RecursionError) as exc:  # NaN, a number of thousands of digits, a thousand brackets
        raise _bad_file(f"{where} is not JSON that can be sent: {exc}") from exc
    except RuntimeError as exc:  # click's word for a standard input that is closed
        raise _bad_file(f"{where} is closed; give it the spec, or the path of a file") from exc
    if not isinstance(spec, dict):
        raise _bad_file(f"{where} must hold a JSON object, not {_json_kind(spec)}")
    left = [f"{place} ({value})" for place, value in _strings(spec) if _PLACEHOLDER.search(value)]
    if left:
        raise _bad_file(f"{where} still has placeholders: {', '.join(left)}")
    return spec


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _strings(value: Any, place: str = "$") -> Iterator[tuple[str, str]]:
    """Yield each string in ``value`` with its JSON path, the free parts left out."""
    if place in _FREE:
        return
    match value:
        case str():
            yield place, value
        case Mapping():
            for key, item in value.items():
                step = f".{key}" if re.fullmatch(r"[A-Za-z_]\w*", key) else f"[{json.dumps(key)}]"
                yield from _strings(item, place + step)
        case list():
            for index, item in enumerate(value):
                yield from _strings(item, f"{place}[{index}]")
        case _:
            return


def _bad_file(message: str) -> click.BadParameter:
    return click.BadParameter(message, ctx=click.get_current_context(silent=True), param_hint="'--file'")


def _json_kind(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")
