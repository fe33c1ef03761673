"""The client of the Dedicated Inference API: one method per call."""

from __future__ import annotations

import datetime as dt
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from cwtrain.config.api import ApiConfig, missing_token
from cwtrain.errors import (
    AbortedError,
    AlreadyExistsError,
    APIError,
    ConfigError,
    CWTrainError,
    FailedPreconditionError,
    NotFoundError,
    UnexpectedAnswerError,
)
from cwtrain.infra import _adopt, _wire
from cwtrain.infra._http import Http, Limits, Transport
from cwtrain.infra._poll import check_seconds
from cwtrain.infra._requests import expected, hot_load_body, items, member, page_query, segment, since, with_id
from cwtrain.infra._retry import RetryPolicy
from cwtrain.models.service import (
    CapacityClaim,
    Deployment,
    Gateway,
    HotLoad,
    HotLoadReplica,
    HotLoadSpec,
    IncrementalSnapshotMetadata,
    PromptCachePolicy,
    SnapshotType,
)

__all__ = ["InferenceClient"]

T = TypeVar("T")

logger = logging.getLogger("cwtrain.infra")


class InferenceClient:
    """Gateways, deployments, capacity claims and hot-loads of CoreWeave Dedicated Inference.

        with InferenceClient() as client:
            print(client.get_deployment("<uuid>").status)

    Every argument that is not given comes from the environment, then from a default: ``token`` from
    ``COREWEAVE_API_TOKEN``, then ``CW_API_TOKEN``; ``base_url`` (an origin) from ``COREWEAVE_API_URL``, then
    ``https://api.coreweave.com``; ``headers`` (sent with every call) from ``CWTRAIN_API_HEADERS``; ``verify`` (True,
    False, or the path of a CA bundle) from ``CWTRAIN_API_INSECURE`` and ``SSL_CERT_FILE``, by default True.

    ``timeout`` is the seconds for one try, ``retry_seconds`` the budget for all tries of one call (0: one try).
    ``token_source`` says in a 401 where the token came from. ``transport`` (httpx), ``clock`` and ``sleep`` are for
    tests. Environment proxies are used except for a loopback ``base_url``; redirects are never followed.

    Creates carry an id that is chosen before the first try, so a lost answer never makes a second resource. Objects
    are typed and carry the wire object in ``raw``; specs are given in the wire's form. Methods raise the classes of
    ``cwtrain.errors``. A client can be used from several threads, and in a forked process, which opens its own
    connections. It pickles without secrets: the process that unpickles it needs the token in its environment.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        base_url: str | None = None,
        timeout: float = 30.0,
        headers: Mapping[str, str] | None = None,
        verify: bool | str | None = None,
        retry_seconds: float = 60.0,
        token_source: str | None = None,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        config = ApiConfig.from_env(
            token=token, base_url=base_url, headers=headers, verify=verify, token_source=token_source
        )
        if config.token is None:
            raise missing_token()
        if isinstance(retry_seconds, bool) or not math.isfinite(retry_seconds) or retry_seconds < 0:
            raise ConfigError(f"retry_seconds={retry_seconds!r} must be a finite number of seconds, 0 or more")
        limits = Limits(
            timeout=check_seconds("timeout", timeout),
            retry=RetryPolicy(seconds=float(retry_seconds), clock=clock, sleep=sleep),
        )
        self._set_up(config, limits, transport)

    def _set_up(self, config: ApiConfig, limits: Limits, transport: Transport | None) -> None:
        self._config = config
        self._limits = limits
        self._transport = transport
        self._http = Http(config, transport=transport, clock=limits.retry.clock)

    @property
    def base_url(self) -> str:
        """The origin that is called."""
        return self._config.base_url

    def within(self, seconds: float, *, retries: bool = True) -> InferenceClient:
        """Return a view of this client whose calls are over within about ``seconds``; it shares the connections.

        Wait loops use it so that one call cannot outlast their deadline. ``retries=False`` makes one try per call.
        """
        view = object.__new__(InferenceClient)
        view.__dict__.update(self.__dict__, _limits=self._limits.within(seconds, retries=retries))
        return view

    def close(self) -> None:
        """Close the connections. Calls after that are refused."""
        self._http.close()

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"InferenceClient(base_url={self.base_url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self._config, "limits": self._limits, "transport": self._transport}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(**state)

    # Gateways --------------------------------------------------------------------------------------------------------

    def create_gateway(self, spec: Mapping[str, Any]) -> Gateway:
        """Create a gateway from ``spec`` (wire form; ``id`` is chosen where it has none) and return it."""
        return self._create("gateway", Gateway, "/gateways", "gateway", spec, self.get_gateway, self.list_gateways)

    def get_gateway(self, gateway_id: str) -> Gateway:
        """Return a gateway. Raises ``NotFoundError``."""
        return self._one(Gateway, "GET", f"/gateways/{segment(gateway_id, 'gateway id')}", "gateway")

    def list_gateways(self, *, updated_after: dt.datetime | str | None = None) -> list[Gateway]:
        """Return all gateways, or those that changed after a time."""
        return list(self._all(Gateway, "/gateways", "items", since(updated_after)))

    def update_gateway(self, gateway_id: str, spec: Mapping[str, Any]) -> Gateway:
        """Replace a gateway's spec as a whole and return the gateway."""
        path = f"/gateways/{segment(gateway_id, 'gateway id')}"
        return self._one(Gateway, "PATCH", path, "gateway", body=with_id(spec, gateway_id))

    def delete_gateway(self, gateway_id: str) -> Gateway | None:
        """Ask for a gateway's deletion and return its last state (None where the service tells none).

        It is gone when GET says NOT_FOUND: see ``lifecycle.delete_gateway``.
        """
        return self._delete(Gateway, f"/gateways/{segment(gateway_id, 'gateway id')}", "gateway")

    def get_gateway_parameters(self) -> dict[str, Any]:
        """Return what a gateway may be made of, as the service says it (``zones``)."""
        return self._call("GET", "/gateways/parameters")

    # Deployments -----------------------------------------------------------------------------------------------------

    def create_deployment(self, spec: Mapping[str, Any]) -> Deployment:
        """Create a deployment from ``spec`` (wire form; ``id`` is chosen where it has none) and return it.

        It holds GPUs until it is deleted. Raises ``AlreadyExistsError`` when the id or the name is another's.
        """
        return self._create(
            "deployment", Deployment, "/deployments", "deployment", spec, self.get_deployment, self.list_deployments
        )

    def get_deployment(self, deployment_id: str) -> Deployment:
        """Return a deployment. Raises ``NotFoundError``."""
        return self._one(Deployment, "GET", f"/deployments/{segment(deployment_id, 'deployment id')}", "deployment")

    def list_deployments(
        self, *, gateway_id: str | None = None, updated_after: dt.datetime | str | None = None
    ) -> list[Deployment]:
        """Return all deployments, or those of a gateway, or those that changed after a time."""
        query = {**({"parentGatewayId": gateway_id} if gateway_id else {}), **since(updated_after)}
        return list(self._all(Deployment, "/deployments", "items", query))

    def update_deployment(self, deployment_id: str, spec: Mapping[str, Any]) -> Deployment:
        """Replace a deployment's spec as a whole and return the deployment.

        ``hotLoad`` cannot change after creation and goes along unchanged: it is fetched when ``spec`` leaves it out.
        Refused while a hot-load runs.
        """
        path = f"/deployments/{segment(deployment_id, 'deployment id')}"
        body = with_id(spec, deployment_id)
        if body.get("hotLoad") is None:
            current = self.get_deployment(deployment_id).raw.get("spec") or {}
            body.pop("hotLoad", None)
            if current.get("hotLoad"):
                body["hotLoad"] = current["hotLoad"]
        return self._one(Deployment, "PATCH", path, "deployment", body=body)

    def delete_deployment(self, deployment_id: str) -> Deployment | None:
        """Ask for a deployment's deletion and return its last state (None where the service tells none).

        It is gone when GET says NOT_FOUND: see ``lifecycle.delete_deployment``.
        """
        return self._delete(Deployment, f"/deployments/{segment(deployment_id, 'deployment id')}", "deployment")

    def get_deployment_parameters(self, gateway_ids: Sequence[str] | None = None) -> dict[str, Any]:
        """Return what a deployment (behind these gateways) may be made of, as the service says it."""
        if isinstance(gateway_ids, str):
            gateway_ids = [gateway_ids]
        return self._call("GET", "/deployments/parameters", query={"gatewayIds": list(gateway_ids or ())})

    # Capacity claims -------------------------------------------------------------------------------------------------

    def create_capacity_claim(self, spec: Mapping[str, Any]) -> CapacityClaim:
        """Create a capacity claim from ``spec`` (wire form; ``id`` is chosen where it has none) and return it."""
        return self._create(
            "capacity claim",
            CapacityClaim,
            "/capacityclaims",
            "capacityClaim",
            spec,
            self.get_capacity_claim,
            self.list_capacity_claims,
        )

    def get_capacity_claim(self, claim_id: str) -> CapacityClaim:
        """Return a capacity claim. Raises ``NotFoundError``."""
        return self._one(CapacityClaim, "GET", f"/capacityclaims/{segment(claim_id, 'claim id')}", "capacityClaim")

    def list_capacity_claims(self, *, updated_after: dt.datetime | str | None = None) -> list[CapacityClaim]:
        """Return all capacity claims, or those that changed after a time."""
        return list(self._all(CapacityClaim, "/capacityclaims", "items", since(updated_after)))

    def update_capacity_claim(self, claim_id: str, resources: Mapping[str, Any]) -> CapacityClaim:
        """Replace a claim's resources (only the count may differ) and return the claim."""
        path = f"/capacityclaims/{segment(claim_id, 'claim id')}"
        body = {"id": claim_id, "resources": dict(resources)}
        return self._one(CapacityClaim, "PATCH", path, "capacityClaim", body=body)

    def delete_capacity_claim(self, claim_id: str) -> CapacityClaim | None:
        """Ask for a claim's deletion and return its last state (None where the service tells none)."""
        return self._delete(CapacityClaim, f"/capacityclaims/{segment(claim_id, 'claim id')}", "capacityClaim")

    def get_capacity_claim_parameters(self) -> dict[str, Any]:
        """Return what a claim may be made of, as the service says it."""
        return self._call("GET", "/capacityclaims/parameters")

    # Hot-loads -------------------------------------------------------------------------------------------------------

    def create_hot_load(
        self,
        deployment_id: str,
        identity: str,
        *,
        snapshot_type: SnapshotType | str,
        incremental: IncrementalSnapshotMetadata | None = None,
        prompt_cache_policy: PromptCachePolicy | str = PromptCachePolicy.UNSPECIFIED,
        hot_load_id: str | None = None,
    ) -> HotLoad:
        """Bring the snapshot ``identity`` into a deployment and return the hot-load, which has only begun.

        A FULL snapshot has no ``incremental``, an INCREMENTAL one needs it. ``hot_load_id`` (a UUID) is chosen where
        none is given; a repeated call with the same id and the same arguments returns the same hot-load. Raises
        ``HotLoadInProgressError`` naming the unfinished hot-load of the deployment, ``AlreadyExistsError`` when the id
        is another's, ``HotLoadFailedError`` when it is ours and has FAILED already.
        """
        asked = HotLoadSpec(
            id=hot_load_id or str(uuid.uuid4()),
            deployment_id=segment(deployment_id, "deployment id") and deployment_id,
            identity=segment(identity, "identity") and identity,
            type=member(SnapshotType, snapshot_type, "snapshot_type"),
            incremental_snapshot_metadata=incremental,
            prompt_cache_policy=member(PromptCachePolicy, prompt_cache_policy, "prompt_cache_policy"),
        )
        segment(asked.id, "hot-load id")
        body = hot_load_body(asked)
        for again in (True, False):
            try:
                return self._one(HotLoad, "POST", "/hotLoads", "hotLoad", body=body)
            except AlreadyExistsError as refusal:
                return self._hot_load_of_that_id(asked, refusal)
            except (FailedPreconditionError, AbortedError) as refusal:
                active = self._look_for_active(asked, refusal)
                if active is not None and active.id == asked.id:
                    return _adopt.adopt_hot_load(asked, active, refusal)
                if active is not None:
                    raise _adopt.busy(active, refusal) from refusal
                if not (again and "in progress" in refusal.message):
                    raise
                logger.info("the hot-load in the way has just ended; asking once more for %s", asked.id)
        raise AssertionError("unreachable")

    def get_hot_load(self, hot_load_id: str) -> HotLoad:
        """Return a hot-load. Raises ``NotFoundError``."""
        return self._one(HotLoad, "GET", f"/hotLoads/{segment(hot_load_id, 'hot-load id')}", "hotLoad")

    def list_hot_loads(self, deployment_id: str | None = None, *, page_size: int = 0) -> Iterator[HotLoad]:
        """Iterate over all hot-loads (of a deployment), newest first; pages are fetched as they are needed.

        ``page_size`` 0 leaves it to the service (50), which caps it at 1000.
        """
        query: dict[str, str | int] = {"parentDeploymentId": deployment_id} if deployment_id else {}
        return self._all(HotLoad, "/hotLoads", "hotLoads", {**query, **page_query(page_size)})

    def list_hot_load_replicas(self, hot_load_id: str, *, page_size: int = 0) -> list[HotLoadReplica]:
        """Return the replicas of a hot-load, by zone and name."""
        path = f"/hotLoads/{segment(hot_load_id, 'hot-load id')}/replicas"
        return list(self._all(HotLoadReplica, path, "replicas", page_query(page_size)))

    def cancel_hot_load(self, hot_load_id: str) -> HotLoad:
        """Cancel a hot-load and return it. The service answers ``UnimplementedError`` today."""
        path = f"/hotLoads/{segment(hot_load_id, 'hot-load id')}:cancel"
        return self._one(HotLoad, "POST", path, "hotLoad", body={"id": hot_load_id})

    # Underneath ------------------------------------------------------------------------------------------------------

    def _call(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        query = {key: value for key, value in (query or {}).items() if value not in ("", [], None)}
        return self._http.call(method, path, limits=self._limits, query=query, body=body)

    def _one(self, kind: type[T], method: str, path: str, key: str, body: Mapping[str, Any] | None = None) -> T:
        reply = self._call(method, path, body=body)
        return _wire.read(kind, expected(reply, key, f"{method} {path}"), f"{method} {path}")

    def _all(self, kind: type[T], path: str, key: str, query: Mapping[str, Any]) -> Iterator[T]:
        """Iterate over the items of all pages. An empty page is no end; a page token that comes back is an error."""
        where = f"GET {path}"
        seen: set[str] = set()
        token = ""
        while True:
            reply = self._call("GET", path, query={**query, "pageToken": token})
            for item in items(reply, key, where):
                yield _wire.read(kind, item, where)
            token = str(reply.get("nextPageToken") or "")
            if not token:
                return
            if token in seen:
                raise UnexpectedAnswerError(
                    f"the page token of {where} came twice: its list would never end",
                    hint="try again; if it stays, tell CoreWeave support",
                )
            seen.add(token)

    def _create(
        self,
        kind: str,
        model: type[T],
        path: str,
        key: str,
        spec: Mapping[str, Any],
        get: Callable[[str], Any],
        others: Callable[[], Any],
    ) -> T:
        body = with_id(spec)
        try:
            made = self._one(model, "POST", path, key, body=body)
        except AlreadyExistsError as refusal:
            adopted: T = _adopt.adopt_resource(kind, body, refusal, get=get, others=others)
            return adopted
        made_id = getattr(made, "id", "")
        if made_id != body["id"]:
            logger.warning("the service gave the %s the id %s instead of ours, %s", kind, made_id, body["id"])
        return made

    def _delete(self, kind: type[T], path: str, key: str) -> T | None:
        reply = self._call("DELETE", path)
        if not reply:
            return None
        return _wire.read(kind, expected(reply, key, f"DELETE {path}"), f"DELETE {path}")

    def _hot_load_of_that_id(self, asked: HotLoadSpec, refusal: APIError) -> HotLoad:
        try:
            found = self.get_hot_load(asked.id)
        except NotFoundError:
            raise AlreadyExistsError(
                f"the hot-load id {asked.id} is taken by one that this token cannot see ({refusal.message})",
                differences=("id",),
                code=refusal.code,
                status=refusal.status,
                request_id=refusal.request_id,
                details=refusal.details,
                hint="use another hot-load id",
            ) from refusal
        return _adopt.adopt_hot_load(asked, found, refusal)

    def _look_for_active(self, asked: HotLoadSpec, refusal: APIError) -> HotLoad | None:
        try:
            return _adopt.active_hot_load(self.list_hot_loads(asked.deployment_id))
        except CWTrainError as exc:  # the refusal is what the caller asked about
            logger.info("cannot see whether a hot-load is in the way: %s", exc)
            raise refusal from exc
