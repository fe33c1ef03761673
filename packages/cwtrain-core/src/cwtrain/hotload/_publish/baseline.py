"""The base checkpoint: checked, published once in the life of a run, and known to those who wait for it."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import attrs

from cwtrain.config import HotLoadConfig
from cwtrain.errors import ConfigError, CWTrainError, SnapshotConflictError, SnapshotError, StorageNotFoundError
from cwtrain.hotload import chain as chains
from cwtrain.hotload._publish.decide import BaselineStep, baseline_step
from cwtrain.hotload._publish.follow import Follower
from cwtrain.hotload._publish.journal import Journal
from cwtrain.hotload._publish.look import content_of
from cwtrain.hotload._publish.names import identity_of, parse_identity
from cwtrain.hotload._publish.opening import highest_epoch, take_epoch
from cwtrain.hotload._publish.send import Budget, Sender
from cwtrain.hotload.check import check_hot_load
from cwtrain.hotload.delta import checkpoint_checksums
from cwtrain.hotload.status import BaselineState, BaselineStatus, write_status
from cwtrain.models.snapshot import INDEX_NAME, LocalSnapshot, SnapshotKind
from cwtrain.models.sync import SnapshotChoice, WeightSyncRequest
from cwtrain.snapshots import inspect_snapshot
from cwtrain.snapshots._write import require_space

__all__ = ["Baseline", "check_base"]

_log = logging.getLogger("cwtrain.hotload")


def check_base(base: str | os.PathLike[str] | None, *, mirror_path: str | None) -> LocalSnapshot:
    """Return the base checkpoint, inspected. Only headers are read.

    Raises ConfigError where there is none, SnapshotError for what is no full checkpoint or leaves no room for a mirror.
    """
    if base is None:
        raise ConfigError(
            "the base checkpoint is not known", hint="give it to the publisher (base=): the trainer's --hf-checkpoint"
        )
    if not os.path.isdir(base):
        raise ConfigError(
            f"the base checkpoint {os.fspath(base)!r} is no directory on this machine",
            hint="download it first and give the directory as --hf-checkpoint: a hub id cannot be published",
        )
    snapshot = inspect_snapshot(base)
    if snapshot.kind is not SnapshotKind.FULL:
        raise SnapshotError(f"{base}: is a delta, the base must be a full checkpoint", hint="give the base checkpoint")
    if mirror_path is not None and not os.path.lexists(mirror_path):
        require_space(
            os.path.join(os.path.dirname(mirror_path), ""), snapshot.tensor_bytes, "the mirror of the base checkpoint"
        )
    return snapshot


@attrs.define
class Baseline:
    """The baseline of one publisher, run once for each epoch that a baseline call opens."""

    base: str | os.PathLike[str] | None
    settings: HotLoadConfig
    journal: Journal
    follower: Follower | None
    sender: Sender

    def run(self, snapshot: LocalSnapshot) -> str:
        """Open an epoch on the base checkpoint, have it served, and return its identity.

        Equal and published already, it is not uploaded again. What becomes of it is written to the status object.
        Raises SnapshotConflictError where PUBLISH_BASELINE is 0 and it is not there or not equal, else what publishing
        raises.
        """
        budget = Budget(None, self.sender.clock)
        identity = identity_of(self.journal.state.run_id, 1, 0)
        try:
            epoch = self._open_epoch(budget)
            self._tell(identity, BaselineState.PUBLISHING, budget)
            identity = self._serve(snapshot, epoch, budget)
            self._tell(identity, BaselineState.SERVED, budget)
        except CWTrainError as error:
            self._tell_failure(identity, error)
            raise
        except Exception as error:
            self._tell_failure(identity, CWTrainError(f"{type(error).__name__}: {error}"))
            raise
        return identity

    def _open_epoch(self, budget: Budget) -> int:
        loader, journal = self.sender.loader, self.journal
        self.sender.through_outages(loader.require_open, budget, "looking at the deployment")
        self.sender.through_outages(
            lambda: check_hot_load(loader.client, loader.deployment_id, s3=loader.store), budget, "checking the access"
        )
        taken = highest_epoch(self.sender, journal, self.sender.hot_loads(budget), budget)
        epoch = take_epoch(self.sender, journal, taken, budget)
        journal.open_epoch(epoch)
        return epoch

    def _serve(self, snapshot: LocalSnapshot, epoch: int, budget: Budget) -> str:
        journal, loader = self.journal, self.sender.loader
        run = journal.state.run_id
        assert self.base is not None
        if self.follower is not None:
            self.follower.reset(self.base, 0)
            checksums, path = self.follower.checksums, self.follower.path
        else:
            checksums, path = dict(snapshot.checksums), snapshot.path
            if len(checksums) != snapshot.tensors:
                checksums = checkpoint_checksums(self.base)
        first, own = identity_of(run, 1, 0), identity_of(run, epoch, 0)
        identity, published = self._find(snapshot, checksums, (first, own), budget)
        if not published and not self.settings.publish_baseline:
            raise SnapshotConflictError(
                f"CWTRAIN_HOTLOAD_PUBLISH_BASELINE=0 says that the base checkpoint is published, and "
                f"{loader.location.uri(first)} is not there or does not hold {snapshot.path}",
                objects=(loader.manifest_key(first),),
                hint="unset CWTRAIN_HOTLOAD_PUBLISH_BASELINE to have it published, or give the checkpoint that was",
            )
        hot_loads = self.sender.hot_loads(budget)
        served = chains.latest_completed(hot_loads)
        step = baseline_step(
            run,
            published=published,
            completed=chains.completed(hot_loads, identity) is not None,
            served=served.identity if served else None,
        )
        _log.info("base checkpoint %s: %s as %s", snapshot.path, step.value, identity)
        if step is BaselineStep.PUBLISH:
            identity = self._publish(path, identity, own, budget)
        elif step is BaselineStep.HOT_LOAD:
            self.sender.trigger(identity, previous_identity=None, wait=True, budget=budget)
        journal.save(journal.state.based(identity))
        return identity

    def _publish(self, path: str, identity: str, own: str, budget: Budget) -> str:
        request = WeightSyncRequest(
            deployment_id=self.sender.loader.deployment_id,
            path=path,
            identity=identity,
            choice=SnapshotChoice.FULL,
            timeout=self.settings.timeout,
        )
        try:
            self.sender.publish(request, version=0, wait=True, budget=budget)
        except SnapshotConflictError:
            if identity == own:
                raise
            # An upload of another base died half-way under the first name.
            self.sender.publish(attrs.evolve(request, identity=own), version=0, wait=True, budget=budget)
            return own
        return identity

    def _find(
        self, snapshot: LocalSnapshot, checksums: Mapping[str, str], names: tuple[str, str], budget: Budget
    ) -> tuple[str, bool]:
        """Return under which identity the base stands in the bucket, equal; or under which it is to be published.

        A base that was changed in the life of the run stands under the name of the epoch that it came with.
        """
        free: list[str] = []
        for identity in dict.fromkeys(self._candidates(names, budget)):
            manifest = self.sender.through_outages(
                partial(self._manifest, identity), budget, f"reading the manifest of {identity}"
            )
            if manifest is None:
                free += [identity] if identity in names else []
            elif content_of(manifest["tensors"]) == content_of(checksums) and not _other_files(snapshot, manifest):
                return identity, True
            else:
                _log.warning("%s holds another base checkpoint than %s", identity, snapshot.path)
        return (*free, names[-1])[0], False

    def _candidates(self, names: tuple[str, str], budget: Budget) -> Iterator[str]:
        """Yield the names that the base may stand under: the run's first, those of later epochs (newest first), ours.

        The bucket is listed only where the first is not it.
        """
        yield names[0]
        loader, run = self.sender.loader, self.journal.state.run_id
        folder = loader.location.manifest_key("").removesuffix(".json")
        found = self.sender.through_outages(
            lambda: list(loader.store.list_objects(f"{folder}{run}")), budget, "looking for earlier bases"
        )
        parsed = {}
        for item in found:
            identity = item.key.removeprefix(folder).removesuffix(".json")
            name = parse_identity(run, identity)
            if name is not None and name.version == 0 and not name.suffix:
                parsed[identity] = name.epoch
        yield from sorted(parsed, key=lambda identity: -parsed[identity])
        yield names[1]

    def _manifest(self, identity: str) -> dict[str, Any] | None:
        """Return the manifest of a snapshot that is whole, else None."""
        loader = self.sender.loader
        if loader.store.head(loader.location.key(identity, INDEX_NAME)) is None:
            return None
        try:
            return loader.read_manifest(identity)
        except StorageNotFoundError:
            return None

    def _tell(self, identity: str, state: BaselineState, budget: Budget) -> None:
        loader = self.sender.loader
        status = self._status(identity, state)
        self.sender.through_outages(
            lambda: write_status(loader.store, loader.location, status), budget, "writing the base's status"
        )

    def _tell_failure(self, identity: str, error: CWTrainError) -> None:
        loader = self.sender.loader
        status = attrs.evolve(self._status(identity, BaselineState.FAILED), error=error.message, hint=error.hint)
        try:
            write_status(loader.store, loader.location, status)
        except CWTrainError as problem:  # what failed counts, not that it could not be told
            _log.warning("rollouts cannot be told that the base failed: %s", problem)

    def _status(self, identity: str, state: BaselineState) -> BaselineStatus:
        return BaselineStatus(
            deployment_id=self.sender.loader.deployment_id,
            run_id=self.journal.state.run_id,
            identity=identity,
            state=state,
            epoch=self.journal.state.epoch or None,
        )


def _other_files(snapshot: LocalSnapshot, manifest: Mapping[str, Any]) -> bool:
    """Return whether config, tokenizer and the like differ. Weights are compared by tensor, not by file."""
    published = {name: item["sha256"] for name, item in manifest["objects"].items() if _is_side_file(name)}
    here: dict[str, str] = {}
    for file in snapshot.files:
        if _is_side_file(file.name) and file.path is not None:
            with open(file.path, "rb") as stream:
                here[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return published != here


def _is_side_file(name: str) -> bool:
    return name != INDEX_NAME and not name.endswith(".safetensors")
