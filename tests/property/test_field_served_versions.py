"""Whatever is accepted is served byte for byte; whatever would not be is refused before an object is written.

The kind: weights that are silently wrong, because a delta is put on another version than it was made from, or because
a tensor is written as another type than it is. Replicas are the emulator's own reader of snapshots.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cwtrain.config import HotLoadConfig
from cwtrain.errors import CWTrainError, SnapshotChainError, SnapshotError
from cwtrain.hotload import CheckpointBase, HotLoader, MemoryBase, MirrorBase, Publisher, SnapshotWriter, WeightMirror
from cwtrain.plugins import Plugins
from cwtrain.storage import MemoryStore
from helpers.fake_service import Clock
from helpers.replica_bytes import Held, LoadingService
from helpers.streamed import TINY, side_files
from helpers.tiny_checkpoint import write_delta_by_hand, write_full
from helpers.toy_trainer import write_empty

NAMES = ("a.weight", "b.weight", "c.weight")
VERSIONS = 5
FEW = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FEWER = settings(FEW, max_examples=12)  # a publisher's journal is synced to the disk at each step


class Place:
    """A deployment with replicas, its bucket in memory, and checkpoints of ``VERSIONS`` versions on the disk."""

    def __init__(self, root: Path, changes: list[set[str]]) -> None:
        self.root, self.store, self.clock = root, MemoryStore("weights"), Clock()
        self.service = LoadingService(self.store, root / "replica")
        self.versions: list[Held] = [{name: ("BF16", (4, 2), bytes(range(16))) for name in NAMES}]
        for number, names in enumerate(changes, 1):
            after = {
                name: ("BF16", (4, 2), bytes((one + number) % 256 for one in raw[2])) if name in names else raw
                for name, raw in self.versions[-1].items()
            }
            self.versions.append(after)
        self.expected: dict[str, Held] = {}
        self.made = 0

    def loader(self) -> HotLoader:
        """Return a loader that knows nothing of what others did."""
        return HotLoader(
            self.service, "dep", s3=self.store, plugins=Plugins(), clock=self.clock, sleep=self.clock.sleep
        )

    def full(self, number: int) -> str:
        place = self.root / f"full-{number}"
        return str(place) if place.exists() else write_full(place, self.versions[number], shards=1)

    def delta(self, base: int, number: int) -> str:
        place = self.root / f"delta-{base}-{number}"
        if place.exists():
            return str(place)
        numbers = {"version": f"{number:06d}", "base_version": f"{base:06d}"}
        old, new = self.versions[base], self.versions[number]
        return write_empty(place, **numbers) if old == new else write_delta_by_hand(place, old, new, **numbers)

    def name(self, number: int) -> str:
        self.made += 1
        return f"run-v{number:06d}-t{self.made}"

    def try_(self, identity: str, number: int, call: Any) -> bool:
        """Return whether ``call`` was accepted: then what is served is version ``number``, else nothing was written."""
        before = dict(self.store.objects)
        try:
            call()
        except CWTrainError:
            assert self.store.objects == before
            return False
        self.expected[identity] = self.versions[number]
        assert self.service.hot_loads[0].identity == identity
        assert self.service.hot_loads[0].state.value == "COMPLETED"
        assert self.service.held[identity] == self.versions[number]
        return True


CHANGES = st.lists(st.sets(st.sampled_from(NAMES), max_size=2), min_size=VERSIONS - 1, max_size=VERSIONS - 1)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["full", "numbered full", "delta", "delta", "delta", "uploaded delta"]),
        st.integers(0, VERSIONS - 1),
        st.integers(1, VERSIONS - 1),
        st.integers(0, 7),
        st.booleans(),
    ),
    min_size=2,
    max_size=8,
)


@FEW
@given(CHANGES, STEPS)
def test_what_a_loader_accepts_is_what_every_replica_has(changes: list[set[str]], steps: list[Any]) -> None:
    """Histories of fulls and deltas, each put on a predecessor that is right or wrong, by loaders new and old."""
    with tempfile.TemporaryDirectory() as root:
        place = Place(Path(root), changes)
        kept = place.loader()
        first = place.name(0)
        assert place.try_(first, 0, lambda: kept.publish(place.full(0), first))
        for kind, base, number, which, same in steps:
            loader = kept if same else place.loader()
            identity = place.name(number)
            previous = list(place.expected)[which % len(place.expected)]
            if kind in ("full", "numbered full"):
                said = {"version": number} if kind == "numbered full" else {}
                assert place.try_(identity, number, lambda: loader.publish(place.full(number), identity, **said))  # noqa: B023
                continue
            if base >= number:
                continue
            delta = place.delta(base, number)
            if kind == "uploaded delta":
                place.try_(identity, number, lambda: _upload_and_trigger(place, loader, delta, identity, previous))  # noqa: B023
            else:
                taken = place.try_(
                    identity,
                    number,
                    lambda: loader.publish(delta, identity, previous_identity=previous),  # noqa: B023
                )
                right = previous.startswith(f"run-v{base:06d}-") and place.versions[base] != place.versions[number]
                assert taken == right, f"{delta} on {previous}"


def _upload_and_trigger(place: Place, loader: HotLoader, delta: str, identity: str, previous: str) -> None:
    loader.upload(delta, identity, previous_identity=previous)
    uploaded = dict(place.store.objects)
    for other in place.expected:
        if other != previous:
            with pytest.raises(CWTrainError):
                loader.trigger(identity, previous_identity=other)
    assert place.store.objects == uploaded
    loader.trigger(identity)


OWN = {
    "F16": np.float16, "F32": np.float32, "F64": np.float64, "U16": np.uint16, "I16": np.int16, "U8": np.uint8,
    "I8": np.int8, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_,
}  # fmt: skip
TOLD = ["BF16", "F16", "F32", "F8_E4M3", "I16", "U16", "I64", "F64", "BOOL"]


class Torchlike:
    """As much of a torch tensor as is looked at: its bytes are behind ``data_ptr``."""

    def __init__(self, array: Any, dtype: str) -> None:
        self._array, self.dtype = np.ascontiguousarray(array), f"torch.{dtype}"
        self.shape, self.device, self.layout = array.shape, "cpu", "torch.strided"

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def element_size(self) -> int:
        return int(self._array.itemsize)

    def numel(self) -> int:
        return int(self._array.size)

    def detach(self) -> Torchlike:
        return self

    def is_contiguous(self) -> bool:
        return True

    def reshape(self, *shape: int) -> Torchlike:
        return self


def tensor_of(own: str, form: str, seed: int) -> tuple[Any, str]:
    """Return a tensor of 4 by 4, and the dtype that it has by itself."""
    array = np.random.default_rng(seed).integers(0, 2, (4, 4)).astype(OWN[own])
    if form == "torch":
        return Torchlike(array, array.dtype.name), own
    if form == "bfloat16 of torch":
        return Torchlike(array.astype(np.float16), "bfloat16"), "BF16"
    if form == "buffer":
        return memoryview(array), own
    return array.T if form == "transposed" else array, own


def bytes_of(tensor: Any) -> bytes:
    return tensor._array.tobytes() if isinstance(tensor, Torchlike) else np.ascontiguousarray(tensor).tobytes()


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(sorted(OWN)),
        st.sampled_from(["array", "transposed", "torch", "bfloat16 of torch", "buffer"]),
        st.none() | st.sampled_from(TOLD),
    ),
    min_size=1,
    max_size=3,
)


def may_be(own: str, told: str | None) -> bool:
    """Return whether a 4 by 4 tensor of dtype ``own`` may be called ``told``: integers may hold bits."""
    views = {"BF16": ("U16", "I16"), "F8_E4M3": ("U8", "I8")}
    return told in (None, own) or own in views.get(told or "", ()) or (own == "U8" and told == "BOOL")


@FEW
@given(TENSORS, st.booleans())
def test_what_a_writer_accepts_has_the_callers_bytes_in_the_callers_type(kinds: list[Any], then_delta: bool) -> None:
    with tempfile.TemporaryDirectory() as root:
        place, base = Place(Path(root), []), MemoryBase()
        sides = side_files(Path(root) / "sides")
        loader = place.loader()
        for step, kind in enumerate(["full", "delta"] if then_delta else ["full"]):
            made = [(f"t{n}", *tensor_of(own, form, n + 10 * step), told) for n, (own, form, told) in enumerate(kinds)]
            wanted = {name: (told or own, (4, 4), bytes_of(tensor)) for name, tensor, own, told in made}
            before = dict(place.store.objects)
            identity = f"run-v{step:06d}"
            try:
                with SnapshotWriter(
                    place.store, loader.location, identity, kind=kind, base=base, side_files=sides, sizes=TINY
                ) as writer:
                    for name, tensor, _, told in made:
                        writer.add(name, tensor, dtype=told)
                    written = writer.finalise([writer.close()])
            except SnapshotError:
                assert place.store.objects == before
                assert not all(may_be(own, told) for _, _, own, told in made)
                return
            assert all(may_be(own, told) for _, _, own, told in made)
            if not written.empty:
                loader.trigger(written)
            assert place.service.held[place.service.hot_loads[0].identity] == wanted


@FEW
@given(
    CHANGES, st.integers(0, VERSIONS - 1), st.integers(0, VERSIONS - 1), st.sampled_from(["memory", "disk", "mirror"])
)
def test_a_base_that_is_not_what_was_published_makes_no_delta(
    changes: list[set[str]], published: int, given_: int, kind: str
) -> None:
    """What a base holds is the caller's word: here one version was published, and the base is made of another."""
    with tempfile.TemporaryDirectory() as root:
        place = Place(Path(root), changes)
        loader = place.loader()
        assert place.try_("start", published, lambda: loader.publish(place.full(published), "start"))
        base: Any
        if kind == "memory":
            base = MemoryBase()
            base.load(place.full(given_), "start")
        elif kind == "disk":
            base = CheckpointBase(place.full(given_), "start")
        else:
            mirror = WeightMirror.create(place.full(given_), Path(root) / "mirror", version=str(given_))
            base = MirrorBase(mirror, "start")
        new = place.versions[-1]
        before = dict(place.store.objects)
        try:
            with SnapshotWriter(place.store, loader.location, "next", kind="delta", base=base, sizes=TINY) as writer:
                for name, (dtype, shape, raw) in new.items():
                    writer.add(name, raw, dtype=dtype, shape=shape)
                written = writer.finalise([writer.close()])
        except SnapshotChainError:
            assert place.store.objects == before
            assert place.versions[published] != place.versions[given_]
            return
        if not written.empty:
            try:
                loader.trigger(written)
            except CWTrainError:  # what changes is checked by the replicas: it is loud, and serves nothing
                assert kind == "disk"
                assert place.versions[published] != place.versions[given_]
                return
        assert place.service.held[place.service.hot_loads[0].identity] == new


