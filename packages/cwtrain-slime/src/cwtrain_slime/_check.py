"""``check``: everything about a run that will not work or will be ignored, found before a GPU is rented."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from cwtrain.config import ApiConfig, HotLoadConfig, StorageConfig, located
from cwtrain.errors import ConfigError, CWTrainError
from cwtrain_slime._check_base import check_base, check_disks
from cwtrain_slime._check_flags import check_flags, read_flags
from cwtrain_slime._check_service import (
    base_identity,
    check_bucket,
    check_deployment,
    check_endpoint,
    check_published_base,
    failed_base,
    publish_base,
)
from cwtrain_slime._dialect import Dialect
from cwtrain_slime._findings import Finding, finding, ok

if TYPE_CHECKING:
    from cwtrain.hotload import HotLoader, ProgressEvent
    from cwtrain.infra import InferenceClient
    from cwtrain.models.service import HotLoad
    from cwtrain.models.snapshot import LocalSnapshot

__all__ = ["CheckReport", "check_run"]


@attrs.frozen(kw_only=True)
class CheckReport:
    """What was found, in the order of the how-to page."""

    trainer: str
    findings: tuple[Finding, ...]
    base: Mapping[str, Any] | None = None
    """The base checkpoint: path, bytes, tensors, identity, and whether it is published and equal; None without one."""

    @property
    def ok(self) -> bool:
        """Whether the run can be started: there is no error among the findings."""
        return ok(self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return {
            "trainer": self.trainer,
            "ok": self.ok,
            "findings": [found.to_json() for found in self.findings],
            "base": None if self.base is None else dict(self.base),
        }


def check_run(
    dialect: Dialect,
    words: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    client: Callable[[], InferenceClient] | None = None,
    with_base: bool = False,
    patience: float = 10.0,
    on_progress: Callable[[ProgressEvent], None] | None = None,
) -> CheckReport:
    """Return what is wrong with a run that is launched with ``words`` in ``environ``.

    ``words`` is the launch line, or only its flags. ``client`` makes the client for the service; it is called only when
    the environment names a deployment and a token. ``with_base`` uploads and hot-loads the base checkpoint, if
    deployment, bucket and checkpoint are in order; ``on_progress`` hears of that. ``patience`` is how many seconds an
    endpoint that does not answer is asked again.
    """
    environ = os.environ if environ is None else environ
    flags, findings = read_flags(dialect, words)
    settings, about_settings = _settings(environ)
    snapshot: LocalSnapshot | None = None
    if flags is not None:
        findings += check_flags(dialect, flags, settings, environ)
    findings += about_settings
    if flags is not None:
        snapshot, about_base = check_base(dialect, flags)
        findings += [*about_base, *check_disks(dialect, flags, settings, snapshot)]
    token, about_token = _token(environ)
    findings += about_token
    base: dict[str, Any] | None = None
    if snapshot is not None:
        base = {"path": snapshot.path, "bytes": snapshot.total_bytes, "tensors": snapshot.tensors, "published": None}
        base["identity"] = base_identity(settings.run_id) if settings and settings.run_id else None
    if settings is not None and token is not None:
        from cwtrain.hotload import HotLoader
        from cwtrain.infra import InferenceClient

        with client() if client is not None else InferenceClient() as made:
            loader = HotLoader(made, settings.deployment_id, run_id=settings.run_id)
            publish = partial(publish_base, on_progress=on_progress) if with_base else None
            published = _service(
                dialect, flags, loader, settings, snapshot, environ, token, findings, publish, patience
            )
            if base is not None:
                base["published"] = published is not None
    return CheckReport(trainer=dialect.name, findings=tuple(findings), base=base)


def _service(
    dialect: Dialect,
    flags: Mapping[str, Any] | None,
    loader: HotLoader,
    settings: HotLoadConfig,
    snapshot: LocalSnapshot | None,
    environ: Mapping[str, str],
    token: str,
    findings: list[Finding],
    publish: Callable[[HotLoader, HotLoadConfig, LocalSnapshot], HotLoad] | None,
    patience: float,
) -> str | None:
    """Add what the service tells to ``findings`` and return the identity of the base once it is published and equal.

    ``publish`` publishes a base that is not: whatever the flags are, it is the same base.
    """
    deployment, about = check_deployment(loader)
    findings += about
    if deployment is None:
        return None
    published = None
    about_bucket = check_bucket(loader)
    findings += about_bucket
    if snapshot is not None and ok(about_bucket):
        published, about = check_published_base(loader, settings, snapshot)
        if publish is not None and published is None and not any(found.name == "base-differs" for found in about):
            try:
                published, about = publish(loader, settings, snapshot).identity, []
            except CWTrainError as exc:
                about = [*about, failed_base(exc)]
        findings += about
    if flags is not None:
        findings += check_endpoint(dialect, flags, loader, environ, token, patience=patience)
    return published


def _settings(environ: Mapping[str, str]) -> tuple[HotLoadConfig | None, list[Finding]]:
    findings: list[Finding] = []
    try:
        StorageConfig.from_env(environ)
    except ConfigError as exc:
        findings += _problems(exc)
    try:
        settings = HotLoadConfig.from_env(environ)
    except ConfigError as exc:
        return None, [*_problems(exc), *findings]
    if settings.full_every > 0 and not settings.keeps_mirror:
        findings.append(
            finding(
                "settings",
                f"CWTRAIN_HOTLOAD_FULL_EVERY={settings.full_every} needs a mirror to make full snapshots from, and "
                "CWTRAIN_HOTLOAD_MIRROR=0 turns it off",
                "leave CWTRAIN_HOTLOAD_MIRROR unset, or CWTRAIN_HOTLOAD_FULL_EVERY=0",
            )
        )
    findings += _unknown(environ)
    if settings.run_id is None:
        findings.append(
            finding(
                "run-id",
                "CWTRAIN_HOTLOAD_RUN_ID is not set: a restart gets another id and uploads its base again",
                "set CWTRAIN_HOTLOAD_RUN_ID to a name of the run",
            )
        )
    if settings.full_every == 0:
        findings.append(
            finding(
                "no-fall-back",
                "CWTRAIN_HOTLOAD_FULL_EVERY=0: a delta that fails ends the run, and the 129th is refused",
                "CWTRAIN_HOTLOAD_FULL_EVERY=20, unless the trainer's nodes share no disk",
            )
        )
    return settings, findings


def _unknown(environ: Mapping[str, str]) -> list[Finding]:
    """Return the variables that look like settings of the hook and are none."""
    known = [name for item in located(HotLoadConfig, environ=environ) for name in item.setting.variables]
    findings = []
    for name in sorted(environ):
        if name.startswith("CWTRAIN_HOTLOAD_") and name not in known:
            close = difflib.get_close_matches(name, known, 1)
            fix = f"set {close[0]} instead" if close else f"unset {name}"
            findings.append(finding("ignored", f"{name} is no setting of cwtrain: it has no effect", fix))
    return findings


def _token(environ: Mapping[str, str]) -> tuple[str | None, list[Finding]]:
    try:
        token = ApiConfig.from_env(environ).token
    except ConfigError as exc:
        return None, _problems(exc, "token")
    if token is None:
        what = "there is no API token: neither COREWEAVE_API_TOKEN nor CW_API_TOKEN is set"
        return None, [finding("token", what, "set COREWEAVE_API_TOKEN, in the trainer's environment too")]
    return token, []


def _problems(exc: ConfigError, name: str = "settings") -> list[Finding]:
    fix = exc.hint or "correct the variable"
    return [finding(name, problem, fix) for problem in exc.problems or (exc.message,)]
