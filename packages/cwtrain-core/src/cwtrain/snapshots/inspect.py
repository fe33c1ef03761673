"""From a directory to a ``LocalSnapshot``, or to one error that lists everything that is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from cwtrain.errors import ConfigError, SnapshotChangedError, SnapshotError, SnapshotLayoutError
from cwtrain.models.snapshot import INDEX_NAME, LocalSnapshot, SnapshotFile, SnapshotKind
from cwtrain.snapshots import identity as identities
from cwtrain.snapshots._delta_rules import Versions, check_blobs, check_formats, check_versions, read_checksums
from cwtrain.snapshots._digests import recorded_digest
from cwtrain.snapshots._files import Entry, RegularFile, list_directory
from cwtrain.snapshots._json import MAX_JSON_BYTES
from cwtrain.snapshots._model_rules import end_tokens_trouble, has_tokenizer, quantisation_trouble, wrapped_names
from cwtrain.snapshots._shards import NUMBERED, Shards, read_shards, take_spare, without_duplicates
from cwtrain.snapshots._sidefiles import ADAPTER, TEMPLATES, adapter_trouble, is_side_file, list_with_templates
from cwtrain.snapshots._sniff import describe_content
from cwtrain.snapshots.checkpoint import SINGLE_NAME, raise_problems
from cwtrain.snapshots.header import Header, read_header, unfit_names
from cwtrain.snapshots.index import dump_index, generate_index, is_delta, read_index

__all__ = ["Inspection", "inspect_snapshot", "late_files", "scan"]

_CONFIG = "config.json"
_GENERATION = "generation_config.json"


@attrs.define(kw_only=True)
class Inspection:
    """What is known of a directory so far: everything wrong goes to ``problems``, everything odd to ``warnings``."""

    path: str
    listing: Mapping[str, Entry]
    problems: list[str] = attrs.field(factory=list)
    warnings: list[str] = attrs.field(factory=list)
    left_out: list[str] = attrs.field(factory=list)
    side_files: list[str] = attrs.field(factory=list)
    index: dict[str, Any] | None = None
    index_generated: bool = False
    config: dict[str, Any] | None = None
    """``config.json``, where it could be read."""
    shards: Shards | None = None
    checksums: dict[str, str] = attrs.field(factory=dict)
    versions: Versions = attrs.field(factory=Versions)

    def usable(self, name: str) -> bool:
        """Return whether ``name`` is there as a regular file; if it is there as something else, that is a problem."""
        entry = self.listing.get(name)
        if entry is not None and entry.trouble:
            self.problems.append(f"{name}: {entry.trouble}")
        return entry is not None and entry.trouble is None

    def place(self, name: str) -> str:
        """Return the path of ``name``."""
        return os.path.join(self.path, name)


def inspect_snapshot(
    path: str | os.PathLike[str],
    *,
    previous_identity: str | None = None,
    identity_for_version: Callable[[int], str | None] = identities.identity_for_version,
    allow_empty_delta: bool = False,
    verify: str = "headers",
    base: str | os.PathLike[str] | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> LocalSnapshot:
    """Return what the directory at ``path`` holds, ready to be published.

    Works offline. ``previous_identity`` names the snapshot that a delta applies to; without it the number in the
    delta's ``base_version`` is mapped by ``identity_for_version`` (7 becomes ``weight_v000007``). An empty delta is
    refused unless ``allow_empty_delta``. Symbolic links are followed.

    ``verify="headers"`` reads only the index and the headers. ``verify="full"`` reads everything: a delta's frames are
    decoded, in bounded memory, and each result is checked against the recorded Adler-32 where ``base`` (the checkpoint
    directory or file that the delta was made from) is given; a full snapshot's tensors are checked where their
    Adler-32 is recorded. Without ``base`` a delta's frames are checked to be exactly one well-formed frame each, of the
    length that they state, which may be at most 1 TiB. ``verified`` of what is returned says how far it went:
    ``headers``, ``frames`` or ``full``. ``on_progress`` is called with the bytes that are checked, and
    all that will be.

    Raises SnapshotLayoutError whose ``problems`` lists everything that is wrong, with file and fix; ChecksumError for
    bytes that do not match; SnapshotChangedError for a file that changes meanwhile; ConfigError for a wrong argument.
    """
    if verify not in ("headers", "full"):
        raise ConfigError(f"verify={verify!r} is unknown", hint="use verify='headers' or verify='full'")
    if base is not None and verify != "full":
        raise ConfigError("base= is given, but only verify='full' reads it", hint="add verify='full' (--verify)")
    place = os.path.abspath(os.fspath(path))
    found = scan(
        place,
        previous_identity=previous_identity,
        identity_for_version=identity_for_version,
        allow_empty_delta=allow_empty_delta,
    )
    snapshot = _snapshot(found, verified=verify)
    if verify == "full":
        snapshot = _verify(found, snapshot, base, on_progress)
    return snapshot


def scan(
    place: str,
    *,
    previous_identity: str | None = None,
    identity_for_version: Callable[[int], str | None] = identities.identity_for_version,
    allow_empty_delta: bool = False,
    foreign_formats: bool = False,
    any_names: bool = False,
) -> Inspection:
    """Return the inspection of a directory without problems, or raise all of them as one SnapshotLayoutError.

    ``foreign_formats`` lets deltas through whose encoding or checksum the service does not take, but we can read;
    ``any_names`` lets tensors through whose names may not be published.
    """
    found = Inspection(path=place, listing=list_with_templates(place))
    _read_index(found)
    delta = found.index is not None and is_delta(found.index)
    _read_config(found, required=not delta)
    if found.index is not None:
        if found.shards is None:
            found.shards = read_shards(place, found.index["weight_map"], found.listing, found.problems)
        if delta:
            checksums = check_formats(found.index["metadata"], found.problems, foreign=foreign_formats)
            _check_delta(
                found,
                found.index,
                found.shards,
                checksums,
                previous_identity,
                identity_for_version,
                allow_empty_delta,
            )
        else:
            _check_full(found, found.index, found.shards, previous_identity)
        if not any_names and (unfit := unfit_names(found.shards.weight_map)):
            found.problems.append(
                f"{INDEX_NAME}: names that are blank or have control characters are no names of tensors: "
                f"{', '.join(map(repr, unfit))}; rename them where the checkpoint is written"
            )
        if not any_names and (wrapped := wrapped_names(found.shards.weight_map)):
            found.problems.append(f"{INDEX_NAME}: {wrapped}")
        _sort_files(found, found.index, found.shards, delta=delta)
        if not delta:
            _check_model(found, found.shards)
    if ADAPTER in found.listing:
        trouble = adapter_trouble(place, found.listing, model=found.shards is not None and not delta)
        if trouble:
            found.problems.append(trouble)
        else:
            found.warnings.append(f"{ADAPTER}: left out, it is left over from an adapter that was merged")
            found.left_out.append(ADAPTER)
    raise_problems(place, found.problems)
    return found


def late_files(path: str | os.PathLike[str]) -> list[str]:
    """Return the names in a directory that are not there, or not whole, and may be soon; empty where that is no matter.

    On a shared disk the files of another node show late: not at all, with no bytes, or with fewer than they have. What
    is whole and wrong is not among them. For a directory that ``scan`` refused.
    """
    place = os.fspath(path)
    try:
        listing = list_directory(place)
    except SnapshotLayoutError:
        return [] if os.path.lexists(place) else [os.path.basename(place)]
    late = [name for name, entry in listing.items() if _is_empty_json(name, entry)]
    named: set[str] = set()
    delta = False
    if INDEX_NAME in listing:
        try:
            index = read_index(os.path.join(place, INDEX_NAME))
        except SnapshotLayoutError:
            return sorted({*late, *([] if _ends_as_json(place, INDEX_NAME) else [INDEX_NAME])})
        named, delta = set(index["weight_map"].values()), is_delta(index)
    elif SINGLE_NAME in listing:
        named = {SINGLE_NAME}
    elif not any(entry.directory or name.endswith((".bin", ".pt", ".pth")) for name, entry in listing.items()):
        late.append(INDEX_NAME)
    late += [name for name in named if name not in listing or _is_short(os.path.join(place, name))]
    if named and not delta and not _ends_as_json(place, _CONFIG):
        late.append(_CONFIG)
    return sorted(set(late))


def _is_empty_json(name: str, entry: Entry) -> bool:
    return name.endswith(".json") and entry.trouble is None and not entry.size_bytes


def _ends_as_json(place: str, name: str) -> bool:
    """Return whether a JSON object in ``place`` is there to its end, be it right or wrong."""
    try:
        with RegularFile(os.path.join(place, name), label=name) as file:
            tail = min(file.size_bytes, 64)
            return file.read(file.size_bytes - tail, tail).rstrip().endswith(b"}")
    except SnapshotError:
        return False


def _is_short(path: str) -> bool:
    """Return whether a safetensors file has fewer bytes than its header says, or no header yet."""
    try:
        with RegularFile(path) as file:
            start = file.read(0, min(file.size_bytes, 8))
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not length or 8 + length > file.size_bytes:
                return length <= MAX_JSON_BYTES
            tensors = json.loads(file.read(8, length)) if length <= MAX_JSON_BYTES else {}
            ends = [one["data_offsets"][1] for name, one in tensors.items() if name != "__metadata__"]
            return bool(file.size_bytes < 8 + length + max(ends, default=0))
    except SnapshotChangedError:
        return True
    except SnapshotError:
        return not os.path.exists(path)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return False


def _read_index(found: Inspection) -> None:
    """Read the index, or generate it for a lone ``model.safetensors``, or say what is missing."""
    if INDEX_NAME in found.listing:
        if found.usable(INDEX_NAME):
            try:
                found.index = read_index(found.place(INDEX_NAME))
            except SnapshotLayoutError as error:
                found.problems.extend(error.problems)
    elif SINGLE_NAME in found.listing:
        if found.usable(SINGLE_NAME):
            try:
                header = read_header(found.place(SINGLE_NAME), label=SINGLE_NAME)
            except SnapshotLayoutError as error:
                found.problems.extend(error.problems)
                return
            found.index, found.index_generated = generate_index(header, SINGLE_NAME), True
            found.shards = Shards(
                directory=found.path, weight_map=found.index["weight_map"], headers={SINGLE_NAME: header}
            )
    else:
        found.problems.append(f"{INDEX_NAME}: is not there, nor is {SINGLE_NAME}; {_what_instead(found.listing)}")


def _what_instead(listing: Mapping[str, Entry]) -> str:
    if any(NUMBERED.fullmatch(name) for name in listing):
        return "there are shards: the index is written last, so the checkpoint may not be complete yet"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in listing):
        return "there are PyTorch files: save the checkpoint as safetensors"
    inner = [name for name, entry in listing.items() if entry.directory and name.startswith("weight_v")]
    if inner:
        return f"give one of the versions in it, for example {inner[-1]}"
    if ADAPTER in listing:
        return "an adapter alone is no model"
    return "give the directory of a checkpoint in safetensors format"


def _read_config(found: Inspection, *, required: bool) -> None:
    if _CONFIG not in found.listing:
        if required:
            found.problems.append(f"{_CONFIG}: is not there; copy it from the model that the training started from")
        return
    if found.usable(_CONFIG):
        try:
            found.config = _read_object(found, _CONFIG)
        except SnapshotLayoutError as error:
            found.problems.extend(error.problems)


def _read_object(found: Inspection, name: str) -> dict[str, Any]:
    """Return the JSON object in a side file. Raises SnapshotLayoutError."""
    with RegularFile(found.place(name), label=name) as file:
        if file.size_bytes > MAX_JSON_BYTES:
            raise _refused(f"{name}: has {file.size_bytes} bytes; no configuration is that long")
        raw = file.read(0, file.size_bytes)
    # More lenient than an index: published configurations have NaN, Infinity and keys given twice.
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        trouble = describe_content(raw) or f"is not JSON ({error}); copy it again from the model"
        raise _refused(f"{name}: {trouble}") from None
    if not isinstance(value, dict):
        raise _refused(f"{name}: is not a JSON object; copy it again from the model")
    return value


def _refused(problem: str) -> SnapshotLayoutError:
    return SnapshotLayoutError(problem, problems=[problem])


def _object_or_warning(found: Inspection, name: str) -> dict[str, Any]:
    """Return the JSON object in a side file that need not be there; empty, with a warning, where it is none."""
    if name not in found.side_files:
        return {}
    try:
        return _read_object(found, name)
    except SnapshotLayoutError as error:
        found.warnings += [f"{problem}; an engine may stop at it" for problem in error.problems]
        return {}


def _check_model(found: Inspection, shards: Shards) -> None:
    """Warn about what an engine would read otherwise than the trainer meant it."""
    config = found.config or {}
    dtypes = {name: tensor.dtype for name, _, tensor in shards.tensors()}
    if found.config is not None and (trouble := quantisation_trouble(config, dtypes)):
        found.warnings.append(trouble)
    if ends := end_tokens_trouble(config, _object_or_warning(found, _GENERATION)):
        found.warnings.append(ends)
    if not has_tokenizer(found.side_files, _object_or_warning(found, "tokenizer_config.json")):
        found.warnings.append(
            "there is no tokenizer file: an engine that reads the tokenizer with the weights has none; copy the "
            "tokenizer's files from the model that the training started from"
        )


def _check_delta(
    found: Inspection,
    index: Mapping[str, Any],
    shards: Shards,
    checksum_format: str | None,
    previous_identity: str | None,
    identity_for_version: Callable[[int], str | None],
    allow_empty_delta: bool,
) -> None:
    found.versions = check_versions(
        index["metadata"],
        previous_identity=previous_identity,
        identity_for_version=identity_for_version,
        problems=found.problems,
    )
    check_blobs(shards, found.problems)
    if checksum_format is not None:
        found.checksums = read_checksums(shards, found.problems, checksum_format)
    if not shards.weight_map and not allow_empty_delta:
        found.problems.append(
            f"{INDEX_NAME}: the delta is empty, nothing changed since version {found.versions.base_version}; "
            "there is nothing to publish: skip this version"
        )


def _check_full(found: Inspection, index: Mapping[str, Any], shards: Shards, previous_identity: str | None) -> None:
    if not shards.weight_map:
        found.problems.append(f"{INDEX_NAME}: names no tensors; a full snapshot has all tensors of the model")
    checksum_format = index["metadata"].get("checksum_format")
    if checksum_format == "adler32":
        found.checksums = read_checksums(shards, found.problems)
    elif checksum_format is not None:
        found.problems.append(
            f"{INDEX_NAME}: checksum_format is {checksum_format!r}, the service takes only 'adler32'; "
            "cwtrain.hotload.delta.write_full_snapshot writes such a snapshot"
        )
    if previous_identity is not None:
        found.warnings.append(
            f"previous_identity {previous_identity!r} is not used: this is a full snapshot, no delta_encoding"
        )


def _sort_files(found: Inspection, index: Mapping[str, Any], shards: Shards, *, delta: bool) -> None:
    """Decide for each name in the directory: shard, side file, left out, or refused."""
    named = {shard for shard in shards.weight_map.values() if isinstance(shard, str)}
    for name, entry in found.listing.items():
        if name in named or name in (INDEX_NAME, ADAPTER):
            continue
        if entry.directory:
            if name != TEMPLATES:
                found.left_out.append(f"{_shown(name)}/")
        elif name.endswith(".safetensors") and not name.startswith("."):
            if NUMBERED.fullmatch(name):
                if delta and entry.trouble is None and take_spare(shards, name):
                    found.left_out.append(name)
                    found.warnings.append(f"{name}: left out, it holds only copies of tensors that are in other shards")
                else:
                    found.problems.append(
                        f"{name}: is left over from another save, no tensor of the index is in it; "
                        "delete it, or save into an empty directory"
                    )
            else:
                found.left_out.append(_shown(name))
                found.warnings.append(f"{_shown(name)}: left out, the index does not name it")
        elif not is_side_file(name):
            found.left_out.append(_shown(name))
        elif not name.isprintable():
            found.left_out.append(_shown(name))
            found.warnings.append(f"{name!r}: left out, it cannot be an object's name")
        elif entry.trouble and name != _CONFIG:
            found.problems.append(f"{name}: {entry.trouble}; remove it or put the file back")
        elif _is_empty_json(name, entry) and name != _CONFIG:
            found.problems.append(f"{name}: has no bytes; remove it or put the file back")
        else:
            found.side_files.append(name)


def _shown(name: str) -> str:
    """Return ``name`` so that it can be printed and stored, also where the file system has bytes that are no UTF-8."""
    return name if name.isprintable() else repr(name)[1:-1]


def _snapshot(found: Inspection, *, verified: str) -> LocalSnapshot:
    assert found.index is not None  # scan() raised otherwise
    assert found.shards is not None
    shards = found.shards
    delta = is_delta(found.index)
    files = [_shard_file(shards, shard, header) for shard, header in sorted(shards.headers.items())]
    files += [_plain_file(found.place(name), found.listing[name]) for name in found.side_files]
    if found.index_generated:
        head = dump_index(found.index)
        files.append(SnapshotFile(name=INDEX_NAME, size_bytes=len(head), head=head))
    else:
        files.append(_plain_file(found.place(INDEX_NAME), found.listing[INDEX_NAME]))
    duplicates = set().union(*shards.duplicates.values())
    for shard, names in sorted(shards.duplicates.items()):
        shown = ", ".join(map(repr, sorted(names)[:3])) + (", ..." if len(names) > 3 else "")
        found.warnings.append(f"{shard}: goes up without {shown}, in another shard too with equal bytes")
    tensors = [tensor.size_bytes for _, _, tensor in shards.tensors()]
    return LocalSnapshot(
        path=found.path,
        kind=SnapshotKind.DELTA if delta else SnapshotKind.FULL,
        files=tuple(files),
        total_bytes=sum(file.size_bytes for file in files),
        tensors=len(tensors),
        tensor_bytes=sum(tensors),
        index=found.index,
        index_generated=found.index_generated,
        empty_delta=delta and not tensors,
        version=found.versions.version,
        base_version=found.versions.base_version,
        previous_identity=found.versions.previous_identity,
        checksums=found.checksums,
        left_out=tuple(found.left_out),
        warnings=tuple(found.warnings),
        duplicates=tuple(sorted(duplicates)),
        verified=verified,
    )


def _plain_file(path: str, entry: Entry) -> SnapshotFile:
    return SnapshotFile(
        name=entry.name,
        size_bytes=entry.size_bytes,
        path=path,
        ranges=((0, entry.size_bytes),),
        file_bytes=entry.size_bytes,
        mtime_ns=entry.mtime_ns,
        inode=entry.inode,
        device=entry.device,
        sha256=recorded_digest(path, inode=entry.inode, size_bytes=entry.size_bytes, mtime_ns=entry.mtime_ns),
    )


def _shard_file(shards: Shards, shard: str, header: Header) -> SnapshotFile:
    duplicates = shards.duplicates.get(shard)
    sha256 = None
    if duplicates:
        head, ranges = without_duplicates(header, duplicates)
    else:
        head, ranges = b"", ((0, header.file_bytes),)
        sha256 = recorded_digest(
            shards.path(shard), inode=header.inode, size_bytes=header.file_bytes, mtime_ns=header.mtime_ns
        )
    return SnapshotFile(
        name=shard,
        size_bytes=len(head) + sum(length for _, length in ranges),
        path=shards.path(shard),
        head=head,
        ranges=ranges,
        file_bytes=header.file_bytes,
        mtime_ns=header.mtime_ns,
        inode=header.inode,
        device=header.device,
        sha256=sha256,
    )


def _verify(
    found: Inspection,
    snapshot: LocalSnapshot,
    base: str | os.PathLike[str] | None,
    on_progress: Callable[[int, int], object] | None,
) -> LocalSnapshot:
    from cwtrain.snapshots.verify import verify_delta, verify_full

    assert found.shards is not None
    if snapshot.kind is SnapshotKind.DELTA:
        verify_delta(found.shards, snapshot.checksums, base=base, on_progress=on_progress)
        if base is not None or snapshot.empty_delta:
            return snapshot
        unread = (
            "the frames are whole, and what they come to was compared with no checksum: that takes the checkpoint that "
            "the delta applies to (--base DIR)"
        )
        return attrs.evolve(snapshot, verified="frames", warnings=(*snapshot.warnings, unread))
    warnings = list(snapshot.warnings)
    if base is not None:
        warnings.append("base= is not used: a full snapshot is checked by itself")
    if snapshot.checksums:
        verify_full(found.shards, snapshot.checksums, on_progress=on_progress)
    else:
        warnings.append("no checksums are recorded, so only the headers could be checked")
        snapshot = attrs.evolve(snapshot, verified="headers")
    return attrs.evolve(snapshot, warnings=tuple(warnings))
