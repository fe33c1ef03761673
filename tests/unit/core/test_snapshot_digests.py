"""The SHA-256 that stays with a file we wrote: found again through a rename, and not believed after any change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cwtrain.snapshots import inspect_snapshot
from cwtrain.snapshots._codec import EncodedTensor
from cwtrain.snapshots._delta_files import DeltaFiles
from cwtrain.snapshots._digests import record_digest, recorded_digest
from helpers.tiny_checkpoint import write_full
from helpers.upload_files import noise, sha256


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "probe").write_bytes(b"")
    try:
        os.setxattr(tmp_path / "probe", "user.cwtrain.probe", b"1")
    except OSError:
        pytest.skip("the file system keeps no extended attributes")
    (tmp_path / "probe").unlink()
    return tmp_path


def recorded(path: Path) -> str | None:
    about = path.stat()
    return recorded_digest(str(path), inode=about.st_ino, size_bytes=about.st_size, mtime_ns=about.st_mtime_ns)


def test_a_record_goes_with_the_file(place: Path) -> None:
    path = place / "a"
    path.write_bytes(noise(1, 3_000_000))
    assert recorded(path) is None
    assert record_digest(path) == sha256(noise(1, 3_000_000))
    path.rename(place / "b")
    assert recorded(place / "b") == sha256(noise(1, 3_000_000))


def test_a_descriptor_and_a_given_digest(place: Path) -> None:
    with (place / "a").open("wb") as file:
        file.write(b"bytes")
        file.flush()
        assert record_digest(file.fileno(), sha256(b"bytes")) == sha256(b"bytes")
    assert recorded(place / "a") == sha256(b"bytes")


@pytest.mark.parametrize("change", ["append", "overwrite", "touch", "copy", "nonsense"])
def test_a_record_of_another_file_counts_for_nothing(place: Path, change: str) -> None:
    path = place / "a"
    path.write_bytes(b"bytes")
    os.utime(path, ns=(1, 1))
    record_digest(path)
    if change == "append":
        with path.open("ab") as file:
            file.write(b"more")
    elif change == "overwrite":
        path.write_bytes(b"other")
    elif change == "touch":
        os.utime(path)
    elif change == "nonsense":
        os.setxattr(path, "user.cwtrain.sha256", b"2 \xff")
    else:
        shutil.copy2(path, place / "copy")
        path = place / "copy"
    assert recorded(path) is None


def test_a_file_system_without_attributes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"bytes")
    assert recorded_digest("/proc/self/status", inode=1, size_bytes=1, mtime_ns=1) is None
    assert recorded_digest(str(tmp_path / "gone"), inode=1, size_bytes=1, mtime_ns=1) is None


def test_inspection_finds_the_records(place: Path) -> None:
    directory = Path(write_full(place / "ckpt"))
    shards = sorted(directory.glob("*.safetensors"))
    wanted = {shard.name: record_digest(shard) for shard in shards}
    found = {file.name: file.sha256 for file in inspect_snapshot(directory).files}
    assert {name: found[name] for name in wanted} == wanted
    assert all(sha is None for name, sha in found.items() if name not in wanted)


@pytest.mark.parametrize("hold_bytes", [1 << 20, 100], ids=["held-back", "streamed"])
def test_a_delta_is_written_with_its_record(place: Path, hold_bytes: int) -> None:
    names = ["a", "b"]
    files = DeltaFiles(str(place), names, raw_bytes=10_000, shard_bytes=1 << 30, hold_bytes=hold_bytes)
    for name in names:
        files.write(noise(1, 5000))
        files.end_tensor(name, EncodedTensor(changed_bytes=1, checksum="00000001", frame_bytes=5000))
    files.close(("000001", "000000"))
    (shard,) = place.glob("*.safetensors")
    assert recorded(shard) == sha256(shard.read_bytes())
