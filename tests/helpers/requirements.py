"""What some tests need from outside: skipped with the reason and the command, or a failure where it is required.

``CWTRAIN_TEST_REQUIRE`` is a comma-separated list of what must not be skipped: ``ceph,chromium,native,torch,ray,peer``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import NamedTuple

import pytest


class Requirement(NamedTuple):
    present: Callable[[], bool]
    install: str


def _module(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


def _programs(*names: str) -> Callable[[], bool]:
    return lambda: all(shutil.which(name) for name in names)


def _chromium() -> bool:
    return any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))


def _peer() -> bool:
    return os.path.exists(os.environ.get("CWTRAIN_TEST_PEER", ""))


def _native() -> bool:
    from cwtrain.snapshots._native import native_function

    return native_function() is not None


KNOWN = {
    "ceph": Requirement(
        _programs("radosgw", "ceph-mon", "ceph-osd"),
        "apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd",
    ),
    "chromium": Requirement(_chromium, "apt-get install -y --no-install-recommends chromium fonts-dejavu-core"),
    "native": Requirement(_native, "apt-get install -y gcc libc6-dev, and uv sync --reinstall-package cwtrain-native"),
    "openssl": Requirement(_programs("openssl"), "apt-get install -y openssl"),
    "peer": Requirement(_peer, "make a venv with the published wheel and set CWTRAIN_TEST_PEER to its python"),
    "ray": Requirement(_module("ray"), "uv pip install ray"),
    "torch": Requirement(
        lambda: _module("torch")() and _module("transformers")(),
        "uv pip install 'torch>=2.6,<2.14' 'transformers>=5.24' tokenizers (a CPU build of torch is enough)",
    ),
}


def require(what: str, present: bool | None = None, reason: str | None = None) -> None:
    """Skip the test unless ``what`` is there; fail it instead when ``CWTRAIN_TEST_REQUIRE`` names it.

    ``present`` and ``reason`` are needed only for what ``KNOWN`` does not list.
    """
    known = KNOWN.get(what)
    if present is None:
        if known is None:
            raise ValueError(f"nobody says how to find {what!r}: give present=, or add it to helpers.requirements")
        present = known.present()
    if present:
        return
    text = f"{what} is missing: {reason or (known.install if known else 'no way to install it is known')}"
    if what in required():
        pytest.fail(f"{text} (required by CWTRAIN_TEST_REQUIRE)", pytrace=False)
    pytest.skip(text)


def required() -> set[str]:
    return {what.strip() for what in os.environ.get("CWTRAIN_TEST_REQUIRE", "").split(",") if what.strip()}
