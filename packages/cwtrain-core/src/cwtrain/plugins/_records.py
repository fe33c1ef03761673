"""What is known of a plugin, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from cwtrain.plugins._entry_points import EntryPoint

__all__ = ["BrokenPlugin", "LoadedPlugin", "broken_at", "broken_entry", "distribution_of", "module_of", "one_line"]


@attrs.frozen(kw_only=True)
class _Plugin:
    name: str
    module: str
    distribution: str | None = None
    version: str | None = None

    @property
    def origin(self) -> str:
        """The distribution with its version, or the module where no distribution is known."""
        return f"{self.distribution} {self.version or ''}".rstrip() if self.distribution else self.module


@attrs.frozen(kw_only=True)
class LoadedPlugin(_Plugin):
    """A plugin that takes part: its name, where it comes from and the hooks it implements."""

    hooks: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class BrokenPlugin(_Plugin):
    """A plugin that failed ``where`` (``load``, a hook's name, a command's name), and with what ``error``."""

    where: str
    error: str


def broken_at(plugin: _Plugin, where: str, error: str) -> BrokenPlugin:
    """Return the record of a loaded plugin that failed at ``where``."""
    return BrokenPlugin(
        name=plugin.name,
        module=plugin.module,
        distribution=plugin.distribution,
        version=plugin.version,
        where=where,
        error=error,
    )


def broken_entry(entry: EntryPoint, exc: BaseException) -> BrokenPlugin:
    """Return the record of an entry point that could not be loaded."""
    distribution, version = distribution_of(entry)
    hint = getattr(exc, "hint", None)
    return BrokenPlugin(
        name=entry.name,
        module=entry.value,
        distribution=distribution,
        version=version,
        where="load",
        error=f"{type(exc).__name__}: {one_line(exc)}" + (f" ({hint})" if hint else ""),
    )


def distribution_of(entry: EntryPoint) -> tuple[str | None, str | None]:
    """Return name and version of the distribution that brings ``entry``."""
    return (entry.dist.name, entry.dist.version) if entry.dist is not None else (None, None)


def module_of(plugin: object) -> str:
    """Return where a plugin object is defined."""
    name = getattr(plugin, "__name__", None) or type(plugin).__qualname__
    home = getattr(plugin, "__module__", None)
    return f"{home}.{name}" if isinstance(home, str) else str(name)


def one_line(exc: BaseException) -> str:
    """Return the message of ``exc`` in one line."""
    return " ".join(str(exc).split())
