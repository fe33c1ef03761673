"""What takes longer than one call: wait until something is ready or gone, hold a deployment for a while.

A deployment holds GPUs until it is deleted. Nothing here deletes on its own, save ``running_deployment``, which is
asked to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import attrs

from cwtrain.errors import (
    AbortedError,
    CWTrainError,
    DeploymentFailedError,
    FailedPreconditionError,
    GatewayFailedError,
    LifecycleError,
    NotFoundError,
    UnexpectedAnswerError,
    WaitTimeoutError,
)
from cwtrain.infra._conditions import unmet
from cwtrain.infra._hold import held
from cwtrain.infra._poll import Deadline, check_seconds, poll
from cwtrain.infra._urls import rollout_base_url
from cwtrain.infra.client import InferenceClient
from cwtrain.models.service import Deployment, Gateway, ResourceStatus

__all__ = [
    "LifecycleError",
    "delete_deployment",
    "delete_gateway",
    "endpoints",
    "rollout_base_url",
    "running_deployment",
    "wait_for_deployment",
    "wait_for_gateway",
]

R = TypeVar("R", Gateway, Deployment)

CREATE_GRACE_SECONDS = 30.0
"""How long NOT_FOUND is taken for "not there yet" after a create."""


@attrs.frozen
class _Kind:
    """What differs between gateways and deployments here."""

    name: str
    failed: type[LifecycleError]
    get: Callable[[InferenceClient, str], Any]
    delete: Callable[[InferenceClient, str], Any]


_GATEWAY = _Kind(
    "gateway",
    GatewayFailedError,
    lambda client, name: client.get_gateway(name),
    lambda client, name: client.delete_gateway(name),
)
_DEPLOYMENT = _Kind(
    "deployment",
    DeploymentFailedError,
    lambda client, name: client.get_deployment(name),
    lambda client, name: client.delete_deployment(name),
)


def wait_for_gateway(
    client: InferenceClient,
    gateway_id: str,
    *,
    timeout: float = 600,
    poll_interval: float = 5,
    just_created: bool = True,
    on_progress: Callable[[Gateway, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Gateway:
    """Wait until a gateway is READY and return it; see ``wait_for_deployment``. Raises ``GatewayFailedError``."""
    return _wait(_GATEWAY, client, gateway_id, timeout, poll_interval, just_created, on_progress, clock, sleep)


def wait_for_deployment(
    client: InferenceClient,
    deployment_id: str,
    *,
    timeout: float = 3600,
    poll_interval: float = 10,
    just_created: bool = True,
    on_progress: Callable[[Deployment, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Deployment:
    """Wait until a deployment is READY and return it. ``timeout`` and ``poll_interval`` are seconds.

    FAILED and DELETING raise ``DeploymentFailedError`` at once, with the conditions that do not hold; every other state
    waits, unknown ones too, and so does an API that does not answer. NOT_FOUND raises ``NotFoundError``, but with
    ``just_created`` it is waited out for 30 s as long as the deployment has not been seen. Raises ``WaitTimeoutError``
    with the last state; the deployment lives on. ``on_progress`` gets each state and the seconds spent. ``clock`` and
    ``sleep`` are for tests.
    """
    return _wait(_DEPLOYMENT, client, deployment_id, timeout, poll_interval, just_created, on_progress, clock, sleep)


def delete_gateway(
    client: InferenceClient,
    gateway_id: str,
    *,
    timeout: float = 600,
    poll_interval: float = 5,
    on_progress: Callable[[Gateway | None, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Delete a gateway and wait until it is gone; see ``delete_deployment``.

    A gateway that deployments still use is asked again until the timeout.
    """
    return _delete(_GATEWAY, client, gateway_id, timeout, poll_interval, on_progress, clock, sleep)