@FEWER
@given(
    CHANGES,
    st.lists(st.tuples(st.sampled_from(["delta", "delta", "full", "lost"]), st.integers(1, 2)), min_size=1, max_size=6),
)
def test_what_a_publisher_accepts_is_what_every_replica_has(changes: list[set[str]], steps: list[Any]) -> None:
    """A trainer that numbers its versions, some of which never reach the publisher."""
    with tempfile.TemporaryDirectory() as root:
        place = Place(Path(root), changes)
        updates = Path(root) / "updates"
        updates.mkdir()
        config = HotLoadConfig(deployment_id="dep", run_id="run", timeout=60.0, state_dir=str(Path(root) / "state"))
        with Publisher(
            config,
            disk_dir=updates,
            base=place.full(0),
            client=place.service,
            s3=place.store,
            plugins=Plugins(),
            clock=place.clock,
            sleep=place.clock.sleep,
        ) as publisher:
            publisher.baseline(wait_seconds=60)
            publisher.finish()
            at, seen = 0, 0
            for kind, more in steps:
                number = min(at + more, VERSIONS - 1)
                if number == at:
                    break
                before, base, at = dict(place.store.objects), at, number
                if kind == "lost" and seen:
                    continue
                path = place.full(number) if kind == "full" else place.delta(base, number)
                try:
                    publisher.publish_directory(path, number=number)
                except CWTrainError:
                    assert place.store.objects == before
                    assert kind != "full"
                    continue
                seen = number
                served = place.service.hot_loads[0].identity
                assert place.service.held[served] == place.versions[number]


