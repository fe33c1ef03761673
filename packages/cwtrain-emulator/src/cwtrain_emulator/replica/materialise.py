"""From a chain in the bucket to a checkpoint on local disk, checked all the way.

A *generation* is a directory ``gen-<number>`` with ``checkpoint/`` (the full snapshot's files with all deltas applied)
and ``generation.json`` (identity, chain, SHA-256 of every tensor). It is built under a temporary name and renamed, so
that what has its final name is whole. A replica that starts with less than its peers copies a generation from one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cwtrain_emulator.engine.safetensors import INDEX_NAME, FormatError
from cwtrain_emulator.replica.checkpoint import SnapshotError, apply_delta, check_full, damage_full, hash_tensors
from cwtrain_emulator.s3.client import ObjectInfo, S3Client, S3Error
from cwtrain_emulator.snapshots import (
    MAX_REPLAYED_DELTAS,
    ChainEntry,
    Index,
    delta_problems,
    listing_digest,
    parse_index,
)

__all__ = ["Generation", "NoWeightsError", "Sabotage", "SnapshotError", "Workshop", "apply_delta", "hash_tensors"]

_MAX_SIDE_FILE_BYTES = 256 << 20
_KEPT_GENERATIONS = 2


class NoWeightsError(SnapshotError):
    """There is no snapshot where the base weights would be."""


@dataclass(frozen=True)
class Sabotage:
    """What faults do to one load: damage what was fetched, or kill the process half way."""

    damage: bool = False
    die: bool = False

    def half_way(self) -> None:
        """Die, if that is to be; as a crash: nothing is tidied up."""
        if self.die:
            os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


@dataclass(frozen=True)
class Generation:
    """A whole checkpoint on disk. `chain` has the pairs (identity, digest) that it was made from."""

    directory: Path
    identity: str
    chain: tuple[tuple[str, str], ...]
    tensors: dict[str, str] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        """The directory with config, index and shards."""
        return self.directory / "checkpoint"

    @property
    def number(self) -> int:
        """Its place in the order of generations."""
        return int(self.directory.name.removeprefix("gen-"))


class Workshop:
    """One replica's directory of generations. Used from one thread."""

    def __init__(self, root: Path, client: S3Client) -> None:
        self._root = root
        self._client = client
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob("tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # What an earlier process left is looked at, byte by byte, before it is used.
        self._generations = [found for found in map(_read_generation, sorted(root.glob("gen-*"))) if found is not None]

    def materialise(
        self, chain: Sequence[ChainEntry], *, peers: Iterable[Path] = (), sabotage: Sabotage | None = None
    ) -> Generation:
        """Return a generation of the chain's last identity, made from the longest part of the chain at hand.

        `peers` are the directories of other replicas, from which a longer part is copied. Raises SnapshotError with
        the reason; then nothing has changed.
        """
        sabotage = sabotage or Sabotage()
        entries = [entry if entry.digest else self._with_digest(entry) for entry in chain]
        wanted = tuple((entry.identity, entry.digest) for entry in entries)
        # What is to be damaged must be made again.
        longest = len(wanted) - 1 if sabotage.damage else len(wanted)
        base = self._longest_part(wanted[:longest])
        if base is None or len(base.chain) < longest:
            base = self._copied_from(peers, wanted[:longest], len(base.chain) if base else 0) or base
        if base is not None and base.chain == wanted:
            sabotage.half_way()
            return base
        deltas = entries[len(base.chain) :] if base is not None else entries[1:]
        if len(deltas) > MAX_REPLAYED_DELTAS:
            raise SnapshotError(
                f"no other replica has the weights to copy, and {len(deltas)} deltas would have to be replayed from "
                f"the bucket; the limit is {MAX_REPLAYED_DELTAS}: publish a full snapshot"
            )
        work = self._root / f"tmp-{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        try:
            return self._build(work, entries, wanted, base, deltas, sabotage)
        except FormatError as exc:
            raise SnapshotError(str(exc)) from exc
        except S3Error as exc:
            raise SnapshotError(f"reading the bucket failed: {exc}") from exc
        except OSError as exc:
            raise SnapshotError(f"writing to local disk failed: {exc}") from exc
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def prune(self, served: Generation) -> None:
        """Delete old generations, all but the served one and its neighbour in age."""
        others = sorted((old for old in self._generations if old != served), key=lambda old: old.number)
        for old in others[: -(_KEPT_GENERATIONS - 1)]:
            self._generations.remove(old)
            shutil.rmtree(old.directory, ignore_errors=True)

    def _build(
        self,
        work: Path,
        entries: Sequence[ChainEntry],
        wanted: tuple[tuple[str, str], ...],
        base: Generation | None,
        deltas: Sequence[ChainEntry],
        sabotage: Sabotage,
    ) -> Generation:
        checkpoint = work / "checkpoint"
        checkpoint.mkdir(parents=True)
        if base is None:
            tensors = self._fetch_full(entries[0], checkpoint, damage=sabotage.damage and not deltas)
        else:
            _link_files(base.checkpoint, checkpoint)
            tensors = dict(base.tensors)
        previous = entries[-1 - len(deltas)].identity
        for entry in deltas:
            delta = work / "delta"
            delta.mkdir()
            index = self._fetch_delta(entry, delta)
            problems = delta_problems(index, identity=entry.identity, previous=previous)
            if problems:
                raise SnapshotError(f"{entry.identity}: {'; '.join(problems)}")
            damage = sabotage.damage and entry is deltas[-1]
            tensors.update(apply_delta(checkpoint, delta, index, damage=damage))
            if entry is deltas[-1]:
                sabotage.half_way()
            shutil.rmtree(delta)
            previous = entry.identity
        sabotage.half_way()
        described = {"identity": entries[-1].identity, "chain": wanted, "tensors": tensors}
        (work / "generation.json").write_text(json.dumps(described))
        return self._adopt(work, Generation(work, entries[-1].identity, wanted, tensors))

    def _adopt(self, work: Path, described: Generation) -> Generation:
        """Give a whole generation its final name."""
        number = 1 + max((old.number for old in self._generations), default=0)
        directory = self._root / f"gen-{number:08d}"
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(work, directory)
        made = replace(described, directory=directory)
        self._generations.append(made)
        return made

    def _copied_from(
        self, peers: Iterable[Path], wanted: tuple[tuple[str, str], ...], more_than: int
    ) -> Generation | None:
        """Copy the longest part of a chain that a peer has, if it is longer than what is here; None when there is none.

        The peer may be deleting what is copied: what is not whole is left.
        """
        offered = [found for peer in peers for found in _described(peer) if found.chain == wanted[: len(found.chain)]]
        for found in sorted(offered, key=lambda one: (-len(one.chain), one.directory)):
            if len(found.chain) <= more_than:
                break
            work = self._root / f"tmp-{os.getpid()}"
            shutil.rmtree(work, ignore_errors=True)
            try:
                shutil.copytree(found.directory, work)
                if hash_tensors(work / "checkpoint") == found.tensors:
                    return self._adopt(work, found)
            except (OSError, SnapshotError, FormatError, KeyError):
                continue
            finally:
                shutil.rmtree(work, ignore_errors=True)
        return None

    def _longest_part(self, wanted: tuple[tuple[str, str], ...]) -> Generation | None:
        parts = [old for old in self._generations if old.chain == wanted[: len(old.chain)]]
        return max(parts, key=lambda old: (len(old.chain), old.number), default=None)

    def _with_digest(self, entry: ChainEntry) -> ChainEntry:
        listed = self._list(entry)
        if INDEX_NAME not in listed:
            raise NoWeightsError(f"s3://{entry.bucket}/{entry.prefix}{INDEX_NAME} does not exist")
        digest = listing_digest((name, found.size_bytes, found.etag) for name, found in listed.items())
        return ChainEntry(**{**entry.to_json(), "digest": digest})

    def _list(self, entry: ChainEntry) -> dict[str, ObjectInfo]:
        try:
            found = self._client.list_objects(entry.bucket, entry.prefix)
        except S3Error as exc:
            raise SnapshotError(f"listing s3://{entry.bucket}/{entry.prefix} failed: {exc}") from exc
        return {info.key.removeprefix(entry.prefix): info for info in found}

    def _fetch_index(self, entry: ChainEntry, listed: dict[str, ObjectInfo]) -> tuple[bytes, Index]:
        if INDEX_NAME not in listed:
            raise SnapshotError(f"{entry.identity}: {INDEX_NAME} is gone from the bucket")
        raw = self._client.get(entry.bucket, entry.prefix + INDEX_NAME, limit=64 << 20)
        index = parse_index(raw)
        missing = [name for name in index.files if name not in listed]
        if missing:
            raise SnapshotError(f"{entry.identity}: gone from the bucket: {', '.join(missing[:5])}")
        return raw, index

    def _fetch_full(self, entry: ChainEntry, directory: Path, *, damage: bool) -> dict[str, str]:
        listed = self._list(entry)
        raw, index = self._fetch_index(entry, listed)
        if index.is_delta:
            raise SnapshotError(f"{entry.identity}: is a delta, and the chain needs a full snapshot here")
        (directory / INDEX_NAME).write_bytes(raw)
        wanted = [*index.files, *(name for name in listed if _is_side_file(name))]
        for name in wanted:
            info = listed[name]
            if _is_side_file(name) and info.size_bytes > _MAX_SIDE_FILE_BYTES:
                continue
            self._client.download(entry.bucket, info.key, directory / name, size_bytes=info.size_bytes)
        if damage:
            damage_full(directory, index)
        return check_full(directory, index)

    def _fetch_delta(self, entry: ChainEntry, directory: Path) -> Index:
        listed = self._list(entry)
        _, index = self._fetch_index(entry, listed)
        for name in index.files:
            info = listed[name]
            self._client.download(entry.bucket, info.key, directory / name, size_bytes=info.size_bytes)
        return index


def _link_files(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        try:
            os.link(entry, target / entry.name)
        except OSError:
            shutil.copyfile(entry, target / entry.name)


def _is_side_file(name: str) -> bool:
    """Return True for the files beside the weights: config, tokenizer and the like, directly in the snapshot."""
    return name not in ("", ".", "..", INDEX_NAME) and "/" not in name and not name.endswith(".safetensors")


def _described(root: Path) -> Iterator[Generation]:
    """Yield the generations that another replica says it has."""
    for directory in sorted(root.glob("gen-*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            yield _description(directory)


def _description(directory: Path) -> Generation:
    values: dict[str, Any] = json.loads((directory / "generation.json").read_text())
    chain = tuple((str(identity), str(digest)) for identity, digest in values["chain"])
    return Generation(directory, str(values["identity"]), chain, dict(values["tensors"]))


def _read_generation(directory: Path) -> Generation | None:
    """Return the generation in `directory` if its bytes are what it says; else remove it and return None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, SnapshotError):
        found = _description(directory)
        if hash_tensors(found.checkpoint) == found.tensors:
            return found
    shutil.rmtree(directory, ignore_errors=True)
    return None
