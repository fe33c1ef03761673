"""Inspection of full checkpoints: what is uploaded, what is left out, what is refused, all at once."""

import json
import os
import pickle
import socket
import subprocess
import sys

import pytest

from cwtrain.errors import ConfigError, SnapshotChangedError, SnapshotLayoutError
from cwtrain.models.snapshot import INDEX_NAME, SnapshotKind
from cwtrain.snapshots import files_for_upload, index_for_upload, inspect_snapshot, local_snapshot_to_json
from helpers import snapshot_files as sf

ONE = "model-00001-of-00002.safetensors"
TWO = "model-00002-of-00002.safetensors"


@pytest.fixture
def checkpoint(tmp_path):
    tensors = sf.toy(0)
    names = list(tensors)
    return sf.write_full(
        tmp_path / "ckpt", {name: tensors[name] for name in names[:4]}, {name: tensors[name] for name in names[4:]}
    )


def problems_of(path, **options) -> list[str]:
    with pytest.raises(SnapshotLayoutError) as caught:
        inspect_snapshot(path, **options)
    error = caught.value
    assert error.problems
    assert all(problem in error.message for problem in error.problems[:50])
    assert pickle.loads(pickle.dumps(error)).problems == error.problems
    return list(error.problems)


def only_problem(path, **options) -> str:
    problems = problems_of(path, **options)
    assert len(problems) == 1, problems
    return problems[0]


def edit_index(directory, change):
    index = sf.read_index(directory)
    change(index)
    sf.write_json(directory / INDEX_NAME, index)


def read_object(file) -> bytes:
    """Return the bytes of one object as an upload sends them."""
    data = file.head
    for offset, length in file.ranges:
        with open(file.path, "rb") as handle:
            handle.seek(offset)
            data += handle.read(length)
    assert len(data) == file.size_bytes
    return data


def test_a_full_checkpoint(checkpoint):
    snapshot = inspect_snapshot(checkpoint)
    assert snapshot.kind is SnapshotKind.FULL
    assert [file.name for file in snapshot.files] == [ONE, TWO, "config.json", "tokenizer.json", INDEX_NAME]
    assert snapshot.path == str(checkpoint)
    assert snapshot.total_bytes == sum(os.path.getsize(checkpoint / file.name) for file in snapshot.files)
    assert snapshot.tensors == len(sf.toy(0))
    assert snapshot.tensor_bytes == sum(len(raw) for _, _, raw in sf.toy(0).values())
    assert not snapshot.warnings
    assert not snapshot.left_out
    assert not snapshot.index_generated
    assert snapshot.previous_identity is None
    for file in snapshot.files:
        status = os.stat(checkpoint / file.name)
        assert (file.head, file.ranges) == (b"", ((0, status.st_size),))
        assert (file.size_bytes, file.file_bytes) == (status.st_size, status.st_size)
        assert (file.mtime_ns, file.inode, file.device) == (status.st_mtime_ns, status.st_ino, status.st_dev)
    assert files_for_upload(snapshot, "step_1") == snapshot.files
    assert json.loads(index_for_upload(snapshot, "step_1")) == sf.read_index(checkpoint)


def test_json_of_the_command_line(checkpoint):
    data = json.loads(json.dumps(local_snapshot_to_json(inspect_snapshot(checkpoint))))
    assert data["path"] == str(checkpoint)
    assert data["type"] == "FULL"
    assert data["files"][-1] == INDEX_NAME
    assert data["total_bytes"] == sum(data["file_bytes"].values())
    assert data["empty_delta"] is False
    assert data["incremental"] is None
    assert data["index_metadata"]["total_size"] > 0
    assert data["index_generated"] is False


