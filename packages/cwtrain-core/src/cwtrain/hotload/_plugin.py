"""Core's own opinion, as an ordinary plugin that is asked last: what publishes when no other plugin does.

So a plugin can stand in for the publish (``cwtrain_sync_weights``), or wrap it to time or to serialise it.
"""

from __future__ import annotations

from cwtrain.errors import CWTrainError, PluginError
from cwtrain.events import SyncFailed, WeightSyncEvent
from cwtrain.models.sync import WeightSyncRequest, WeightSyncResult
from cwtrain.plugins import Plugins, hookimpl

__all__ = ["PUBLISH", "CoreDefaults", "with_defaults"]

PUBLISH = "publish"
"""The key in ``WeightSyncRequest.settings`` under which the publisher gives what publishes: called with the request."""
_NAME = "cwtrain.publisher"


class CoreDefaults:
    """What core does where no plugin has an opinion. ``last_failure`` is the error that plugins were told of last."""

    def __init__(self) -> None:
        self.last_failure: CWTrainError | None = None

    @hookimpl
    def cwtrain_weight_sync(self, event: WeightSyncEvent) -> None:
        """Remember which failure was told, so that nobody tells it twice."""
        if isinstance(event, SyncFailed):
            self.last_failure = event.error

    @hookimpl(trylast=True)
    def cwtrain_sync_weights(self, request: WeightSyncRequest) -> WeightSyncResult | None:
        """Publish with the publisher that asks."""
        publish = request.settings.get(PUBLISH)
        if publish is None:
            return None
        result = publish(request)
        if not isinstance(result, WeightSyncResult):
            raise PluginError(f"the request's settings[{PUBLISH!r}] returned {result!r}, not a WeightSyncResult")
        return result


def with_defaults(plugins: Plugins) -> CoreDefaults:
    """Return core's defaults among ``plugins``, where they are registered once."""
    found = plugins.plugin(_NAME)
    if found is None:
        found = CoreDefaults()
        plugins.register(found, name=_NAME, distribution="cwtrain-core")
    assert isinstance(found, CoreDefaults)
    return found
