"""The documented surface: what users' scripts import (the table in `tools/public_names.py`), with its signatures."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import cwtrain
from cwtrain.errors import CWTrainError
from public_names import LATER, LATER_SAYS, NAMES

CLIENT_METHODS = {
    "create_gateway": ["spec"],
    "get_gateway": ["gateway_id"],
    "list_gateways": [],
    "update_gateway": None,
    "delete_gateway": ["gateway_id"],
    "get_gateway_parameters": [],
    "create_deployment": ["spec"],
    "get_deployment": ["deployment_id"],
    "list_deployments": [],
    "update_deployment": None,
    "delete_deployment": ["deployment_id"],
    "get_deployment_parameters": ["gateway_ids"],
    "create_hot_load": ["deployment_id", "identity"],
    "get_hot_load": ["hot_load_id"],
    "list_hot_loads": ["deployment_id"],
    "list_hot_load_replicas": ["hot_load_id"],
    "cancel_hot_load": ["hot_load_id"],
    "close": [],
}

# Positional parameters that the documentation shows with a default; every other default is keyword-only.
POSITIONAL_DEFAULTS = {
    "cwtrain.config.api.token_from_env": {"environ"},
    "cwtrain.hotload.delta.write_full_snapshot": {"checksums"},
    "cwtrain.infra.client.InferenceClient": {"token"},
    "cwtrain.infra.client.InferenceClient.get_deployment_parameters": {"gateway_ids"},
    "cwtrain.infra.client.InferenceClient.list_hot_loads": {"deployment_id"},
    "cwtrain.integrations.preflight.main": {"args"},
    "cwtrain.storage.s3.s3_client": {"endpoint_url"},
    "cwtrain_emulator.emulator.Emulator": {"state_dir"},
}


def positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that may be given by position, `self` aside."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [item for item in parameters if item.kind in kinds and item.name not in ("self", "cls")]


def keywords(function: Callable[..., Any]) -> set[str]:
    """Return the names that may only be given by keyword."""
    parameters = inspect.signature(function).parameters.values()
    return {item.name for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module]])
def test_a_documented_name_is_there(module: str, name: str) -> None:
    home = importlib.import_module(module)
    assert getattr(home, name) is not None
    if name not in ("lifecycle", "main"):
        assert name in home.__all__


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in LATER for name in LATER[module]])
def test_a_name_of_a_later_version_says_so(module: str, name: str) -> None:
    home = importlib.import_module(module)
    with pytest.raises((ImportError, AttributeError, CWTrainError), match=LATER_SAYS):
        getattr(home, name)


def test_names_are_one_object_wherever_they_are_imported_from() -> None:
    from cwtrain import errors, hotload, infra, snapshots
    from cwtrain.models import service

    assert cwtrain.HotLoader is hotload.HotLoader
    assert cwtrain.InferenceClient is infra.InferenceClient
    assert cwtrain.inspect_snapshot is snapshots.inspect_snapshot is hotload.inspect_snapshot
    assert cwtrain.upload_snapshot is hotload.upload_snapshot
    assert hotload.SnapshotError is errors.SnapshotError
    assert infra.lifecycle.LifecycleError is errors.LifecycleError
    assert infra.HotLoad is service.HotLoad is hotload.HotLoad


def test_the_constructor_of_the_client() -> None:
    from cwtrain.infra import InferenceClient

    assert [item.name for item in positional(InferenceClient)] == ["token"]
    assert {"base_url", "timeout", "headers", "verify"} <= keywords(InferenceClient)
    assert inspect.signature(InferenceClient).parameters["timeout"].default == 30.0


@pytest.mark.parametrize("method", CLIENT_METHODS)
def test_the_methods_of_the_client(method: str) -> None:
    from cwtrain.infra import InferenceClient

    wanted = CLIENT_METHODS[method]
    found = [item.name for item in positional(getattr(InferenceClient, method))]
    assert wanted is None or found == wanted


def test_create_hot_load_takes_its_options_by_keyword() -> None:
    from cwtrain.infra import InferenceClient

    wanted = {"snapshot_type", "incremental", "prompt_cache_policy", "hot_load_id"}
    assert wanted <= keywords(InferenceClient.create_hot_load)


def test_capacity_claims_have_the_same_calls() -> None:
    from cwtrain.infra import InferenceClient

    wanted = ["create_capacity_claim", "get_capacity_claim", "list_capacity_claims", "update_capacity_claim"]
    wanted += ["delete_capacity_claim", "get_capacity_claim_parameters"]
    assert [name for name in wanted if not callable(getattr(InferenceClient, name, None))] == []


@pytest.mark.parametrize(
    ("method", "by_position", "by_keyword"),
    [
        ("publish", ["checkpoint", "identity"], {"previous_identity", "wait", "on_progress", "timeout", "dry_run"}),
        ("upload", ["checkpoint", "identity"], {"previous_identity", "workers", "on_progress"}),
        ("trigger", ["identity"], {"previous_identity", "wait", "timeout", "on_progress"}),
        ("wait", ["hot_load_id"], {"timeout", "on_progress"}),
        ("rollback", ["identity"], {"wait", "timeout", "on_progress"}),
    ],
)
def test_the_methods_of_the_loader(method: str, by_position: list[str], by_keyword: set[str]) -> None:
    from cwtrain import HotLoader

    function = getattr(HotLoader, method)
    assert [item.name for item in positional(function)] == by_position
    assert by_keyword <= keywords(function)


def test_the_loader_writes_and_reads_manifests() -> None:
    from cwtrain import HotLoader

    assert callable(HotLoader.upload_manifest)
    assert callable(HotLoader.read_manifest)


def test_the_constructor_of_the_loader() -> None:
    from cwtrain import HotLoader

    assert [item.name for item in positional(HotLoader)] == ["client", "deployment_id"]


def test_s3_client_has_the_documented_signature() -> None:
    from cwtrain.infra import s3_client

    parameters = inspect.signature(s3_client).parameters
    assert [item.name for item in positional(s3_client)] == ["endpoint_url"]
    assert parameters["endpoint_url"].default is None
    assert "region_name" in keywords(s3_client)
    assert any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())


def public_modules() -> Iterator[str]:
    """Yield every module of the client packages without an underscore in its path, once loaded."""
    import cwtrain_rollout

    for package in (cwtrain, cwtrain_rollout):
        yield package.__name__
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            parts = info.name.split(".")
            if not any(part.startswith("_") for part in parts) and "integrations" not in parts and "cli" not in parts:
                yield info.name


def public_callables(modules: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Return home -> callable for every public function, and for the methods of every public class."""
    found: dict[str, Callable[..., Any]] = {}
    for module_name in modules:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", []):
            try:
                value = getattr(module, name)
            except (ImportError, AttributeError, CWTrainError):
                continue
            home = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
            if inspect.isfunction(value):
                found[home] = value
            elif inspect.isclass(value) and home.startswith("cwtrain"):
                if not issubclass(value, BaseException) and "__init__" in vars(value):
                    found[home] = value
                for key, member in vars(value).items():
                    member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                    if inspect.isfunction(member) and not key.startswith("_"):
                        found[f"{home}.{key}"] = member
    return found


def test_defaults_are_keyword_only() -> None:
    problems = []
    for name, function in public_callables(NAMES).items():
        allowed = POSITIONAL_DEFAULTS.get(name, {"environ"} if name.endswith(".from_env") else set())
        given = {item.name for item in positional(function) if item.default is not inspect.Parameter.empty}
        if given - allowed:
            problems.append(f"{name}: {', '.join(sorted(given - allowed))} should stand after `*`")
    assert not problems, "\n".join(problems)


def test_every_public_thing_has_a_docstring() -> None:
    missing = [name for name, function in public_callables(public_modules()).items() if not inspect.getdoc(function)]
    missing += [name for name in public_modules() if not importlib.import_module(name).__doc__]
    assert not missing, "\n".join(missing)
