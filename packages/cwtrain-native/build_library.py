"""Compile the library when a wheel is built, an editable one too.

`CC` and `CFLAGS` are honoured. Without a compiler the wheel is made all the same, without the library and for any
platform: cwtrain-core then works with numpy, as it does where this package is not installed at all.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-std=gnu11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"]


class LibraryHook(BuildHookInterface[Any]):
    """Hatchling's custom build hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say that the wheel is of this platform. Raises RuntimeError where compiling fails."""
        package = os.path.join(self.root, "src", "cwtrain_native")
        target = os.path.join(package, "_difference.so")
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if not compiler or shutil.which(compiler[0]) is None:
            self.app.display_warning(
                f"no C compiler ({' '.join(compiler)}): cwtrain-native is built without its library"
            )
            return
        command = [*compiler, *FLAGS, *shlex.split(os.environ.get("CFLAGS", "")), "-o", f"{target}.new"]
        done = subprocess.run([*command, os.path.join(package, "difference.c")], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr.strip()[-4000:]}")
        os.replace(f"{target}.new", target)  # a process that has the old one mapped keeps it
        build_data["artifacts"].append("/src/cwtrain_native/_difference.so")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
