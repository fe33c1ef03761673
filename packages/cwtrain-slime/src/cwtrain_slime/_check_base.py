"""What this machine's disks tell: the base checkpoint, the directories, the room for versions and mirror, a resume."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cwtrain.config import HotLoadConfig
from cwtrain.errors import SnapshotError, SnapshotLayoutError
from cwtrain.models.snapshot import LocalSnapshot, SnapshotKind
from cwtrain.snapshots import inspect_snapshot
from cwtrain_slime._check_flags import directories
from cwtrain_slime._checkpoints import TRACKER
from cwtrain_slime._dialect import Dialect
from cwtrain_slime._findings import Finding, finding

__all__ = ["check_base", "check_disks"]

_ROOM = 3
"""So many times the base's size on the disks is comfortable; below it is worth a word."""


def check_base(dialect: Dialect, flags: Mapping[str, Any]) -> tuple[LocalSnapshot | None, list[Finding]]:
    """Return the base checkpoint, inspected, and what is wrong with it. Headers are read, not weights."""
    spelled, path = dialect.flag("hf_checkpoint"), flags["hf_checkpoint"]
    if not path:
        return None, [finding("base-missing", f"{spelled} is not given: deltas start from its bytes", f"{spelled} DIR")]
    if not os.path.isdir(path):
        return None, [
            finding(
                "base-missing",
                f"{spelled} {path} is no directory on this machine; with a hub id the first delta has no base",
                f"download it (hf download {path} --local-dir DIR), then {spelled} DIR",
            )
        ]
    try:
        snapshot = inspect_snapshot(path)
    except SnapshotLayoutError as exc:
        fix = exc.hint or "repair the checkpoint, or download it again"
        return None, [finding("base-invalid", f"{path}: {problem}", fix) for problem in exc.problems or (exc.message,)]
    except SnapshotError as exc:
        return None, [finding("base-invalid", str(exc), exc.hint or "repair the checkpoint, or download it again")]
    if snapshot.kind is not SnapshotKind.FULL:
        return None, [finding("base-invalid", f"{path} is a delta, the base is a full checkpoint", f"{spelled} DIR")]
    return snapshot, [*_quantised(path), *_resume(dialect, flags)]


def _quantised(path: str) -> Iterator[Finding]:
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # inspection has judged it
    quantised = config.get("quantization_config") if isinstance(config, dict) else None
    if not quantised:
        return
    if method := quantised.get("quant_method") if isinstance(quantised, dict) else quantised:
        yield finding(
            "base-quantised",
            f"the base is quantised ({method}): scales that the trainer packs for kernels have another size than the "
            "base's, and the first delta is refused",
            "compare one export with the base (cwtrain snapshot show), or train from a bf16 base",
        )


def _resume(dialect: Dialect, flags: Mapping[str, Any]) -> Iterator[Finding]:
    load = flags["load"]
    if not load:
        return
    spelled = dialect.flag("load")
    try:
        iteration = _iteration(load)
    except OSError as exc:
        yield finding(
            "resume",
            f"{spelled} {load} cannot be looked at: {exc.strerror or exc}",
            f"let this user read it, or correct {spelled}",
        )
        return
    if iteration is None:
        yield finding(
            "resume",
            f"{spelled} {load} has no {TRACKER}: {dialect.name} then starts a fresh run without a word",
            f"restore {TRACKER}, or leave {spelled} out to start anew",
        )
        return
    if iteration not in ("", "0", "release"):
        yield finding(
            "resume",
            f"the run goes on from iteration {iteration}, and rollouts from {dialect.flag('hf_checkpoint')} until the "
            "first version, whose delta carries the whole difference",
            f"{dialect.flag('hf_checkpoint')} an export of the same iteration (--save-hf writes them), with a new "
            "CWTRAIN_HOTLOAD_RUN_ID",
        )


def _iteration(load: str) -> str | None:
    """Return what the tracker in a directory of checkpoints says: nothing where there are none, None where it lacks."""
    tracker = Path(load) / TRACKER
    try:
        if stat.S_ISREG(os.stat(tracker).st_mode):
            return tracker.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        pass
    return None if os.path.isdir(load) and os.listdir(load) else ""


def check_disks(
    dialect: Dialect, flags: Mapping[str, Any], settings: HotLoadConfig | None, snapshot: LocalSnapshot | None
) -> list[Finding]:
    """Return what is wrong with the directories, and whether there is room for versions and the mirror."""
    disk_dir, state_dir = directories(flags, settings)
    if disk_dir is None or state_dir is None:
        return []
    findings = list(_erased(dialect, flags, disk_dir, state_dir))
    if snapshot is not None:
        findings += _room(dialect, disk_dir, state_dir, settings, snapshot.tensor_bytes)
    return findings


def _erased(dialect: Dialect, flags: Mapping[str, Any], disk_dir: Path, state_dir: Path) -> Iterator[Finding]:
    spelled = dialect.flag("disk_dir")
    held = {
        dialect.flag(name): flags[name] for name in ("hf_checkpoint", "load", "local_checkpoint_dir") if flags[name]
    }
    root = Path(os.path.realpath(disk_dir))
    for name, path in {**held, "CWTRAIN_HOTLOAD_STATE_DIR": state_dir}.items():
        if Path(os.path.realpath(path)).is_relative_to(root):
            yield finding(
                "disk-dir-erases",
                f"{spelled} {disk_dir} holds {path} ({name}), and the trainer erases {spelled} at every start",
                f"{spelled} a directory of its own",
            )


def _room(
    dialect: Dialect, disk_dir: Path, state_dir: Path, settings: HotLoadConfig | None, size: int
) -> Iterator[Finding]:
    """Compare the free room with what one version and the mirror can take at most."""
    mirror = size if settings is None or settings.keeps_mirror else 0
    wanted: dict[int, tuple[Path, int]] = {}
    for path, needed in ((disk_dir, size), (state_dir, mirror)):
        # os.path: what may not be looked at counts as not there, and its parent is asked.
        existing = next(parent for parent in (path, *path.absolute().parents) if os.path.exists(parent))
        device = existing.stat().st_dev
        _, before = wanted.get(device, (existing, 0))
        wanted[device] = (existing, before + needed)
    for existing, needed in wanted.values():
        free = shutil.disk_usage(existing).free
        words = f"{_gigabytes(free)} free on the disk of {existing}; a first version and the mirror can take"
        fix = f"put {dialect.flag('disk_dir')} or CWTRAIN_HOTLOAD_STATE_DIR on a larger disk"
        if free < needed:
            yield finding("disk-full", f"{words} {_gigabytes(needed)}", fix)
        elif free < _ROOM * needed:
            yield finding(
                "disk-tight",
                f"{words} {_gigabytes(needed)}, and the trainer never deletes a delta",
                f"CWTRAIN_HOTLOAD_CLEANUP=1 deletes what is published, or {fix}",
            )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
