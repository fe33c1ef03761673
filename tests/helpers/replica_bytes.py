"""What a replica would hold, made from a bucket in memory by the emulator's own reader, a stranger to the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cwtrain.hotload.chain import chain_of
from cwtrain.models.service import HotLoad, HotLoadState, SnapshotType
from cwtrain.models.snapshot import SnapshotKind
from cwtrain.storage import MemoryStore
from cwtrain_emulator.engine.safetensors import read_header
from cwtrain_emulator.replica.materialise import Generation, SnapshotError, Workshop
from cwtrain_emulator.snapshots import ChainEntry, snapshot_prefix
from helpers.fake_service import FakeService
from helpers.memory_bucket import MemoryBucket

Held = dict[str, tuple[str, tuple[int, ...], bytes]]


class LoadingService(FakeService):  # type: ignore[misc]  # the fake has no types of its own
    """A service whose replicas really make the weights of each hot-load, and fail it where that cannot be done."""

    def __init__(self, store: MemoryStore, root: Path) -> None:
        super().__init__(replicas=("r1",), polls=1)
        self._store = store
        self._workshop = Workshop(root, _client(store))
        self.held: dict[str, Held] = {}

    def get_hot_load(self, hot_load_id: str) -> Any:
        found = next((one for one in self.hot_loads if one.id == hot_load_id), None)
        if found is not None and not found.state.terminal:
            try:
                self.held[found.identity] = self._load(found)
                self.outcome = HotLoadState.COMPLETED
            except SnapshotError as error:
                self.replica_errors["r1"] = str(error)
                self.outcome = HotLoadState.FAILED
        return super().get_hot_load(hot_load_id)

    def _load(self, hot_load: HotLoad) -> Held:
        target = self.deployment.hot_load
        links = chain_of(
            hot_load, [one for one in self.hot_loads if one.state is HotLoadState.COMPLETED or one is hot_load]
        )
        self._workshop._client.objects = _client(self._store).objects
        entries = [
            ChainEntry(
                identity=link.identity,
                type=(SnapshotType.FULL if link.kind is SnapshotKind.FULL else SnapshotType.INCREMENTAL).value,
                bucket=target.bucket,
                prefix=snapshot_prefix(target.path_prefix, link.identity),
            )
            for link in links.links
        ]
        return tensors_of(self._workshop.materialise(entries))


def _client(store: MemoryStore) -> Any:
    bucket = MemoryBucket()
    bucket.objects = {(store.bucket, key): stored.body for key, stored in store.objects.items()}
    return bucket


def tensors_of(generation: Generation) -> Held:
    """Return dtype, shape and bytes of every tensor of a generation."""
    held: Held = {}
    for shard in sorted(generation.checkpoint.glob("*.safetensors")):
        header, data = read_header(shard), shard.read_bytes()
        for name, info in header.tensors.items():
            begin = header.data_start + info.begin
            held[name] = (info.dtype, tuple(info.shape), data[begin : begin + info.size_bytes])
    return held
