"""WeightMirror: any chain of updates, applied in any way, ends at the trainer's bytes."""

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cwtrain.hotload import WeightMirror, inspect_snapshot
from helpers import snapshot_files as sf

SIZES = st.sampled_from([0, 1, 7, 8, 9, 63, 64, 4095, 4096, 70_000])
STEPS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 5)),  # which tensors change
        st.sampled_from(["slots", "in place", "one pass", "again"]),
        st.integers(0, 2**32),
    ),
    min_size=1,
    max_size=5,
)


def change(raw, seed):
    if not raw:
        return raw
    new = bytearray(raw)
    for step in range(1 + len(raw) // 500):
        new[(seed + 7919 * step) % len(raw)] ^= 1 + (seed + step) % 255
    return bytes(new)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=st.lists(SIZES, min_size=6, max_size=6), split=st.integers(0, 5), steps=STEPS)
def test_any_chain_ends_at_the_trainers_bytes(sizes, split, steps):
    models = [{f"t{n}": ("U8", [size], bytes(i % 251 for i in range(size))) for n, size in enumerate(sizes)}]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)

        def write(name, model):
            names = list(model)
            parts = [{n: model[n] for n in part} for part in (names[:split], names[split:]) if part]
            return sf.write_full(root / name, *parts)

        mirror = WeightMirror.create(write("base", models[0]), root / "m", workers=1)
        for number, (which, how, seed) in enumerate(steps, start=1):
            old = models[-1]
            new = {
                name: (dtype, shape, change(raw, seed) if n in which else raw)
                for n, (name, (dtype, shape, raw)) in enumerate(old.items())
            }
            models.append(new)
            numbers = {"version": f"{number:06d}", "base_version": f"{number - 1:06d}"}
            mirror.close()
            mirror = WeightMirror(root / "m", workers=1, in_place=how == "in place")
            if how == "one pass":
                mirror.write_delta(write(f"v{number}", new), root / f"d{number}", version=number)
                assert sf.apply_delta(old, root / f"d{number}") == new
            else:
                names = [name for n, name in enumerate(new) if n in which] if how == "again" else None
                sf.write_delta(root / f"d{number}", old, new, metadata=numbers, names=names)
                mirror.apply_delta(root / f"d{number}")
            assert mirror.version == f"{number:06d}"
            assert sf.read_checkpoint(mirror.path) == new
            assert inspect_snapshot(mirror.path, verify="full").checksums == mirror.checksums
        mirror.close()
