"""slime adapter for CoreWeave Dedicated Inference: a run publishes its weights by flags and environment alone.

    --update-weight-mode delta --update-weight-transport disk
    --update-weight-delta-encoding xor --update-weight-delta-checksum adler32
    --update-weight-disk-dir DIR --update-weight-local-checkpoint-dir DIR2
    --custom-update-weight-post-write-path cwtrain.integrations.slime.hook

``hook(args, version_dir, rollout_engines)`` publishes each version that slime writes; the settings are
``CWTRAIN_HOTLOAD_*`` (``cwtrain.config.HotLoadConfig``). In a run without engines of its own give
``cwtrain.integrations.slime.hook_without_engines`` instead: slime skips its weight updates there, and looking this name
up in a train actor makes it stop skipping them. Before a run: ``cwtrain slime check ARGS...``.

The same hook serves miles: it reads from its arguments who calls.
"""

from __future__ import annotations

from typing import Any

__all__ = ["hook"]


def hook(args: Any, version_dir: str, rollout_engines: Any) -> None:
    """Publish what the trainer wrote at ``version_dir``; the trainer calls it, on every rank.

    ``args`` is the trainer's namespace; ``rollout_engines`` is not used, and may be empty. Returns when the version is
    served (``CWTRAIN_HOTLOAD_WAIT=1``), on all ranks together. Raises on all ranks together: a run never goes on
    with weights that the deployment does not have.
    """
    from cwtrain_slime._args import RunArgs
    from cwtrain_slime._post_write import adapter_of

    run = RunArgs.of(args)
    adapter_of(run).post_write(run, str(version_dir))


def _hook_without_engines() -> Any:
    """Return ``hook``, once slime's train actor in this process publishes without engines."""
    from cwtrain_slime._engines import publish_without_engines

    publish_without_engines()
    return hook


def __getattr__(name: str) -> Any:
    # Not in __all__: looking it up changes slime's train actor, and `import *` must not.
    if name == "hook_without_engines":
        return _hook_without_engines()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
