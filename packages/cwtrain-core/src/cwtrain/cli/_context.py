"""Global options, and what a command makes of them: one frozen ``Context``."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import attrs
import click

from cwtrain.cli._options import TEXT
from cwtrain.cli._output import FORMATS, LogHandler, Output, say
from cwtrain.waits import waiting

if TYPE_CHECKING:
    from cwtrain.config import ApiConfig
    from cwtrain.hotload import HotLoader
    from cwtrain.infra import InferenceClient

__all__ = [
    "Command",
    "Context",
    "GlobalOptions",
    "global_options",
    "logging_to_stderr",
    "offer_output",
    "pass_context",
    "set_log_level",
]

_OF_OUTPUT = ("verbose", "quiet", "output", "errors")

_P = ParamSpec("_P")
_R = TypeVar("_R")


@attrs.define(kw_only=True)
class GlobalOptions:
    """What the global options said so far; they may stand before the group or after the command."""

    base_url: str | None = None
    token: str | None = attrs.field(default=None, repr=False)
    verbose: bool = False
    quiet: bool = False
    output: str = "json"
    errors: str = "text"
    running: list[str] = attrs.field(factory=list)
    """What goes on at the service when this process stops now, in words for the person."""


@attrs.frozen(kw_only=True)
class Context:
    """What a command works with: where the API is, where output goes, what still runs when it is interrupted."""

    base_url: str | None
    token: str | None = attrs.field(repr=False)
    out: Output
    running: list[str]

    def overrides(self) -> dict[str, object]:
        """Return the API settings that options gave, for ``ApiConfig``."""
        return {"token": self.token, "base_url": self.base_url}

    def api_config(self) -> ApiConfig:
        """Return where the API is: options, then environment, then defaults."""
        from cwtrain.config import ApiConfig

        return ApiConfig.from_env(token=self.token, base_url=self.base_url)

    def client(self) -> InferenceClient:
        """Return a client for the API."""
        from cwtrain.infra import InferenceClient

        source = "--token" if self.token and self.token.strip() else None
        return InferenceClient(self.token, base_url=self.base_url, token_source=source)

    def loader(self, client: InferenceClient, name_or_id: str) -> HotLoader:
        """Return a loader for the deployment, watched so that an interrupt can say what still runs."""
        from cwtrain.cli._running import watch
        from cwtrain.hotload import HotLoader

        watch(self.running)
        return HotLoader(client, deployment_id=self.deployment_id(client, name_or_id))

    def deployment_id(self, client: InferenceClient, name_or_id: str) -> str:
        """Return the id of the deployment that a person named. Raises ``NotFoundError``."""
        from cwtrain.infra._find import find_one, is_uuid

        if is_uuid(name_or_id):
            return name_or_id
        return find_one("deployment", name_or_id, client.get_deployment, client.list_deployments).id

    def still_running(self, *texts: str) -> None:
        """Note what goes on at the service should this process be stopped from now on, and what to do about it."""
        self.running[:] = texts

    def all_done(self) -> None:
        """Note that nothing goes on."""
        self.running.clear()


def pass_context(function: Callable[Concatenate[Context, _P], _R]) -> Callable[_P, _R]:
    """Give the command a ``Context`` as its first argument."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        ctx = click.get_current_context()
        given = _given(ctx)
        context = Context(base_url=given.base_url, token=given.token, out=_output(ctx), running=given.running)
        return function(context, *args, **kwargs)

    return wrapper


def offer_output(ctx: click.Context) -> None:
    """Put into ``ctx.meta`` what a plugin's command needs to honour the global options, without an import of ours.

    ``cwtrain.output`` is a function that returns the ``Output`` of the command line, once all of it is parsed.
    ``cwtrain.options`` is a function that returns the options of output, for commands that take them after their name.
    """
    ctx.meta["cwtrain.output"] = functools.partial(_output, ctx)
    ctx.meta["cwtrain.options"] = _output_options


