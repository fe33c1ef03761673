"""A stand-in for a shared disk whose listings and sizes lag: what another node wrote shows when the clock says so."""

from __future__ import annotations

import os
from pathlib import Path


class LaggingDisk:
    """Hides files and shows them later. ``sleep`` is the sleep of whoever looks: it moves the clock, and time shows.

    No file system is mounted: a hidden file lies beside the directory, and is renamed into it when it is due.
    """

    def __init__(self, clock):
        self.clock = clock
        self._hidden = []

    def hide(self, path, *, seconds, first="absent"):
        """Have ``path`` show in ``seconds``; ``first`` is how it looks until then: absent, empty or short."""
        path = Path(path)
        aside = path.parent.parent / f"hidden-{len(self._hidden)}-{path.name}"
        os.rename(path, aside)
        if first != "absent":
            path.write_bytes(aside.read_bytes()[: aside.stat().st_size // 2 if first == "short" else 0])
        self._hidden.append((self.clock.now() + seconds, aside, path))

    def sleep(self, seconds):
        self.clock.sleep(seconds)
        for one in [one for one in self._hidden if one[0] <= self.clock.now()]:
            self._hidden.remove(one)
            os.replace(one[1], one[2])
