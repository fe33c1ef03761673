"""A resource by its name or its id, as people give it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from cwtrain.errors import NotFoundError

__all__ = ["find_one", "is_uuid"]


class _Named(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...


_R = TypeVar("_R", bound=_Named)


def find_one(what: str, name_or_id: str, get: Callable[[str], _R], list_all: Callable[[], Iterable[_R]]) -> _R:
    """Return the one with that id, or the only one with that name. Raises ``NotFoundError``, also for two of a name."""
    if is_uuid(name_or_id):
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


def is_uuid(text: str) -> bool:
    """Return whether ``text`` is an id as the service makes them, and no name."""
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True
