"""What the commands of deployments and gateways share: finding one by name or id, and deleting one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cwtrain.cli._context import Context
from cwtrain.errors import NotFoundError

if TYPE_CHECKING:
    from cwtrain.infra import InferenceClient

__all__ = ["delete_resource", "find_one"]


class _Named(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...


_R = TypeVar("_R", bound=_Named)


def find_one(what: str, name_or_id: str, get: Callable[[str], _R], list_all: Callable[[], Iterable[_R]]) -> _R:
    """Return the one with that id, or the only one with that name. Raises ``NotFoundError``."""
    if _is_uuid(name_or_id):
        return get(name_or_id)
    found = [one for one in list_all() if name_or_id in (one.id, one.name)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFoundError(
            f"no {what} has the name or id {name_or_id!r}", code="not_found", hint=f"cwtrain {what} list"
        )
    ids = ", ".join(one.id for one in found)
    raise NotFoundError(f"{len(found)} {what}s are named {name_or_id!r}", hint=f"give one of the ids: {ids}")


def delete_resource(
    ctx: Context,
    what: str,
    resource_id: str,
    *,
    client: InferenceClient,
    delete: Callable[[str], Any],
    delete_and_wait: Callable[..., bool],
    wait: bool,
    timeout: float,
    ignore_not_found: bool,
) -> None:
    """Delete and print ``{id, result}``; without ``ignore_not_found`` there being nothing to delete is an error."""
    try:
        if wait:
            ctx.still_running(f"{what} {resource_id} is being deleted; see: cwtrain {what} get {resource_id}")
            gone = delete_and_wait(client, resource_id, timeout=timeout)
            result = "deleted" if gone else "not_found"
            ctx.all_done()
        else:
            delete(resource_id)
            result = "deleting"
    except NotFoundError:
        if not ignore_not_found:
            raise
        result = "not_found"
    if result == "not_found" and not ignore_not_found:
        raise NotFoundError(f"there is no {what} {resource_id}", code="not_found", hint=f"cwtrain {what} list")
    ctx.out.data({"id": resource_id, "result": result}, ids=[resource_id])


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True
