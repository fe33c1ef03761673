"""What a tool needs beside Python: said in one line with how to install it, before anything else is done.

import needed

with needed.imports():
    from cwtrain_emulator.emulator import Emulator

needed.need("torch", "safetensors", programs=("uv",))   # what is imported later, or run
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["imports", "need"]

_TORCH = "uv pip install 'torch>=2.6,<2.14' (a CPU build is enough)"
_INSTALL = {
    "torch": _TORCH,
    "transformers": "uv pip install 'transformers>=5.24'",
    "tokenizers": "uv pip install tokenizers",
    "safetensors": "uv pip install safetensors",
    "accelerate": "uv pip install accelerate",
    "gguf": "uv pip install gguf",
    "playwright": "uv pip install playwright",
    "uv": "pip install uv",
    "git": "apt-get install -y git",
    "chromium": "apt-get install -y --no-install-recommends chromium fonts-dejavu-core",
}
_WORKSPACE = "uv sync, then run the tool with: uv run python tools/{tool}"


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Let a tool import what it needs, and end it with one line where that is not installed."""
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name is None:
            raise
        _end([exc.name.partition(".")[0]])


def need(*modules: str, programs: Sequence[str] = ()) -> None:
    """End the tool with one line where one of ``modules`` or ``programs`` is missing; all that is missing is in it."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    missing += [name for name in programs if shutil.which(name) is None]
    if missing:
        _end(missing)


def _end(missing: Sequence[str]) -> NoReturn:
    tool = Path(sys.argv[0]).name or "this tool"
    how = dict.fromkeys(_INSTALL.get(name, _WORKSPACE.format(tool=tool)) for name in missing)
    verb = "is" if len(missing) == 1 else "are"
    print(f"{tool} needs {', '.join(missing)}, which {verb} not installed here: {'; '.join(how)}", file=sys.stderr)
    sys.exit(2)
