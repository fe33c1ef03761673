"""``cwtrain deployment``: create, look at, change and delete deployments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cwtrain.cli._context import Command, Context, pass_context
from cwtrain.cli._options import TEXT, load_spec, spec_option, timeout_option, wait_option
from cwtrain.cli._resources import delete_resource, find_one

if TYPE_CHECKING:
    from cwtrain.infra import InferenceClient
    from cwtrain.models.service import Deployment

__all__ = ["deployment"]

_COLUMNS = ("id", "name", "status", "model_name", "engine")


@click.group(no_args_is_help=True)
def deployment() -> None:
    """Create, look at, change and delete deployments.

    A deployment holds GPUs until it is deleted.
    """


@deployment.command(cls=Command)
@spec_option("deployment's spec")
@wait_option("Wait until the deployment is READY.")
@timeout_option(3600, "Seconds to wait with --wait.")
@pass_context
def create(ctx: Context, file: str, wait: bool, timeout: float) -> None:
    """Create a deployment from a spec and print it with its endpoints and rollout_base_url.

    Its id is told on standard error before the wait begins, and the deployment is printed also when the wait fails: it
    goes on holding GPUs until you delete it. Values that still are a <placeholder> are refused.

    Example: cwtrain deployment create --file deployment.json --wait
    """
    spec = load_spec(file)
    client = ctx.client()
    created = client.create_deployment(spec)
    ctx.still_running(
        f"deployment {created.id} stays and holds GPUs; look at it with: cwtrain deployment get {created.id}; "
        f"delete it with: cwtrain deployment delete {created.id}"
    )
    ctx.out.say(
        f"created deployment {created.id} ({created.name}); to delete it: cwtrain deployment delete {created.id}"
    )
    if wait:
        created = _wait_until_ready(ctx, client, created, timeout)
    ctx.all_done()
    _print(ctx, created, _endpoints(client, created))


def _wait_until_ready(ctx: Context, client: InferenceClient, created: Deployment, timeout: float) -> Deployment:
    from cwtrain.infra import lifecycle

    try:
        return lifecycle.wait_for_deployment(client, created.id, timeout=timeout)
    except Exception as exc:
        # The id and where it will answer are printed all the same: without them nobody can find what holds the GPUs.
        latest = _latest(client, created)
        _print(ctx, latest, _endpoints(client, latest))
        exc.add_note(
            f"deployment {created.id} stays and holds GPUs; delete it with: cwtrain deployment delete {created.id}"
        )
        raise
    except BaseException:
        _print(ctx, created, [])
        raise


def _latest(client: InferenceClient, deployment: Deployment) -> Deployment:
    from cwtrain.errors import CWTrainError

    try:
        return client.get_deployment(deployment.id)
    except CWTrainError:
        return deployment


def _endpoints(client: InferenceClient, deployment: Deployment) -> list[str]:
    """Return the endpoints of the deployment's gateways, none where they cannot be asked for."""
    from cwtrain.errors import CWTrainError
    from cwtrain.infra import lifecycle

    try:
        return list(lifecycle.endpoints(client, deployment))
    except CWTrainError:
        return []


def _print(ctx: Context, deployment: Deployment, endpoints: list[str]) -> None:
    from cwtrain.infra._wire import deployment_to_json

    ctx.out.data(deployment_to_json(deployment, endpoints), ids=[deployment.id])


@deployment.command(cls=Command)
@click.argument("name_or_id", type=TEXT)
@pass_context
def get(ctx: Context, name_or_id: str) -> None:
    """Print a deployment, found by its id or its name, with its endpoints.

    Example: cwtrain deployment get my-policy
    """
    client = ctx.client()
    found = find_one("deployment", name_or_id, client.get_deployment, client.list_deployments)
    _print(ctx, found, _endpoints(client, found))


@deployment.command("list", cls=Command)
@pass_context
def list_(ctx: Context) -> None:
    """Print all deployments.

    Example: cwtrain --output table deployment list
    """
    from cwtrain.infra._wire import deployment_to_json

    found = list(ctx.client().list_deployments())
    ctx.out.data([deployment_to_json(one) for one in found], ids=[one.id for one in found], columns=_COLUMNS)


@deployment.command(cls=Command)
@click.argument("deployment_id", metavar="ID", type=TEXT)
@spec_option("whole new spec", required=False)
@click.option(
    "--disable/--enable", "disabled", default=None, help="Stop serving and give the GPUs back, or serve again."
)
@pass_context
def update(ctx: Context, deployment_id: str, file: str | None, disabled: bool | None) -> None:
    """Change a deployment: the whole spec from a file, or only whether it is disabled.

    The service refuses changes while a hot-load runs, and changes of hotLoad always.

    Example: cwtrain deployment update 2f3c... --disable
    """
    if file is None and disabled is None:
        raise click.UsageError("nothing to change: give --file, --disable or --enable", click.get_current_context())
    client = ctx.client()
    spec = load_spec(file) if file is not None else dict(client.get_deployment(deployment_id).raw.get("spec") or {})
    if spec.setdefault("id", deployment_id) != deployment_id:
        raise click.UsageError(
            f"the spec's id is {spec['id']!r}, not {deployment_id!r}; leave it out or correct it",
            click.get_current_context(),
        )
    if disabled is not None:
        spec["disabled"] = disabled
    changed = client.update_deployment(spec)
    _print(ctx, changed, _endpoints(client, changed))


@deployment.command(cls=Command)
@click.argument("deployment_id", metavar="ID", type=TEXT)
@wait_option("Wait until it is gone.")
@timeout_option(600, "Seconds to wait with --wait.")
@click.option("--ignore-not-found", is_flag=True, help="Succeed when there is no such deployment.")
@pass_context
def delete(ctx: Context, deployment_id: str, wait: bool, timeout: float, ignore_not_found: bool) -> None:
    """Delete a deployment and print {id, result}: deleting, deleted (with --wait) or not_found.

    Example: cwtrain deployment delete 2f3c... --wait
    """
    from cwtrain.infra import lifecycle

    client = ctx.client()
    delete_resource(
        ctx,
        "deployment",
        deployment_id,
        delete=client.delete_deployment,
        delete_and_wait=lifecycle.delete_deployment,
        client=client,
        wait=wait,
        timeout=timeout,
        ignore_not_found=ignore_not_found,
    )


@deployment.command(cls=Command)
@click.option("--gateway", "gateway_ids", multiple=True, type=TEXT, metavar="ID", help="Only for these gateways.")
@pass_context
def parameters(ctx: Context, gateway_ids: tuple[str, ...]) -> None:
    """Print what a deployment can be made of: engines and their options, instance types.

    Example: cwtrain deployment parameters --gateway 7be1...
    """
    ctx.out.data(ctx.client().get_deployment_parameters(list(gateway_ids) or None))