def test_side_files_are_uploaded_by_an_allow_list(checkpoint):
    wanted = [
        "generation_config.json", "tokenizer.model", "tokenizer_extra", "merges.bpe", "vocab.bpe",
        "chat_template.jinja",
        "modeling_toy.py", "notes.txt", "special_tokens_map.json", "preprocessor_config.json",
    ]  # fmt: skip
    unwanted = [
        ".hidden.json", "pytorch_model.bin", "tokenizer.bin", "x.pt", "x.pth", "weights.tmp", "config.json.tmp",
        "optimizer.json", "optimizer.txt", "trainer_state.json", "training_args.json", "scheduler.json",
        "rng_state_0.json", "README.txt", "README.md", "pytorch_model.bin.index.json",
        "consolidated.safetensors.index.json", "latest_checkpointed_iteration.txt", "events.out.tfevents", "LICENSE",
        f"{INDEX_NAME}.bak",
    ]  # fmt: skip
    for name in wanted + unwanted:
        (checkpoint / name).write_text("{}")
    (checkpoint / "tokenizer_folder").mkdir()
    (checkpoint / "global_step_3").mkdir()
    snapshot = inspect_snapshot(checkpoint)
    assert {file.name for file in snapshot.files} == {ONE, TWO, INDEX_NAME, "config.json", "tokenizer.json", *wanted}
    assert set(snapshot.left_out) == {*unwanted, "tokenizer_folder/", "global_step_3/"}
    assert snapshot.files[-1].name == INDEX_NAME


def test_a_single_file_gets_a_generated_index(tmp_path):
    directory = tmp_path / "ckpt"
    sf.write_json(directory / "config.json", {})
    (directory / "model.safetensors").write_bytes(sf.safetensors(sf.toy(0)))
    snapshot = inspect_snapshot(directory)
    assert snapshot.index_generated
    assert not (directory / INDEX_NAME).exists()
    index = snapshot.files[-1]
    assert (index.name, index.path, index.ranges) == (INDEX_NAME, None, ())
    data = json.loads(index.head)
    assert data["metadata"] == {"total_size": sum(len(raw) for _, _, raw in sf.toy(0).values())}
    assert data["weight_map"] == dict.fromkeys(sf.toy(0), "model.safetensors")
    assert list(data["weight_map"]) == sorted(sf.toy(0))
    assert index.head == index_for_upload(snapshot, "step_1") == inspect_snapshot(directory).files[-1].head
    assert snapshot.total_bytes == sum(file.size_bytes for file in snapshot.files)


def test_b16_missing_shard(checkpoint):
    """B16: a shard that the index names and that is not there is named, with the number of its tensors."""
    os.remove(checkpoint / TWO)
    assert only_problem(checkpoint).startswith(f"{TWO}: the index names it for 3 tensors")


def test_b16_index_and_shards_must_agree_both_ways(checkpoint):
    """B16: tensors that only the index or only a shard has are refused, naming file and tensor."""
    edit_index(checkpoint, lambda index: index["weight_map"].update({"mtp.fc.weight": TWO}))
    assert "'mtp.fc.weight' is in it by the index" in only_problem(checkpoint)
    edit_index(checkpoint, lambda index: [index["weight_map"].pop(name) for name in ("mtp.fc.weight", "packed")])
    assert only_problem(checkpoint).startswith(
        f"{TWO}: tensor 'packed' is in it, but the index does not place it there"
    )
    edit_index(checkpoint, lambda index: index["weight_map"].update(packed=ONE))
    problems = problems_of(checkpoint)
    assert len(problems) == 2
    assert all("'packed'" in problem for problem in problems)


