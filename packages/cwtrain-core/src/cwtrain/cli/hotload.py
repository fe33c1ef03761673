"""``cwtrain hotload``: look at snapshots, publish them, and follow what the service does with them."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import click

from cwtrain.cli._context import Command, Context, pass_context
from cwtrain.cli._group import LazyGroup
from cwtrain.cli._options import IDENTITY, SECONDS, TEXT, deployment_option, no_wait_option, timeout_option
from cwtrain.models.text import size
from cwtrain.waits import waiting

if TYPE_CHECKING:
    from cwtrain.hotload import ProgressEvent
    from cwtrain.infra import InferenceClient
    from cwtrain.models.service import HotLoad, HotLoadState, PromptCachePolicy

__all__ = ["hotload"]

_COLUMNS = ("spec.id", "spec.identity", "status.state", "status.created_at", "spec.type?")
_CHAIN = ("identity", "type", "hot_load_id")
_IN_ONE = {"spec.snapshot_chain": _CHAIN}
_IN_STATUS = {
    "hot_load.spec.snapshot_chain": _CHAIN,
    "replicas": ("name", "state", "current_snapshot_identity=serves", "transitioned_at=since?", "error_reason=error"),
}
_RESUMES = "nothing of it runs at the service; the same command goes on where this one stopped"

_previous_identity = click.option(
    "--previous-identity",
    type=TEXT,
    help="Identity that a delta applies to.  [default: for a numeric base_version N in its index, weight_v{N:06d}]",
)
_base_version = click.option(
    "--base-version",
    type=click.IntRange(min=0),
    help="Version that the delta's predecessor holds.  [default: what its manifest says, or else its name]",
)
_reset_prompt_cache = click.option(
    "--reset-prompt-cache", is_flag=True, help="Empty the prompt cache at the swap.  [default: the server's policy]"
)

_of_deployment = deployment_option(required=False, help="The deployment in which to look for an identity.")


@click.group(
    cls=LazyGroup,
    lazy={
        "chain": "cwtrain.cli.hotload_bucket:chain",
        "resume-info": "cwtrain.cli.hotload_bucket:resume_info",
        "gc": "cwtrain.cli.hotload_bucket:gc",
    },
    no_args_is_help=False,
)
def hotload() -> None:
    """Check, publish and follow snapshots of weights."""


@hotload.command(cls=Command, example="cwtrain hotload inspect /ckpt/step_000101 --verify --base /ckpt/step_000100")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@_previous_identity
@click.option("--verify", is_flag=True, help="Decode every frame and compare every checksum, too.")
@click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Checkpoint that the delta applies to; with --verify its new bytes are checked as well.",
)
@pass_context
def inspect(ctx: Context, directory: str, previous_identity: str | None, verify: bool, base: str | None) -> None:
    """Check a snapshot on disk and print what it is. Needs no network and no credentials."""
    from cwtrain.snapshots import inspect_snapshot, local_snapshot_to_json

    if base is not None and not verify:
        raise click.UsageError("--base is only read with --verify", click.get_current_context())
    _require_predecessor(directory, previous_identity)
    snapshot = inspect_snapshot(
        directory,
        previous_identity=previous_identity,
        allow_empty_delta=True,
        verify="full" if verify else "headers",
        base=base,
    )
    ctx.out.data(local_snapshot_to_json(snapshot), ids=[snapshot.path])


@hotload.command(
    cls=Command,
    example="cwtrain hotload publish --deployment 2f3c... --checkpoint /ckpt/step_000100 --identity step_000100",
)
@deployment_option()
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False),
    required=True,
    metavar="DIR",
    help="Directory of the snapshot: a full checkpoint or a delta.",
)
@click.option("--identity", type=IDENTITY, required=True, help="Identity to publish it under.")
@_previous_identity
@_base_version
@_reset_prompt_cache
@no_wait_option
@timeout_option(1800, "Seconds for everything after the upload.")
@click.option(
    "--deadline",
    type=SECONDS,
    envvar="CWTRAIN_HOTLOAD_DEADLINE",
    help="Seconds for everything, the upload too; without it CWTRAIN_HOTLOAD_DEADLINE, else no limit.",
)
@click.option("--workers", type=click.IntRange(min=1), default=8, show_default=True, help="Uploads at the same time.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan; write nothing.")
@pass_context
def publish(
    ctx: Context,
    deployment_id: str,
    checkpoint: str,
    identity: str,
    previous_identity: str | None,
    base_version: int | None,
    reset_prompt_cache: bool,
    wait: bool,
    timeout: float,
    deadline: float | None,
    workers: int,
    dry_run: bool,
) -> None:
    """Upload a snapshot and hot-load it, and print the hot-load.

    The same command run again after an interruption goes on where the first one stopped.
    """
    _require_predecessor(checkpoint, previous_identity, deployment_id=deployment_id)
    policy = _policy(reset_prompt_cache)
    with ctx.client() as client:
        loader = ctx.loader(client, deployment_id)
        if deadline is not None:
            loader = loader.within(deadline)
        if dry_run:
            plan = loader.plan(
                checkpoint,
                identity,
                previous_identity=previous_identity,
                prompt_cache_policy=policy,
                base_version=base_version,
            )
            ctx.out.data(_plain(attrs.asdict(plan)), ids=[plan.identity])
            return
        ctx.still_running(_RESUMES)
        with _progress(ctx) as on_progress:
            done = loader.publish(
                checkpoint,
                identity,
                previous_identity=previous_identity,
                prompt_cache_policy=policy,
                wait=wait,
                timeout=timeout,
                on_progress=on_progress,
                workers=workers,
                base_version=base_version,
            )
    _print(ctx, done)


@hotload.command(cls=Command, example="cwtrain hotload trigger --deployment 2f3c... --identity step_000100")
@deployment_option()
@click.option("--identity", type=IDENTITY, required=True, help="Identity of a snapshot that is in the bucket.")
@_previous_identity
@_reset_prompt_cache
@no_wait_option
@timeout_option(1800, "Seconds to wait.")
@pass_context
def trigger(
    ctx: Context,
    deployment_id: str,
    identity: str,
    previous_identity: str | None,
    reset_prompt_cache: bool,
    wait: bool,
    timeout: float,
) -> None:
    """Hot-load a snapshot that is in the bucket, and print the hot-load."""
    with ctx.client() as client, _progress(ctx) as on_progress:
        ctx.still_running(_RESUMES)
        done = ctx.loader(client, deployment_id).trigger(
            identity,
            previous_identity=previous_identity,
            prompt_cache_policy=_policy(reset_prompt_cache),
            wait=wait,
            timeout=timeout,
            on_progress=on_progress,
        )
    _print(ctx, done)


@hotload.command(cls=Command, example="cwtrain hotload wait 5d0a...")
@click.argument("name_or_id", metavar="IDENTITY_OR_ID", type=TEXT)
@_of_deployment
@timeout_option(1800, "Seconds to wait.")
@pass_context
def wait(ctx: Context, name_or_id: str, deployment_id: str | None, timeout: float) -> None:
    """Wait until a hot-load has ended, and print it.

    With --output jsonl there is a line for each change; the last is the result.
    """
    from cwtrain.hotload.operations import goes_on

    with ctx.client() as client:
        hot_load_id = _hot_load_id(ctx, client, name_or_id, deployment_id)
        ctx.still_running(goes_on(hot_load_id))
        loader = ctx.loader(client, client.get_hot_load(hot_load_id).spec.deployment_id)
        with _progress(ctx, stream=ctx.out.streams) as on_progress:
            done = loader.wait(hot_load_id, timeout=timeout, on_progress=on_progress)
    _print(ctx, done)


@hotload.command(cls=Command, example="cwtrain hotload status 5d0a...")
@click.argument("name_or_id", metavar="IDENTITY_OR_ID", type=TEXT)
@_of_deployment
@pass_context
def status(ctx: Context, name_or_id: str, deployment_id: str | None) -> None:
    """Print a hot-load and where each replica is."""
    from cwtrain.hotload.operations import warn_about_stragglers
    from cwtrain.infra._wire import hot_load_to_json, replica_to_json

    with ctx.client() as client:
        hot_load_id = _hot_load_id(ctx, client, name_or_id, deployment_id)
        found = client.get_hot_load(hot_load_id)
        replicas = list(client.list_hot_load_replicas(hot_load_id))
    warn_about_stragglers(found, replicas)
    shown = [replica_to_json(replica) for replica in replicas]
    data = {"hot_load": hot_load_to_json(found), "replicas": shown}
    ctx.out.data(data, ids=[found.id], columns=_IN_STATUS)


@hotload.command(cls=Command, example="cwtrain hotload cancel 5d0a...")
@click.argument("name_or_id", metavar="IDENTITY_OR_ID", type=TEXT)
@_of_deployment
@pass_context
def cancel(ctx: Context, name_or_id: str, deployment_id: str | None) -> None:
    """Ask the service to cancel a hot-load, and print it.

    The service does not offer this today, and says so.
    """
    with ctx.client() as client:
        hot_load_id = _hot_load_id(ctx, client, name_or_id, deployment_id)
        ctx.still_running(f"hot-load {hot_load_id} may be canceled; see: cwtrain hotload status {hot_load_id}")
        canceled = client.cancel_hot_load(hot_load_id)
    _print(ctx, canceled)


@hotload.command("list", cls=Command, example="cwtrain --output table hotload list --deployment 2f3c... --limit 5")
@deployment_option(required=False, by_environment=False, help="Only hot-loads of this deployment.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many, newest first.")
@pass_context
def list_(ctx: Context, deployment_id: str | None, limit: int) -> None:
    """Print the newest hot-loads."""
    from cwtrain.infra._wire import hot_load_to_json

    with ctx.client() as client:
        wanted = ctx.deployment_id(client, deployment_id) if deployment_id else None
        found = list(itertools.islice(client.list_hot_loads(wanted, page_size=min(limit, 1000)), limit))
    ctx.out.data([hot_load_to_json(one) for one in found], ids=[one.id for one in found], columns=_COLUMNS)


@hotload.command(cls=Command, example="cwtrain hotload rollback --deployment 2f3c... --identity step_000080")
@deployment_option()
@click.option("--identity", type=TEXT, required=True, help="Identity of an earlier COMPLETED hot-load.")
@no_wait_option
@timeout_option(1800, "Seconds to wait.")
@pass_context
def rollback(ctx: Context, deployment_id: str, identity: str, wait: bool, timeout: float) -> None:
    """Serve an earlier identity again.

    A new hot-load of the same snapshot is asked for, and printed.
    """
    with ctx.client() as client, _progress(ctx) as on_progress:
        ctx.still_running(_RESUMES)
        done = ctx.loader(client, deployment_id).rollback(identity, wait=wait, timeout=timeout, on_progress=on_progress)
    _print(ctx, done)


@hotload.command(cls=Command, example="cwtrain hotload verify --deployment 2f3c... --identity step_000100")
@deployment_option()
@click.option("--identity", type=TEXT, required=True, help="Identity of a snapshot in the deployment's bucket.")
@pass_context
def verify(ctx: Context, deployment_id: str, identity: str) -> None:
    """Read a snapshot in the bucket back and check it.

    Its objects are compared with its manifest, byte by byte, and what was checked is printed.
    """
    from cwtrain.errors import SnapshotError
    from cwtrain.hotload.verify import verify_snapshot

    with ctx.client() as client, _bytes_read(identity) as on_progress:
        loader = ctx.loader(client, deployment_id)
        checked = verify_snapshot(loader.store, loader.location, identity, on_progress=on_progress)
    if checked.problems:
        raise SnapshotError(
            f"{checked.uri} is not what was published: {'; '.join(checked.problems)}",
            hint="identities are immutable, so publish the snapshot again under a new one, or roll back",
        )
    ctx.out.data(_plain(attrs.asdict(checked)), ids=[identity])


@hotload.command(cls=Command, example="cwtrain hotload check --deployment 2f3c...")
@deployment_option()
@pass_context
def check(ctx: Context, deployment_id: str) -> None:
    """Check that this environment can hot-load a deployment.

    Every permission on the bucket is tried, and nothing is left there. The trainers' hooks read their deployment from
    the environment: python -m cwtrain.integrations.preflight checks that.
    """
    from cwtrain.hotload.check import check_hot_load

    with ctx.client() as client:
        checked = check_hot_load(client, ctx.deployment_id(client, deployment_id))
    for warning in checked.warnings:
        ctx.out.say(f"warning: {warning}")
    ctx.out.data(checked.to_json(), ids=[checked.deployment])


def _hot_load_id(ctx: Context, client: InferenceClient, name_or_id: str, deployment_id: str | None) -> str:
    """Return the id of the hot-load that a person named by its id or its identity. Raises ``NotFoundError``."""
    from cwtrain.errors import NotFoundError
    from cwtrain.infra._find import is_uuid

    if is_uuid(name_or_id):
        return name_or_id
    where = ctx.deployment_id(client, deployment_id) if deployment_id else None
    found = [one for one in client.list_hot_loads(where) if name_or_id in (one.id, one.identity)]
    if not found:
        raise NotFoundError(
            f"no hot-load has the id or the identity {name_or_id!r}", code="not_found", hint="cwtrain hotload list"
        )
    if len(found) > 1:
        ids = ", ".join(one.id for one in found)
        raise NotFoundError(
            f"{len(found)} hot-loads are of {name_or_id!r}", hint=f"give one of the ids, the newest first: {ids}"
        )
    return found[0].id


def _policy(reset: bool) -> PromptCachePolicy:
    from cwtrain.models.service import PromptCachePolicy

    return PromptCachePolicy.RESET_ALL if reset else PromptCachePolicy.UNSPECIFIED


def _require_predecessor(directory: str, previous_identity: str | None, *, deployment_id: str = "ID") -> None:
    """Refuse a delta of which it is neither given nor derivable what it applies to; anything else is for inspection."""
    from cwtrain.errors import SnapshotLayoutError
    from cwtrain.models.snapshot import INDEX_NAME
    from cwtrain.snapshots.identity import version_number
    from cwtrain.snapshots.index import is_delta, read_index

    if previous_identity is not None:
        return
    try:
        index = read_index(os.path.join(directory, INDEX_NAME))
    except SnapshotLayoutError:  # inspection says it better
        return
    base = index["metadata"].get("base_version") if is_delta(index) else None
    if isinstance(base, str) and version_number(base) is None:
        raise click.UsageError(
            f"{directory} is a delta, and its base_version {base!r} is no number that says what it applies to: give "
            "--previous-identity, the identity of the snapshot that it was made on "
            f"(cwtrain hotload list --deployment {deployment_id} shows what a deployment has)",
            click.get_current_context(),
        )


@contextmanager
def _progress(ctx: Context, *, stream: bool = False) -> Iterator[Callable[[ProgressEvent], None]]:
    """Give a callback that tells the person how far it is, and with ``stream`` the program too."""
    from cwtrain.infra._wire import hot_load_to_json

    last: list[HotLoadState] = []

    with ctx.out.progress() as tell:

        def on_progress(event: ProgressEvent) -> None:
            tell(event)
            # The last line is the result, which the command itself writes.
            if stream and event.hot_load is not None and not event.hot_load.state.terminal:
                state = event.hot_load.state
                if [state] != last:
                    last[:] = [state]
                    ctx.out.data(hot_load_to_json(event.hot_load))

        yield on_progress


@contextmanager
def _bytes_read(identity: str) -> Iterator[Callable[[int], None]]:
    """Give a callback that is told what was read back, so that a wait can say how much it is."""
    lock, total = threading.Lock(), 0

    def on_progress(count: int) -> None:
        nonlocal total
        with lock:
            total += count

    with waiting(lambda: f"reading {identity} back: {size(total)}"):
        yield on_progress


def _print(ctx: Context, hot_load: HotLoad) -> None:
    from cwtrain.infra._wire import hot_load_to_json

    ctx.out.data(hot_load_to_json(hot_load), ids=[hot_load.id], columns=_IN_ONE)


def _plain(value: Any) -> Any:
    """Return attrs data as plain JSON data."""
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case str():
            return str(value)
        case _ if hasattr(value, "isoformat"):
            return value.isoformat()
        case _:
            return value
