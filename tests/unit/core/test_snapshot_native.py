"""Compiled code that is missing, of another version or wrong is not used: the numpy code does the same."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cwtrain.snapshots import _codec, _native
from cwtrain.snapshots._buffers import round_up
from cwtrain.snapshots._sequences import CLUMPED, EQUAL, FEW, SequenceBuilder

HAS = "VERSION, COLUMNS = 1, 5\ndef library_path(): return '/somewhere'\n"
FAKES = {
    "another version": ("VERSION, COLUMNS = 99, 5", "it is of version 99, and 1 is needed"),
    "not what it should be": ("answer = 42", "has no attribute 'VERSION'"),
    "cannot be loaded": (HAS + "def difference(): raise OSError('wrong ELF class')", "wrong ELF class"),
    "breaks when it is imported": ("raise RuntimeError('broken')", "broken"),
    "not callable": (HAS + "def difference(): return None", "not callable"),
    "wrong arguments": (
        HAS
        + "import ctypes\ndef difference():\n f = ctypes.CDLL(None).abs\n f.argtypes = [ctypes.c_char_p]\n return f",
        "argument 1",
    ),
    "finds nothing": (HAS + "def difference(): return lambda *arguments: None", "does not find what the numpy code"),
}

ENCODE = """
import logging, sys
logging.basicConfig(format="%(message)s")
from cwtrain.snapshots import _codec, _native
print(_native.native_function() is None, _codec.encode_xor(bytes(5000), bytes(2000) + b"x" + bytes(2999)).hex())
"""


def encoded_with(path: Path) -> tuple[str, str, str]:
    """Encode in a fresh process; return whether compiled code was refused, the frame, and what was logged."""
    done = subprocess.run(
        [sys.executable, "-c", ENCODE],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused, frame = done.stdout.split()
    return refused, frame, done.stderr


@pytest.mark.parametrize("kind", FAKES)
def test_what_cannot_be_used_is_said_once_and_numpy_does_the_work(tmp_path: Path, kind: str) -> None:
    source, why = FAKES[kind]
    (tmp_path / "cwtrain_native.py").write_text(source, encoding="utf-8")
    refused, frame, said = encoded_with(tmp_path)
    assert (refused, frame) == ("True", _codec.encode_xor(bytes(5000), bytes(2000) + b"x" + bytes(2999), "numpy").hex())
    assert said.count("cwtrain-native is not used") == 1, said
    assert why in said
    assert "install cwtrain-native again" in said


ABSENT = {
    "not installed": "raise ImportError('not installed')",
    "without its library": "VERSION, COLUMNS = 1, 5\ndef library_path(): return None",
}


@pytest.mark.parametrize("kind", ABSENT)
def test_without_it_nothing_is_said(tmp_path: Path, kind: str) -> None:
    (tmp_path / "cwtrain_native.py").write_text(ABSENT[kind], encoding="utf-8")
    refused, _, said = encoded_with(tmp_path)
    assert (refused, said) == ("True", "")


def test_doctor_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    (tmp_path / "cwtrain_native.py").write_text(FAKES["cannot be loaded"][0], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "cwtrain", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COREWEAVE_API_URL": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["encoder"]["zeros"] == "numpy"
    assert "wrong ELF class" in report["encoder"]["problem"]
    assert report["encoder"]["problem"] in report["problems"]


def test_numpy_can_be_asked_for() -> None:
    assert _codec.delta_codec("numpy").function is None


def test_it_is_tried_on_parts_of_each_kind() -> None:
    """Else a library that is wrong for one kind would be believed."""
    kinds = _native.sample()
    assert len(kinds) > FEW
    found = []
    for kind in kinds[:4]:
        padded = np.zeros(round_up(kind.size), np.uint8)
        padded[: kind.size] = kind
        (one,) = SequenceBuilder(padded.size).find(padded, [kind.size], [0])
        found.append((one.records, int(np.count_nonzero(padded.view(np.uint64)))))
    (sparse, words), (equal, _), (clumped, clumped_words), (dense, _) = found
    assert sparse >= CLUMPED * words
    assert equal == EQUAL
    assert 0 < clumped < CLUMPED * clumped_words
    assert dense == 0


@pytest.mark.parametrize("spoilt", [None, "clumped", "dense", "sparse", "xor"])
def test_a_library_that_is_wrong_for_one_kind_only_is_refused(spoilt: str | None) -> None:
    """Built on the numpy code, and wrong in the records of one kind of part, or in one byte."""

    def function(old: int, new: int, parts: int, table: int, masks: int, records: int, *rules: float) -> None:
        rows = np.ctypeslib.as_array((ctypes.c_int64 * (5 * parts)).from_address(table)).reshape(parts, 5)
        size = int(rows[-1, 0]) + round_up(int(rows[-1, 1]))
        left, right = (np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at)) for at in (old, new))
        room = (ctypes.c_int32 * (4 * (size // 8 + parts))).from_address(records)
        told = np.ctypeslib.as_array(room).reshape(-1, 4)
        builder = SequenceBuilder(size)
        builder.subtract(left, right, rows[:, 1].tolist(), rows[:, 0].tolist())
        first = 0
        for number, one in enumerate(builder.found()):
            spoil = ["sparse", "equal", "clumped", "dense"][number % 4] == spoilt
            mine = builder.records_of(one)
            told[first : first + len(mine)] = mine
            if spoil and len(mine):
                told[first + len(mine) - 1, 1] += 1
            rows[number, 2:] = one.changed_bytes, first, one.records + (spoil and not len(mine))
            first += len(mine)
        if spoilt == "xor":
            left[0] ^= 1

    assert _native.agrees(function) == (spoilt is None)
