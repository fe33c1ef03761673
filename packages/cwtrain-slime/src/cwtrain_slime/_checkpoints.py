"""Which of the trainer's own checkpoints has the weights that were just published: a note beside it says so.

Both trainers save, if a checkpoint is due, right before they update weights. So a checkpoint that appeared since the
last version has this version's weights; not where updates are rarer than steps, nor where the save goes on behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

__all__ = ["TRACKER", "SavedCheckpoints"]

TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Megatron's file that names the last complete checkpoint."""


class SavedCheckpoints:
    """Notices new checkpoints of one run."""

    def __init__(self, args: Any) -> None:
        save = getattr(args, "save", None)
        paired = getattr(args, "update_weights_interval", 1) in (1, None) and not getattr(args, "async_save", False)
        self._root = Path(save) if save and paired else None
        self._last = self._iteration()

    def new(self) -> tuple[Path, int] | None:
        """Return the directory and iteration of the checkpoint that appeared since the last look, None without one."""
        found = self._iteration()
        if self._root is None or found is None or found == self._last:
            return None
        self._last = found
        directory = self._root / f"iter_{found:07d}"
        return (directory, found) if directory.is_dir() else None

    def _iteration(self) -> int | None:
        if self._root is None:
            return None
        try:
            return int((self._root / TRACKER).read_text(encoding="utf-8").strip())
        except (OSError, ValueError):  # none yet, or `release`
            return None
