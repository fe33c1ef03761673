"""What the service tells: the deployment, the bucket, the published base, and whether the endpoint's answers can train.

Nothing is changed here, except by ``publish_base``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from cwtrain.config import HotLoadConfig
from cwtrain.errors import ConfigError, CWTrainError, HotLoadError, StorageAccessError, StorageNotFoundError
from cwtrain.models.service import Deployment, HotLoadState, ResourceStatus
from cwtrain.models.snapshot import LocalSnapshot
from cwtrain_slime._dialect import Dialect
from cwtrain_slime._findings import Finding, finding

if TYPE_CHECKING:
    from cwtrain.hotload import HotLoader, ProgressEvent
    from cwtrain.infra import InferenceClient
    from cwtrain.models.service import HotLoad

__all__ = [
    "base_identity",
    "check_bucket",
    "check_deployment",
    "check_endpoint",
    "check_published_base",
    "failed_base",
    "publish_base",
]

_PROMPT: Final = (1, 2, 3)
"""Token ids that every vocabulary has."""
_ENDPOINT_SECONDS: Final = 60.0


def base_identity(run_id: str) -> str:
    """Return under which identity a run's base checkpoint is published."""
    return f"{run_id}-v000000"


def check_deployment(loader: HotLoader) -> tuple[Deployment | None, list[Finding]]:
    """Return the deployment, and what stands in the way of hot-loading it."""
    try:
        deployment = loader.refresh_deployment()
    except CWTrainError as exc:
        return None, [_said("service", exc, "look at CWTRAIN_HOTLOAD_DEPLOYMENT_ID and COREWEAVE_API_TOKEN")]
    try:
        _ = loader.target
    except HotLoadError as exc:
        return None, [_said("no-hot-load", exc, "create a deployment with hotLoad, as in the recipe")]
    word = deployment.status_text or str(deployment.status)
    if deployment.status is ResourceStatus.FAILED:
        fix = "look at its conditions (cwtrain deployment get), then create another"
        return None, [finding("service", f"deployment {deployment.id} is {word}, which is final", fix)]
    findings = []
    if deployment.status is not ResourceStatus.READY:
        findings.append(
            finding(
                "not-ready",
                f"deployment {deployment.id} is {word}: the first publish waits for it",
                "start it before the run",
            )
        )
    if deployment.disabled:
        findings.append(
            finding("not-ready", f"deployment {deployment.id} is disabled: nothing serves the weights", "enable it")
        )
    return deployment, findings


def check_bucket(loader: HotLoader) -> list[Finding]:
    """Return which permissions on the deployment's bucket are missing, all at once."""
    from cwtrain.storage import check_access

    try:
        report = check_access(loader.store, loader.location)
        report.raise_for_refused()
    except StorageAccessError as exc:
        return [_said("bucket", exc, "give the trainer's key the bucket policy of docs/how-to")]
    except CWTrainError as exc:
        return [_said("bucket", exc, "look at the object store's settings: cwtrain doctor")]
    return [
        finding(
            "bucket-optional",
            f"{check.action} is not allowed: uploads that a killed run left open cannot be found and aborted",
            f"allow {check.action} on the bucket, or abort them by hand",
        )
        for check in report.checks
        if not check.required and check.allowed is False
    ]


