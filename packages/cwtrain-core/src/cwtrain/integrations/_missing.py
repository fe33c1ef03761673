"""What an alias says when its distribution is not installed."""

from __future__ import annotations

__all__ = ["missing"]


def missing(exc: ModuleNotFoundError, *, module: str, distribution: str) -> ModuleNotFoundError:
    """Return an error that names the package to install, or raise ``exc`` when something inside the package is missing.

    A missing ``torch`` inside an installed adapter keeps its own error.
    """
    if exc.name != module:
        raise exc
    return ModuleNotFoundError(f"{module!r} is not installed; run: pip install {distribution}", name=module)
