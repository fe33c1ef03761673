"""Keeps in words what a hot-load command has set going at the service, for the moment it is interrupted."""

from __future__ import annotations

from cwtrain.events import HotLoadProgressed, HotLoadRequested, WeightSyncEvent
from cwtrain.hotload.operations import goes_on
from cwtrain.models.service import HotLoadState
from cwtrain.plugins import get_plugins, hookimpl

__all__ = ["watch"]

_NAME = "cwtrain.cli"


class _Watch:
    def __init__(self, running: list[str]) -> None:
        self._running = running

    @hookimpl
    def cwtrain_weight_sync(self, event: WeightSyncEvent) -> None:
        """Note the hot-load that was asked for, and forget it when it has ended."""
        match event:
            case HotLoadRequested(hot_load_id=hot_load_id):
                self._running[:] = [goes_on(hot_load_id)]
            case HotLoadProgressed(hot_load_id=hot_load_id, state=state, waiting_on=None):
                ended = state in HotLoadState.__members__ and HotLoadState[state].terminal
                self._running[:] = [] if ended else [goes_on(hot_load_id)]
            case _:
                pass


def watch(running: list[str]) -> None:
    """Keep ``running`` true while this process publishes or waits."""
    plugins = get_plugins()
    plugins.unregister(_NAME)
    plugins.register(_Watch(running), name=_NAME)
