"""Conditions of a resource in words."""

from __future__ import annotations

from collections.abc import Iterable

from cwtrain.infra._status import quote
from cwtrain.models.service import Condition, ConditionStatus

__all__ = ["in_words", "unmet"]


def unmet(conditions: Iterable[Condition]) -> str:
    """Return the conditions that do not hold in words; all of them where each holds (a ``Failed`` may be TRUE)."""
    every = list(conditions)
    return in_words([one for one in every if one.status is not ConditionStatus.TRUE] or every)


def in_words(conditions: Iterable[Condition]) -> str:
    """Return ``conditions`` in words, capped; a plain statement when there are none."""
    texts = [_one(condition) for condition in conditions]
    return quote("; ".join(text for text in texts if text)) or "the service gives no reason"


def _one(condition: Condition) -> str:
    zone = f" in {condition.zone}" if condition.zone else ""
    said = ": ".join(part for part in (condition.reason, condition.message) if part)
    return f"{condition.type or 'condition'} is {condition.status.name}{zone}" + (f" ({said})" if said else "")
