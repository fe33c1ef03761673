"""Everything that a mirror does to its disk, one small call each: the seam where tests kill it or pull the plug."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Sequence

from cwtrain.snapshots._targets import write_views

__all__ = ["Disk"]

_FICLONE = 0x40049409  # of linux/fs.h: share all blocks of another file
_BLOCK = 1 << 20
_UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM, errno.ETXTBSY)


class Disk:
    """The real disk. No call but ``fsync`` and ``fsync_directory`` makes anything survive a crash of the machine."""

    def open(self, path: str, *, create: bool = False) -> int:
        """Return a descriptor for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)

    def write(self, fd: int, views: Sequence[bytes | memoryview], offset: int) -> None:
        """Write the views one after the other from ``offset`` on."""
        write_views(fd, [memoryview(view) for view in views], offset)

    def truncate(self, fd: int, size: int) -> None:
        """Give the file this size."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """Give the file this size, with room on the disk for all of it: far cheaper to write than a sparse file."""
        os.ftruncate(fd, size)
        try:
            os.posix_fallocate(fd, 0, size)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _UNSUPPORTED:
                os.ftruncate(fd, 0)  # give back what was got
                raise

    def clone(self, source: int, target: int) -> bool:
        """Make ``target`` share all blocks of ``source``; False where the file system cannot."""
        try:
            from fcntl import ioctl

            ioctl(target, _FICLONE, source)
        except (ImportError, OSError):
            return False
        return True

    def copy_range(self, source: int, target: int, offset: int, length: int) -> None:
        """Copy a range to the same place of another file, inside the kernel where it offers that."""
        end = offset + length
        try:
            while offset < end:
                done = os.copy_file_range(source, target, end - offset, offset, offset)
                if not done:
                    break
                offset += done
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _UNSUPPORTED:
                raise
        while offset < end:
            block = os.pread(source, min(_BLOCK, end - offset), offset)
            if not block:
                raise OSError(errno.EIO, "the file is shorter than its header says")
            self.write(target, [block], offset)
            offset += len(block)

    def fsync(self, fd: int) -> None:
        """Bring a file to the disk."""
        os.fsync(fd)

    def fsync_directory(self, path: str) -> None:
        """Bring a directory's entries to the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """Rename, over what is there."""
        os.rename(source, target)

    def mkdir(self, path: str) -> None:
        """Make a directory."""
        os.mkdir(path)

    def symlink(self, leads_to: str, path: str) -> None:
        """Make ``path`` a symbolic link, also where it is one already: never absent in between."""
        temporary = f"{path}.new"
        self.remove(temporary)
        os.symlink(leads_to, temporary)
        os.rename(temporary, path)

    def link(self, source: str, path: str) -> None:
        """Make ``path`` another name of the file ``source``, or a copy where the file system has no hard links."""
        real = os.path.realpath(source)
        try:
            os.link(real, path)
        except OSError as error:
            if error.errno not in (*_UNSUPPORTED, errno.EMLINK, errno.EACCES):
                raise
            shutil.copyfile(real, path)

    def remove(self, path: str) -> None:
        """Remove a file or link, if it is there."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass

    def remove_tree(self, path: str) -> None:
        """Remove a directory with all that is in it, if it is there."""
        shutil.rmtree(path, ignore_errors=True)

    def free_bytes(self, path: str) -> int:
        """Return how many bytes can be written where ``path`` lies."""
        return shutil.disk_usage(path).free

    def boot_id(self) -> str:
        """Return what identifies this run of the machine; empty where that cannot be known."""
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                return file.read().strip()
        except OSError:
            return ""

    def close(self, fds: Iterable[int]) -> None:
        """Close descriptors."""
        for fd in fds:
            os.close(fd)
