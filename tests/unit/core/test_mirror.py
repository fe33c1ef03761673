"""WeightMirror: follows deltas byte for byte, is a full snapshot at any time, and refuses without a trace."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from cwtrain.errors import (
    ChecksumError,
    MirrorDamagedError,
    MirrorError,
    MirrorLockedError,
    SnapshotChainError,
    SnapshotError,
    SnapshotLayoutError,
)
from cwtrain.hotload import WeightMirror, inspect_snapshot
from cwtrain.hotload._mirror_disk import Disk
from cwtrain.hotload.delta import write_delta
from cwtrain.snapshots.manifest import manifest_to_bytes, parse_manifest
from helpers import snapshot_files as sf
from helpers.mirror_cases import CountingDisk, shards, write_chain

MODES = pytest.mark.parametrize("in_place", [False, True], ids=["slots", "in-place"])


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chain")
    models = write_chain(directory, 1, 3)
    return directory, models


def tree(directory):
    """Return every file below a directory that says something about the version."""
    found = {}
    for path in sorted(Path(directory).rglob("*")):
        if path.is_file() and path.name not in ("lock", "holder.json", "writing"):
            found[str(path.relative_to(directory))] = path.read_bytes()
    return found


@MODES
def test_it_follows_the_trainer_and_is_a_full_snapshot(tmp_path, chain, in_place):
    directory, models = chain
    with WeightMirror.create(directory / "base", tmp_path / "m", in_place=in_place) as mirror:
        assert mirror.version == "0"
        for number in (1, 2, 3):
            report = mirror.apply_delta(directory / f"d{number}")
            assert (report.version, report.base_version) == (f"{number:06d}", mirror_before(number))
            assert report.in_place is in_place
            assert set(report.changed) == {
                name for name in models[0] if models[number - 1][name] != models[number][name]
            }
            assert mirror.version == f"{number:06d}"
            assert sf.read_checkpoint(mirror.path) == models[number]
            snapshot = inspect_snapshot(mirror.path, verify="full")
            assert snapshot.verified == "full"
            assert snapshot.checksums == mirror.checksums
            assert set(report.checksums.items()) <= set(mirror.checksums.items())
            assert not snapshot.warnings
            assert [file.name for file in snapshot.files if "/" in file.name or file.name.startswith(".")] == []
        mirror.verify()
        assert mirror.snapshot_path == mirror.path
    with WeightMirror(tmp_path / "m") as again:
        assert again.version == "000003"
        assert sf.read_checkpoint(again.path) == models[3]


def mirror_before(number):
    return "0" if number == 1 else f"{number - 1:06d}"


def test_modes_can_alternate(tmp_path, chain):
    directory, models = chain
    WeightMirror.create(directory / "base", tmp_path / "m").close()
    for number, in_place in ((1, False), (2, True), (3, False)):
        with WeightMirror(tmp_path / "m", in_place=in_place) as mirror:
            assert mirror.apply_delta(directory / f"d{number}").in_place is in_place
            assert sf.read_checkpoint(mirror.path) == models[number]
            mirror.verify()


def test_it_goes_in_place_when_the_disk_is_short(tmp_path, chain):
    directory, models = chain
    WeightMirror.create(directory / "base", tmp_path / "m").close()
    with WeightMirror(tmp_path / "m", disk=CountingDisk(free=1 << 20)) as mirror:
        assert mirror.apply_delta(directory / "d1").in_place
        assert sf.read_checkpoint(mirror.path) == models[1]
    with WeightMirror(tmp_path / "m", in_place=False, disk=CountingDisk(free=1 << 20)) as mirror:
        with pytest.raises(SnapshotError, match="bytes more") as caught:
            mirror.apply_delta(directory / "d2")
        assert caught.value.hint
        assert mirror.version == "000001"
    with WeightMirror(tmp_path / "m") as mirror:  # room again: second files are made once, and stay
        assert not mirror.apply_delta(directory / "d2").in_place
    with WeightMirror(tmp_path / "m", disk=CountingDisk(free=0)) as mirror:
        assert not mirror.apply_delta(directory / "d3").in_place or mirror.version == "000003"
        assert sf.read_checkpoint(mirror.path) == models[3]


@MODES
def test_fsyncs_and_writes_are_few(tmp_path, chain, in_place):
    directory, models = chain
    disk = CountingDisk()
    with WeightMirror.create(directory / "base", tmp_path / "m", in_place=in_place, disk=disk) as mirror:
        for number in (1, 2, 3):
            disk.calls.clear()
            disk.written = 0
            report = mirror.apply_delta(directory / f"d{number}")
            syncs = disk.calls["fsync"] + disk.calls["fsync_directory"]
            assert syncs <= report.shards + 2
            if not in_place:
                files = sum(os.path.getsize(mirror.path / name) for name in os.listdir(mirror.path) if "-of-" in name)
                assert disk.written < files + 10_000
        disk.calls.clear()
        mirror.advance("4")
        assert disk.calls["fsync"] + disk.calls["fsync_directory"] == 2
        assert mirror.version == "4"
    with WeightMirror(tmp_path / "m", disk=CountingDisk()) as mirror:
        assert mirror.version == "4"
        assert sf.read_checkpoint(mirror.path) == models[3]


def broken_deltas(directory, models):
    """Yield (name, delta directory, error, what it names) of deltas that must change nothing."""
    old, new = models[0], models[1]

    def write(name, **options):
        return sf.write_delta(directory / name, options.pop("old", old), options.pop("new", new), **options)

    numbers = {"version": "000003", "base_version": "000002"}
    yield "base", write("base", metadata=numbers), SnapshotChainError, "000002"
    stranger = {**new, "lm_head.weight": ("BF16", [1], b"ab")}
    grown = {**old, "lm_head.weight": ("BF16", [1], b"cd")}
    yield "unknown", write("unknown", old=grown, new=stranger), SnapshotLayoutError, "lm_head.weight"

    def cut(data):
        return sf.frame(data[:-2] if len(data) == 18 else data)

    changed = {**new, "c.weight": ("F16", [3, 3], bytes(18))}
    yield "length", write("length", new=changed, make_frame=cut), ChecksumError, "c.weight"

    def grow(data):
        return sf.frame(data + b"\1" if len(data) == 18 else data)

    yield "longer", write("longer", new=changed, make_frame=grow), ChecksumError, "c.weight"

    def flip(data):
        return sf.frame(bytes([data[0] ^ 1]) + data[1:] if len(data) > 1 << 20 else data)

    yield "checksum", write("checksum", make_frame=flip), ChecksumError, "embed.weight"

    def damage(data):
        frame = bytearray(sf.frame(data))
        if len(data) > 1 << 20:
            frame[len(frame) // 2 :] = bytes(len(frame) - len(frame) // 2)
        return bytes(frame)

    yield "damaged", write("damaged", make_frame=damage), ChecksumError, "embed.weight"


@MODES
def test_what_is_wrong_changes_nothing_and_is_named(tmp_path, chain, in_place):
    directory, models = chain
    with WeightMirror.create(directory / "base", tmp_path / "m", in_place=in_place, workers=2) as mirror:
        for name, delta, error, named in broken_deltas(tmp_path / "bad", models):
            before = {path: data for path, data in tree(mirror.path).items() if "/b/" not in path}
            with pytest.raises(error, match=named):
                mirror.apply_delta(delta)
            after = {path: data for path, data in tree(mirror.path).items() if "/b/" not in path}
            assert before == after, name
            assert mirror.version == "0"
            mirror.verify()
        mirror.apply_delta(directory / "d1")
        assert sf.read_checkpoint(mirror.path) == models[1]
        with pytest.raises(SnapshotChainError, match="applies to version '000000'") as caught:
            mirror.apply_delta(directory / "d1")
        assert "already" in (caught.value.hint or "")
    with WeightMirror(tmp_path / "m") as mirror:
        assert sf.read_checkpoint(mirror.path) == models[1]


def test_one_process_at_a_time_and_the_other_is_named(tmp_path, chain):
    directory, _ = chain
    with WeightMirror.create(directory / "base", tmp_path / "m"):
        code = (
            "import sys\nfrom cwtrain.hotload import WeightMirror\n"
            "try:\n    WeightMirror(sys.argv[1])\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
        )
        told = subprocess.run([sys.executable, "-c", code, tmp_path / "m"], capture_output=True, text=True, check=True)
        assert told.stdout.startswith("MirrorLockedError")
        assert f"process {os.getpid()} on " in told.stdout
        assert " since 2" in told.stdout
        with pytest.raises(MirrorLockedError, match=f"process {os.getpid()}"):
            WeightMirror(tmp_path / "m")
        with pytest.raises(MirrorLockedError):
            WeightMirror.create(directory / "base", tmp_path / "m", replace=True)
    WeightMirror(tmp_path / "m").close()


def test_closed_is_closed(tmp_path, chain):
    directory, _ = chain
    mirror = WeightMirror.create(directory / "base", tmp_path / "m")
    mirror.close()
    mirror.close()
    with pytest.raises(MirrorError, match="closed"):
        mirror.apply_delta(directory / "d1")


def test_states_of_other_versions_are_refused_by_name(tmp_path, chain):
    directory, _ = chain
    WeightMirror.create(directory / "base", tmp_path / "m").close()
    path = tmp_path / "m" / ".cwtrain-mirror" / "state.json"
    state = json.loads(path.read_text())
    assert state["schema_version"] == 1
    path.write_text(json.dumps({**state, "schema_version": 99}))
    with pytest.raises(MirrorError, match=r"schema_version 99, this cwtrain reads 1"):
        WeightMirror(tmp_path / "m")
    for text in ("", "{", "[]", json.dumps({**state, "shards": {"x": 1}}), json.dumps({**state, "serial": "1"})):
        path.write_text(text)
        with pytest.raises(MirrorError):
            WeightMirror(tmp_path / "m")
    path.write_text(json.dumps(state))
    WeightMirror(tmp_path / "m").close()
    with pytest.raises(MirrorError, match="no mirror here"):
        WeightMirror(tmp_path)


def test_another_boot_means_verifying(tmp_path, chain):
    directory, models = chain
    with WeightMirror.create(directory / "base", tmp_path / "m", disk=CountingDisk(boot="one")) as mirror:
        mirror.apply_delta(directory / "d1")
    with WeightMirror(tmp_path / "m", disk=CountingDisk(boot="two")) as mirror:
        assert sf.read_checkpoint(mirror.path) == models[1]
    state = json.loads((tmp_path / "m/.cwtrain-mirror/state.json").read_text())
    assert state["boot_id"] == "two"
    path = Path(os.path.realpath(tmp_path / "m/model-00001-of-00003.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    WeightMirror(tmp_path / "m", disk=CountingDisk(boot="two")).close()  # nobody looked at the bytes
    with pytest.raises(MirrorDamagedError, match=r"a\.weight") as caught:
        WeightMirror(tmp_path / "m", disk=CountingDisk(boot="three"))
    assert "from_bucket" in (caught.value.hint or "")
    with WeightMirror.create(directory / "base", tmp_path / "m", replace=True) as mirror:
        mirror.apply_delta(directory / "d1")
        assert sf.read_checkpoint(mirror.path) == models[1]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_create_refuses(tmp_path, chain):
    directory, models = chain
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(SnapshotError, match="not an empty directory"):
        WeightMirror.create(directory / "base", tmp_path / "full")
    with pytest.raises(SnapshotLayoutError):
        WeightMirror.create(directory / "d1", tmp_path / "m")
    sums = {name: f"{zlib.adler32(raw):08x}" for name, (_, _, raw) in models[0].items()}
    with pytest.raises(ChecksumError, match="expected is 00000000"):
        WeightMirror.create(directory / "base", tmp_path / "m", checksums={**sums, "c.weight": "00000000"})
    assert sorted(os.listdir(tmp_path)) == ["full"]
    with WeightMirror.create(directory / "base", tmp_path / "m"):
        pass
    with pytest.raises(MirrorError, match="there is a mirror already"):
        WeightMirror.create(directory / "base", tmp_path / "m")


def test_manifest_and_copy(tmp_path, chain):
    directory, models = chain
    with WeightMirror.create(directory / "base", tmp_path / "m") as mirror:
        mirror.apply_delta(directory / "d1")
        manifest = mirror.manifest("run-v000001-full", run_id="run", step=7)
        assert parse_manifest(manifest_to_bytes(manifest)) == manifest
        assert manifest["version"] == "000001"
        assert manifest["step"] == 7
        assert manifest["tensors"] == dict(sorted(mirror.checksums.items()))
        copy = mirror.write_full_snapshot(tmp_path / "copy")
        mirror.apply_delta(directory / "d2")
    assert sf.read_checkpoint(copy) == models[1]
    assert not any(path.is_symlink() for path in copy.iterdir())
    assert inspect_snapshot(copy, verify="full").checksums == manifest["tensors"]


@MODES
def test_b15_b27_other_tensors_are_refused_by_name(tmp_path, chain, in_place):
    """B15, B27: packed experts, another dtype of the same size: both sides are named, and nothing is written."""
    _, models = chain
    sf.write_full(tmp_path / "v0", *shards(models[0]))
    packed = {name: tensor for name, tensor in models[0].items() if name != "b.weight"}
    sf.write_full(tmp_path / "packed", {**packed, "gate_up.weight": models[0]["b.weight"]})
    sf.write_full(tmp_path / "cast", {**models[0], "a.scale": ("I32", [], models[0]["a.scale"][2])})
    with WeightMirror.create(tmp_path / "v0", tmp_path / "m", in_place=in_place) as mirror:
        for name, said in (("packed", r"b\.weight.*gate_up\.weight"), ("cast", r"I32 \[\].*F32|F32 \[\].*I32")):
            with pytest.raises(SnapshotLayoutError, match=f"(?s){said}"):
                mirror.write_delta(tmp_path / name, tmp_path / "d", version=1)
            assert not (tmp_path / "d").exists()
            assert mirror.version == "0"
            assert sf.read_checkpoint(mirror.path) == models[0]


@MODES
def test_delta_and_mirror_in_one_pass(tmp_path, chain, in_place):
    _, models = chain
    for number in range(4):
        sf.write_full(tmp_path / f"v{number}", *shards(models[number]))
    sf.write_full(tmp_path / "same", *shards(models[3]))
    with WeightMirror.create(tmp_path / "v0", tmp_path / "m", in_place=in_place) as mirror:
        for number in (1, 2, 3):
            stats = mirror.write_delta(tmp_path / f"v{number}", tmp_path / f"d{number}", version=number)
            assert stats.version == mirror.version == f"{number:06d}"
            assert sf.read_checkpoint(mirror.path) == models[number]
            mirror.verify()
            write_delta(
                tmp_path / f"v{number - 1}", tmp_path / f"v{number}", tmp_path / f"e{number}",
                version=number, base_version=number - 1,
            )  # fmt: skip
            assert tree(tmp_path / f"d{number}") == tree(tmp_path / f"e{number}")
        assert mirror.write_delta(tmp_path / "same", tmp_path / "d4", version=4).empty
        assert mirror.version == "000004"
        other = {**models[3], "c.weight": ("F32", [3], bytes(12))}
        sf.write_full(tmp_path / "other", *shards(other))
        with pytest.raises(SnapshotLayoutError, match=r"c\.weight"):
            mirror.write_delta(tmp_path / "other", tmp_path / "d5", version=5)
        assert mirror.version == "000004"
        assert not (tmp_path / "d5").exists()
        mirror.verify()
        assert sf.read_checkpoint(mirror.path) == models[3]


def test_a_delta_can_be_applied_where_the_one_pass_was_killed(tmp_path, chain):
    _, models = chain
    for number in (0, 1):
        sf.write_full(tmp_path / f"v{number}", *shards(models[number]))

    class Failing(CountingDisk):
        def fsync(self, fd):
            raise OSError(5, "no such luck")

    WeightMirror.create(tmp_path / "v0", tmp_path / "m").close()
    with WeightMirror(tmp_path / "m", disk=Failing(boot=Disk().boot_id())) as mirror:
        with pytest.raises(OSError, match="no such luck"):
            mirror.write_delta(tmp_path / "v1", tmp_path / "d1", version=1)
        assert mirror.version == "0"
    with WeightMirror(tmp_path / "m") as mirror:
        mirror.apply_delta(tmp_path / "d1")
        assert sf.read_checkpoint(mirror.path) == models[1]
