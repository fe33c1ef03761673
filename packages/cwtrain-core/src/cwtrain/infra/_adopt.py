"""What a create that met ALREADY_EXISTS or a busy deployment really means.

A create carries an id that we chose before the first try. So when the service says that it exists, the resource under
that id decides: equal to what was asked for, it is our own earlier try and is adopted; different, it is a conflict that
names the fields; not there, it is the name that is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from cwtrain.errors import (
    AlreadyExistsError,
    APIError,
    CWTrainError,
    DeploymentFailedError,
    GatewayFailedError,
    HotLoadCanceledError,
    HotLoadError,
    HotLoadFailedError,
    HotLoadInProgressError,
    LifecycleError,
    NotFoundError,
)
from cwtrain.infra._conditions import in_words, unmet
from cwtrain.models.service import (
    CapacityClaim,
    Deployment,
    Gateway,
    HotLoad,
    HotLoadSpec,
    HotLoadState,
    PromptCachePolicy,
    ResourceStatus,
)

__all__ = ["active_hot_load", "adopt_hot_load", "adopt_resource", "busy", "differences", "hot_load_differences"]

R = TypeVar("R", Gateway, Deployment, CapacityClaim)

_ONE_OF = frozenset(
    {"coreWeaveAuth", "weightsAndBiasesAuth", "bodyBasedRouting", "headerBasedRouting", "pathBasedRouting"}
)
_ORDERED = frozenset({"capacityClasses"})
_ENUM_KEYS = frozenset({"apiType", "capacityClasses", "capacityType", "transitionMode"})
_NOT_ECHOED = frozenset({"apiKey"})


# Resources -----------------------------------------------------------------------------------------------------------


def adopt_resource(
    kind: str,
    asked: Mapping[str, Any],
    refusal: APIError,
    *,
    get: Callable[[str], R],
    others: Callable[[], Iterable[R]],
) -> R:
    """Return the resource of the id in ``asked`` if it is what was asked for; else raise what is wrong.

    ``kind`` is ``gateway``, ``deployment`` or ``capacity claim``. Raises ``AlreadyExistsError`` for a conflict, and
    ``LifecycleError`` when our own earlier try has become a resource that FAILED or is being deleted.
    """
    resource_id = str(asked["id"])
    try:
        found = get(resource_id)
    except NotFoundError:
        raise _name_taken(kind, asked, refusal, others) from refusal
    different = differences(asked, found.raw.get("spec"))
    if different:
        raise _again(
            refusal,
            f"{kind} {resource_id} exists already and differs from what was asked for in: {', '.join(different)}",
            different,
            f"choose another id, or look at it with: {_do('get', kind, resource_id)}",
        ) from refusal
    if found.status in (ResourceStatus.FAILED, ResourceStatus.DELETING):
        raise _dead(kind, found) from refusal
    return found


def _name_taken(
    kind: str, asked: Mapping[str, Any], refusal: APIError, others: Callable[[], Iterable[R]]
) -> AlreadyExistsError:
    name = str(asked.get("name", ""))
    try:
        holder = next((other for other in others() if other.name == name), None)
    except CWTrainError:  # the refusal is the better story
        holder = None
    if holder is None:
        where = "by one that this token cannot see, or that was just deleted"
        return _again(refusal, f"the name {name!r} is taken: {kind} {where}", ("name",), "choose another name")
    return _again(
        refusal,
        f"the name {name!r} is taken by {kind} {holder.id} ({holder.status.name})",
        ("name",),
        f"choose another name, or use that one: {_do('get', kind, holder.id)}",
    )


def _dead(kind: str, found: Gateway | Deployment | CapacityClaim) -> LifecycleError:
    classes: dict[str, type[LifecycleError]] = {"deployment": DeploymentFailedError, "gateway": GatewayFailedError}
    return classes.get(kind, LifecycleError)(
        f"{kind} {found.id} was created by an earlier try and is {found.status.name}: {unmet(found.conditions)}",
        resource=found,
        hint=f"delete it with: {_do('delete', kind, found.id)}",
    )


def _do(verb: str, kind: str, resource_id: str) -> str:
    """Return the command for it; the CLI has none for claims."""
    if kind == "capacity claim":
        return f"InferenceClient().{verb}_capacity_claim({resource_id!r})"
    return f"cwtrain {kind} {verb} {resource_id}"


def _again(refusal: APIError, message: str, different: Iterable[str], hint: str) -> AlreadyExistsError:
    """Return the refusal, said better."""
    return AlreadyExistsError(
        f"{message} ({refusal.message})",
        differences=tuple(different),
        code=refusal.code,
        status=refusal.status,
        request_id=refusal.request_id,
        details=refusal.details,
        hint=hint,
    )


def differences(asked: Mapping[str, Any], found: Any, path: str = "") -> tuple[str, ...]:
    """Return the paths in which ``found`` is not what was ``asked`` for. Only what was asked for is compared.

    The wire's zero values may be left out, defaults may be filled in, 64-bit numbers may be text, enums may be
    shortened or numbers, and lists without a meaning of order may be sorted. Values are never returned: an
    ``engineEnv`` holds secrets.
    """
    found = found if isinstance(found, Mapping) else {}
    paths: list[str] = []
    for key, want in asked.items():
        name = _camel(str(key))
        have = found[key] if key in found else found.get(name)
        here = f"{path}{key}"
        if name in _NOT_ECHOED and not have:
            continue
        if name in _ONE_OF and (want is None) != (have is None):
            paths.append(here)
        elif isinstance(want, Mapping):
            paths += differences(want, have, f"{here}.")
        elif not _same(want, have, name):
            paths.append(here)
    return tuple(paths)


def _same(want: Any, have: Any, key: str) -> bool:
    if isinstance(want, (list, tuple)):
        wanted, had = list(want), list(have) if isinstance(have, (list, tuple)) else [] if not have else [have]
        if len(wanted) != len(had):
            return False
        if key not in _ORDERED and all(isinstance(item, (str, int)) for item in [*wanted, *had]):
            wanted, had = sorted(wanted, key=str), sorted(had, key=str)
        return all(_same_item(a, b, key) for a, b in zip(wanted, had, strict=True))
    return _same_item(want, have, key)


def _same_item(want: Any, have: Any, key: str) -> bool:
    if isinstance(want, Mapping):
        return not differences(want, have)
    if _is_zero(want):
        return _is_zero(have)
    if isinstance(want, bool) or isinstance(have, bool):
        return want is have
    if want == have:
        return True
    if key in _ENUM_KEYS and have is not None:
        if isinstance(have, int) or isinstance(want, int):
            return True  # numbers of enums are not documented; the equal id is evidence enough
        a, b = str(want).upper(), str(have).upper()
        return a == b or a.endswith(f"_{b}") or b.endswith(f"_{a}")
    if not isinstance(want, (int, float)):
        return False
    try:
        return float(want) == float(have)
    except (TypeError, ValueError):
        return False


def _is_zero(value: Any) -> bool:
    return not value or (isinstance(value, str) and value.upper().endswith("_UNSPECIFIED"))


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda match: match[1].upper(), name)


# Hot-loads -----------------------------------------------------------------------------------------------------------


def adopt_hot_load(asked: HotLoadSpec, found: HotLoad, refusal: APIError) -> HotLoad:
    """Return ``found`` if it is what was ``asked`` for and not lost; else raise what is wrong."""
    different = hot_load_differences(asked, found.spec)
    if different:
        raise _again(
            refusal,
            f"hot-load {asked.id} exists already and differs from what was asked for in: {', '.join(different)}",
            different,
            f"use another hot-load id, or look at it with: cwtrain hotload status {asked.id}",
        ) from refusal
    if found.state in (HotLoadState.FAILED, HotLoadState.CANCELED):
        failed = found.state is HotLoadState.FAILED
        kind: type[HotLoadError] = HotLoadFailedError if failed else HotLoadCanceledError
        raise kind(
            f"hot-load {found.id} of {found.identity!r} was created by an earlier try and is {found.state.name}: "
            f"{in_words(found.status.conditions)}",
            hot_load=found,
            hint=f"see its replicas with: cwtrain hotload status {found.id}",
        ) from refusal
    return found


def hot_load_differences(asked: HotLoadSpec, found: HotLoadSpec) -> tuple[str, ...]:
    """Return the fields of a hot-load in which ``found`` is not what was ``asked`` for."""
    policies = {asked.prompt_cache_policy, found.prompt_cache_policy}
    default = {PromptCachePolicy.UNSPECIFIED, PromptCachePolicy.PRESERVE}
    same_policy = (
        len(policies) == 1 or policies <= default or asked.prompt_cache_policy is PromptCachePolicy.UNSPECIFIED
    )
    same = {
        "deployment_id": asked.deployment_id == found.deployment_id,
        "identity": asked.identity == found.identity,
        "type": asked.type is found.type,
        "incremental_snapshot_metadata": asked.incremental_snapshot_metadata == found.incremental_snapshot_metadata,
        "prompt_cache_policy": same_policy,
    }
    return tuple(name for name, equal in same.items() if not equal)


def active_hot_load(hot_loads: Iterable[HotLoad]) -> HotLoad | None:
    """Return the first unfinished one of ``hot_loads``, or None. A state that we do not know counts as unfinished."""
    return next((hot_load for hot_load in hot_loads if not hot_load.state.terminal), None)


def busy(active: HotLoad, refusal: APIError) -> HotLoadInProgressError:
    """Return the error for a create that found another hot-load unfinished."""
    return HotLoadInProgressError(
        f"hot-load {active.id} of {active.identity!r} is {active.state.name} on deployment "
        f"{active.spec.deployment_id}, and only one may run at a time ({refusal.message})",
        hot_load_id=active.id,
        code=refusal.code,
        status=refusal.status,
        request_id=refusal.request_id,
        details=refusal.details,
        hint=f"wait for it with: cwtrain hotload wait {active.id}",
    )