@pytest.mark.parametrize(
    "shard", ["../other.safetensors", "sub/x.safetensors", "/x.safetensors", "model.bin", "a\\b.safetensors", "",
              ".safetensors", "a\n.safetensors", 7, None, ["x"]]
)  # fmt: skip
def test_b16_weight_map_names_files_directly_inside(checkpoint, shard):
    """B16: a shard outside the directory, or no file name at all, is refused."""
    (checkpoint.parent / "other.safetensors").write_bytes(sf.safetensors({"x": ("U8", [1], b"x")}))
    edit_index(checkpoint, lambda index: index["weight_map"].update(x=shard))
    assert f"'x' to {shard!r}" in only_problem(checkpoint)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty (0 bytes)"),
        ('{"weight_map": {"a', "cut off?"),
        ("[]", "not a JSON object"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": []}', "weight_map is not an object"),
        ('{"weight_map": {}, "metadata": 3}', "metadata is not an object"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "the key 'a' twice"),
        ('{"weight_map": {}, "metadata": {"total_size": NaN}}', "NaN"),
        ('{"weight_map": {"\\ud800": "x.safetensors"}}', "half a character"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        ("<html>not here</html>", "HTML page"),
    ],
)
def test_indexes_of_the_wrong_shape(checkpoint, text, words):
    (checkpoint / INDEX_NAME).write_text(text)
    problem = only_problem(checkpoint)
    assert problem.startswith(INDEX_NAME)
    assert words in problem


@pytest.mark.parametrize("metadata", [None, {}, {"total_size": "9"}, {"total_size": 1.5}, {"total_size": 1}, "absent"])
def test_b62_index_metadata_is_not_needed_for_reading(checkpoint, metadata):
    """B62: an index without metadata, or with a wrong total_size, is read."""
    edit_index(
        checkpoint, lambda index: index.pop("metadata") if metadata == "absent" else index.update(metadata=metadata)
    )
    assert inspect_snapshot(checkpoint).index_metadata == (metadata if isinstance(metadata, dict) else {})


def test_b17_left_over_shards_are_refused(checkpoint):
    """B17: numbered shards of an earlier save are refused by name; nothing outside the index is ever uploaded."""
    for number in range(1, 5):
        (checkpoint / f"model-0000{number}-of-00004.safetensors").write_bytes(sf.safetensors({"x": ("U8", [1], b"x")}))
    problems = problems_of(checkpoint)
    assert [problem.partition(":")[0] for problem in problems] == [
        f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)
    ]
    assert all("left over from another save" in problem for problem in problems)


def test_b17_other_weight_files_are_left_out_with_a_warning(checkpoint):
    """B17: an unnamed safetensors file of another format is named once, and not uploaded, even if it is broken."""
    (checkpoint / "consolidated.safetensors").write_bytes(b"")
    (checkpoint / "model.safetensors").write_bytes(sf.safetensors(sf.toy(1)))
    (checkpoint / "optimizer.pt").write_bytes(b"x")
    (checkpoint / ".cache").mkdir()
    snapshot = inspect_snapshot(checkpoint)
    assert set(snapshot.left_out) == {".cache/", "consolidated.safetensors", "model.safetensors", "optimizer.pt"}
    assert [warning.partition(":")[0] for warning in snapshot.warnings] == [
        "consolidated.safetensors", "model.safetensors",
    ]  # fmt: skip
    assert [file.name for file in snapshot.files if file.name.endswith(".safetensors")] == [ONE, TWO]


def test_b17_one_tensor_in_two_shards(tmp_path):
    """B17: a tensor in two shards passes only with equal bytes; then the copy that the index names is uploaded."""
    shared = ("U8", [4], b"same")
    first = {"a": ("U8", [3], b"aaa"), "twice": shared, "b": ("U8", [2], b"bb")}
    second = {"twice": shared, "c": ("U8", [5], b"ccccc")}
    directory = sf.write_full(tmp_path / "ckpt", first, second)
    snapshot = inspect_snapshot(directory)
    assert snapshot.duplicates == ("twice",)
    assert (snapshot.tensors, snapshot.tensor_bytes) == (4, 14)
    files = {file.name: file for file in snapshot.files}
    assert read_object(files[TWO]) == (directory / TWO).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(read_object(files[ONE]))
    assert sf.read_tensors(tmp_path / "cut.safetensors") == ({"a": first["a"], "b": first["b"]}, {"format": "pt"})
    assert len(files[ONE].ranges) == 2
    assert snapshot.total_bytes == sum(file.size_bytes for file in snapshot.files)
    (directory / TWO).write_bytes(sf.safetensors({**second, "twice": ("U8", [4], b"Same")}, {"format": "pt"}))
    assert "'twice' is also in" in only_problem(directory)
    (directory / TWO).write_bytes(sf.safetensors({**second, "twice": ("I8", [4], b"same")}, {"format": "pt"}))
    assert "another type" in only_problem(directory)


