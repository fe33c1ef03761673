"""``cwtrain snapshot``: what it writes is decoded by helpers that share no code with the library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers.run_cli import run
from helpers.snapshot_files import apply_delta, read_checkpoint, read_index, toy, write_delta, write_full, xor


@pytest.fixture
def pair(tmp_path):
    """Two versions of a small model."""
    for version in (1, 3):
        write_full(tmp_path / f"step_{version:06d}", toy(version))
    return tmp_path / "step_000001", tmp_path / "step_000003"


def made(pair, out):
    done = run("snapshot", "diff", *map(str, pair), str(out))
    assert done.code == 0, done.err
    return done


def test_diff_takes_the_versions_from_the_names_and_says_what_is_in_the_delta(pair, tmp_path):
    done = made(pair, tmp_path / "delta")
    old, new = toy(1), toy(3)
    changed = [name for name in new if old[name] != new[name]]
    differing = sum(byte != 0 for name in changed for byte in xor(old[name][2], new[name][2]))
    assert (done.data["version"], done.data["base_version"]) == ("000003", "000001")
    assert (done.data["changed_tensors"], done.data["changed_bytes"]) == (len(changed), differing)
    assert done.data["path"] == str(tmp_path / "delta")
    assert apply_delta(old, tmp_path / "delta") == new
    assert done.err.splitlines()[-1].startswith("comparing: 5.9 KiB of 5.9 KiB")


@pytest.mark.parametrize(
    ("options", "versions"),
    [
        ([], ("000001", "000000")),
        (["--base-version", "7"], ("000008", "000007")),
        (["--version", "9"], ("000009", "000000")),
        (["--version", "9", "--base-version", "4"], ("000009", "000004")),
    ],
)
def test_diff_of_names_without_numbers_counts_from_0(tmp_path, options, versions):
    write_full(tmp_path / "base", toy(0))
    write_full(tmp_path / "new", toy(1))
    done = run("snapshot", "diff", str(tmp_path / "base"), str(tmp_path / "new"), str(tmp_path / "out"), *options)
    assert (done.data["version"], done.data["base_version"]) == versions
    metadata = read_index(tmp_path / "out")["metadata"]
    assert (metadata["version"], metadata["base_version"]) == versions


def test_a_delta_without_changes_is_written_and_warned_about(pair, tmp_path):
    done = run("snapshot", "diff", str(pair[0]), str(pair[0]), str(tmp_path / "out"))
    assert done.data["empty"] is True
    assert "warning: nothing changed" in done.err


def test_apply_gives_the_new_bytes(pair, tmp_path):
    made(pair, tmp_path / "delta")
    done = run("snapshot", "apply", str(pair[0]), str(tmp_path / "delta"), str(tmp_path / "out"))
    assert (done.code, done.data["version"]) == (0, "000003")
    assert read_checkpoint(tmp_path / "out") == toy(3)
    assert "applying: " in done.err


def test_a_delta_on_another_base_changes_nothing(pair, tmp_path):
    made(pair, tmp_path / "delta")
    done = run("snapshot", "apply", str(pair[1]), str(tmp_path / "delta"), str(tmp_path / "out"))
    assert (done.code, done.out) == (1, "")
    assert "layer.weight" in done.err
    assert "next: " in done.err
    assert not (tmp_path / "out").exists()


def test_full_records_checksums(pair, tmp_path):
    done = run("snapshot", "full", str(pair[0]), str(tmp_path / "out"))
    assert (done.code, done.data["checksums"]) == (0, len(toy(1)))
    assert read_checkpoint(tmp_path / "out") == toy(1)
    assert run("snapshot", "verify", str(tmp_path / "out")).data["verified"] == "full"


def test_convert_makes_what_the_service_takes(pair, tmp_path):
    write_delta(tmp_path / "foreign", toy(1), toy(3), metadata={"version": "000003", "base_version": "000001"})
    done = run("snapshot", "convert", str(pair[0]), str(tmp_path / "foreign"), str(tmp_path / "out"))
    assert (done.code, done.data["version"]) == (0, "000003")
    assert apply_delta(toy(1), tmp_path / "out") == toy(3)


def test_verify_compares_with_the_base_and_names_what_is_wrong(pair, tmp_path):
    made(pair, tmp_path / "delta")
    right = run("snapshot", "verify", str(tmp_path / "delta"), "--base", str(pair[0]))
    assert (right.code, right.data["type"], right.data["verified"]) == (0, "INCREMENTAL", "full")
    wrong = run("snapshot", "verify", str(tmp_path / "delta"), "--base", str(pair[1]))
    assert (wrong.code, wrong.out) == (1, "")
    assert "layer.weight" in wrong.err


def test_verify_takes_a_delta_that_carries_identities(tmp_path):
    metadata = {"version": "step_000003", "base_version": "step_000001"}
    write_delta(tmp_path / "delta", toy(1), toy(3), metadata=metadata)
    assert run("snapshot", "verify", str(tmp_path / "delta")).code == 0


def test_show_counts_what_changes(pair, tmp_path):
    made(pair, tmp_path / "delta")
    found = run("snapshot", "show", str(tmp_path / "delta")).data
    old, new = toy(1), toy(3)
    for tensor in found["tensors"]:
        before, after = old[tensor["name"]][2], new[tensor["name"]][2]
        assert tensor["raw_bytes"] == len(after)
        assert tensor["changed_bytes"] == sum(byte != 0 for byte in xor(before, after))
    assert found["type"] == "INCREMENTAL"
    assert found["tensor_count"] == len(found["tensors"])
    assert found["density"] == pytest.approx(found["changed_bytes"] / found["raw_bytes"], rel=1e-5)
    assert sum(layer["tensors"] for layer in found["layers"]) == len(found["tensors"])


def test_show_groups_by_layer_with_a_bar_each(tmp_path):
    tensors = {
        f"model.layers.{layer}.w": ("BF16", [8 * (layer + 1)], bytes(range(16)) * (layer + 1)) for layer in range(2)
    }
    write_full(tmp_path / "full", {**tensors, "norm": ("BF16", [1], b"ab")})
    found = run("snapshot", "show", str(tmp_path / "full")).data
    assert [layer["layer"] for layer in found["layers"]] == ["model.layers.0", "model.layers.1", "norm"]
    assert (found["ratio"], found["density"]) == (1.0, None)
    rows = run("-o", "table", "snapshot", "show", str(tmp_path / "full")).out.splitlines()
    bars = {line.split()[0]: line.count("█") for line in rows if line.strip()}
    assert (bars["model.layers.1"], bars["model.layers.0"]) == (16, 8)
    assert run("-o", "id", "snapshot", "show", str(tmp_path / "full")).out.split() == [*tensors, "norm"]
    lines = run("-o", "jsonl", "snapshot", "show", str(tmp_path / "full")).out.splitlines()
    assert [json.loads(line)["name"] for line in lines] == [*tensors, "norm"]


def test_show_names_a_damaged_frame(tmp_path):
    write_delta(tmp_path / "delta", toy(1), toy(3), make_frame=lambda data: b"no frame at all")
    done = run("snapshot", "show", str(tmp_path / "delta"))
    assert (done.code, done.out) == (1, "")
    assert "layer.weight" in done.err


def test_out_that_exists_is_left_alone(pair, tmp_path):
    made(pair, tmp_path / "delta")
    again = run("snapshot", "diff", *map(str, pair), str(tmp_path / "delta"))
    assert (again.code, again.out) == (1, "")
    assert "next: " in again.err
    assert apply_delta(toy(1), tmp_path / "delta") == toy(3)


def test_quiet_says_nothing(pair, tmp_path):
    assert run("--quiet", "snapshot", "diff", *map(str, pair), str(tmp_path / "delta")).err == ""


def test_no_network_library_is_loaded(pair, tmp_path):
    words = ["snapshot", "diff", *map(str, pair), str(tmp_path / "delta")]
    code = f"from cwtrain.cli import main; main({words!r}); import sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not {"boto3", "botocore", "httpx", "rich"} & set(done.stderr.split())
