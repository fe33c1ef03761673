"""Whatever the bytes are, compiled code and numpy find the same, record by record."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cwtrain_native
from cwtrain.snapshots import _codec
from cwtrain.snapshots._buffers import positions_of, round_up
from cwtrain.snapshots._native import NativeBuilder, agrees, native_function
from cwtrain.snapshots._sequences import FEW, SequenceBuilder
from helpers.requirements import require

pytestmark = pytest.mark.needs("native")

CHUNK = 1 << 15
FRAME_CHUNK = 1 << 16


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, CHUNK), min_size=1, max_size=1),
        st.lists(st.integers(1, 1500), min_size=2, max_size=FEW),
        st.lists(st.integers(1, 300), min_size=FEW + 1, max_size=60),
    ),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.03, 0.08, 0.2, 0.5, 0.7, 1.0]), min_size=1, max_size=5),
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 1 << 30),
)
@example(lengths=[CHUNK], shares=[0.0], item_bytes=2, seed=0)
@example(lengths=[1] * 60, shares=[0.0, 1.0], item_bytes=1, seed=0)
def test_both_find_the_same(lengths: list[int], shares: list[float], item_bytes: int, seed: int) -> None:
    function = native_function()
    assert function is not None
    positions = positions_of(lengths)
    size = positions[-1] + round_up(lengths[-1])
    rng = random.Random(seed)
    old = np.frombuffer(rng.randbytes(size), np.uint8).copy()
    new = old.copy()
    for number, (position, length) in enumerate(zip(positions, lengths, strict=True)):
        share = shares[number % len(shares)]
        for at in range(position, position + length, item_bytes):
            if rng.random() < share:
                new[at] ^= rng.randrange(1, 256)
        old[position + length : position + round_up(length)] = 0
        new[position + length : position + round_up(length)] = 0
    left, right = old.copy(), old.copy()
    compiled, numpy = NativeBuilder(function, CHUNK), SequenceBuilder(CHUNK)
    compiled.subtract(left, new, lengths, positions)
    numpy.subtract(right, new, lengths, positions)
    assert np.array_equal(left, right)
    for one, other in zip(compiled.found(), numpy.found(), strict=True):
        assert (one.changed_bytes, one.records) == (other.changed_bytes, other.records)
        assert np.array_equal(compiled.records_of(one), numpy.records_of(other))


def pairs() -> dict[str, tuple[bytes, bytes]]:
    rng = random.Random(3)
    made = {}
    for name, size, share in (
        ("sparse", 3 * FRAME_CHUNK + 5, 0.004),
        ("real", 2 * FRAME_CHUNK, 0.012),
        ("clumped", FRAME_CHUNK + 1, 0.12),
        ("dense", FRAME_CHUNK, 0.9),
    ):
        old = rng.randbytes(size)
        made[name] = (old, bytes(byte ^ (rng.randrange(1, 4) if rng.random() < share else 0) for byte in old))
    return made


@pytest.mark.parametrize("name", pairs())
def test_both_make_the_same_frame(name: str) -> None:
    old, new = pairs()[name]
    ours, theirs = (_codec.encode_xor(old, new, encoder, chunk_bytes=FRAME_CHUNK) for encoder in ("sequences", "numpy"))
    assert ours == theirs
    assert _codec.decode_xor(ours, old) == new


def test_the_compiled_code_is_used() -> None:
    assert native_function() is not None
    assert _codec.delta_codec("sequences").function is native_function()


# Each breaks one rule of the compiled code, and leaves the others as they are.
BROKEN = {
    "the zeros of short runs are forgotten": ("pending = literals + match;", "pending = literals;"),
    "clumped parts are looked at once": ("< clumped * (double)count", "< 0.0"),
    "dense parts get sequences": ("> dense * (double)words", "> 2.0 * (double)words"),
    "the last run is lost": ("if (length - from >= shortest)", "if (length - from >= length)"),
    "shorter runs": ("int keep = to - from >= shortest;", "int keep = to - from > shortest;"),
    "the last words are left": ("if (rest)", "if (rest > 7)"),
}


@pytest.mark.parametrize("kind", [None, *BROKEN])
def test_core_s_own_trial_refuses_code_that_is_wrong_in_one_rule(tmp_path: Path, kind: str | None) -> None:
    compiler = shutil.which("cc")
    require("native", compiler is not None, "no C compiler: apt-get install gcc libc6-dev")
    source = (Path(cwtrain_native.__file__).parent / "difference.c").read_text(encoding="utf-8")
    if kind is not None:
        right, wrong = BROKEN[kind]
        assert source.count(right) == 1
        source = source.replace(right, wrong)
    (tmp_path / "difference.c").write_text(source, encoding="utf-8")
    build = [str(compiler), "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", str(tmp_path / "difference.so")]
    subprocess.run([*build, str(tmp_path / "difference.c")], check=True)
    function = ctypes.CDLL(str(tmp_path / "difference.so")).cwtrain_native_difference
    function.argtypes, function.restype = cwtrain_native.difference().argtypes, None
    assert agrees(function) == (kind is None)


def test_versions_of_unlike_sizes_are_refused_before_compiled_code_sees_them() -> None:
    function = native_function()
    assert function is not None
    builder = NativeBuilder(function, CHUNK)
    for old, new, lengths in ((64, 72, [64]), (72, 64, [64]), (64, 64, [65]), (64, 64, [32, 33])):
        with pytest.raises(ValueError, match="of the other"):
            builder.subtract(np.zeros(old, np.uint8), np.zeros(new, np.uint8), lengths, positions_of(lengths))
