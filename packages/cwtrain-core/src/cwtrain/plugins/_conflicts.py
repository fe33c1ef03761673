"""What two plugins cannot both have, and hooks that do not exist: found, and said in one way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, TypeVar

import pluggy

from cwtrain.errors import PluginConflictError, PluginLoadError
from cwtrain.plugins import specs
from cwtrain.plugins._records import LoadedPlugin, distribution_of

if TYPE_CHECKING:
    import click

    from cwtrain.plugins._entry_points import EntryPoint

__all__ = ["LEAVE_OUT", "conflict", "conflicting_command", "refuse_unknown_hooks", "unique"]

_T = TypeVar("_T")
LEAVE_OUT: Final = "CWTRAIN_DISABLED_PLUGINS=<name>"


def refuse_unknown_hooks(manager: pluggy.PluginManager, name: str) -> None:
    """Raise for hooks of the one plugin in ``manager`` that this version does not have."""
    unknown = [
        hook.name
        for hook in manager.get_hookcallers(manager.get_plugin(name)) or ()
        if not hook.has_spec() and not all(impl.optionalhook for impl in hook.get_hookimpls())
    ]
    if unknown:
        import difflib

        close = [match for hook in unknown for match in difflib.get_close_matches(hook, specs.KINDS, 1)]
        raise PluginLoadError(
            f"plugin {name!r} implements unknown hooks: {', '.join(unknown)}",
            hint=(f"did you mean {', '.join(close)}? " if close else "")
            + "A hook of another version of core is marked hookimpl(optionalhook=True)",
        )


def unique(what: str, found: Iterable[tuple[LoadedPlugin, _T]]) -> dict[str, _T]:
    """Return the items by name, or raise naming the distributions of two that share one."""
    owners: dict[str, LoadedPlugin] = {}
    items: dict[str, _T] = {}
    for plugin, item in found:
        name: str = item.name  # type: ignore[attr-defined]  # both kinds have a name
        if name in items:
            raise PluginConflictError(
                f"two plugins register the {what} {name!r}: {owners[name].origin} and {plugin.origin}",
                hint=f"uninstall one of them, or leave one out with {LEAVE_OUT}",
            )
        owners[name], items[name] = plugin, item
    return items


def conflicting_command(name: str, clash: PluginConflictError) -> click.Command:
    import click

    def fail(**_: object) -> None:
        raise clash

    return click.Command(
        name,
        callback=fail,
        help=f"(not usable: {clash})",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def conflict(what: str, name: str, *entries: EntryPoint) -> PluginConflictError:
    origins = " and ".join(distribution_of(entry)[0] or entry.value for entry in entries)
    return PluginConflictError(f"two distributions bring a {what} named {name!r}: {origins}")
