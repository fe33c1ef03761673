"""What callers may give a publisher, checked before anything is done with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from operator import index
from typing import Any, SupportsIndex

import attrs

from cwtrain.errors import ConfigError
from cwtrain.hotload._publish.plan import TensorBase, Tensors
from cwtrain.snapshots._inputs import TensorInput, tensor_input
from cwtrain.snapshots.header import unfit_names

__all__ = ["NamedTensors", "base_place", "baseline_wait", "named_tensors", "version_of"]

_TOO_LARGE = 10**18
"""Identities have up to 18 digits of a version."""


def version_of(number: SupportsIndex) -> int:
    """Return ``number`` as an int. Raises ConfigError for what is no version."""
    try:
        found = -1 if isinstance(number, bool) else index(number)
    except TypeError:
        found = -1
    if not 0 <= found < _TOO_LARGE:
        raise ConfigError(f"number={number!r} is not a version", hint="give an integer from 0 to 999999999999999999")
    return found


@attrs.frozen
class NamedTensors:
    """The tensors of one version, to be gone through more than once; ``dtype`` says what those without one are."""

    tensors: Tensors
    dtype: str | Mapping[str, str] | None = None

    def __iter__(self) -> Iterator[tuple[str, Any, str | None]]:
        pairs = self.tensors.items() if isinstance(self.tensors, Mapping) else self.tensors()
        for name, tensor in pairs:
            yield name, tensor, self.dtype.get(name) if isinstance(self.dtype, Mapping) else self.dtype

    def inputs(self) -> dict[str, TensorInput] | None:
        """Return all of them, not read yet; None where only making them would tell.

        Raises SnapshotError for what cannot be published as it is, by its type.
        """
        if not isinstance(self.tensors, Mapping):
            return None
        return {name: tensor_input(name, tensor, dtype=dtype) for name, tensor, dtype in self}


def named_tensors(tensors: Tensors, dtype: str | Mapping[str, str] | None = None) -> NamedTensors:
    """Return what was given. Raises ConfigError for what cannot be gone through a second time, as an iterator."""
    if isinstance(tensors, Mapping) and (unfit := unfit_names(filter(lambda name: isinstance(name, str), tensors))):
        raise ConfigError(
            f"names that are blank or have control characters are no names of tensors: {', '.join(map(repr, unfit))}",
            hint="rename them where the state dict is made",
        )
    if isinstance(tensors, Mapping) and isinstance(dtype, Mapping) and (unknown := sorted(dtype.keys() - tensors)):
        raise ConfigError(
            f"dtype= names {', '.join(map(repr, unknown[:5]))}, which is no tensor that is given",
            hint="give dtypes by the names of the tensors",
        )
    if isinstance(tensors, Mapping) or callable(tensors):
        return NamedTensors(tensors, dtype)
    raise ConfigError(
        f"tensors is a {type(tensors).__name__}, which is neither a mapping nor a function",
        hint="give a state dict, or a function that returns the (name, tensor) pairs anew at each call: a delta that "
        "fails in the engine is published once more in full",
    )


def base_place(name: TensorBase | str | None) -> TensorBase:
    """Return where the base of the next delta lies. Raises ConfigError for another name."""
    try:
        return TensorBase(name or TensorBase.NONE)
    except ValueError:
        known = ", ".join(TensorBase)
        raise ConfigError(f"tensor_base={name!r} is not known", hint=f"give one of {known}") from None


def baseline_wait(seconds: float) -> float:
    """Return how long a baseline call blocks; what is too long for a thread is cut. Raises ConfigError for no time."""
    if not seconds >= 0:
        raise ConfigError(f"wait_seconds={seconds} is no time", hint="give seconds, 0 or more")
    return min(seconds, threading.TIMEOUT_MAX)
