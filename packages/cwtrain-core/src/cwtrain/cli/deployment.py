"""``cwtrain deployment``: create, look at, change and delete deployments."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from cwtrain.cli._context import Command, Context, pass_context
from cwtrain.cli._errors import Terminated
from cwtrain.cli._group import LazyGroup
from cwtrain.cli._options import TEXT, load_spec, spec_option, timeout_option, wait_option
from cwtrain.cli._resources import create_resource, delete_resource, found_id, status_lines
from cwtrain.errors import CWTrainError
from cwtrain.infra._find import find_one, is_uuid

if TYPE_CHECKING:
    from cwtrain.infra import InferenceClient
    from cwtrain.models.service import Deployment

__all__ = ["deployment"]

_AFTERWARDS = 10.0
"""Seconds for looking up what only completes the output."""
_COLUMNS = ("id", "name", "status", "model_name", "engine")


@click.group(cls=LazyGroup, no_args_is_help=False)
def deployment() -> None:
    """Create, look at, change and delete deployments.

    A deployment holds GPUs until it is deleted.
    """


@deployment.command(cls=Command, example="cwtrain deployment create --file deployment.json --wait")
@spec_option("deployment's spec")
@wait_option("Wait until the deployment is READY.")
@timeout_option(3600, "Seconds to wait with --wait.")
@pass_context
def create(ctx: Context, file: str, wait: bool, timeout: float) -> None:
    """Create a deployment from a spec and print it with its endpoints and rollout_base_url.

    Its id is told on standard error before the wait begins, and the deployment is printed also when the wait fails: it
    goes on holding GPUs until you delete it. Values that still are a <placeholder> are refused.
    """
    spec = load_spec(file)
    with ctx.client() as client:
        created, stays = create_resource(ctx, "deployment", spec, client.create_deployment, "holds GPUs")
        if wait:
            created = _wait_until_ready(ctx, client, created, timeout, stays)
        ctx.all_done()
        _print(ctx, created, _endpoints(client, created))


def _wait_until_ready(
    ctx: Context, client: InferenceClient, created: Deployment, timeout: float, stays: str
) -> Deployment:
    from cwtrain.infra import lifecycle

    try:
        return lifecycle.wait_for_deployment(
            client, created.id, timeout=timeout, on_progress=status_lines(ctx, "deployment", created.id)
        )
    except CWTrainError as exc:
        # The id and where it will answer are printed all the same: without them nobody can find what holds the GPUs.
        exc.add_note(stays)
        latest = _latest(client, created)
        with suppress(OSError):  # where nothing takes it, the error is still the one to be told
            _print(ctx, latest, _endpoints(client, latest))
        raise
    except (KeyboardInterrupt, Terminated):
        with suppress(OSError):
            _print(ctx, created, [])
        raise


def _latest(client: InferenceClient, deployment: Deployment) -> Deployment:
    try:
        return client.within(_AFTERWARDS, retries=False).get_deployment(deployment.id)
    except CWTrainError:
        return deployment


def _endpoints(client: InferenceClient, deployment: Deployment) -> list[str]:
    """Return the endpoints of the deployment's gateways, none where they cannot be asked for."""
    from cwtrain.errors import CWTrainError
    from cwtrain.infra import lifecycle

    try:
        return lifecycle.endpoints(client.within(_AFTERWARDS, retries=False), deployment)
    except CWTrainError:
        return []


def _print(ctx: Context, deployment: Deployment, endpoints: list[str]) -> None:
    from cwtrain.infra._wire import deployment_to_json

    ctx.out.data(deployment_to_json(deployment, endpoints), ids=[deployment.id])


@deployment.command(cls=Command, example="cwtrain deployment get my-policy")
@click.argument("name_or_id", type=TEXT)
@pass_context
def get(ctx: Context, name_or_id: str) -> None:
    """Print a deployment, found by its id or its name, with its endpoints."""
    with ctx.client() as client:
        found = find_one("deployment", name_or_id, client.get_deployment, client.list_deployments)
        _print(ctx, found, _endpoints(client, found))


@deployment.command(cls=Command, example="cwtrain deployment wait my-policy")
@click.argument("name_or_id", type=TEXT)
@timeout_option(3600, "Seconds to wait.")
@pass_context
def wait(ctx: Context, name_or_id: str, timeout: float) -> None:
    """Wait until a deployment is READY and print it, as `create --wait` does; nothing is created or changed."""
    from cwtrain.infra import lifecycle

    with ctx.client() as client:
        deployment_id = found_id(
            ctx,
            "deployment",
            name_or_id,
            lambda name: find_one("deployment", name, client.get_deployment, client.list_deployments),
        )
        ready = lifecycle.wait_for_deployment(
            client, deployment_id, timeout=timeout, on_progress=status_lines(ctx, "deployment", deployment_id)
        )
        ctx.all_done()
        _print(ctx, ready, _endpoints(client, ready))


