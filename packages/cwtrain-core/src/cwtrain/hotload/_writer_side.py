"""The files of a full snapshot that are no weights, read from a directory."""

from __future__ import annotations

import os
from typing import Any

from cwtrain.snapshots._files import RegularFile
from cwtrain.snapshots._json import parse_json
from cwtrain.snapshots._sidefiles import ADAPTER, adapter_trouble, is_side_file, list_with_templates
from cwtrain.snapshots.checkpoint import raise_problems

__all__ = ["read_config", "read_side_files"]

_CONFIG = "config.json"
_MOST_BYTES = 256 << 20


def read_side_files(path: str, *, only_check: bool = False) -> dict[str, bytes]:
    """Return the side files of the directory by name; with ``only_check`` only ``config.json`` is read.

    Raises SnapshotLayoutError with everything that is wrong: no ``config.json``, dangling links, an adapter.
    """
    listing = list_with_templates(path)
    names = [name for name, entry in listing.items() if is_side_file(name) and not entry.directory]
    problems = [f"{name}: {listing[name].trouble}" for name in names if listing[name].trouble]
    problems += [
        f"{name}: has {listing[name].size_bytes} bytes, which no file beside the weights has"
        for name in names
        if listing[name].size_bytes > _MOST_BYTES
    ]
    if _CONFIG not in names:
        problems.append(f"{_CONFIG}: is not there; give the directory of a full checkpoint")
    if ADAPTER in listing and (trouble := adapter_trouble(path, listing, model=_CONFIG in names)):
        problems.append(trouble)
    raise_problems(path, problems)
    config = _read(path, _CONFIG)
    try:
        good = isinstance(parse_json(config), dict)
    except ValueError:
        good = False
    raise_problems(path, [] if good else [f"{_CONFIG}: is not a JSON object"])
    if only_check:
        return {}
    return {name: config if name == _CONFIG else _read(path, name) for name in names}


def read_config(path: str) -> dict[str, Any]:
    """Return what ``config.json`` in a directory says that ``read_side_files`` looked at."""
    value = parse_json(_read(path, _CONFIG))
    return value if isinstance(value, dict) else {}


def _read(path: str, name: str) -> bytes:
    with RegularFile(os.path.join(path, name), label=os.path.join(path, name)) as file:
        return bytes(file.read(0, file.size_bytes))
