"""The settings as a table: one source for the reference page, the tests and ``cwtrain doctor``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import attrs

from cwtrain.config._env import env_vars, load, sources
from cwtrain.config.api import ApiConfig
from cwtrain.config.hotload import HotLoadConfig
from cwtrain.config.plugins import PluginConfig
from cwtrain.config.storage import StorageConfig
from cwtrain.errors import ConfigError

__all__ = ["CONFIGS", "Setting", "SettingValue", "describe", "located", "masked"]

CONFIGS: tuple[type[Any], ...] = (ApiConfig, StorageConfig, HotLoadConfig, PluginConfig)
"""The configuration classes of core, in the order of the reference page."""


_IN_WORDS = {(ApiConfig, "verify"): "TLS is checked"}
"""Defaults that no value of the variables spells."""


@attrs.frozen(kw_only=True)
class Setting:
    """One setting: the variables it is read from (the first that is set wins), its meaning and its default."""

    field: str
    variables: tuple[str, ...]
    help: str
    default: str
    required: bool = False
    secret: bool = False


@attrs.frozen(kw_only=True)
class SettingValue:
    """One setting as it stands: ``value`` as text (a secret is masked), ``source`` where it came from.

    ``source`` is ``argument``, a variable's name, ``default`` or, for a setting that has none, ``unset``. ``problem``
    says why the value cannot be used.
    """

    setting: Setting
    value: str | None
    source: str
    problem: str | None = None


def describe(cls: type[Any]) -> tuple[Setting, ...]:
    """Return the settings of the configuration class ``cls``, in order."""
    fields = {field.name: field for field in attrs.fields(cls)}
    return tuple(
        Setting(
            field=name,
            variables=var.names,
            help=var.help,
            default=_IN_WORDS.get((cls, name)) or _default(fields[name]),
            required=fields[name].default is attrs.NOTHING,
            secret=var.secret,
        )
        for name, var in env_vars(cls).items()
    )


def located(
    cls: type[Any], *, environ: Mapping[str, str] | None = None, overrides: Mapping[str, object] | None = None
) -> tuple[SettingValue, ...]:
    """Return every setting of ``cls`` with its value and where it came from. Values that cannot be used are kept."""
    environ = os.environ if environ is None else environ
    overrides = overrides or {}
    found = sources(cls, environ, overrides)
    values = []
    for setting in describe(cls):
        source = found[setting.field]
        text: str | None
        if source == "argument":
            text = _shown(overrides[setting.field])
        elif source == "default":
            text = setting.default or None
            source = "unset" if text is None or setting.required else source
            text = None if setting.required else text
        else:
            text = environ[source].strip()
        if setting.secret and text is not None and source != "default":
            text = masked(text)
        problem = _problem(cls, setting, environ, overrides)
        values.append(SettingValue(setting=setting, value=text, source=source, problem=problem))
    return tuple(_with_conflicts(cls, values, environ, overrides))


def _with_conflicts(
    cls: type[Any], values: list[SettingValue], environ: Mapping[str, str], overrides: Mapping[str, object]
) -> Iterator[SettingValue]:
    """Yield the values, with what is wrong between two settings at the first one that is named."""
    conflicts: list[str] = []
    if not any(value.problem for value in values):
        try:
            load(cls, environ, overrides)
        except ConfigError as exc:
            conflicts = [text for text in exc.problems if not text.split(" (")[0].endswith("is not set")]
    for value in values:
        told = [text for text in conflicts if any(name in text for name in value.setting.variables)]
        conflicts = [text for text in conflicts if text not in told]
        yield attrs.evolve(value, problem="; ".join(told)) if told else value


def masked(text: str) -> str:
    """Return a stand-in for a secret that says only whether there is one."""
    return "********" if text else ""


def _problem(
    cls: type[Any], setting: Setting, environ: Mapping[str, str], overrides: Mapping[str, object]
) -> str | None:
    """Return why this one setting cannot be used, the others left out of it."""
    only = {name: environ[name] for name in setting.variables if name in environ}
    given = {name: value for name, value in overrides.items() if name == setting.field}
    try:
        load(cls, only, given)
    except ConfigError as exc:
        own = [text for text in exc.problems if any(text.startswith(name) for name in (*setting.variables, *given))]
        return None if setting.required and not only and not given else (own[0] if own else None)
    return None


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    default: Any = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # attrs types Factory as a function
        default = default.factory()
    return _shown(default)


def _shown(value: object) -> str:
    """Return ``value`` as one would write it into a variable; nothing for None and for empty collections."""
    if value is None or value == () or value == {}:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, Enum):
        return "" if value.name == "UNSPECIFIED" else value.name.lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)
