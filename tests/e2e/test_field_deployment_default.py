"""A command that looks at all deployments does so whatever deployment the environment names for a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cwtrain.cli._root import root
from helpers.conformance import idle_deployment_body
from helpers.emulator_api import Api
from helpers.run_cli import run

Fixture = Any


def test_what_says_that_it_looks_at_all_takes_no_default_from_the_environment() -> None:
    hotload = root.get_command(click.Context(root), "hotload")
    assert isinstance(hotload, click.Group)
    ctx = click.Context(hotload)
    optional = {
        name: param.envvar
        for name in hotload.list_commands(ctx)
        for param in getattr(hotload.get_command(ctx, name), "params", ())
        if "--deployment" in param.opts and ("all deployments" in param.help or "Only" in param.help)
    }
    assert optional == {"list": None, "resume-info": None}


def test_a_run_is_found_where_it_published(emulator: Fixture, deployment: Fixture, tmp_path: Path) -> None:
    from cwtrain_emulator.engine.model_io import make_model

    make_model(tmp_path / "m0", vocab_size=16, hidden_size=4, context=4, seed=0)
    here, run_id = deployment["spec"]["id"], f"found-{deployment['spec']['id'][:8]}"
    published = run(
        *("hotload", "publish", "--deployment", here, "--checkpoint", str(tmp_path / "m0")),
        *("--identity", f"{run_id}-v000000"),
        env=emulator.env,
    )
    assert published.code == 0, published.err
    api = Api(emulator.base_url, emulator.admin_token)
    body = idle_deployment_body(api.gateway()["spec"]["id"], emulator.bucket)
    body["hotLoad"] = {**body.get("hotLoad", {}), "bucket": emulator.bucket, "pathPrefix": f"other-{run_id}"}
    other = api.ok("POST", "/deployments", body)["deployment"]["spec"]["id"]
    try:
        env = {**emulator.env, "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": other}
        info = run("hotload", "resume-info", "--run", run_id, env=env)
        assert [one["deployment_id"] for one in info.data["deployments"]] == [here], info.err
        named = run("hotload", "resume-info", "--run", run_id, "--deployment", other, env=env)
        assert [one["versions"] for one in named.data["deployments"]] == [[]]
        listed = run("hotload", "list", "-o", "id", "--limit", "1000", env=env)
        assert published.data["spec"]["id"] in listed.out.split()
    finally:
        api.ok("DELETE", f"/deployments/{other}")
        api.close()
