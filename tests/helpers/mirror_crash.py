"""A machine that crashes: a disk that notes every call, and what may be left of them when the power goes.

Whatever was synced is there. Of everything else each call may have reached the disk or not, a write also in part, in
any combination that a seed picks: no order is assumed between calls that no sync stands between.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from helpers.mirror_cases import CountingDisk

Dirs = dict[str, "int | str"]
"""Path -> inode, or what a link leads to. Directories are all there."""


class RecordingDisk(CountingDisk):
    """Works like the real one and notes each call below ``root``. For one worker."""

    def __init__(self, root: Path, **options) -> None:
        super().__init__(**options)
        self.root = os.path.realpath(root)
        self.calls_made: list[tuple] = []
        self.inodes: dict[int, bytes] = {}
        self.entries: Dirs = {}
        self._known: dict[int, int] = {}  # inode of the real file -> ours; real ones are used again after a removal
        for path in sorted(Path(self.root).rglob("*")):
            name = str(path.relative_to(self.root))
            if path.is_symlink():
                self.entries[name] = os.readlink(path)
            elif path.is_file() and path.name not in ("lock", "holder.json"):
                self.entries[name] = self._inode(path.stat().st_ino)
                self.inodes[self.entries[name]] = path.read_bytes()

    def _inode(self, real: int, *, new: bool = False) -> int:
        if new or real not in self._known:
            self._known[real] = len(self._known) + 1000 * len(self.calls_made)
        return self._known[real]

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self.root)

    def _ours(self, fd: int) -> int:
        return self._inode(os.fstat(fd).st_ino)

    def open(self, path, *, create=False):
        new = not os.path.exists(path)
        fd = super().open(path, create=create)
        inode = self._inode(os.fstat(fd).st_ino, new=new)
        if new:
            self.calls_made.append(("enter", self._name(path), inode))
        return fd

    def write(self, fd, views, offset):
        self.calls_made.append(("write", self._ours(fd), offset, b"".join(views)))
        super().write(fd, views, offset)

    def truncate(self, fd, size):
        self.calls_made.append(("truncate", self._ours(fd), size))
        super().truncate(fd, size)

    def allocate(self, fd, size):
        self.truncate(fd, size)

    def clone(self, source, target):
        return False

    def copy_range(self, source, target, offset, length):
        self.write(target, [os.pread(source, length, offset)], offset)

    def fsync(self, fd):
        self.calls_made.append(("fsync", self._ours(fd)))
        super().fsync(fd)

    def fsync_directory(self, path):
        self.calls_made.append(("fsync_directory", self._name(path)))
        super().fsync_directory(path)

    def rename(self, source, target):
        if not os.path.isdir(source):
            inode = self._inode(os.stat(source).st_ino)
            self.calls_made.append(("enter", self._name(target), inode))
            self.calls_made.append(("leave", self._name(source)))
        else:
            for path in sorted(Path(source).rglob("*")):
                if path.is_file():
                    name = os.path.join(self._name(target), str(path.relative_to(source)))
                    self.calls_made.append(("enter", name, self._inode(path.stat().st_ino)))
                    self.calls_made.append(("leave", self._name(str(path))))
        super().rename(source, target)

    def symlink(self, leads_to, path):
        self.calls_made.append(("enter", self._name(path), leads_to))
        super().symlink(leads_to, path)

    def link(self, source, path):
        self._inode(os.stat(source).st_ino)
        self.inodes.setdefault(self._inode(os.stat(source).st_ino), Path(source).read_bytes())
        self.calls_made.append(("enter", self._name(path), self._inode(os.stat(source).st_ino)))
        super().link(source, path)

    def remove(self, path):
        if os.path.lexists(path):
            self.calls_made.append(("leave", self._name(path)))
        super().remove(path)

    def remove_tree(self, path):
        for entry in sorted(Path(path).rglob("*")):
            if entry.is_file():
                self.calls_made.append(("leave", self._name(str(entry))))
        super().remove_tree(path)

    def after_crash(self, cut: int, seed: int, directory: Path) -> None:
        """Write to ``directory`` what is left when the power goes just before call number ``cut``."""
        chance = random.Random(f"{cut} {seed}")
        keep = chance.choice([0.0, 0.5, 0.9, 1.0])
        made = self.calls_made[:cut]
        synced = {call[1]: number for number, call in enumerate(made) if call[0] == "fsync"}
        listed = {call[1]: number for number, call in enumerate(made) if call[0] == "fsync_directory"}
        files = {inode: bytearray(data) for inode, data in self.inodes.items()}
        entries = dict(self.entries)
        for number, call in enumerate(made):
            if call[0] in ("write", "truncate"):
                certain = synced.get(call[1], -1) > number
                if certain or chance.random() < keep:
                    _do(files.setdefault(call[1], bytearray()), call, chance, torn=not certain and keep < 1)
            elif call[0] in ("enter", "leave"):
                parent = os.path.dirname(call[1]) or "."
                if listed.get(parent, -1) > number or chance.random() < keep:
                    if call[0] == "enter":
                        entries[call[1]] = call[2]
                    else:
                        entries.pop(call[1], None)
        shutil.rmtree(directory, ignore_errors=True)
        for name in ("a", "b", "view-a", "view-b"):
            (directory / ".cwtrain-mirror" / name).mkdir(parents=True)
        for name, what in entries.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(what, str):
                path.symlink_to(what)
            else:
                path.write_bytes(files.get(what, b""))


def _do(data: bytearray, call: tuple, chance: random.Random, *, torn: bool) -> None:
    if call[0] == "truncate":
        data[:] = data[: call[2]] + bytes(max(0, call[2] - len(data)))
        return
    _, _, offset, new = call
    if torn and chance.random() < 0.3:
        new = new[: chance.randrange(len(new) + 1)]
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(new)] = new
