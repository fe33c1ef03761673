"""The compiled function by itself: what it tells is true of the bytes, whatever they are."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cwtrain_native
from helpers.requirements import require

SHORTEST, DENSE, CLUMPED, CLUMPED_SHORTEST = 4, 0.55, 0.8, 16
EQUAL = -1


Difference = Callable[..., None]

# What the compiler is told for other processors than this one: no AVX2, and no SSE2 either.
FOR_ALL = "-DFOR_EACH_PROCESSOR="
OTHERS = {"as built": None, "any x86-64": [FOR_ALL], "portable": [FOR_ALL, "-U__SSE2__"]}


@pytest.fixture(scope="module", params=OTHERS)
def function(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Difference:
    """The function as it was built, and as it would be built for others."""
    there = cwtrain_native.library_path() is not None
    require("native", there, "built without its library: apt-get install gcc libc6-dev, and sync again")
    built = cwtrain_native.difference()
    flags = OTHERS[request.param]
    if flags is None:
        return built
    compiler = shutil.which("cc")
    require("native", compiler is not None, "no C compiler: apt-get install gcc libc6-dev")
    source = Path(cwtrain_native.__file__).parent / "difference.c"
    target = tmp_path_factory.mktemp("built") / "difference.so"
    strict = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([str(compiler), *strict, *flags, "-o", str(target), str(source)], check=True)
    other: Difference = ctypes.CDLL(str(target)).cwtrain_native_difference
    other.argtypes, other.restype = built.argtypes, None  # type: ignore[attr-defined]
    return other


def difference(
    function: Difference,
    pairs: list[tuple[bytes, bytes]],
    *,
    dense: float = DENSE,
    clumped: float = CLUMPED,
    guard: bytes = b"guard",
) -> list[tuple[bytes, int, list[tuple[int, int]] | None]]:
    """Call the function on these parts and return, for each, its XOR, its changed bytes, and its (literals, match)."""
    positions, old, new = [], bytearray(), bytearray()
    for left, right in pairs:
        positions.append(len(old))
        padding = bytes(-len(left) % 8)
        old += left + padding
        new += right + padding
    words = len(old) // 8
    before = bytes(new)
    old_buffer = (ctypes.c_char * (len(old) + len(guard))).from_buffer(old + guard)
    new_buffer = (ctypes.c_char * len(new)).from_buffer(new) if new else None
    table = (ctypes.c_int64 * (5 * len(pairs)))()
    for number, ((left, _), position) in enumerate(zip(pairs, positions, strict=True)):
        table[5 * number], table[5 * number + 1] = position, len(left)
    masks = (ctypes.c_uint64 * (words // 8 + 1))()
    room = 4 * (words + len(pairs))
    records = (ctypes.c_uint32 * (room + 1))()
    records[room] = 0xDEADBEEF
    function(
        *(old_buffer, new_buffer, len(pairs), table, masks, records),
        *(dense, SHORTEST, clumped, CLUMPED_SHORTEST),
    )
    assert records[room] == 0xDEADBEEF, "a record beyond the room for them"
    assert bytes(old_buffer)[len(old) :] == guard, "a byte beyond the buffer"
    assert bytes(new) == before
    found = []
    for number, ((left, _), position) in enumerate(zip(pairs, positions, strict=True)):
        _, _, changed, first, count = table[5 * number : 5 * number + 5]
        rows = [records[4 * at : 4 * at + 4] for at in range(first, first + max(0, count))]
        assert all((row[0], row[3]) == (1, 0) for row in rows)
        sequences = None if count == EQUAL else [(row[1], row[2]) for row in rows]
        found.append((bytes(old_buffer)[position : position + len(left)], changed, sequences))
    return found


def check(function: Difference, pairs: list[tuple[bytes, bytes]], **rules: float) -> None:
    for (left, right), (got, changed, sequences) in zip(pairs, difference(function, pairs, **rules), strict=True):
        want = bytes(a ^ b for a, b in zip(left, right, strict=True))
        assert got == want
        assert changed == sum(map(bool, want))
        assert (sequences is None) == (not any(want))
        at = 0
        for literals, match in sequences or ():
            assert literals >= 1
            assert match >= SHORTEST
            at += literals
            # A match at offset 1 repeats the byte before it: that is a zero, and so is all that it stands for.
            assert want[at - 1 : at + match] == bytes(match + 1)
            at += match
        assert at <= len(want)


@st.composite
def parts(draw: st.DrawFn) -> list[tuple[bytes, bytes]]:
    pairs = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 511, 512, 513, 1024, 4099])))
        rng = random.Random(draw(st.integers(0, 1 << 30)))
        left = rng.randbytes(size)
        share = draw(st.sampled_from([0.0, 0.002, 0.02, 0.2, 0.6, 1.0]))
        right = bytes(byte ^ (rng.randrange(1, 256) if rng.random() < share else 0) for byte in left)
        pairs.append((left, right))
    return pairs


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pairs=parts(), dense=st.sampled_from([DENSE, 2.0]), clumped=st.sampled_from([CLUMPED, 0.0]))
def test_what_it_tells_is_true(
    function: Difference, pairs: list[tuple[bytes, bytes]], dense: float, clumped: float
) -> None:
    check(function, pairs, dense=dense, clumped=clumped)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 511, 512, 513, 520, 1 << 16])
def test_one_changed_byte_anywhere_near_an_edge(function: Difference, size: int) -> None:
    old = bytes(size)
    for at in sorted({0, 1, 7, 8, 62, 63, 64, 65, 503, 504, 511, 512, size - 9, size - 2, size - 1}):
        if 0 <= at < size:
            check(function, [(old, old[:at] + b"\x80" + old[at + 1 :])])


def test_dense_parts_are_literals_and_equal_ones_nothing(function: Difference) -> None:
    old = bytes(8 * 100)
    dense = bytes([1] * (8 * 56)) + bytes(8 * 44)
    sparse = bytes([1] * (8 * 55)) + bytes(8 * 45)
    found = difference(function, [(old, dense), (old, sparse), (old, old)])
    assert [sequences for _, _, sequences in found] == [[], [(8 * 55 + 1, 8 * 45 - 1)], None]


def test_where_changes_lie_close_together_only_long_runs_count(function: Difference) -> None:
    close = (b"\x01" + bytes(7)) * 20 + bytes(80)
    loose = (b"\x01" + bytes(15)) * 20
    old = bytes(len(close))
    ((_, _, short),) = difference(function, [(old, close)], dense=2.0)
    assert short == [(2, 6)] * 19 + [(2, 86)]
    ((_, _, none),) = difference(function, [(bytes(len(loose)), loose)], dense=2.0)
    assert none == [(2, 14)] * 20
    # Two words of changes to each run: fewer runs than 0.8 for each word, and those of 6 zeros are not worth a match.
    pairs = (bytes([1]) + bytes(6) + bytes([1]) + bytes([1]) + bytes(6) + bytes([1])) * 10 + bytes(100)
    ((_, _, sequences),) = difference(function, [(bytes(len(pairs)), pairs)], dense=2.0)
    assert sequences == [(161, 99)]


def copied(folder: Path, source: str) -> Path:
    """Put a copy of the package into the folder, and return where its library belongs."""
    for name in ("cwtrain_native", "cwtrain_native.libs"):
        (folder / name).mkdir()
    (folder / "cwtrain_native" / "__init__.py").write_text(source, encoding="utf-8")
    return folder / "cwtrain_native.libs" / "difference.so"


def refusal(folder: Path) -> str:
    """Return what the copy of the package says, in a process of its own, instead of giving the function."""
    code = "import cwtrain_native as n, sys\ntry: n.difference()\nexcept OSError as e: print(e)\nelse: sys.exit('none')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["missing", "no library", "another library"])
def test_a_library_that_cannot_be_used_is_an_oserror(tmp_path: Path, kind: str) -> None:
    source = Path(cwtrain_native.__file__).read_text(encoding="utf-8")
    # An editable installation's library would be found by its place on the path.
    beside_only = source.replace("(beside, *sys.path)", "(beside,)")
    assert beside_only != source
    library = copied(tmp_path, beside_only)
    if kind == "no library":
        library.write_text("text")
    elif kind == "another library":
        shutil.copy(_ctypes.__file__, library)
    assert ("install it again" if kind == "missing" else str(library)) in refusal(tmp_path)


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    require("native", compiler is not None, "no C compiler: apt-get install gcc libc6-dev")
    library = copied(tmp_path, Path(cwtrain_native.__file__).read_text(encoding="utf-8"))
    (tmp_path / "other.c").write_text(
        "int cwtrain_native_version(void) { return 99; } void cwtrain_native_difference(void) {}"
    )
    build = [str(compiler), "-shared", "-fPIC", "-o", str(library), str(tmp_path / "other.c")]
    subprocess.run(build, check=True)
    assert "is of version 99, not 1" in refusal(tmp_path)
