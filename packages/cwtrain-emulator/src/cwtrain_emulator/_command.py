"""``emulator serve`` runs the emulator, ``emulator start`` leaves one running; so does `python -m cwtrain_emulator`."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import click
from click.core import ParameterSource

from cwtrain_emulator._cwtrain import Command, output

__all__ = ["serve_command", "start_command"]


def _bucket(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Refuse a name that the store would refuse, again and again, while it is waited for."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", value):
        raise click.BadParameter(f"{value!r} is none: give 3 to 63 lower-case letters, digits and inner dashes")
    return value


class _Printable(logging.Formatter):
    """Lines in which what is no printable character is spelt out: names and paths come from whoever sends a request."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """Return the line."""
        text = super().formatMessage(record)
        return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


@click.command("serve", cls=Command)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port of the API; 0: any.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--env", "as_shell", is_flag=True, help="Print shell exports instead of JSON.")
@click.option("--replicas", type=click.IntRange(1, 64), default=2, show_default=True, help="Replicas per deployment.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where everything is kept; without it a temporary directory, deleted at the end.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of requests that have none.")
@click.option(
    "--bucket", default="cwtrain-weights", show_default=True, callback=_bucket, help="Name of the bucket, a host label."
)
@click.option("--region", default="US-EAST-04A", show_default=True, help="Region of the object store.")
@click.option("--s3-endpoint", metavar="URL", help="Use this store (keys from AWS_*) instead of starting one.")
@click.option("--report-identity", is_flag=True, help="Answers name the identity that made them.")
@click.option("--no-hot-load", is_flag=True, help="Hot-loads are not enabled for the organization.")
@click.option(
    "--transition-seconds",
    type=click.FloatRange(0, 3600),
    default=0.05,
    show_default=True,
    help="How long resources stay CREATING, UPDATING or DELETING at least.",
)
@click.option(
    "--swap-delay",
    type=click.FloatRange(0, 3600),
    default=0.01,
    show_default=True,
    help="Seconds between one replica's swap of weights and the next one's.",
)
@click.option(
    "--engine",
    type=click.Choice(["numpy", "transformers"]),
    default="numpy",
    show_default=True,
    help="What runs Hugging Face models; `transformers` is an extra. The small default models always run in numpy.",
)
@click.option("--slots", type=click.IntRange(1), help="Sequences that a replica generates at once; none: no limit.")
@click.option("--queue", type=click.IntRange(0), help="Requests that wait for slots at a replica; beyond: 429.")
@click.option(
    "--tokens-per-second", type=click.FloatRange(0.001), help="Tokens that a replica makes of each sequence per second."
)
@click.option("--retry-after", metavar="SECONDS", help="Header Retry-After of a 429; none: without it.")
@click.option("--discard-state", is_flag=True, hidden=True, help="Delete the state directory at the end.")
@click.option("--watch-stdin", is_flag=True, hidden=True, help="Stop at the end of standard input.")
@click.option("--verbose", is_flag=True, help="Log more on stderr.")
def serve_command(
    *,
    port: int,
    host: str,
    as_shell: bool,
    replicas: int,
    state_dir: Path | None,
    seed: int,
    bucket: str,
    region: str,
    s3_endpoint: str | None,
    report_identity: bool,
    no_hot_load: bool,
    transition_seconds: float,
    swap_delay: float,
    engine: str,
    slots: int | None,
    queue: int | None,
    tokens_per_second: float | None,
    retry_after: str | None,
    discard_state: bool,
    watch_stdin: bool,
    verbose: bool,
) -> None:
    """Run the API, the bucket, the replicas and the endpoint until Ctrl-C.

    Prints one JSON line with every URL, token and key (--output table: a table), then logs to stderr.

    Example: cwtrain emulator serve --state-dir ./state
    """
    from cwtrain_emulator.s3.weed import WeedError
    from cwtrain_emulator.serve import ServeError, serve
    from cwtrain_emulator.settings import Settings

    out = output()
    out.refuse_ids()
    if s3_endpoint is not None:
        _check_store(s3_endpoint)
    level = logging.INFO if verbose else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level)
    temporary = state_dir is None or discard_state
    directory = Path(tempfile.mkdtemp(prefix="cwtrain-emulator-")) if state_dir is None else state_dir.absolute()
    settings = Settings(
        state_dir=directory,
        host=host,
        port=port,
        replicas=replicas,
        seed=seed,
        bucket=bucket,
        region=region,
        s3_endpoint=s3_endpoint,
        report_identity=report_identity,
        hot_load_enabled=not no_hot_load,
        transition_seconds=transition_seconds,
        swap_delay_seconds=swap_delay,
        engine=engine,
        slots=slots,
        queue=queue,
        tokens_per_second=tokens_per_second,
        retry_after=retry_after,
        keep_state=not temporary,
        environ=dict(os.environ),
    )
    try:
        write = out.data if out.format == "table" and not as_shell else None
        serve(settings, as_shell=as_shell, watch_stdin=watch_stdin, write=write)
    except (ServeError, WeedError, ValueError) as exc:
        raise click.ClickException(str(exc)) from exc
    finally:
        if temporary:
            shutil.rmtree(directory, ignore_errors=True)


def _check_store(endpoint: str) -> None:
    """Refuse, as wrong usage, a store that cannot be reached or that there are no keys for."""
    from cwtrain_emulator.s3.client import credentials_from_env

    if not re.match(r"https?://[^/\s]", endpoint):
        raise click.UsageError(f"--s3-endpoint {endpoint!r} is no http or https URL", click.get_current_context())
    try:
        credentials_from_env()
    except ValueError as exc:
        raise click.UsageError(str(exc), click.get_current_context()) from exc


@click.command("start", cls=Command)
@click.option("--timeout", type=click.FloatRange(1, 3600), default=90.0, show_default=True, help="Seconds to wait.")
def start_command(
    timeout: float, as_shell: bool, state_dir: Path | None, s3_endpoint: str | None, **_passed_on: object
) -> None:
    """Start the emulator in the background, and return when everything answers.

    Prints what `serve` prints; `emulator stop` ends it. Where it cannot start, that is an error with the reason, and
    nothing is left running. Its log is serve.log in the state directory.

    Example: cwtrain emulator start --env >emulator.env && . ./emulator.env
    """
    from cwtrain_emulator.emulator import Emulator, EmulatorError
    from cwtrain_emulator.serve import exports

    out = output()
    out.refuse_ids()
    if s3_endpoint is not None:
        _check_store(s3_endpoint)
    emulator = Emulator(state_dir, detached=True, start_timeout=timeout, extra_args=_given(click.get_current_context()))
    try:
        emulator.start()
    except EmulatorError as exc:
        said, _, reason = str(exc).rpartition("\nError: ")  # what `serve` has said at the end, if it could
        raise click.ClickException(f"the emulator did not start: {reason}" if said else str(exc)) from exc
    values = emulator.leave()
    if as_shell:
        click.echo(exports(values), nl=False)
    else:
        out.data(values)
    state = values["state_dir"]
    where = f"the page is {values['base_url']}/, the log {state}/serve.log"
    stop = f"cwtrain emulator stop --state-dir {shlex.quote(state)}"
    click.echo(f"cwtrain emulator at {values['base_url']}; {where}; stop it with: {stop}", err=True)


def _given(ctx: click.Context) -> list[str]:
    """Return the options of `serve` that this command was given, as words for it."""
    words = []
    for option in _SHARED:
        if ctx.get_parameter_source(option.name or "") is not ParameterSource.COMMANDLINE or option.name in _OURS:
            continue
        value = ctx.params[option.name or ""]
        words += [option.opts[0]] if option.is_flag else [f"{option.opts[0]}={value}"]
    return words


_OURS = ("as_shell", "state_dir")
"""Options of `start` that it heeds itself."""

_SHARED = [one for one in serve_command.params if isinstance(one, click.Option) and not one.hidden]
start_command.params[:0] = _SHARED