def delete_deployment(
    client: InferenceClient,
    deployment_id: str,
    *,
    timeout: float = 600,
    poll_interval: float = 5,
    on_progress: Callable[[Deployment | None, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Delete a deployment and wait until GET says NOT_FOUND; return False when there was nothing to delete.

    ``timeout`` and ``poll_interval`` are seconds. The delete is asked for until it is accepted; an API that does not
    answer is waited out. A deployment that becomes FAILED after it was DELETING raises ``DeploymentFailedError``; one
    that is still there at the end ``WaitTimeoutError``, with the last state. In both cases it may still hold GPUs.
    """
    return _delete(_DEPLOYMENT, client, deployment_id, timeout, poll_interval, on_progress, clock, sleep)


def endpoints(client: InferenceClient, deployment: Deployment | str) -> list[str]:
    """Return the endpoints of a deployment's gateways, in the gateways' order, without duplicates.

    ``deployment`` is a ``Deployment`` or an id. The list is empty while no gateway is READY.
    """
    if isinstance(deployment, str):
        deployment = client.get_deployment(deployment)
    found = (url for gateway_id in deployment.gateway_ids for url in client.get_gateway(gateway_id).endpoints)
    return list(dict.fromkeys(found))


def running_deployment(
    client: InferenceClient,
    spec: Mapping[str, Any],
    *,
    timeout: float = 3600,
    poll_interval: float = 10,
    delete_timeout: float = 600,
    on_created: Callable[[Deployment], None] | None = None,
    on_progress: Callable[[Deployment, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> AbstractContextManager[Deployment]:
    """Create a deployment, wait until it is READY, hand it out, and delete it on every way out.

        with lifecycle.running_deployment(client, spec) as deployment:
            train(deployment)

    It is deleted after the block, on exceptions (a failed wait too), Ctrl-C and SIGTERM, and the exit waits until it is
    gone (``delete_timeout`` seconds). For SIGTERM a handler is installed in the main thread: it leaves the block with
    ``SystemExit(143)``; when the deployment is gone, the handler that was there before is put back and called. When the
    delete itself fails, the error (or a note on the error that ended the block) says what may still run.
    ``on_created`` gets the deployment as soon as there is one.
    """
    for name, seconds in (("timeout", timeout), ("poll_interval", poll_interval), ("delete_timeout", delete_timeout)):
        check_seconds(name, seconds)  # before there is anything to delete
    return held(
        client,
        spec,
        wait=lambda deployment_id: wait_for_deployment(
            client,
            deployment_id,
            timeout=timeout,
            poll_interval=poll_interval,
            on_progress=on_progress,
            clock=clock,
            sleep=sleep,
        ),
        delete=lambda deployment_id: delete_deployment(
            client, deployment_id, timeout=delete_timeout, clock=clock, sleep=sleep
        ),
        on_created=on_created,
        clock=clock,
        sleep=sleep,
    )


# Underneath ----------------------------------------------------------------------------------------------------------


def _wait(
    kind: _Kind,
    client: InferenceClient,
    resource_id: str,
    timeout: float,
    poll_interval: float,
    just_created: bool,
    on_progress: Callable[[R, float], None] | None,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> R:
    deadline = Deadline(timeout, clock)
    known = False

    def fetch() -> R | None:
        nonlocal known
        try:
            found: R = kind.get(client.within(deadline.left()), resource_id)
        except NotFoundError:
            if just_created and not known and deadline.spent() < CREATE_GRACE_SECONDS:
                return None
            raise
        known = True
        return found

    def done(found: R | None) -> bool:
        if found is None:
            return False
        if found.status in (ResourceStatus.FAILED, ResourceStatus.DELETING):
            raise kind.failed(
                f"{kind.name} {resource_id} is {found.status.name} after {deadline.spent():.1f} s: "
                f"{unmet(found.conditions)}",
                resource=found,
                hint=f"it will not become ready; delete it with: cwtrain {kind.name} delete {resource_id}",
            )
        return found.status is ResourceStatus.READY

    def report(found: R | None, spent: float) -> None:
        if found is not None and on_progress is not None:
            on_progress(found, spent)

    def too_late(_: R | None, seen: str, spent: float) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"{kind.name} {resource_id} is not READY after {spent:.1f} s; last seen: {seen}",
            last_seen=seen,
            hint=f"it goes on at the service: wait for it with: cwtrain {kind.name} wait {resource_id}, "
            f"or delete it with: cwtrain {kind.name} delete {resource_id}",
        )

    ready = poll(
        fetch,
        done=done,
        timeout=deadline,
        poll_interval=poll_interval,
        describe=_in_words,
        what=f"{kind.name} {resource_id} to be READY",
        on_progress=report,
        timeout_error=too_late,
        eager=True,
        clock=clock,
        sleep=sleep,
    )
    assert ready is not None  # done() is true for nothing else
    return ready


def _delete(
    kind: _Kind,
    client: InferenceClient,
    resource_id: str,
    timeout: float,
    poll_interval: float,
    on_progress: Callable[[Any, float], None] | None,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    deadline = Deadline(timeout, clock)

    def too_late(_: object, seen: str, spent: float) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"{kind.name} {resource_id} is not gone after {spent:.1f} s; last seen: {seen}",
            last_seen=seen,
            hint=f"it may still run; try again with: cwtrain {kind.name} delete {resource_id}",
        )

    asked = poll(
        _DeleteAsker(kind, client, resource_id, deadline).ask,
        done=lambda answer: answer.accepted or answer.gone,
        timeout=deadline,
        poll_interval=poll_interval,
        describe=lambda answer: answer.text,
        what=f"{kind.name} {resource_id} to be deleted",
        timeout_error=too_late,
        eager=True,
        clock=clock,
        sleep=sleep,
    )
    if asked.gone:
        return asked.was_there
    was_deleting = asked.status is ResourceStatus.DELETING

    def fetch() -> Gateway | Deployment | None:
        try:
            found: Gateway | Deployment = kind.get(client.within(deadline.left()), resource_id)
        except NotFoundError:
            return None
        return found

    def gone(found: Gateway | Deployment | None) -> bool:
        nonlocal was_deleting
        if found is None:
            return True
        if found.status is ResourceStatus.FAILED and was_deleting:
            raise kind.failed(
                f"the deletion of {kind.name} {resource_id} has FAILED after {deadline.spent():.1f} s, it is still "
                f"there: {unmet(found.conditions)}",
                resource=found,
                hint=f"it may still run; try again with: cwtrain {kind.name} delete {resource_id}",
            )
        was_deleting = was_deleting or found.status is ResourceStatus.DELETING
        return False

    poll(
        fetch,
        done=gone,
        timeout=deadline,
        poll_interval=poll_interval,
        describe=_in_words,
        what=f"{kind.name} {resource_id} to be gone",
        on_progress=on_progress,
        timeout_error=too_late,
        eager=True,
        clock=clock,
        sleep=sleep,
    )
    return True


@attrs.frozen(kw_only=True)
class _DeleteAnswer:
    """What became of one DELETE."""

    accepted: bool = False
    gone: bool = False
    was_there: bool = True
    status: ResourceStatus = ResourceStatus.UNSPECIFIED
    text: str = ""


@attrs.define
class _DeleteAsker:
    """Asks for a deletion, one try at a time, and remembers whether an earlier try may have worked."""

    kind: _Kind
    client: InferenceClient
    resource_id: str
    deadline: Deadline
    maybe_deleted: bool = False

    def ask(self) -> _DeleteAnswer:
        """Send one DELETE. A refusal for the resource's present state is an answer; an outage is raised."""
        try:
            last = self.kind.delete(self.client.within(self.deadline.left(), retries=False), self.resource_id)
        except NotFoundError:
            return _DeleteAnswer(gone=True, was_there=self.maybe_deleted)
        except (FailedPreconditionError, AbortedError) as refusal:
            return _DeleteAnswer(text=f"not deleted: {refusal.message}")
        except CWTrainError as error:
            if isinstance(error, UnexpectedAnswerError) and error.status is None:
                return _DeleteAnswer(accepted=True)  # a 2xx that lacks the last state: what counts is what GET says
            self.maybe_deleted = True
            raise
        return _DeleteAnswer(accepted=True, status=last.status if last else ResourceStatus.UNSPECIFIED)


def _in_words(found: Gateway | Deployment | None) -> str:
    if found is None:
        return "NOT_FOUND"
    if found.status is ResourceStatus.UNSPECIFIED:
        return f"UNSPECIFIED ({found.status_text})" if found.status_text else "no state"
    if found.status is ResourceStatus.READY:
        return found.status.name
    return f"{found.status.name} ({unmet(found.conditions)})" if found.conditions else found.status.name