def test_b37_links_are_followed(tmp_path, checkpoint):
    """B37: a hub cache of links is read through them, and uploaded under the links' names, also from outside."""
    hub = tmp_path / "hub" / "snapshots" / "abc"
    hub.mkdir(parents=True)
    for name in os.listdir(checkpoint):
        os.symlink(os.path.relpath(checkpoint / name, hub), hub / name)
    snapshot = inspect_snapshot(hub)
    plain = inspect_snapshot(checkpoint)
    assert [(f.name, f.size_bytes, f.inode) for f in snapshot.files] == [
        (f.name, f.size_bytes, f.inode) for f in plain.files
    ]
    assert [read_object(file) for file in snapshot.files] == [read_object(file) for file in plain.files]


def make_special(path, kind):
    if kind == "dangling":
        os.symlink("../blobs/gone", path)
    elif kind == "loop":
        os.symlink(path.name, path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link to directory":
        os.symlink(".", path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        os.symlink("/dev/zero", path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)


SPECIAL = {
    "dangling": "link to nothing (../blobs/gone)",
    "loop": "loop of links",
    "directory": "is a directory",
    "link to directory": "is a directory",
    "pipe": "named pipe",
    "device": "character device",
    "socket": "socket",
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [ONE, INDEX_NAME, "config.json"])
def test_b37_what_is_no_regular_file_is_refused_by_name(checkpoint, name, kind):
    """B37: dangling links, loops, directories, FIFOs, devices and sockets are named; none is opened or waited for."""
    os.remove(checkpoint / name)
    make_special(checkpoint / name, kind)
    problem = only_problem(checkpoint)
    assert problem.startswith(f"{name}: ")
    assert SPECIAL[kind] in problem


@pytest.mark.parametrize("kind", ["dangling", "loop", "pipe", "device"])
def test_b37_side_files_too(checkpoint, kind):
    """B37: a side file that is no regular file is named as well; a directory of such a name is left out."""
    make_special(checkpoint / "vocab.txt", kind)
    problem = only_problem(checkpoint)
    assert problem.startswith("vocab.txt: ")
    assert SPECIAL[kind] in problem


def test_the_directory_itself(tmp_path, checkpoint):
    assert "no such directory" in only_problem(tmp_path / "nowhere")
    assert "give the directory" in only_problem(checkpoint / ONE)
    link = tmp_path / "link"
    os.symlink(checkpoint, link)
    assert inspect_snapshot(str(link)).path == str(link)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "give the directory of a checkpoint"),
        ([ONE], "may not be complete yet"),
        (["pytorch_model.bin"], "save the checkpoint as safetensors"),
        (["weight_v000001/", "weight_v000002/"], "for example weight_v000002"),
    ],
)
def test_what_to_do_without_index(tmp_path, names, words):
    directory = tmp_path / "ckpt"
    sf.write_json(directory / "config.json", {})
    for name in names:
        (directory / name).mkdir() if name.endswith("/") else (directory / name).write_bytes(b"")
    assert words in only_problem(directory)


def test_an_adapter_is_refused_with_the_way_to_merge_it(checkpoint):
    (checkpoint / "adapter_config.json").write_text("{}")
    problem = only_problem(checkpoint)
    assert problem.startswith("adapter_config.json: ")
    assert "merge_and_unload" in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
        ("", "empty"),
        ("version https://git-lfs.github.com/", "git lfs"),
    ],
)
def test_config_must_be_an_object(checkpoint, text, words):
    (checkpoint / "config.json").write_text(text)
    assert words in only_problem(checkpoint)
    os.remove(checkpoint / "config.json")
    assert "is not there" in only_problem(checkpoint)


