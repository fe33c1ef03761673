"""The settings of a trainer's hook, ``CWTRAIN_HOTLOAD_*``: which deployment, how long, how often a full snapshot."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping

import attrs

from cwtrain.config._env import boolean, env, env_vars, load, positive_seconds, whole_number
from cwtrain.errors import ConfigError
from cwtrain.models.service import PromptCachePolicy

__all__ = ["HotLoadConfig", "clean_run_id"]

logger = logging.getLogger("cwtrain.config")
_PREFIX = "CWTRAIN_HOTLOAD_"
_MAX_RUN_ID = 96
"""An identity has at most 128 characters, and epoch, version and suffix take the rest."""
_NO_IDENTITY = re.compile(r"[^A-Za-z0-9._-]")


def clean_run_id(value: object) -> str:
    """Return ``value`` as the prefix of identities: characters that no identity may have become ``-``.

    Raises ConfigError for one that is too long or has neither a letter nor a digit.
    """
    run = _NO_IDENTITY.sub("-", str(value).strip())
    if len(run) > _MAX_RUN_ID:
        raise ConfigError(f"must have at most {_MAX_RUN_ID} characters: epoch and version are added to it")
    if not run.strip("-._"):
        raise ConfigError("must have a letter or a digit")
    return run


def _policy(value: str | PromptCachePolicy) -> PromptCachePolicy:
    name = str(value).strip().upper().replace("-", "_")
    if name in PromptCachePolicy.__members__:
        return PromptCachePolicy[name]
    raise ConfigError("must be preserve or reset_all")


def _versions(value: object) -> int:
    return whole_number(0, 64)(value)


def _workers(value: object) -> int:
    return whole_number(1)(value)


def _seconds_or_none_at_all(value: object) -> float:
    text = str(value).strip()
    return 0.0 if text in ("0", "0.0") else positive_seconds(value)


@attrs.frozen(kw_only=True)
class HotLoadConfig:
    """What every trainer adapter reads. Durations are in seconds."""

    deployment_id: str = attrs.field(
        metadata=env("CWTRAIN_HOTLOAD_DEPLOYMENT_ID", help="UUID of the deployment to hot-load")
    )
    run_id: str | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(clean_run_id),
        metadata=env(
            "CWTRAIN_HOTLOAD_RUN_ID",
            help="prefix of the run's identities; without it made from the disk directory's name and the time",
        ),
    )
    wait: bool = attrs.field(
        default=True,
        converter=boolean,
        metadata=env("CWTRAIN_HOTLOAD_WAIT", help="1 blocks until the hot-load is COMPLETED, 0 returns at acceptance"),
    )
    timeout: float = attrs.field(
        default=1800.0,
        converter=positive_seconds,
        metadata=env(
            "CWTRAIN_HOTLOAD_TIMEOUT",
            help="seconds for readiness, for another hot-load, for the hot-load, and for an outage of API or store",
        ),
    )
    deadline: float | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(positive_seconds),
        metadata=env(
            "CWTRAIN_HOTLOAD_DEADLINE",
            help="seconds that one numbered call may take, upload included; without it the adapter's own",
        ),
    )
    publish_baseline: bool = attrs.field(
        default=True,
        converter=boolean,
        metadata=env(
            "CWTRAIN_HOTLOAD_PUBLISH_BASELINE",
            help="1 publishes the base checkpoint as version 0, 0 asserts that it is there",
        ),
    )
    baseline_wait: float = attrs.field(
        default=600.0,
        converter=positive_seconds,
        metadata=env("CWTRAIN_HOTLOAD_BASELINE_WAIT", help="seconds that the trainer's baseline call may block"),
    )
    full_every: int = attrs.field(
        default=20,
        converter=_versions,
        metadata=env(
            "CWTRAIN_HOTLOAD_FULL_EVERY", help="a full snapshot every so many versions, 0 to 64; 0 never cuts the chain"
        ),
    )
    mirror: bool | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(boolean),
        metadata=env(
            "CWTRAIN_HOTLOAD_MIRROR",
            help="keep a local copy of the weights; without it, on where FULL_EVERY is above 0",
        ),
    )
    verify: bool = attrs.field(
        default=False,
        converter=boolean,
        metadata=env("CWTRAIN_HOTLOAD_VERIFY", help="1 asks every replica again what it serves after each hot-load"),
    )
    state_dir: str | None = attrs.field(
        default=None,
        metadata=env(
            "CWTRAIN_HOTLOAD_STATE_DIR",
            help="directory for mirror, staging, manifests and journal; without it <disk directory>-hotload",
        ),
    )
    files_wait: float = attrs.field(
        default=90.0,
        converter=_seconds_or_none_at_all,
        metadata=env(
            "CWTRAIN_HOTLOAD_FILES_WAIT",
            help="seconds to look again for files that a shared disk may show late; 0 does not wait",
        ),
    )
    prompt_cache_policy: PromptCachePolicy = attrs.field(
        default=PromptCachePolicy.UNSPECIFIED,
        converter=_policy,
        metadata=env(
            "CWTRAIN_HOTLOAD_PROMPT_CACHE_POLICY",
            help="preserve or reset_all; without it the server's default (preserve)",
        ),
    )
    upload_workers: int = attrs.field(
        default=8,
        converter=_workers,
        metadata=env("CWTRAIN_HOTLOAD_UPLOAD_WORKERS", help="uploads at the same time"),
    )
    cleanup: bool = attrs.field(
        default=False,
        converter=boolean,
        metadata=env(
            "CWTRAIN_HOTLOAD_CLEANUP",
            help="1 deletes the trainer's directories that are acknowledged and behind the last full snapshot",
        ),
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> HotLoadConfig:
        """Return the configuration from ``overrides``, then ``environ``, then defaults.

        Raises ``ConfigError`` with every problem at once. A ``CWTRAIN_HOTLOAD_*`` variable that does not exist is
        warned about with the nearest name.
        """
        environ = os.environ if environ is None else environ
        known = [name for var in env_vars(cls).values() for name in var.names]
        for name in sorted(environ):
            if name.startswith(_PREFIX) and name not in known:
                close = difflib.get_close_matches(name, known, 1)
                logger.warning(
                    "the environment variable %s is not a setting of cwtrain%s",
                    name,
                    f"; did you mean {close[0]}?" if close else "",
                )
        return load(cls, environ, overrides)

    @property
    def keeps_mirror(self) -> bool:
        """Whether a local copy of the weights is kept: ``mirror``, or what follows from ``full_every``."""
        return self.mirror if self.mirror is not None else self.full_every > 0
