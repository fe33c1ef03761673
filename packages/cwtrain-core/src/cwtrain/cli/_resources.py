"""What the commands of deployments and gateways share: making one, deleting one, and telling its status."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from cwtrain.cli._context import Context
from cwtrain.errors import NotFoundError, TransportError
from cwtrain.infra._find import is_uuid
from cwtrain.models.text import duration

__all__ = ["create_resource", "delete_resource", "found_id", "status_lines"]


class _Named(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...


class _Stated(Protocol):
    @property
    def status(self) -> str: ...
    @property
    def status_text(self) -> str: ...


_R = TypeVar("_R", bound=_Named)


def create_resource(
    ctx: Context, what: str, spec: dict[str, Any], create: Callable[[dict[str, Any]], _R], costs: str
) -> tuple[_R, str]:
    """Create from ``spec`` and return it with the sentence that says how to get rid of it again.

    The id is chosen and told here, before anything is asked of the service: whatever happens from then on, an answer
    that never comes included, the person knows what to look for.
    """
    spec["id"] = spec.get("id") or str(uuid.uuid4())
    resource_id = str(spec["id"])
    maybe = f"{what} {resource_id} may exist; wait for it with: cwtrain {what} wait {resource_id}"
    ctx.still_running(maybe)
    ctx.out.say(f"creating {what} {resource_id}")
    try:
        created = create(spec)
    except TransportError as exc:
        exc.add_note(maybe)
        raise
    stays = f"{what} {created.id} {costs} until you delete it: cwtrain {what} delete {created.id}"
    goes_on = f"{what} {created.id} is being made; wait for it with: cwtrain {what} wait {created.id}"
    ctx.still_running(goes_on, stays)
    return created, stays


def found_id(ctx: Context, what: str, name_or_id: str, find: Callable[[str], _R]) -> str:
    """Return the id of what a command is about to wait for, and note how to go on with that."""
    resource_id = name_or_id if is_uuid(name_or_id) else find(name_or_id).id
    ctx.still_running(
        f"nothing was changed; wait for {what} {resource_id} again with: cwtrain {what} wait {resource_id}"
    )
    return resource_id


def status_lines(ctx: Context, what: str, resource_id: str) -> Callable[[_Stated | None, float], None]:
    """Return a callback that tells the person each change of a resource's status."""
    last = ""

    def on_progress(found: _Stated | None, spent: float) -> None:
        nonlocal last
        status = "gone" if found is None else str(found.status)
        if found is not None and status == "UNSPECIFIED":
            status = found.status_text or status
        if status != last:
            last = status
            ctx.out.say(f"{what} {resource_id}: {status}, {duration(round(spent))}")

    return on_progress


def delete_resource(
    ctx: Context,
    what: str,
    name_or_id: str,
    *,
    find: Callable[[str], _R],
    delete: Callable[[str], Any],
    delete_and_wait: Callable[[str], bool],
    wait: bool,
    ignore_not_found: bool,
) -> None:
    """Delete and print ``{id, result}``; without ``ignore_not_found`` there being nothing to delete is an error."""
    resource_id = name_or_id
    try:
        if not is_uuid(name_or_id):
            resource_id = find(name_or_id).id
        again = f"cwtrain {what} delete {resource_id} --wait --ignore-not-found"
        ctx.still_running(f"{what} {resource_id} may be going away; see it through with: {again}")
        if wait:
            result = "deleted" if delete_and_wait(resource_id) else "not_found"
        else:
            delete(resource_id)
            result = "deleting"
    except NotFoundError as error:
        if not ignore_not_found or error.code is None:  # several of that name are there
            raise
        result = "not_found"
    if result == "not_found" and not ignore_not_found:
        raise NotFoundError(f"there is no {what} {resource_id}", code="not_found", hint=f"cwtrain {what} list")
    ctx.all_done()
    ctx.out.data({"id": resource_id, "result": result}, ids=[resource_id])
