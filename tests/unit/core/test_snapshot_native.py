"""Compiled code that is missing, of another version or wrong is not used: the numpy code does the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cwtrain.snapshots import _codec

FAKES = {
    "another version": "VERSION, COLUMNS = 99, 5",
    "without its library": "VERSION, COLUMNS = 1, 5\ndef difference(): raise OSError('no such file: _difference.so')",
    "not what it should be": "answer = 42",
    "finds nothing": "VERSION, COLUMNS = 1, 5\ndef difference(): return lambda *arguments: None",
    "not callable": "VERSION, COLUMNS = 1, 5\ndef difference(): return None",
}

ENCODE = """
import logging, sys
logging.basicConfig(format="%(message)s")
from cwtrain.snapshots import _codec, _native
print(_native.native_function() is None, _codec.encode_xor(bytes(5000), bytes(2000) + b"x" + bytes(2999)).hex())
"""


def encoded_with(path: Path | None, **environ: str) -> tuple[str, str, str]:
    """Encode in a fresh process; return whether compiled code was refused, the frame, and what was logged."""
    more = {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(
        [sys.executable, "-c", ENCODE],
        env={**os.environ, **more, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused, frame = done.stdout.split()
    return refused, frame, done.stderr


@pytest.mark.parametrize("kind", FAKES)
def test_what_cannot_be_used_is_said_once_and_numpy_does_the_work(tmp_path: Path, kind: str) -> None:
    (tmp_path / "cwtrain_native.py").write_text(FAKES[kind], encoding="utf-8")
    refused, frame, said = encoded_with(tmp_path)
    assert (refused, frame) == ("True", _codec.encode_xor(bytes(5000), bytes(2000) + b"x" + bytes(2999), "numpy").hex())
    assert said.count("cwtrain-native is not used") == 1, said


def test_without_it_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "cwtrain_native.py").write_text("raise ImportError('not installed')", encoding="utf-8")
    refused, _, said = encoded_with(tmp_path)
    assert (refused, said) == ("True", "")


def test_numpy_can_be_asked_for() -> None:
    assert _codec.delta_codec("numpy").function is None
