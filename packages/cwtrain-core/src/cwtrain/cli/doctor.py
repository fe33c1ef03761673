"""``cwtrain doctor``: what is installed and set, and whether the service can be reached from here."""

from __future__ import annotations

import difflib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from cwtrain.cli._context import Command, Context, pass_context

__all__ = ["doctor"]

_LIBRARIES = (
    "attrs",
    "boto3",
    "botocore",
    "cattrs",
    "click",
    "filelock",
    "httpx",
    "numpy",
    "pluggy",
    "rich",
    "stamina",
    "zstandard",
)
_COLUMNS = {
    "plugins": ("name", "state", "version", "provides", "problems"),
    "settings": ("variables", "value", "source?"),
}
_OURS = "CWTRAIN_"
_NEAR = 0.8
"""How like a setting's name a variable's must be to be taken for it misspelled, from 0 to 1."""
_DEPLOYMENT = "CWTRAIN_HOTLOAD_DEPLOYMENT_ID"
_SECONDS = 10.0
"""What one question to the API may take: a report is wanted now, also while nothing answers."""
_SKEW_SECONDS = 60.0
"""A clock that is off by more is worth a word; S3 refuses requests from a clock 900 s off."""


@click.command(cls=Command, example="cwtrain doctor")
@click.option("--strict", is_flag=True, help="Exit with code 1 where there is a problem.")
@pass_context
def doctor(ctx: Context, strict: bool) -> None:
    """Report what is installed, set and reachable.

    That is versions, plugins, every setting of core and of plugins with its source (secrets masked), the API's endpoint
    and clock, the object store, the bucket when CWTRAIN_HOTLOAD_DEPLOYMENT_ID names a deployment, and what deltas are
    made with ("encoder": the extra [fast] brings the fastest libraries). What is missing or wrong
    stands in "problems" and on standard error, variables that look like settings and are none among it; without
    --strict the exit code says only that the report was made.
    """
    ctx.out.refuse_ids()
    settings = list(_settings(ctx))
    endpoint, clock = _endpoint(ctx)
    storage, missing = _storage()
    report: dict[str, Any] = {
        "versions": _versions(),
        "plugins": _plugins(),
        "settings": settings,
        "endpoint": endpoint,
        "clock": clock,
        "storage": storage,
        "bucket": _bucket(ctx),
        "encoder": _encoder(),
    }
    report["problems"] = _once([*_problems(report), *missing, *_unreadable(settings)])
    for problem in report["problems"]:
        ctx.out.say(f"problem: {problem}")
    told = [{**one, "value": "(not set)" if one["value"] is None else one["value"]} for one in settings]
    ctx.out.data(report, columns=_COLUMNS, table={**report, "settings": told})
    if strict and report["problems"]:
        click.get_current_context().exit(1)


def _versions() -> dict[str, Any]:
    import importlib.metadata  # here: it costs more than all else that `cwtrain --help` imports of this module

    found = {
        _folded(distribution.name): distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.name and _folded(distribution.name).startswith("cwtrain")
    }
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {"python": platform.python_version(), "platform": platform.platform(), **dict(sorted(found.items()))}


def _folded(name: str) -> str:
    return name.lower().replace("_", "-")


def _plugins() -> list[dict[str, Any]] | dict[str, str]:
    from cwtrain.cli.plugins import plugin_rows
    from cwtrain.errors import CWTrainError

    try:
        return plugin_rows()
    except CWTrainError as exc:
        return {"error": _words(exc)}


def _settings(ctx: Context) -> Iterator[dict[str, Any]]:
    from cwtrain.config import CONFIGS, ApiConfig, located
    from cwtrain.errors import CWTrainError
    from cwtrain.plugins import get_plugins

    found = [
        item for config in CONFIGS for item in located(config, overrides=ctx.overrides() if config is ApiConfig else {})
    ]
    try:
        found += get_plugins().settings()
    except CWTrainError:  # told with the plugins
        pass
    for item in found:
        yield {
            "variables": list(item.setting.variables),
            "value": item.value,
            "source": item.source,
            **({"problem": item.problem} if item.problem else {}),
        }


