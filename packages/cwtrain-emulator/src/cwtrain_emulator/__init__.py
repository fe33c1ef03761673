"""CoreWeave Dedicated Inference on one machine: API, bucket, replicas and endpoint, for tests and for learning.

`Emulator` runs it as child processes::

    from cwtrain_emulator import Emulator

    with Emulator() as emulator:
        print(emulator.base_url, emulator.s3_endpoint, emulator.bucket)

On a terminal it is ``cwtrain emulator serve`` or ``python -m cwtrain_emulator serve``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwtrain_emulator.emulator import Emulator, EmulatorError

__all__ = ["Emulator", "EmulatorError"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from cwtrain_emulator import emulator

        return getattr(emulator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