def test_config_may_hold_what_published_ones_hold(checkpoint):
    (checkpoint / "config.json").write_text('{"limit": Infinity, "a": 1, "a": 2}')
    inspect_snapshot(checkpoint)


def test_all_problems_are_reported_at_once(checkpoint):
    os.remove(checkpoint / "config.json")
    (checkpoint / ONE).write_bytes((checkpoint / ONE).read_bytes()[:-1])
    os.remove(checkpoint / TWO)
    (checkpoint / "model-00003-of-00003.safetensors").write_bytes(b"")
    (checkpoint / "adapter_config.json").write_text("{}")
    os.symlink("gone", checkpoint / "vocab.json")
    edit_index(checkpoint, lambda index: index["metadata"].update(checksum_format="blake3"))
    names = [problem.partition(":")[0] for problem in problems_of(checkpoint)]
    assert sorted(names) == sorted(
        ["config.json", ONE, TWO, "model-00003-of-00003.safetensors", "adapter_config.json", "vocab.json", INDEX_NAME]
    )


def test_a_full_snapshot_without_tensors_is_refused(tmp_path):
    directory = sf.write_full(tmp_path / "ckpt")
    assert "names no tensors" in only_problem(directory)
    os.remove(directory / INDEX_NAME)
    (directory / "model.safetensors").write_bytes(sf.with_header("{}"))
    assert "names no tensors" in only_problem(directory)


def test_checksums_of_a_full_snapshot(tmp_path):
    tensors = {"a": ("U8", [3], b"abc"), "e": ("U8", [0], b"")}
    directory = sf.write_full(tmp_path / "ckpt", tensors, metadata={"total_size": 3, "checksum_format": "adler32"})
    shard = directory / "model-00001-of-00001.safetensors"
    assert len(problems_of(directory)) == 2
    shard.write_bytes(sf.safetensors(tensors, {"a": "024d0127", "e": "00000001"}))
    assert inspect_snapshot(directory).checksums == {"a": "024d0127", "e": "00000001"}
    for wrong in ("24d0127", "024D0127", "0x24d0127", "024d0127\n", ""):
        shard.write_bytes(sf.safetensors(tensors, {"a": wrong, "e": "00000001"}))
        assert "8 lower-case hex digits" in only_problem(directory)
    edit_index(directory, lambda index: index["metadata"].update(checksum_format="xxh3-128"))
    assert "write_full_snapshot" in only_problem(directory)


def test_names_that_no_object_can_have(checkpoint):
    bad = os.fsencode(checkpoint) + b"/vocab\xff.txt"
    open(bad, "wb").close()
    (checkpoint / "a\nb.json").write_text("{}")
    snapshot = inspect_snapshot(checkpoint)
    assert {"vocab\\udcff.txt", "a\\nb.json"} <= set(snapshot.left_out)
    assert len(snapshot.warnings) == 2
    json.dumps(local_snapshot_to_json(snapshot), ensure_ascii=False).encode()


def test_predecessor_of_a_full_snapshot_is_not_used(checkpoint):
    snapshot = inspect_snapshot(checkpoint, previous_identity="step_1")
    assert snapshot.previous_identity is None
    assert "step_1" in snapshot.warnings[0]


def test_arguments(checkpoint):
    for options in ({"verify": "all"}, {"base": checkpoint}):
        with pytest.raises(ConfigError):
            inspect_snapshot(checkpoint, **options)


def test_a_file_that_changes_is_an_error(checkpoint):
    from cwtrain.snapshots import open_checkpoint

    tensor = open_checkpoint(checkpoint).tensors["layer.weight"]
    os.utime(tensor.file.path, ns=(1, 1))
    with pytest.raises(SnapshotChangedError) as caught:
        tensor.open()
    assert caught.value.file


def test_inspection_imports_nothing_heavy(checkpoint):
    code = (
        "import sys; from cwtrain.snapshots import inspect_snapshot; inspect_snapshot(sys.argv[1]);"
        "print([m for m in ('boto3', 'botocore', 'httpx', 'numpy', 'rich', 'zstandard') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code, checkpoint], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
