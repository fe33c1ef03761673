"""``Plugins``: finds plugins, keeps them apart from each other, and asks them through typed methods.

pluggy keeps the registry, the call order, wrappers and argument checks. The dispatch of *register* and *observe* hooks
is ours: with pluggy's own, one plugin that raises would keep all later ones from being called.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar, assert_never

import pluggy

from cwtrain._process import NotPickled, renew_locks_after_fork
from cwtrain.config import PluginConfig
from cwtrain.errors import PluginConflictError, PluginError, PluginLoadError
from cwtrain.plugins import specs
from cwtrain.plugins._conflicts import LEAVE_OUT, conflict, conflicting_command, refuse_unknown_hooks, unique
from cwtrain.plugins._entry_points import EntryPoint
from cwtrain.plugins._entry_points import entry_points as find_entry_points
from cwtrain.plugins._records import (
    BrokenPlugin,
    LoadedPlugin,
    broken_at,
    broken_entry,
    distribution_of,
    module_of,
    one_line,
)
from cwtrain.plugins._trace import trace_after, trace_before

if TYPE_CHECKING:
    import click

    from cwtrain.config import SettingValue
    from cwtrain.events import AnyEvent, WeightsWritten
    from cwtrain.models.snapshot import Chain, PublishPlan
    from cwtrain.models.sync import (
        Integration,
        RolloutBackendFactory,
        SnapshotChoice,
        WeightSyncRequest,
        WeightSyncResult,
    )

__all__ = ["BrokenPlugin", "LoadedPlugin", "Plugins", "get_plugins"]

logger = logging.getLogger("cwtrain.plugins")
_T = TypeVar("_T")


class Plugins(NotPickled):
    """The plugins of one process, or of one test, asked through one typed method for each hook.

    ``Plugins()`` is empty; ``Plugins.load()`` has what the environment's entry points name. ``failures`` counts the
    exceptions of *observe* hooks by (plugin, hook).
    """

    _instead = "each process has its own, see cwtrain.plugins.get_plugins()"

    def __init__(self, *, config: PluginConfig | None = None) -> None:
        self._config = config if config is not None else PluginConfig()
        self._manager: Final = self._new_manager()
        self._alone: dict[str, pluggy.PluginManager] = {}
        self._loaded: dict[str, LoadedPlugin] = {}
        self._broken: dict[tuple[str, str], BrokenPlugin] = {}
        self._disabled: tuple[str, ...] = ()
        self._failures: Counter[tuple[str, str]] = Counter()
        self._order: dict[str, tuple[tuple[str, Callable[..., Any]], ...]] = {}

    # ------------------------------------------------------------------ loading

    @classmethod
    def load(
        cls,
        *,
        config: PluginConfig | None = None,
        entry_points: Iterable[EntryPoint] | None = None,
    ) -> Plugins:
        """Return the plugins that entry points of the group ``cwtrain`` name, those of ``config.disabled`` left out.

        A plugin that cannot be imported or names an unknown hook is recorded in ``broken`` and warned about once;
        ``config.strict`` raises ``PluginLoadError`` instead. Without ``config`` the environment says
        (``CWTRAIN_DISABLED_PLUGINS``, ``CWTRAIN_STRICT_PLUGINS``, ``CWTRAIN_TRACE_PLUGINS``).
        """
        plugins = cls(config=config if config is not None else PluginConfig.from_env())
        if entry_points is None:
            entry_points = find_entry_points(specs.ENTRY_POINT_GROUP)
        off = {_folded(name) for name in plugins._config.disabled}
        seen: dict[str, EntryPoint] = {}
        disabled = set()
        for entry in sorted(entry_points, key=lambda entry: (entry.name, distribution_of(entry)[0] or "")):
            if _folded(entry.name) in off:
                disabled.add(entry.name)
                continue
            if (first := seen.setdefault(entry.name, entry)) is not entry:
                if first.value != entry.value:  # the same one twice on the path is no conflict
                    plugins._record_broken(broken_entry(entry, conflict("plugin", entry.name, first, entry)))
                continue
            plugins._load_entry(entry)
        plugins._disabled = tuple(sorted(disabled))
        return plugins

    def _load_entry(self, entry: EntryPoint) -> None:
        distribution, version = distribution_of(entry)
        try:
            self.register(entry.load(), name=entry.name, distribution=distribution, version=version)
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - whatever a foreign module does at import stays its own
            self._record_broken(broken_entry(entry, exc), exc)

    def register(
        self, plugin: object, *, name: str | None = None, distribution: str | None = None, version: str | None = None
    ) -> str:
        """Add ``plugin`` (a module, a class or an object with ``hookimpl`` functions) and return its name.

        Raises ``PluginConflictError`` for a name that is taken and ``PluginLoadError`` for an unknown hook or for
        arguments that the hook does not have; nothing is added then.
        """
        name = name or self._manager.get_canonical_name(plugin)
        if (other := self._loaded.get(name)) is not None:
            raise PluginConflictError(
                f"two plugins are named {name!r}: {other.origin} and {distribution or module_of(plugin)}",
                hint=f"uninstall one of them, or leave one out with {LEAVE_OUT}",
            )
        # Validated on a manager of its own, which is also what calls it apart from the others.
        alone = self._new_manager()
        try:
            alone.register(plugin, name)
            refuse_unknown_hooks(alone, name)
            self._manager.register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as exc:
            raise PluginLoadError(f"plugin {name!r} cannot be used: {one_line(exc)}") from exc
        self._alone[name] = alone
        self._order.clear()
        self._loaded[name] = LoadedPlugin(
            name=name,
            module=module_of(plugin),
            distribution=distribution,
            version=version,
            hooks=tuple(sorted(hook.name for hook in alone.get_hookcallers(plugin) or ())),
        )
        return name

    def plugin(self, name: str) -> object | None:
        """Return what is registered as ``name``, None where nothing is."""
        found: object | None = self._manager.get_plugin(name)
        return found

    def unregister(self, name: str) -> None:
        """Remove the plugin called ``name``, if there is one."""
        if self._loaded.pop(name, None) is not None:
            self._manager.unregister(name=name)
            del self._alone[name]
            self._order.clear()

    def _new_manager(self) -> pluggy.PluginManager:
        manager = pluggy.PluginManager(specs.PROJECT)
        manager.add_hookspecs(specs)
        if self._config.trace:
            manager.add_hookcall_monitoring(trace_before, trace_after)
        return manager

    def _record_broken(self, broken: BrokenPlugin, cause: BaseException | None = None) -> None:
        if self._config.strict:
            raise PluginLoadError(
                f"plugin {broken.name!r} ({broken.origin}) is broken at {broken.where}: {broken.error}",
                hint=f"fix or uninstall it, leave it out with {LEAVE_OUT}, or unset CWTRAIN_STRICT_PLUGINS",
            ) from cause
        if (key := (broken.name, broken.where)) not in self._broken:
            logger.warning(
                "plugin %r (%s) is left out at %s: %s; see: cwtrain plugins list",
                broken.name,
                broken.origin,
                broken.where,
                broken.error,
            )
            logger.debug("traceback of plugin %r", broken.name, exc_info=cause)
            self._broken[key] = broken

    # ------------------------------------------------------------------ what there is

    @property
    def loaded(self) -> tuple[LoadedPlugin, ...]:
        """The plugins that take part, by name."""
        return tuple(self._loaded[name] for name in sorted(self._loaded))

    @property
    def broken(self) -> tuple[BrokenPlugin, ...]:
        """What failed to load or to register, by name."""
        return tuple(self._broken[key] for key in sorted(self._broken))

    @property
    def disabled(self) -> tuple[str, ...]:
        """Names of installed plugins that the configuration leaves out."""
        return self._disabled

    @property
    def failures(self) -> Mapping[tuple[str, str], int]:
        """How often an *observe* hook raised, by (plugin, hook)."""
        return MappingProxyType(self._failures)

    # ------------------------------------------------------------------ register hooks

    def integrations(self) -> tuple[Integration, ...]:
        """Return the trainers that plugins integrate, by name; two of one name raise ``PluginConflictError``."""
        from cwtrain.models.sync import Integration

        found = self._collect("cwtrain_register_integration", Integration)
        return tuple(item for _, item in sorted(unique("integration", found).items()))

    def rollout_backends(self) -> tuple[RolloutBackendFactory, ...]:
        """Return the ways to sample rollouts, by name; two of one name raise ``PluginConflictError``."""
        from cwtrain.models.sync import RolloutBackendFactory

        found = self._collect("cwtrain_register_rollout_backend", RolloutBackendFactory)
        return tuple(item for _, item in sorted(unique("rollout backend", found).items()))

    def rollout_backend(self, name: str) -> RolloutBackendFactory:
        """Return the way to sample rollouts called ``name``; ``PluginError`` says which there are."""
        backends = {backend.name: backend for backend in self.rollout_backends()}
        if name not in backends:
            raise PluginError(
                f"no rollout backend is named {name!r}; there are: {', '.join(backends) or 'none'}",
                hint="install the distribution that brings it, and look at: cwtrain plugins list",
            )
        return backends[name]

    def settings(self) -> tuple[SettingValue, ...]:
        """Return the settings that plugins read from the environment, as they stand."""
        from cwtrain.config import SettingValue

        return tuple(item for _, item in self._collect("cwtrain_register_settings", SettingValue))

    def register_commands(self, group: click.Group, *, reserved: Collection[str] = ()) -> dict[str, str]:
        """Add the plugins' commands to ``group`` and return the name of the plugin behind each.

        Names in ``reserved`` are core's and stay core's. A name that two plugins offer becomes a command that fails and
        names both distributions.
        """
        import click

        owners: dict[str, LoadedPlugin] = {}
        for plugin_name, call in self._each("cwtrain_register_commands"):
            plugin = self._loaded[plugin_name]
            own = click.Group(plugin_name)
            if self._isolated(plugin_name, "cwtrain_register_commands", call, cli=own) is None:
                continue
            for name, command in own.commands.items():
                if name in reserved:
                    self._record_broken(broken_at(plugin, "cwtrain_register_commands", f"{name!r} is core's command"))
                elif name in owners:
                    clash = PluginConflictError(
                        f"two plugins offer the command {name!r}: {owners[name].origin} and {plugin.origin}",
                        hint=f"uninstall one of them, or leave one out with {LEAVE_OUT}",
                    )
                    group.add_command(conflicting_command(name, clash), name)
                    self._record_broken(broken_at(plugin, f"command {name}", str(clash)))
                else:
                    owners[name] = plugin
                    group.add_command(command, name)
        return {name: plugin.name for name, plugin in owners.items()}

    def _collect(self, hook: str, kind: type[_T]) -> list[tuple[LoadedPlugin, _T]]:
        found: list[tuple[LoadedPlugin, _T]] = []
        for name, call in self._each(hook):
            plugin = self._loaded[name]
            for answer in self._isolated(name, hook, call) or ():
                items = [answer] if isinstance(answer, kind) or not isinstance(answer, Iterable) else list(answer)
                if all(isinstance(item, kind) for item in items):
                    found += [(plugin, item) for item in items]
                else:
                    problem = f"returned {type(answer).__name__}, expected {kind.__name__} or an iterable of them"
                    self._record_broken(broken_at(plugin, hook, problem))
        return found

    def _isolated(self, name: str, hook: str, call: Callable[..., Any], **kwargs: object) -> list[Any] | None:
        try:
            answers: list[Any] = call(**kwargs)
        except Exception as exc:  # noqa: BLE001 - one plugin's mistake must not take the others along
            self._record_broken(broken_at(self._loaded[name], hook, f"{type(exc).__name__}: {one_line(exc)}"), exc)
            return None
        return answers

    # ------------------------------------------------------------------ choose and guard hooks

    def name_snapshot(self, written: WeightsWritten) -> str | None:
        """Return the first plugin's identity for ``written``, or None when none has an opinion."""
        identity = self._ask("cwtrain_name_snapshot", written=written)
        if identity is not None and not isinstance(identity, str):
            raise self._bad_answer("cwtrain_name_snapshot", identity, "an identity (str) or None")
        return identity

    def choose_snapshot(self, written: WeightsWritten, chain: Chain) -> SnapshotChoice | None:
        """Return the first plugin's choice for ``written``, or None when none has an opinion."""
        from cwtrain.models.sync import SnapshotChoice

        choice = self._ask("cwtrain_choose_snapshot", written=written, chain=chain)
        if choice is None:
            return None
        try:
            return SnapshotChoice(choice)
        except ValueError as exc:
            expected = f"a SnapshotChoice ({', '.join(SnapshotChoice)}) or None"
            raise self._bad_answer("cwtrain_choose_snapshot", choice, expected) from exc

    def sync_weights(self, request: WeightSyncRequest) -> WeightSyncResult | None:
        """Return what the first plugin that handles ``request`` did, or None when none does."""
        from cwtrain.models.sync import WeightSyncResult

        result = self._ask("cwtrain_sync_weights", request=request)
        if result is not None and not isinstance(result, WeightSyncResult):
            raise self._bad_answer("cwtrain_sync_weights", result, "a WeightSyncResult or None")
        return result

    def before_publish(self, plan: PublishPlan) -> None:
        """Ask every plugin whether ``plan`` may go on; what one raises is its veto and reaches the caller."""
        self._ask("cwtrain_before_publish", plan=plan)

    def _ask(self, hook: str, **kwargs: object) -> Any:
        try:
            return getattr(self._manager.hook, hook)(**kwargs)
        except Exception as exc:
            exc.add_note(f"raised by {self._blame(hook, exc)} in the hook {hook}")
            raise

    def _blame(self, hook: str, exc: Exception) -> str:
        """Name the plugin whose function stands deepest in the traceback of ``exc``."""
        impls = getattr(self._manager.hook, hook).get_hookimpls()
        by_code = {getattr(impl.function, "__code__", None): impl.plugin_name for impl in impls}
        guilty = [by_code[code] for code in _codes(exc.__traceback__) if code in by_code]
        names = guilty[-1:] or [impl.plugin_name for impl in impls]
        who = " or ".join(f"{name!r} ({self._loaded[name].origin})" for name in names)
        return f"plugin {who}" if who else "core"

    def _bad_answer(self, hook: str, answer: object, expected: str) -> PluginError:
        names = [impl.plugin_name for impl in getattr(self._manager.hook, hook).get_hookimpls()]
        return PluginError(
            f"the hook {hook} returned {answer!r}, expected {expected}; it is implemented by: {', '.join(names)}"
        )

    # ------------------------------------------------------------------ observe hooks

    def notify(self, event: AnyEvent) -> None:
        """Tell every plugin that listens. What one raises is logged once and counted in ``failures``, no more."""
        from cwtrain import events  # here: its classes are half of what `cwtrain --help` would cost

        match event:
            case events.WeightsWritten():
                hook = "cwtrain_post_write"
            case (
                events.SyncStarted()
                | events.SnapshotInspected()
                | events.SnapshotUploaded()
                | events.HotLoadRequested()
                | events.HotLoadProgressed()
                | events.SyncCompleted()
                | events.SyncSkipped()
                | events.SyncFailed()
            ):
                hook = "cwtrain_weight_sync"
            case (
                events.RolloutBatchCompleted()
                | events.RolloutRetried()
                | events.RolloutUnavailable()
                | events.WeightVersionSeen()
            ):
                hook = "cwtrain_rollout_backend"
            case _:
                assert_never(event)
        for name, call in self._each(hook):
            try:
                call(event=event)
            except Exception as exc:  # noqa: BLE001 - an ear must not disturb the training run
                self._note_failure(name, hook, exc)

    def _note_failure(self, name: str, hook: str, exc: Exception) -> None:
        self._failures[name, hook] += 1
        if self._failures[name, hook] == 1:
            logger.warning(
                "plugin %r (%s) raised in %s and is told of later events all the same: %s: %s",
                name,
                self._loaded[name].origin,
                hook,
                type(exc).__name__,
                one_line(exc),
            )
            logger.debug("traceback of plugin %r in %s", name, hook, exc_info=exc)

    # ------------------------------------------------------------------ dispatch

    def _each(self, hook: str) -> tuple[tuple[str, Callable[..., Any]], ...]:
        """Return (plugin name, a caller that reaches this plugin alone) in the order in which pluggy would call."""
        callers = self._order.get(hook)
        if callers is None:
            impls = getattr(self._manager.hook, hook).get_hookimpls()
            names = dict.fromkeys(impl.plugin_name for impl in reversed(impls))
            callers = self._order[hook] = tuple((name, getattr(self._alone[name].hook, hook)) for name in names)
        return callers


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _codes(traceback: TracebackType | None) -> Iterable[object]:
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


_lock = threading.Lock()
renew_locks_after_fork(sys.modules[__name__], "_lock")


def get_plugins() -> Plugins:
    """Return the process-wide plugins, loaded from the environment's entry points at the first call."""
    with _lock:
        return _process_plugins()


@functools.cache
def _process_plugins() -> Plugins:
    return Plugins.load()