def check_published_base(
    loader: HotLoader,
    settings: HotLoadConfig,
    snapshot: LocalSnapshot,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[str | None, list[Finding]]:
    """Return the base's identity once it is published, and what is wrong with it.

    The checkpoint is read whole and compared tensor by tensor with the manifest, if there is one.
    """
    from cwtrain.hotload.delta import checkpoint_checksums

    if settings.run_id is None:
        return None, []
    identity = base_identity(settings.run_id)
    try:
        manifest = loader.read_manifest(identity)
    except StorageNotFoundError:
        gigabytes = snapshot.total_bytes / 1e9
        fix = "upload it ahead of the run: run this check with --publish-base"
        what = f"the base ({gigabytes:.1f} GB) is not published as {identity}: the run's first call uploads it"
        if not settings.publish_baseline:
            return None, [finding("base-absent", f"{what}, and CWTRAIN_HOTLOAD_PUBLISH_BASELINE=0 forbids that", fix)]
        return None, [finding("base-unpublished", what, fix)]
    except CWTrainError as exc:
        return None, [_said("bucket", exc, "look at the bucket: cwtrain hotload verify")]
    here = checkpoint_checksums(snapshot.path, on_progress=on_progress)
    there: Mapping[str, str] = manifest["tensors"]
    if differing := _differing(here, there):
        return None, [
            finding(
                "base-differs",
                f"{identity} in the bucket is not {snapshot.path}: {differing}",
                "give the checkpoint that was published, or set a new CWTRAIN_HOTLOAD_RUN_ID",
            )
        ]
    return identity, []


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return how two checkpoints differ, with counts and examples; empty for equal ones."""
    missing, extra = sorted(set(there) - set(here)), sorted(set(here) - set(there))
    changed = sorted(name for name in set(here) & set(there) if here[name] != there[name])
    parts = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (
            ("tensors only there", missing),
            ("tensors only here", extra),
            ("tensors with other bytes", changed),
        )
        if names
    ]
    return "; ".join(parts)


def publish_base(
    loader: HotLoader,
    settings: HotLoadConfig,
    snapshot: LocalSnapshot,
    *,
    on_progress: Callable[[ProgressEvent], None] | None = None,
) -> HotLoad:
    """Upload and hot-load the base as the run's own first call would, and return the COMPLETED hot-load.

    Made again it goes on where it stopped. Raises ConfigError without a run id, else what publishing raises.
    """
    if settings.run_id is None:
        raise ConfigError(
            "without CWTRAIN_HOTLOAD_RUN_ID the run would not find the base that is published now",
            hint="set CWTRAIN_HOTLOAD_RUN_ID, here and for the run",
        )
    return loader.publish(
        snapshot.path,
        base_identity(settings.run_id),
        prompt_cache_policy=settings.prompt_cache_policy,
        timeout=settings.timeout,
        workers=settings.upload_workers,
        on_progress=on_progress,
    )


def failed_base(exc: CWTrainError) -> Finding:
    """Return what to say of a ``publish_base`` that raised ``exc``."""
    return _said("base-failed", exc, "run the check with --publish-base again: it goes on where it stopped")


def check_endpoint(
    dialect: Dialect,
    flags: Mapping[str, Any],
    loader: HotLoader,
    environ: Mapping[str, str],
    token: str | None,
    *,
    patience: float,
) -> list[Finding]:
    """Ask the deployment's endpoint for two small completions and return what is wrong with the answers.

    The endpoint, the model and the key are those of ``CWTRAIN_ROLLOUT_*``, else the deployment's own and the API token.
    An endpoint that does not answer is asked again for ``patience`` seconds.
    """
    try:
        from cwtrain_rollout import RolloutConfig
    except ModuleNotFoundError:
        return [finding("endpoint", "the sampler is not installed here", "pip install cwtrain-rollout")]
    overrides: dict[str, Any] = {
        "timeout": _ENDPOINT_SECONDS,
        "deadline": patience,
        "max_attempts": 2,
        # What a run makes of samples is not what is asked here: ids and log-probs for ids, or the error.
        "on_failure": "raise",
        "logprobs": True,
        "token_ids": True,
        "token_id_prompts": True,
        # The mode is found out here; the sampler is not to refuse anything for it.
        "logprobs_mode": "processed",
    }
    try:
        overrides |= _where(loader, environ, token)
        return list(_answers(dialect, flags, RolloutConfig.from_env(environ, **overrides), loader.client))
    except CWTrainError as exc:
        if _has_no_weights(loader, exc):
            return [
                finding(
                    "no-weights",
                    f"deployment {loader.deployment_id} answers that it serves no weights yet, and no hot-load of it "
                    "has been completed: what its answers are like cannot be seen before the first one",
                    "run the check with --publish-base, or let the run's first call publish the base",
                )
            ]
        return [_said("endpoint", exc, "look at the gateway, the model's name and the key")]


def _has_no_weights(loader: HotLoader, error: CWTrainError) -> bool:
    """Return whether a new deployment refuses (503) because nothing was ever loaded into it."""
    if not str(getattr(error, "last", None) or "").startswith("HTTP 503"):
        return False
    try:
        hot_loads = list(loader.client.list_hot_loads(loader.deployment_id))
    except CWTrainError:
        return False
    return not any(one.state is HotLoadState.COMPLETED for one in hot_loads)


def _where(loader: HotLoader, environ: Mapping[str, str], token: str | None) -> dict[str, Any]:
    """Return endpoint, model and key as far as the environment does not give them."""
    from cwtrain.infra import lifecycle

    found: dict[str, Any] = {}
    if not environ.get("CWTRAIN_ROLLOUT_BASE_URL", "").strip():
        urls = lifecycle.endpoints(loader.client, loader.deployment)
        if not urls:
            raise ConfigError(
                "no gateway of the deployment has an endpoint",
                hint="wait for the gateway, or set CWTRAIN_ROLLOUT_BASE_URL",
            )
        found["base_url"] = lifecycle.rollout_base_url(urls[0])
    if not environ.get("CWTRAIN_ROLLOUT_MODEL", "").strip():
        found["model"] = loader.deployment.model_name
    has_key = any(environ.get(f"CWTRAIN_ROLLOUT_API_KEY{end}", "").strip() for end in ("", "_FILE"))
    if not has_key and token:
        found["api_key"] = token
    return found


def _answers(dialect: Dialect, flags: Mapping[str, Any], config: Any, client: InferenceClient) -> Iterator[Finding]:
    from cwtrain_rollout import Group, Sampler, SamplingParams

    # The token may have been given to the command alone: the hot-load list is read with the same client.
    sampler = Sampler(config, client=client)
    neutral = sampler.sample_groups([Group(prompt=_PROMPT, n=1)], SamplingParams(max_tokens=2))[0].samples[0]
    if not neutral.token_ids or len(neutral.logprobs or ()) != len(neutral.token_ids):
        yield finding(
            "endpoint",
            f"{config.base_url} answers without the ids and log-probs of its tokens: nothing can be trained on that",
            "serve it with Dynamo and vLLM, as a Dedicated Inference deployment does",
        )
        return
    # Among one token only, the processed log-prob is 0; the raw one is that of all tokens.
    one = sampler.sample_groups([Group(prompt=_PROMPT, n=1)], SamplingParams(max_tokens=1, top_k=1))[0].samples[0]
    if math.isclose((one.logprobs or (0.0,))[0], 0.0, abs_tol=1e-6):
        return
    fix = "engineConfig `logprobs-mode: processed_logprobs` in the deployment file, as in the recipe"
    what = f"{config.base_url} reports log-probs of the model, not of what was sampled from"
    if _filtered(flags) and (flags["use_rollout_logprobs"] or flags["use_tis"]):
        used = dialect.flag("use_tis" if flags["use_tis"] else "use_rollout_logprobs")
        yield finding("log-probs", f"{what}, and {used} trains on them with temperature or filters set", fix)
    else:
        yield finding("log-probs-raw", f"{what}: right only at temperature 1 without filters", fix)


def _filtered(flags: Mapping[str, Any]) -> bool:
    return (flags["temperature"], flags["top_p"]) != (1, 1) or flags["top_k"] not in (-1, None)


def _said(name: str, exc: CWTrainError, fix: str) -> Finding:
    return finding(name, str(exc), exc.hint or fix)