@FEWER
@given(TENSORS)
def test_what_a_publisher_of_tensors_accepts_has_the_callers_bytes_and_type(kinds: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as root:
        place = Place(Path(root), [])
        sides = side_files(Path(root) / "sides")
        config = HotLoadConfig(deployment_id="dep", run_id="run", timeout=60.0, state_dir=str(Path(root) / "state"))
        with Publisher(
            config,
            disk_dir=root,
            base=sides,
            client=place.service,
            s3=place.store,
            plugins=Plugins(),
            tensor_base="memory",
            clock=place.clock,
            sleep=place.clock.sleep,
        ) as publisher:
            made = {f"t{n}": (*tensor_of(own, form, n), told) for n, (own, form, told) in enumerate(kinds)}
            wanted = {name: (told or own, (4, 4), bytes_of(tensor)) for name, (tensor, own, told) in made.items()}
            fits = all(may_be(own, told) for _, own, told in made.values())
            before = dict(place.store.objects)
            try:
                publisher.publish_tensors(
                    {name: tensor for name, (tensor, _, _) in made.items()},
                    number=1,
                    dtype={name: told for name, (_, _, told) in made.items() if told},
                )
            except SnapshotError:
                assert not fits
                assert place.store.objects == before
            else:
                assert fits
                assert place.service.held[place.service.hot_loads[0].identity] == wanted
