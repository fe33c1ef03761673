"""The kind: what was written is not to be seen yet. The emulator's stand-ins for it, a store's and a directory's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cwtrain_emulator.faults import Fault, FaultBook, FaultError


def rule(**values: object) -> Fault:
    return FaultBook().add({"target": "directory", "kind": "late", **values})


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "source").mkdir()
    (tmp_path / "view").mkdir()
    return tmp_path / "source", tmp_path / "view"


@pytest.mark.parametrize(("first", "before"), [("absent", None), ("empty", 0), ("short", 50)])
def test_a_file_shows_late_and_then_whole(folders: tuple[Path, Path], first: str, before: int | None) -> None:
    from cwtrain_emulator.late_files import _View

    source, view = folders
    (source / "v1").mkdir()
    written = source / "v1" / "shard"
    written.write_bytes(bytes(range(100)))
    now = [written.stat().st_ctime + 1]
    shown = _View(rule(source=str(source), view=str(view), seconds=30, first=first), lambda: now[0])
    shown.show()
    seen = view / "v1" / "shard"
    assert (seen.stat().st_size if seen.exists() else None) == before
    now[0] += 28.5
    shown.show()
    assert (seen.stat().st_size if seen.exists() else None) == before
    now[0] += 1
    shown.show()
    assert seen.read_bytes() == written.read_bytes()
    # What the view's own node wrote stays; what the source removed goes.
    (view / "v1" / "own").write_bytes(b"own")
    shutil.rmtree(source / "v1")
    shown.show()
    assert [path.name for path in (view / "v1").iterdir()] == ["own"]


def test_a_rule_counts_files_and_cleared_shows_all(folders: tuple[Path, Path]) -> None:
    from cwtrain_emulator.late_files import _View

    source, view = folders
    for name in ("a", "b", "c"):
        (source / name).write_bytes(b"1")
    found = rule(source=str(source), view=str(view), seconds=60, after=1, times=1)
    now = (source / "a").stat().st_ctime + 5
    shown = _View(found, lambda: now)
    shown.show()
    assert sorted(path.name for path in view.iterdir()) == ["a", "c"], "the first passes, the second is struck"
    assert (found.seen, found.struck) == (3, 1)
    shown.show(at_once=True)
    assert sorted(path.name for path in view.iterdir()) == ["a", "b", "c"]


def test_a_directory_is_given_by_its_whole_path(folders: tuple[Path, Path]) -> None:
    with pytest.raises(FaultError, match="source: must be an absolute path"):
        rule(source="updates", view=str(folders[1]), seconds=1)
    with pytest.raises(FaultError, match="source: is required"):
        rule(view=str(folders[1]))


def test_an_object_is_late_for_so_many_seconds_after_its_write() -> None:
    book = FaultBook()
    late = book.add({"target": "store", "kind": "late_object", "key": r"model-.*\.safetensors$", "seconds": 10})

    def struck(key: str, ages: dict[str, float]) -> bool:
        subject = {"method": "GET", "path": f"/b/{key}", "permission": "s3:GetObject", "access_key": "", "caller": ""}
        return bool(book.take("store", key=key, listing=False, writes=False, ages=ages, **subject))

    key = "p/model-1.safetensors"
    assert struck(key, {key: 9.9})
    assert not struck(key, {key: 10.1})
    assert not struck(key, {}), "written before anybody looked"
    assert not struck("p/index.json", {"p/index.json": 1.0})
    assert late.hides(key, {key: 0.0})
