"""What an import or an offline command may load, looked at in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.snapshot_files import write_full

HEAVY = {"boto3", "botocore", "httpx", "numpy", "rich", "stamina", "zstandard", "torch", "ray", "asyncio"}


def loaded(code: str) -> set[str]:
    """Return which heavy packages are loaded after ``code`` ran in a new interpreter."""
    script = f"{code}\nimport sys\nprint('LOADED', *sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "code",
    [
        "import cwtrain",
        "import cwtrain.errors, cwtrain.events, cwtrain.models, cwtrain.config, cwtrain.plugins",
        "import cwtrain.infra, cwtrain.storage, cwtrain.snapshots, cwtrain.hotload, cwtrain.integrations",
        "from cwtrain.config import ApiConfig, HotLoadConfig, StorageConfig, PluginConfig; ApiConfig.from_env()",
        "from cwtrain.snapshots import inspect_snapshot",
        "import cwtrain.cli",
        "from cwtrain.plugins import get_plugins; get_plugins().integrations()",
        "from cwtrain.cli import main; assert main(['--help']) == 0",
        "from cwtrain.cli import main; assert main(['hotload', 'publish', '--help']) == 0",
        "from cwtrain.cli import main; assert main(['plugins', 'list']) == 0",
        "from cwtrain.cli import main; assert main(['completion', 'zsh']) == 0",
    ],
)
def test_nothing_heavy_is_loaded(code):
    assert loaded(code) == set()


def test_inspect_needs_no_network_library_and_no_credentials(tmp_path):
    write_full(tmp_path, {"a": ("BF16", [2], b"\x01\x02\x03\x04")})
    assert loaded(f"from cwtrain.cli import main; assert main(['hotload', 'inspect', {str(tmp_path)!r}]) == 0") == set()
    verify = f"from cwtrain.cli import main; assert main(['hotload', 'inspect', '--verify', {str(tmp_path)!r}]) == 0"
    assert not loaded(verify) & {"boto3", "botocore", "httpx", "rich"}


def test_a_table_needs_nothing_heavy():
    assert loaded("from cwtrain.cli import main; assert main(['plugins', 'list', '-o', 'table']) == 0") == set()
