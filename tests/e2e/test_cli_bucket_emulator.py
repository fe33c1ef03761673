"""``hotload chain``, ``resume-info`` and ``gc`` against the emulator, on what a run has published there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cwtrain.hotload import HotLoader, MemoryBase, SnapshotWriter
from cwtrain.infra import InferenceClient
from helpers.conformance import idle_deployment_body
from helpers.emulator_api import Api
from helpers.run_cli import run

Fixture = Any


@pytest.fixture
def published(
    emulator: Fixture, deployment: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """A run of five versions, streamed and hot-loaded: a baseline, deltas, and a full one in between."""
    from cwtrain_emulator.engine.model_io import f32_to_bf16, load_model, make_model, stored_dtype

    for name, value in emulator.env.items():
        monkeypatch.setenv(name, value)
    base = MemoryBase()
    with InferenceClient() as client:
        loader = HotLoader(client, deployment["spec"]["id"], poll_interval=0.05)
        previous = None
        for version in range(5):
            make_model(tmp_path / f"m{version}", vocab_size=16, hidden_size=4, context=4, seed=version)
            tensors = load_model(tmp_path / f"m{version}").tensors
            full = version in (0, 3)
            identity = f"run-v{version:06d}"
            options: dict[str, Any] = {"kind": "full", "side_files": tmp_path / "m0"} if full else {"kind": "delta"}
            with SnapshotWriter(
                loader.store, loader.location, identity, base=base, run_id="run", version=version, **options
            ) as writer:
                for name, values in tensors.items():
                    words = f32_to_bf16(values) if stored_dtype(name) == "BF16" else values
                    writer.add(name, words, dtype=stored_dtype(name))
                writer.finalise([writer.close()])
            loader.trigger(identity, previous_identity=None if full else previous)
            previous = identity
    return dict(emulator.env)


def test_the_bucket_of_a_run(emulator: Fixture, deployment: Fixture, published: dict[str, str]) -> None:
    here = ("--deployment", deployment["spec"]["id"])
    chain = run("hotload", "chain", *here, env=published)
    assert [link["identity"] for link in chain.data["links"]] == ["run-v000003", "run-v000004"], chain.err
    assert chain.data["deltas"] == 1
    assert run("hotload", "chain", *here, "-o", "id", env=published).out == "run-v000003\nrun-v000004\n"

    info = run("hotload", "resume-info", "--run", "run", env=published)
    # The emulator is that of other tests, too: their deployments may have runs of the same name.
    (found,) = [one for one in info.data["deployments"] if one["deployment_id"] == deployment["spec"]["id"]]
    assert [one["version"] for one in found["versions"]] == [0, 1, 2, 3, 4], info.err
    assert found["served"] == "run-v000004"
    assert found["next_identity"] == "run.2-v000001"
    assert "its first delta is run.2-v000001 on run-v000000" in info.err
    nothing = run("hotload", "resume-info", "--run", "nobody", env=published)
    assert nothing.data == {"run_id": "nobody", "deployments": [], "not_looked_at": []}, nothing.err
    (here_too,) = run("hotload", "resume-info", "--run", "nobody", *here, env=published).data["deployments"]
    assert here_too["versions"] == []

    listed = run("hotload", "gc", *here, "--keep", "1", env=published)
    assert [one["identity"] for one in listed.data["doomed"]] == ["run-v000002", "run-v000001"], listed.err
    assert listed.data["removed"] is False
    assert "add --yes" in listed.err
    assert listed.data["live"]["run-v000000"] == "a run's baseline"
    removed = run("hotload", "gc", *here, "--keep", "1", "--yes", env=published)
    assert removed.data["removed"] is True, removed.err
    assert "removed run-v000002 (1 of 2)" in removed.err
    again = run("hotload", "gc", *here, "--keep", "1", env=published)
    assert again.data["doomed"] == []
    for identity in ("run-v000000", "run-v000004"):
        assert run("hotload", "verify", *here, "--identity", identity, env=published).data["problems"] == []
    assert run("hotload", "verify", *here, "--identity", "run-v000001", env=published).code == 1


def test_a_deployment_of_somebody_else_does_not_hide_the_run(
    emulator: Fixture, deployment: Fixture, published: dict[str, str]
) -> None:
    """In an organization there are deployments whose buckets this key cannot read."""
    api = Api(emulator.base_url, emulator.admin_token)
    gateway = deployment["spec"]["gatewayIds"][0]
    other = api.ok("POST", "/deployments", idle_deployment_body(gateway, "no-such-bucket"))["deployment"]["spec"]["id"]
    try:
        info = run("hotload", "resume-info", "--run", "run", env=published)
        assert deployment["spec"]["id"] in [one["deployment_id"] for one in info.data["deployments"]], info.err
        assert other in [one["deployment_id"] for one in info.data["not_looked_at"]]
        assert f"warning: not looked at: deployment {other}" in info.err

        nothing = run("hotload", "resume-info", "--run", "nobody", env=published)
        assert (nothing.code, nothing.out) == (1, "")
        assert f"not looked at: deployment {other}" in nothing.err
        assert run("hotload", "resume-info", "--run", "run", "--deployment", other, env=published).code == 1
    finally:
        api.ok("DELETE", f"/deployments/{other}")
        api.close()