def _output(ctx: click.Context) -> Output:
    given = _given(ctx)
    return Output(given.output, quiet=given.quiet)


def _output_options() -> list[click.Parameter]:
    return [option for option in global_options() if option.name in _OF_OUTPUT]


def _given(ctx: click.Context) -> GlobalOptions:
    given = ctx.find_root().ensure_object(GlobalOptions)
    assert isinstance(given, GlobalOptions)
    return given


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Keep an option that was really given; one that stands after the command wins over one before it."""
    if value is None or value is False or ctx.resilient_parsing or not param.name:
        return
    given = _given(ctx)
    setattr(given, param.name, value)
    if param.name == "token":
        say("warning: other users of this machine can see --token; COREWEAVE_API_TOKEN is safer", quiet=given.quiet)
    if param.name in ("verbose", "quiet"):
        set_log_level(verbose=given.verbose, quiet=given.quiet)


def global_options() -> list[click.Parameter]:
    """Return the global options; the root shows them, commands accept them as well."""

    def option(*names: str, **settings: Any) -> click.Option:
        return click.Option(names, expose_value=False, callback=_remember, **settings)

    return [
        option(
            "--base-url",
            type=TEXT,
            metavar="ORIGIN",
            help="Origin of the API.  [env var: COREWEAVE_API_URL; default: https://api.coreweave.com]",
        ),
        option("--token", metavar="TOKEN", help="API access token.  [env var: COREWEAVE_API_TOKEN, then CW_API_TOKEN]"),
        option("--verbose", is_flag=True, help="Show the library's log, and tracebacks of errors."),
        option("--quiet", is_flag=True, help="Say nothing on standard error but errors."),
        option("--output", "-o", type=click.Choice(FORMATS), help="What standard output gets.  [default: json]"),
        option(
            "--errors",
            type=click.Choice(("text", "json")),
            help="How an error is told on standard error.  [default: text]",
        ),
    ]


class Command(click.Command):
    """A command of core: it takes the global options after its name too, and shows an ``example`` in its help."""

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example = example

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it waits for and does not name itself is at least told by its name."""
        with waiting(f"{ctx.command_path} is at work"):
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, then the global ones."""
        common = {option.opts[0] for option in global_options()}
        rows: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                rows[param.opts[0] in common and param not in self.params].append(record)
        for ours, title in ((False, "Options"), (True, "Global options")):
            if rows[ours]:
                with formatter.section(title):
                    formatter.write_dl(rows[ours])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example, in one line so that it can be copied."""
        super().format_epilog(ctx, formatter)
        if self.example:
            with formatter.section("Example"):
                formatter.write(f"{'':>{formatter.current_indent}}{self.example}\n")

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's parameters, and the global options that it has no name of its own for."""
        params = super().get_params(ctx)
        taken = {name for param in params for name in param.opts}
        return params + [option for option in global_options() if not taken & set(option.opts)]


@contextmanager
def logging_to_stderr(*, verbose: bool, quiet: bool) -> Iterator[None]:
    """Send the log of ``cwtrain`` to standard error inside the block; see ``set_log_level``."""
    logger, handler = logging.getLogger("cwtrain"), LogHandler()
    before = logger.level, logger.propagate, logging.getLogger("cwtrain.plugins").level
    logger.addHandler(handler)
    logger.propagate = False
    set_log_level(verbose=verbose, quiet=quiet)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        level, logger.propagate, plugins_level = before
        logger.setLevel(level)
        logging.getLogger("cwtrain.plugins").setLevel(plugins_level)


def set_log_level(*, verbose: bool, quiet: bool) -> None:
    """Let warnings through, everything with ``verbose``, errors only with ``quiet``."""
    logging.getLogger("cwtrain").setLevel(logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING)
    traced = os.environ.get("CWTRAIN_TRACE_PLUGINS", "").strip() not in ("", "0") and not verbose
    logging.getLogger("cwtrain.plugins").setLevel(logging.INFO if traced else logging.NOTSET)
