"""What `cwtrain slime check` asks the service, against the emulator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cwtrain.infra import InferenceClient
from cwtrain_emulator.engine.model_io import load_model, make_model, save_model
from cwtrain_slime._check import CheckReport, check_run
from cwtrain_slime._dialect import SLIME
from helpers.emulator_api import Api
from helpers.run_cli import run
from helpers.trainer_lines import flags

Check = Callable[..., CheckReport]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    make_model(folder, vocab_size=64, hidden_size=8, context=2, seed=0)
    return folder


@pytest.fixture
def environ(emulator: Any, deployment: dict[str, Any]) -> dict[str, str]:
    return {
        **emulator.env,
        "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": deployment["spec"]["id"],
        "CWTRAIN_HOTLOAD_RUN_ID": "run",
    }


@pytest.fixture
def check(
    environ: dict[str, str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Give a check of a good launch line; it returns the names of what was found."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def run(changes: dict[str, str | None] | None = None, *, base: Path = model, **settings: Any) -> list[str]:
        with_base = settings.pop("with_base", False)
        words = flags("slime", tmp_path, base, changes)
        report = check_run(SLIME, words, environ={**environ, **settings}, with_base=with_base, patience=0.2)
        return [found.name for found in report.findings]

    return run


def test_a_base_that_is_published_ahead_of_the_run(check: Check, environ: dict[str, str], model: Path) -> None:
    """The long first upload, then a run with nothing to find but the log-probs of this deployment."""
    first = check()
    assert "base-unpublished" in first
    assert "base-absent" in check(CWTRAIN_HOTLOAD_PUBLISH_BASELINE="0")
    assert "base-unpublished" not in check(with_base=True)
    with InferenceClient() as client:
        hot_loads = list(client.list_hot_loads(environ["CWTRAIN_HOTLOAD_DEPLOYMENT_ID"]))
        assert [one.identity for one in hot_loads] == ["run-v000000"]
        assert check(with_base=True) == ["log-probs-raw"]
        assert len(list(client.list_hot_loads(environ["CWTRAIN_HOTLOAD_DEPLOYMENT_ID"]))) == 1
    assert check({"--use-tis": None, "--rollout-temperature": "0.7"}) == ["log-probs"]


def test_another_base_under_the_same_run(check: Check, model: Path, tmp_path: Path) -> None:
    """B27: what the run's deltas will start from is compared with what is published, byte for byte."""
    check(with_base=True)
    other = load_model(model)
    values = other.tensors["model.context.0.weight"].copy()
    values[0, 0] = -values[0, 0]
    other.tensors["model.context.0.weight"] = values
    save_model(tmp_path / "other", other)
    for side in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (tmp_path / "other" / side).write_bytes((model / side).read_bytes())
    assert "base-differs" in check(base=tmp_path / "other")
    assert "base-differs" in check(base=tmp_path / "other", with_base=True)


def test_a_deployment_that_is_not_there_or_has_no_hot_load(check: Check, emulator: Any, deployment: Any) -> None:
    assert check(CWTRAIN_HOTLOAD_DEPLOYMENT_ID="0000") == ["service"]
    api = Api(emulator.base_url, emulator.admin_token)
    spec = {key: value for key, value in deployment["spec"].items() if key not in ("id", "hotLoad", "organizationId")}
    made = api.ok("POST", "/deployments", {**spec, "name": "cold"})["deployment"]["spec"]["id"]
    try:
        assert check(CWTRAIN_HOTLOAD_DEPLOYMENT_ID=made) == ["no-hot-load"]
    finally:
        api.ok("DELETE", f"/deployments/{made}")
        api.close()


def test_a_base_that_cannot_be_published_is_a_finding_among_the_others(check: Check, faults: Any) -> None:
    found = check({"--update-weight-transport": "nccl"}, with_base=True, CWTRAIN_HOTLOAD_RUN_ID="")
    assert {"not-disk", "run-id", "base-failed"} <= set(found)


def test_what_a_run_makes_of_samples_does_not_change_what_is_asked(check: Check, faults: Any) -> None:
    check(with_base=True)
    odd = {"ON_FAILURE": "drop", "TOKEN_ID_PROMPTS": "0", "TOKEN_IDS": "0", "LOGPROBS": "0"}
    environ = {f"CWTRAIN_ROLLOUT_{name}": value for name, value in odd.items()}
    assert check(**environ) == ["log-probs-raw"]
    faults.add("endpoint", "status", status=404)
    assert check(**environ) == ["endpoint"]


def test_a_deployment_that_is_disabled(check: Check, emulator: Any, deployment: Any) -> None:
    api = Api(emulator.base_url, emulator.admin_token)
    api.ok("PATCH", f"/deployments/{deployment['spec']['id']}", {**deployment["spec"], "disabled": True})
    api.close()
    assert "not-ready" in check()


def test_permissions_on_the_bucket(check: Check, faults: Any) -> None:
    fault = faults.add("store", "denied", permission="s3:PutObject", caller="trainer")
    assert "bucket" in check()
    faults.clear(fault)
    faults.add("store", "denied", permission="s3:ListBucketMultipartUploads", caller="trainer")
    assert "bucket-optional" in check()


def test_an_endpoint_that_cannot_be_trained_from(check: Check, faults: Any) -> None:
    check(with_base=True)
    faults.add("endpoint", "status", status=404)
    assert check() == ["endpoint"]


def test_the_commands(environ: dict[str, str], model: Path, tmp_path: Path, emulator: Any) -> None:
    """JSON on standard output, words on standard error, exit code 1 for an error; miles' line is another."""
    words = flags("slime", tmp_path, model, {"--update-weight-transport": "nccl"})
    done = run("slime", "check", "--publish-base", *words, env=environ)
    assert done.code == 1, done.err
    report = done.data
    assert report["trainer"] == "slime"
    assert report["base"] == {
        "path": str(model),
        "bytes": report["base"]["bytes"],
        "tensors": 6,
        "published": True,
        "identity": "run-v000000",
    }
    assert [found["name"] for found in report["findings"]] == ["not-disk", "log-probs-raw"]
    assert "error: " in done.err
    assert "fix: --update-weight-mode delta --update-weight-transport disk" in done.err
    good = run("miles", "check", *flags("miles", tmp_path, model), env=environ)
    assert good.code == 0, good.err
    assert good.data["ok"] is True
    assert run("slime", "check", env=environ).code == 2
    token = environ["COREWEAVE_API_TOKEN"]
    bare = {name: value for name, value in environ.items() if name != "COREWEAVE_API_TOKEN"}
    given = run("--token", token, "miles", "check", *flags("miles", tmp_path, model), env=bare)
    assert given.code == 0, given.err


def test_the_trainers_are_not_imported(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from cwtrain_slime._check import check_run; from cwtrain_slime._dialect import SLIME;"
        f"check_run(SLIME, {flags('slime', tmp_path, model)!r}, environ={{}});"
        "assert not {'torch', 'ray', 'slime', 'miles'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