@deployment.command("list", cls=Command, example="cwtrain --output table deployment list")
@pass_context
def list_(ctx: Context) -> None:
    """Print all deployments with their endpoints."""
    from cwtrain.infra._wire import deployment_to_json

    with ctx.client() as client:
        found = client.list_deployments()
        gateways = {one.id: one.endpoints for one in client.list_gateways()} if found else {}
    rows = []
    for one in found:
        endpoints = dict.fromkeys(url for gateway_id in one.gateway_ids for url in gateways.get(gateway_id, ()))
        rows.append(deployment_to_json(one, list(endpoints)))
    ctx.out.data(rows, ids=[one.id for one in found], columns=_COLUMNS)


@deployment.command(cls=Command, example="cwtrain deployment update 2f3c... --disable")
@click.argument("name_or_id", type=TEXT)
@spec_option("whole new spec", required=False)
@click.option(
    "--disable/--enable", "disabled", default=None, help="Stop serving and give the GPUs back, or serve again."
)
@pass_context
def update(ctx: Context, name_or_id: str, file: str | None, disabled: bool | None) -> None:
    """Change a deployment: the whole spec from a file, or only whether it is disabled.

    The service refuses changes while a hot-load runs, and changes of hotLoad always.
    """
    if file is None and disabled is None:
        raise click.UsageError("nothing to change: give --file, --disable or --enable", click.get_current_context())
    spec = load_spec(file) if file is not None else None
    if spec is not None and is_uuid(name_or_id):
        _require_id(spec, name_or_id)
    with ctx.client() as client:
        deployment_id = name_or_id
        if spec is None or not is_uuid(name_or_id):
            found = find_one("deployment", name_or_id, client.get_deployment, client.list_deployments)
            deployment_id = found.id
            spec = dict(found.raw.get("spec") or {}) if spec is None else spec
            _require_id(spec, deployment_id)
        if disabled is not None:
            spec["disabled"] = disabled
        ctx.still_running(f"deployment {deployment_id} may be changed; see: cwtrain deployment get {deployment_id}")
        changed = client.update_deployment(deployment_id, spec)
        _print(ctx, changed, _endpoints(client, changed))


def _require_id(spec: dict[str, Any], deployment_id: str) -> None:
    """Let the spec have this id, or refuse one that has another."""
    if spec.setdefault("id", deployment_id) != deployment_id:
        raise click.UsageError(
            f"the spec's id is {spec['id']!r}, not {deployment_id!r}; leave it out or correct it",
            click.get_current_context(),
        )


@deployment.command(cls=Command, example="cwtrain deployment delete 2f3c... --wait")
@click.argument("name_or_id", type=TEXT)
@wait_option("Wait until it is gone.")
@timeout_option(600, "Seconds to wait with --wait.")
@click.option("--ignore-not-found", is_flag=True, help="Succeed when there is no such deployment.")
@pass_context
def delete(ctx: Context, name_or_id: str, wait: bool, timeout: float, ignore_not_found: bool) -> None:
    """Delete a deployment and print {id, result}: deleting, deleted (with --wait) or not_found."""
    from cwtrain.infra import lifecycle

    with ctx.client() as client:
        delete_resource(
            ctx,
            "deployment",
            name_or_id,
            find=lambda name: find_one("deployment", name, client.get_deployment, client.list_deployments),
            delete=client.delete_deployment,
            delete_and_wait=lambda found: lifecycle.delete_deployment(
                client,
                found,
                timeout=timeout,
                on_progress=status_lines(ctx, "deployment", found),
            ),
            wait=wait,
            ignore_not_found=ignore_not_found,
        )


@deployment.command(cls=Command, example="cwtrain deployment parameters --gateway 7be1...")
@click.option(
    "--gateway", "names_or_ids", multiple=True, type=TEXT, metavar="NAME_OR_ID", help="Only for these gateways."
)
@pass_context
def parameters(ctx: Context, names_or_ids: tuple[str, ...]) -> None:
    """Print what a deployment can be made of: engines and their options, instance types."""
    with ctx.client() as client:
        gateway_ids = [
            one if is_uuid(one) else find_one("gateway", one, client.get_gateway, client.list_gateways).id
            for one in names_or_ids
        ]
        ctx.out.data(client.get_deployment_parameters(gateway_ids or None))
