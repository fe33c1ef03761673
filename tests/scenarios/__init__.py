"""Cases that show in real time, on real parts, what the suite shows on a clock of its own.

    from scenarios import case

    @case("store-503", shows="a publish waits out a store that answers 503", seconds=(5, 20, 45))
    def store_503(seconds):
        ...                                  # real emulator, real S3 server, real ranks
        assert found == wanted               # an exception means that it does not hold
        return {"took": 21.3}                # plain data for the report

Each module of this package registers its cases when it is imported; ``tools/field_outages.py`` imports them all and
runs each case once for each of its ``seconds``. Cases share nothing: each starts the parts that it needs, and ends
them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Case", "all_cases", "case"]

Run = Callable[[float], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """One case: what it shows, the seconds that it is run with, and how."""

    name: str
    shows: str
    seconds: tuple[float, ...]
    run: Run


_CASES: dict[str, Case] = {}


def case(name: str, *, shows: str, seconds: Sequence[float]) -> Callable[[Run], Run]:
    """Register a function as the case ``name``: it gets seconds, returns plain data, and raises where it fails."""

    def register(run: Run) -> Run:
        if name in _CASES:
            raise ValueError(f"two cases are called {name}")
        _CASES[name] = Case(name, shows, tuple(seconds), run)
        return run

    return register


def all_cases() -> list[Case]:
    """Return the cases of every module of this package, by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return [_CASES[name] for name in sorted(_CASES)]
