"""The checksums that writers of deltas record: of a tensor's whole new bytes, as lower-case hex digits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

import attrs

from cwtrain.errors import ConfigError
from cwtrain.snapshots._adler import adler32, adler32_hex

ADLER32 = "adler32"
_HEX = re.compile(r"[0-9a-f]*")


class Hasher(Protocol):
    """A checksum in the making."""

    def update(self, data: memoryview, /) -> object:
        """Go on with ``data``."""
        ...

    def hexdigest(self) -> str:
        """Return the digits."""
        ...


class Adler32:
    """Adler-32 with a hasher's methods."""

    def __init__(self) -> None:
        self.value = 1

    def update(self, data: memoryview, /) -> None:
        """Go on with ``data``."""
        self.value = adler32(data, self.value)

    def hexdigest(self) -> str:
        """Return the 8 digits."""
        return adler32_hex(self.value)


@attrs.frozen(kw_only=True)
class _Algorithm:
    label: str
    digits: int
    package: str | None = None
    make: Callable[[Any], Hasher]


_ALGORITHMS: Mapping[str, _Algorithm] = {
    ADLER32: _Algorithm(label="Adler-32", digits=8, make=lambda _: Adler32()),
    "xxh3-128": _Algorithm(label="XXH3-128", digits=32, package="xxhash", make=lambda module: module.xxh3_128()),
    "blake3": _Algorithm(label="BLAKE3", digits=64, package="blake3", make=lambda module: module.blake3()),
}

CHECKSUM_FORMATS = tuple(_ALGORITHMS)
"""What we can check. The service takes only the first."""


def label_of(algorithm: str) -> str:
    """Return how a checksum is called in messages."""
    return _ALGORITHMS[algorithm].label


def well_formed(algorithm: str, text: str) -> bool:
    """Return whether ``text`` can be such a checksum."""
    return len(text) == digits_of(algorithm) and _HEX.fullmatch(text) is not None


def digits_of(algorithm: str) -> int:
    """Return how many hex digits such a checksum has."""
    return _ALGORITHMS[algorithm].digits


def hashers(algorithm: str, *, load: Callable[[str], Any] = import_module) -> Callable[[], Hasher]:
    """Return what makes a new hasher. Raises ConfigError if its library is not installed (``load`` imports it)."""
    known = _ALGORITHMS[algorithm]
    module = None
    if known.package is not None:
        try:
            module = load(known.package)
        except ImportError as error:
            raise ConfigError(
                f"the checksums are {algorithm}, and the package {known.package} is not installed",
                hint="pip install 'cwtrain-core[checksums]'",
            ) from error
    return lambda: known.make(module)
