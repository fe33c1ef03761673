"""Find out, before a run, whether this environment can hot-load a deployment; nothing is left in the bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from cwtrain.errors import HotLoadError
from cwtrain.models.service import Deployment, ResourceStatus

if TYPE_CHECKING:
    from cwtrain.infra.client import InferenceClient

__all__ = ["HotLoadCheck", "check_hot_load"]


@attrs.frozen(kw_only=True)
class HotLoadCheck:
    """A deployment that can be hot-loaded from here: ``result`` is ``ok``, what is worth a word is in ``warnings``."""

    deployment: str
    bucket: str
    path_prefix: str
    uri: str
    """Where the snapshots go; an identity and a slash follow."""
    result: str = "ok"
    warnings: tuple[str, ...] = ()
    not_tried: tuple[str, ...] = ()
    """What was not tried, since it would leave something behind, or cannot be tried from here."""

    def to_json(self) -> dict[str, Any]:
        """Return the check as plain JSON data."""
        data = attrs.asdict(self)
        data["warnings"], data["not_tried"] = list(self.warnings), list(self.not_tried)
        return data


def check_hot_load(client: InferenceClient, deployment_id: str, *, s3: Any = None) -> HotLoadCheck:
    """Ask the service for the deployment, and try every permission that publishing needs on its bucket.

    ``s3`` is a boto3 client (one is made from the environment without it). Raises HotLoadError for a deployment without
    hot-load, StorageAccessError naming every refused permission, and what the client raises.

    What cannot be found out beforehand is whether hot-load is on for the organization: the service says so only when a
    hot-load is asked for.
    """
    deployment = client.get_deployment(deployment_id)
    target = deployment.hot_load
    if target is None or not target.bucket:
        raise HotLoadError(
            f"deployment {deployment_id} ({deployment.name}) has no hotLoad",
            hint="hotLoad can be set at creation only: create a deployment with hotLoad {bucket, pathPrefix}",
        )
    from cwtrain.storage import Location, check_access, s3_client
    from cwtrain.storage.check import NOT_TRIED

    location = Location(target.bucket, target.path_prefix)
    access = check_access(s3 if s3 is not None else s3_client(), location)
    access.raise_for_refused()
    warnings = list(_about(deployment))
    warnings += [
        f"{check.action} is not allowed: uploads that a killed run left open cannot be found and aborted"
        for check in access.checks
        if not check.required and check.allowed is False
    ]
    return HotLoadCheck(
        deployment=deployment.id,
        bucket=target.bucket,
        path_prefix=target.path_prefix,
        uri=f"s3://{location.bucket}/{location.root}",
        warnings=tuple(warnings),
        not_tried=NOT_TRIED,
    )


def _about(deployment: Deployment) -> list[str]:
    """Return what stands in the way of a publish now, though not for ever."""
    warnings = []
    if deployment.status is not ResourceStatus.READY:
        word = deployment.status_text or deployment.status
        warnings.append(f"the deployment is {word}, not READY: a publish waits for it")
    if deployment.disabled:
        warnings.append(
            "the deployment is disabled: until it is enabled, nothing serves the weights and a publish is refused"
        )
    return warnings
