"""Other people's decoders of zstd frames, and one of our own that shares nothing with libzstd."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import zstandard

from helpers import plain_zstd

Decode = Callable[[bytes], bytes]


def by_zstandard(frame: bytes) -> bytes:
    """Decode one frame, and refuse what follows it."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    data = decoder.decompress(frame)
    assert decoder.eof
    assert not decoder.unused_data
    return data


def by_rfc(frame: bytes) -> bytes:
    """Decode by the letter of RFC 8878, as strictly as decoders ever were."""
    return plain_zstd.decompress(frame, strict_first_block=True)


def by_command(frame: bytes) -> bytes:
    """Decode with the `zstd` command."""
    return subprocess.run(["zstd", "-dc"], input=frame, capture_output=True, check=True).stdout


def standard_library() -> Any:
    """Return `compression.zstd` of Python 3.14, or its backport, or None."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def decoders(*, slow: bool = True) -> dict[str, Decode]:
    """Return all decoders that are here by name; without `slow` only those that take megabytes at once."""
    found: dict[str, Decode] = {"zstandard": by_zstandard}
    if (module := standard_library()) is not None:
        found["standard library"] = module.decompress
    if shutil.which("zstd"):
        found["command"] = by_command
    if slow:
        found["RFC 8878"] = by_rfc
    return found
