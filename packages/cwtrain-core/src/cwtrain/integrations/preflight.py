"""Check a trainer's access before a run: ``python -m cwtrain.integrations.preflight``.

It reads the environment that the trainers' hooks read (``CWTRAIN_HOTLOAD_*``, the API token, the object store's
settings), asks the service for the deployment, and tries every permission that publishing needs on the bucket; nothing
is left there. Exit code 0 and JSON on standard output when a run can publish; otherwise 1 and what is wrong, all
problems of the environment at once, on standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from cwtrain._streams import UnfailingStderr, open_closed_streams, settle_streams
from cwtrain.config import ApiConfig, HotLoadConfig, StorageConfig
from cwtrain.errors import ConfigError, CWTrainError

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run the check and return 0 or 1. It takes no arguments but ``--help``."""
    with UnfailingStderr():
        return _main(list(sys.argv[1:] if args is None else args))


def _main(words: list[str]) -> int:
    if words in (["--help"], ["-h"]):
        return _printed(f"{__doc__}")
    if words:
        return _refused(ConfigError(f"unexpected arguments: {' '.join(words)}", hint="it reads the environment only"))
    try:
        deployment_id = _deployment_id(os.environ)
        from cwtrain.hotload.check import check_hot_load
        from cwtrain.infra import InferenceClient

        with InferenceClient() as client:
            checked = check_hot_load(client, deployment_id)
    except CWTrainError as exc:
        return _refused(exc)
    for warning in checked.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    return _printed(json.dumps(checked.to_json(), ensure_ascii=False, indent=2) + "\n")


def _printed(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as exc:
        sys.stderr.write(f"error: standard output: {exc.strerror}\n")
        return 1
    return 0


def _deployment_id(environ: Mapping[str, str]) -> str:
    """Return the deployment that the environment names, after a look at everything else that hooks read from it."""
    problems: list[str] = []
    hints: list[str] = []
    deployment_id = ""
    try:
        deployment_id = HotLoadConfig.from_env(environ).deployment_id
    except ConfigError as exc:
        _keep(exc, problems, hints)
    try:
        if ApiConfig.from_env(environ).token is None:
            problems.append("COREWEAVE_API_TOKEN is not set (API access token)")
            hints.append("set COREWEAVE_API_TOKEN")
    except ConfigError as exc:
        _keep(exc, problems, hints)
    try:
        StorageConfig.from_env(environ)
    except ConfigError as exc:
        _keep(exc, problems, hints)
    if problems:
        text = problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n  " + "\n  ".join(problems)
        raise ConfigError(text, problems=problems, hint="; ".join(dict.fromkeys(hints)) or None)
    return deployment_id


def _keep(exc: ConfigError, problems: list[str], hints: list[str]) -> None:
    problems += exc.problems or (str(exc),)
    if exc.hint:
        hints.append(exc.hint)


def _refused(exc: CWTrainError) -> int:
    sys.stderr.write(f"error: {exc}\n")
    if exc.hint:
        sys.stderr.write(f"  next: {exc.hint}\n")
    return 1


if __name__ == "__main__":
    open_closed_streams()
    code = main()
    settle_streams()
    sys.exit(code)
