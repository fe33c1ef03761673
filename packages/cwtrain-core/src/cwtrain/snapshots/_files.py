"""Reading files that others wrote: only regular ones, by ordinary reads of bounded size, never by memory mapping.

Network file systems fail a memory map at open, or kill the process when the file shrinks; a read says so in an error.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import attrs

from cwtrain.errors import SnapshotChangedError, SnapshotError, SnapshotLayoutError

BLOCK_BYTES = 1 << 20
"""How much is read at once: large enough for full speed, small enough to stay in the cache."""


@attrs.frozen(kw_only=True)
class Entry:
    """One name in a directory, looked at through links. ``trouble`` says why it is no regular file, or is None."""

    name: str
    trouble: str | None = None
    directory: bool = False
    size_bytes: int = 0
    mtime_ns: int = 0
    inode: int = 0
    device: int = 0


def look(path: str, name: str) -> Entry:
    """Return what ``path`` leads to, without opening it (opening a FIFO would block)."""
    try:
        status = os.stat(path)
    except OSError as error:
        return Entry(name=name, trouble=_why_no_stat(path, error))
    trouble = _why_not_regular(status.st_mode)
    return Entry(
        name=name,
        trouble=trouble,
        directory=stat.S_ISDIR(status.st_mode),
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
        device=status.st_dev,
    )


def list_directory(path: str) -> dict[str, Entry]:
    """Return the directory's entries by name, sorted. Raises SnapshotLayoutError if it is no readable directory."""
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        problem = "there is no such directory; check the path"
    except NotADirectoryError:
        problem = "this is a file; give the directory that holds the checkpoint"
    except OSError as error:
        problem = f"the directory cannot be read: {error.strerror}; check its permissions"
    else:
        return {name: look(os.path.join(path, name), name) for name in names}
    raise SnapshotLayoutError(f"{path}: {problem}", problems=[f"{path}: {problem}"])


def _why_no_stat(path: str, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a link in a loop of links; put the file itself there"
    if os.path.islink(path):
        return f"is a link to nothing ({os.readlink(path)}); fetch the file it leads to again"
    if isinstance(error, FileNotFoundError):
        return "is not there"
    return f"cannot be read: {error.strerror}; check its permissions"


def _why_not_regular(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    kinds = (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    kind = next((text for test, text in kinds if test(mode)), "something else")
    return f"is {kind}, not a regular file; put the file itself there"


class RegularFile:
    """A regular file, open for reads at given offsets; threads may share it.

    ``label`` names it in errors. Opening raises SnapshotLayoutError if it is no readable regular file.
    """

    def __init__(self, path: str, *, label: str | None = None) -> None:
        self.path = path
        self.label = label or path
        entry = look(path, self.label)
        if entry.trouble:
            raise self._refused(entry.trouble)
        try:
            # O_NONBLOCK: should a FIFO have taken the file's place since, opening it must not block.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._refused(f"cannot be read: {error.strerror}; check its permissions") from error
        status = os.fstat(self._fd)
        if trouble := _why_not_regular(status.st_mode):
            os.close(self._fd)
            raise self._refused(trouble)
        self.size_bytes = status.st_size
        self.mtime_ns = status.st_mtime_ns
        self.inode = status.st_ino
        self.device = status.st_dev

    def _refused(self, trouble: str) -> SnapshotLayoutError:
        problem = f"{self.label}: {trouble}"
        return SnapshotLayoutError(problem, problems=[problem])

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset`` on. A short read raises SnapshotChangedError with the offset."""
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise SnapshotError(
                    f"{self.label}: reading at offset {offset + done} failed: {error.strerror}"
                ) from error
            if got == 0:
                raise SnapshotChangedError(
                    f"{self.label}: the file ends at offset {offset + done}, {len(view) - done} bytes short of "
                    f"what was to be read; it had {self.size_bytes} bytes when it was opened",
                    file=self.label,
                    hint="something shortens the file while it is read; wait until the checkpoint is complete",
                )
            done += got

    def read_views(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views one after the other with the bytes from ``offset`` on, in one read where possible."""
        if len(views) > 1:
            total = sum(map(len, views))
            try:
                if os.preadv(self._fd, views, offset) == total:
                    return
            except OSError:  # the reads below say where
                pass
        for view in views:
            self.read_into(offset, view)
            offset += len(view)

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on; for headers and small pieces."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def blocks(self, offset: int, length: int, *, buffer: bytearray | None = None) -> Iterator[memoryview]:
        """Yield the range in blocks. All share one buffer: use each before asking for the next."""
        view = memoryview(buffer if buffer is not None else bytearray(min(BLOCK_BYTES, length)))
        done = 0
        while done < length:
            block = view[: min(len(view), length - done)]
            self.read_into(offset + done, block)
            yield block
            done += len(block)

    def check_unchanged(self, *, size_bytes: int, mtime_ns: int, inode: int) -> None:
        """Raise SnapshotChangedError unless the open file still is what was seen before."""
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns, status.st_ino) != (size_bytes, mtime_ns, inode):
            raise SnapshotChangedError(
                f"{self.label}: the file changed while it was used (size, time or inode differ)",
                file=self.label,
                hint="wait until the checkpoint is complete, and keep it as it is until the work on it is done",
            )

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def same_bytes(one: RegularFile, one_offset: int, two: RegularFile, two_offset: int, length: int) -> bool:
    """Return whether two ranges of ``length`` bytes are equal."""
    pairs = zip(one.blocks(one_offset, length), two.blocks(two_offset, length), strict=True)
    return all(bytes(left) == bytes(right) for left, right in pairs)  # as bytes: views compare item by item