def _unknown(settings: Iterable[dict[str, Any]], environ: Iterable[str]) -> Iterator[str]:
    """Return what to say of variables that look like settings and are none.

    Those of an area that has settings (``CWTRAIN_HOTLOAD_``), and others of ours that are nearly a setting.
    """
    known = {name for setting in settings for name in setting["variables"] if name.startswith(_OURS)}
    areas = {_area(name) for name in known}
    for name in sorted(set(environ) - known):
        if not name.startswith(_OURS):
            continue
        near = difflib.get_close_matches(name, sorted(known), 1, cutoff=_NEAR)
        if near:
            yield f"{name} is no setting and has no effect; did you mean {near[0]}?"
        elif _area(name) in areas:
            yield f"{name} is no setting of what is installed here and has no effect: unset it"


def _area(name: str) -> str:
    """Return the first two words of a variable's name, as in ``CWTRAIN_HOTLOAD_``."""
    return "_".join(name.split("_")[:2]) + "_"


def _endpoint(ctx: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the API's endpoint and its clock say."""
    from cwtrain.errors import CWTrainError

    unknown = {"skew_seconds": None, "ok": None}
    try:
        config = ctx.api_config()
    except CWTrainError as exc:
        return {"url": None, "reachable": None, "error": _words(exc)}, unknown
    from cwtrain.infra._probe import probe

    try:
        answer = probe(config)
    except CWTrainError as exc:
        return {"url": config.base_url, "reachable": False, "error": _words(exc)}, unknown
    endpoint = {
        "url": config.base_url,
        "reachable": True,
        "status": answer.status,
        "seconds": round(answer.seconds, 3),
        "token": config.token_source or None,
    }
    skew = answer.skew_seconds
    ok = None if skew is None else abs(skew) <= _SKEW_SECONDS
    return endpoint, {"skew_seconds": None if skew is None else round(skew, 1), "ok": ok}


def _storage() -> tuple[dict[str, Any], list[str]]:
    """Return which object store would be used, and who says so; and everything that is missing for it."""
    from cwtrain.errors import CWTrainError
    from cwtrain.storage import s3_client, s3_settings
    from cwtrain.storage._signing import credentials_of
    from cwtrain.storage.s3 import DEFAULT_ENDPOINT

    problems: list[str] = []
    client: Any = None
    # What is wrong hides what else is: so it is left out, one after the other.
    for endpoint, region in ((None, None), (DEFAULT_ENDPOINT, None), (None, "any"), (DEFAULT_ENDPOINT, "any")):
        try:
            client = s3_client(endpoint, region_name=region)
            break
        except CWTrainError as exc:
            problems.append(_words(exc))
    credentials = credentials_of(client) if client is not None else None
    if credentials is not None and credentials.source is None:
        problems.append(_no_keys(os.environ))
    report: dict[str, Any] = {"credentials": credentials.source if credentials is not None else None}
    if client is None or endpoint or region:
        return {**report, "error": problems[0]}, problems
    settings = s3_settings(client)
    report |= {
        "endpoint": settings.endpoint_url,
        "endpoint_source": settings.endpoint_source,
        "region": settings.region,
        "region_source": settings.region_source,
        "addressing": settings.addressing,
        "addressing_source": settings.addressing_source,
    }
    return report, problems


def _no_keys(environ: Mapping[str, str]) -> str:
    """Return what to say where boto3 finds no S3 credentials: half of them may be there."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    half = [name for name in names if environ.get(name, "").strip()]
    absent = " and ".join(name for name in names[:2] if name not in half)
    text = f"no S3 credentials: {', '.join(half)} alone is not enough" if half else "no S3 credentials were found"
    lost = [
        f"{name}={path!r} is not there"
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")
        if (path := environ.get(name, "").strip()) and not os.path.exists(os.path.expanduser(path))
    ]
    places = f" ({', '.join(lost)})" if lost else ""
    return f"{text}{places}; set {absent}, or AWS_PROFILE"


def _unreadable(settings: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield what to say of files that a variable names and that cannot be read."""
    named = {
        row["source"]: row["value"] for row in settings if row["source"].endswith("_FILE") and "problem" not in row
    }
    named["AWS_WEB_IDENTITY_TOKEN_FILE"] = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE", "").strip()
    for name, path in named.items():
        if not path:
            continue
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as exc:
            yield f"{name}={path!r} cannot be read: {exc.strerror or exc}; correct the path or its mode, or unset it"


def _encoder() -> dict[str, str]:
    """Return what deltas are made with: each part is the fastest that is installed, and all make correct ones."""
    from cwtrain.errors import CWTrainError
    from cwtrain.snapshots._codec import in_use

    try:
        return in_use()
    except CWTrainError as exc:
        return {"error": _words(exc)}


def _bucket(ctx: Context) -> dict[str, Any] | None:
    from cwtrain.errors import CWTrainError

    named = os.environ.get(_DEPLOYMENT, "").strip()
    if not named:
        return None
    from cwtrain.hotload.check import check_hot_load

    try:
        with ctx.client() as client:
            asking = client.within(_SECONDS, retries=False)
            return check_hot_load(asking, ctx.deployment_id(asking, named)).to_json()
    except CWTrainError as exc:
        return {"deployment": named, "result": "failed", "error": _words(exc)}


def _once(problems: Iterable[str]) -> list[str]:
    """Return the problems without those that another one says, too, and says more."""
    found = list(dict.fromkeys(problems))
    return [one for one in found if not any(other != one and other.startswith(one) for other in found)]


def _problems(report: dict[str, Any]) -> Iterator[str]:
    from cwtrain.config.api import TOKEN_VARIABLES, missing_token

    if foreign := _foreign():
        yield foreign
    plugins = report["plugins"]
    if isinstance(plugins, dict):
        yield plugins["error"]
    else:
        for row in plugins:
            for problem in row["problems"]:
                yield f"plugin {row['name']}: {problem}"
    yield from (setting["problem"] for setting in report["settings"] if "problem" in setting)
    yield from _unknown(report["settings"], os.environ)
    endpoint = report["endpoint"]
    if not any(row["variables"][0] == TOKEN_VARIABLES[0] and row["source"] != "unset" for row in report["settings"]):
        yield _words(missing_token())
    if "error" in endpoint:
        yield endpoint["error"]
    elif endpoint["token"] is not None:
        if endpoint["status"] == 401:
            yield f"{endpoint['url']} does not accept the token of {endpoint['token']}"
        elif endpoint["status"] >= 400:
            yield f"{endpoint['url']} answers with HTTP {endpoint['status']}"
    if report["clock"]["ok"] is False:
        yield (
            f"the clock of this machine is off by {report['clock']['skew_seconds']:g} s against the API's; "
            "object stores refuse requests when it is off by 900 s"
        )
    bucket = report["bucket"]
    if bucket is not None and "error" in bucket:
        yield bucket["error"]
    elif bucket is not None and bucket["deployment"] != (named := os.environ[_DEPLOYMENT].strip()):
        yield f"{_DEPLOYMENT}={named!r} is a name, which commands take and trainers do not: set {bucket['deployment']}"
    yield from (report["encoder"][word] for word in ("error", "problem") if word in report["encoder"])


def _foreign() -> str | None:
    """Return what to say when a distribution named ``cwtrain`` is installed: it has our import name and is not ours."""
    import importlib.metadata

    try:
        found = importlib.metadata.distribution("cwtrain")
    except importlib.metadata.PackageNotFoundError:
        return None
    return (
        f"the distribution 'cwtrain' {found.version} is installed beside cwtrain-core and writes into the same import "
        "package: run pip uninstall cwtrain, then pip install --force-reinstall cwtrain-core"
    )


def _words(exc: Any) -> str:
    return f"{exc}; {exc.hint}" if exc.hint else str(exc)
