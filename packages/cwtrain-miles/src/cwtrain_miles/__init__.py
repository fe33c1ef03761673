"""miles adapter for CoreWeave Dedicated Inference: a run publishes its weights by flags and environment alone.

    --update-weight-transfer-mode disk-delta
    --update-weight-delta-encoding xor --update-weight-delta-checksum adler32
    --update-weight-disk-dir DIR --update-weight-local-checkpoint-dir DIR2
    --custom-update-weight-post-write-path cwtrain.integrations.miles.hook

``hook(args, version_dir, rollout_engines)`` publishes each version that miles writes; the settings are
``CWTRAIN_HOTLOAD_*`` (``cwtrain.config.HotLoadConfig``). It is slime's hook, which reads from its arguments who calls.
Before a run: ``cwtrain miles check ARGS...``.
"""

from __future__ import annotations

from cwtrain_slime import hook

__all__ = ["hook"]
