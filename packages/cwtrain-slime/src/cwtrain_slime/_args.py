"""What we read from the trainer's settings: from its namespace inside a run, or from its command line before one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from cwtrain.errors import ConfigError, IntegrationError
from cwtrain_slime._dialect import FLAGS, Dialect, Flag, Kind, dialect_of

__all__ = ["RunArgs", "as_words", "overridden", "parse_command_line"]


@attrs.frozen(kw_only=True)
class RunArgs:
    """The part of a run's settings that a hook needs."""

    dialect: Dialect
    disk_dir: Path
    hf_checkpoint: Path | None
    full_mode: bool
    """Whether every version is a full checkpoint (slime's disk transport without deltas)."""
    rank: int
    world_size: int
    raw: Any = attrs.field(repr=False)
    """The trainer's own namespace, for the trainer's own functions."""

    @classmethod
    def of(cls, args: Any) -> RunArgs:
        """Return the settings in the namespace that the trainer gives to its hook.

        Raises IntegrationError for one without a disk directory: this is not a disk run.
        """
        dialect = dialect_of(args)
        disk_dir = getattr(args, "update_weight_disk_dir", None)
        if not disk_dir:
            raise IntegrationError(
                f"{dialect.name} called the hook without {dialect.flag('disk_dir')}",
                hint=f"set {dialect.flag('disk_dir')}; `cwtrain {dialect.name} check` looks at all flags",
            )
        checkpoint = getattr(args, "hf_checkpoint", None)
        return cls(
            dialect=dialect,
            disk_dir=Path(disk_dir),
            hf_checkpoint=Path(checkpoint) if checkpoint else None,
            full_mode=dialect.name == "slime" and getattr(args, "update_weight_mode", "delta") == "full",
            rank=int(getattr(args, "rank", 0) or 0),
            world_size=int(getattr(args, "world_size", 1) or 1),
            raw=args,
        )


def as_words(words: Sequence[str]) -> list[str]:
    """Return a launch line as words. One that came whole, in quotes (``"$ARGS"``), is split as a shell does it.

    Raises ConfigError where its quotes do not close.
    """
    words = [words] if isinstance(words, str) else words
    if len(words) != 1 or len(words[0].split()) < 2:
        return list(words)
    try:
        return shlex.split(words[0], comments=True)
    except ValueError as exc:
        raise ConfigError(
            "the launch line, given as one word, cannot be split", problems=[f"launch line: {exc}"]
        ) from exc


def parse_command_line(dialect: Dialect, words: Sequence[str]) -> dict[str, Any]:
    """Return every setting of ``FLAGS`` that the dialect has, as a launch line gives it, else its default.

    Words that are no flag of the table are passed over: the line may begin with ``python train.py``, and trainers have
    hundreds of flags more. ``foreign`` lists flags that only the other trainer has, ``given`` the settings that were
    given. Raises ConfigError with every value that cannot be read.
    """
    ours = {spelled: flag for flag in FLAGS if (spelled := flag.spelled(dialect.name))}
    other = "miles" if dialect.name == "slime" else "slime"
    theirs = {spelled for flag in FLAGS if (spelled := flag.spelled(other)) and spelled not in ours}
    found: dict[str, Any] = {flag.name: flag.default(dialect.name) for flag in ours.values()}
    given: list[str] = []
    foreign: list[str] = []
    problems: list[str] = []
    rest = as_words(words)
    while rest:
        word = rest.pop(0)
        spelled, equals, value = word.partition("=")
        if spelled in theirs:
            foreign.append(spelled)
        flag = ours.get(spelled)
        if flag is None:
            continue
        values = [value] if equals else _values(flag, rest)
        try:
            found[flag.name] = _read(flag, values)
            given.append(flag.name)
        except ConfigError as exc:
            problems.append(f"{spelled} {exc}")
    if problems:
        raise ConfigError("; ".join(problems), problems=problems, hint="give the flags as for the trainer")
    return {**found, "given": tuple(dict.fromkeys(given)), "foreign": tuple(dict.fromkeys(foreign))}


def _values(flag: Flag, rest: list[str]) -> list[str]:
    """Take the words that belong to a flag off the front of ``rest``."""
    if flag.kind is Kind.SWITCH:
        return []
    taken: list[str] = []
    while rest and not rest[0].startswith("--") and (flag.kind is Kind.WORDS or not taken):
        taken.append(rest.pop(0))
    return taken


def _read(flag: Flag, values: Sequence[str]) -> Any:
    if flag.kind is Kind.SWITCH:
        return True
    if not values:
        raise ConfigError("has no value")
    if flag.kind is Kind.WORDS:
        return list(values)
    if flag.kind is Kind.NUMBER:
        return as_number(values[0])
    return values[0]


def as_number(value: object) -> float:
    """Return ``value`` as a number; an integer stays one."""
    try:
        return int(str(value))
    except ValueError:
        pass
    try:
        return float(str(value))
    except ValueError:
        raise ConfigError(f"is not a number: {value!r}") from None


def overridden(dialect: Dialect, found: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``found`` with what a ``--custom-config-path`` file says: each of its keys replaces a flag's attribute.

    Raises ConfigError with every value that is not of its flag's kind: the trainer takes such a file as it is.
    """
    attributes = {
        spelled.removeprefix("--").replace("-", "_"): flag for flag in FLAGS if (spelled := flag.spelled(dialect.name))
    }
    changed: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in more.items():
        if (flag := attributes.get(key)) is None:
            continue
        if value is not None and not isinstance(value, _KINDS[flag.kind]):
            problems.append(f"{key} of {dialect.flag('custom_config')} is no {_NAMES[flag.kind]}: {value!r}")
        changed[flag.name] = value
    if problems:
        raise ConfigError("; ".join(problems), problems=problems, hint="give values as the flags would have them")
    return {**found, **changed, "given": tuple(dict.fromkeys([*found["given"], *changed]))}


_KINDS: Final[Mapping[Kind, tuple[type, ...]]] = {
    Kind.SWITCH: (bool,),
    Kind.TEXT: (str,),
    Kind.NUMBER: (int, float),
    Kind.WORDS: (list,),
}
_NAMES: Final[Mapping[Kind, str]] = {
    Kind.SWITCH: "true or false",
    Kind.TEXT: "text",
    Kind.NUMBER: "number",
    Kind.WORDS: "list",
}
