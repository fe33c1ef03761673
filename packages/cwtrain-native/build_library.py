"""Compile the library when a wheel is built, an editable one too.

It goes into the wheel, never into the source folder, beside the package: `cwtrain_native.libs/difference.so`. `CC` and
`CFLAGS` are honoured. Where it cannot be compiled (no compiler, no C library's headers, not Linux) the wheel is made
all the same, without it and for any platform: cwtrain-core then works with numpy, as it does where this package is not
installed. With `CWTRAIN_NATIVE_REQUIRED=1` that is an error instead.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-std=gnu11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"]
PLACE = "cwtrain_native.libs/difference.so"


class LibraryHook(BuildHookInterface[Any]):
    """Hatchling's custom build hook."""

    _folder = ""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say that the wheel is of this platform. Raises RuntimeError where it must and cannot."""
        self._folder = tempfile.mkdtemp(prefix="cwtrain-native-")
        library = os.path.join(self._folder, "difference.so")
        problem = self._compile(library)
        if problem:
            if os.environ.get("CWTRAIN_NATIVE_REQUIRED"):
                shutil.rmtree(self._folder, ignore_errors=True)
                raise RuntimeError(problem)
            self.app.display_warning(f"built without the library: {problem}")
            return
        build_data["force_include" if version == "standard" else "force_include_editable"][library] = PLACE
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is in the wheel by now."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _compile(self, library: str) -> str:
        """Return why there is no library; empty when there is."""
        if not sys.platform.startswith("linux"):
            return f"it is for Linux, and this is {sys.platform}"
        compiler = shlex.split(os.environ.get("CC") or "cc")
        source = os.path.join(self.root, "src", "cwtrain_native", "difference.c")
        command = [*compiler, *FLAGS, *shlex.split(os.environ.get("CFLAGS", "")), "-o", library, source]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"the C compiler cannot be started: {error}"
        if done.returncode:
            return f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr.strip()[-4000:]}"
        return ""
