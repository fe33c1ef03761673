"""Train with reinforcement learning against CoreWeave Dedicated Inference.

    from cwtrain import HotLoader, InferenceClient

    loader = HotLoader(InferenceClient(), deployment_id="<uuid>")
    assert loader.publish("/ckpt/step_000100", identity="step_000100").state.name == "COMPLETED"

The public names are loaded at first use, so ``import cwtrain`` costs almost nothing and needs no credentials.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not typing's: this module is imported before anything else, and typing costs milliseconds
if TYPE_CHECKING:
    from typing import Any

    from cwtrain.hotload import HotLoader, SnapshotWriter, upload_snapshot
    from cwtrain.infra import InferenceClient
    from cwtrain.snapshots import inspect_snapshot

    __version__: str

__all__ = ["HotLoader", "InferenceClient", "SnapshotWriter", "__version__", "inspect_snapshot", "upload_snapshot"]

_HOMES = {
    "HotLoader": "cwtrain.hotload",
    "InferenceClient": "cwtrain.infra",
    "SnapshotWriter": "cwtrain.hotload",
    "inspect_snapshot": "cwtrain.snapshots",
    "upload_snapshot": "cwtrain.hotload",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("cwtrain-core")
    if home := _HOMES.get(name):
        from importlib import import_module

        return getattr(import_module(home), name)
    raise AttributeError(f"module 'cwtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
