"""Entry points of one group, found without ``importlib.metadata``: its import is a quarter of what ``--help`` costs.

Read is what installers write: ``entry_points.txt`` in the ``*.dist-info`` and ``*.egg-info`` folders on ``sys.path``.
Where anything else may bring distributions (a zip file or an egg on the path, a finder that knows some), the standard
library is asked. What comes out is the same either way.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import importlib.metadata

__all__ = ["EntryPoint", "FoundEntryPoint", "entry_points", "found_entry_points"]


class EntryPoint(Protocol):
    """What is used of an ``importlib.metadata.EntryPoint``."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def dist(self) -> Any: ...
    def load(self) -> Any:
        """Return the object that the entry point names."""
        ...


class FoundDistribution(NamedTuple):
    """The name and version that a distribution gives itself."""

    name: str
    version: str


class FoundEntryPoint(NamedTuple):
    """An entry point that was read from a file."""

    name: str
    value: str
    dist: FoundDistribution

    def load(self) -> Any:
        """Import the module and return it, or the attribute that stands after the colon."""
        module, _, attributes = re.sub(r"\s*\[.*\]\s*$", "", self.value).partition(":")
        found: Any = import_module(module.strip())
        for attribute in filter(None, attributes.strip().split(".")):
            found = getattr(found, attribute)
        return found


def entry_points(group: str) -> Sequence[EntryPoint | importlib.metadata.EntryPoint]:
    """Return the entry points of ``group`` that the environment's distributions bring."""
    if _only_folders():
        return list(found_entry_points(group, sys.path))
    import importlib.metadata

    return list(importlib.metadata.entry_points(group=group))


def _only_folders() -> bool:
    """Return whether every distribution there is lies in a folder on ``sys.path``."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    return finders == [PathFinder] and not any(
        os.path.isfile(entry) or entry.rstrip(os.sep).endswith(".egg") for entry in map(str, sys.path)
    )


def found_entry_points(group: str, path: Iterable[str]) -> Iterator[FoundEntryPoint]:
    """Yield the entry points of ``group`` in the folders of ``path``; of two distributions of one name the first."""
    seen: set[str] = set()
    for folder in dict.fromkeys(path):
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            stem, _, kind = name.rpartition(".")
            if kind.lower() not in ("dist-info", "egg-info"):
                continue
            distribution = re.sub(r"[-_.]+", "_", stem.partition("-")[0]).lower()
            if distribution in seen:
                continue
            seen.add(distribution)
            place = os.path.join(folder, name)
            pairs = list(_pairs(group, _lines(os.path.join(place, "entry_points.txt"))))
            if pairs:
                dist = _distribution(place, stem)
                yield from (FoundEntryPoint(entry, value, dist) for entry, value in pairs)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [line.strip() for line in file]
    except OSError:
        return []


def _pairs(group: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    section = None
    for line in lines:
        if line.startswith("[") and line.endswith("]"):
            section = line.strip("[]")
        elif section == group and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()


def _distribution(place: str, stem: str) -> FoundDistribution:
    name, _, version = stem.partition("-")
    for line in _lines(os.path.join(place, "METADATA")) or _lines(os.path.join(place, "PKG-INFO")):
        if not line:
            break
        key, _, value = line.partition(":")
        if key.lower() == "name":
            name = value.strip()
        elif key.lower() == "version":
            version = value.strip()
    return FoundDistribution(name, version)
