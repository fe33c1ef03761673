"""Which plugins take part, and what happens when one is broken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from cwtrain.config._env import boolean, env, load

__all__ = ["PluginConfig"]


def _names(value: str | Iterable[str]) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(name for part in parts if (name := part.strip()))


@attrs.frozen(kw_only=True)
class PluginConfig:
    """The environment's word on plugins."""

    disabled: tuple[str, ...] = attrs.field(
        default=(),
        converter=_names,
        metadata=env("CWTRAIN_DISABLED_PLUGINS", help="names of plugins to leave out, with commas between them"),
    )
    strict: bool = attrs.field(
        default=False,
        converter=boolean,
        metadata=env("CWTRAIN_STRICT_PLUGINS", help="1 makes a broken plugin an error instead of a warning"),
    )
    trace: bool = attrs.field(
        default=False,
        converter=boolean,
        metadata=env("CWTRAIN_TRACE_PLUGINS", help="1 logs every call of a hook"),
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> PluginConfig:
        """Return the configuration from ``overrides``, then ``environ``, then defaults. Raises ``ConfigError``."""
        return load(cls, environ, overrides)
