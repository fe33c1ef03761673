"""``cwtrain demo``: the quick start. Only click is imported before it runs."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import click

from cwtrain.cli._context import Command, Context, pass_context
from cwtrain.cli._errors import Terminated
from cwtrain.errors import ConfigError

__all__ = ["demo"]

_COLUMNS = ("step", "reward", "version", "kind", "bytes", "ratio", "hot-load", "rollout")


@click.command("demo", cls=Command)
@click.option("--steps", type=click.IntRange(2, 1000), default=20, show_default=True, help="Training steps.")
@click.option("--replicas", type=click.IntRange(1, 8), default=2, show_default=True, help="Replicas of the deployment.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="All draws follow from it.")
@click.option(
    "--engine",
    type=click.Choice(("numpy", "transformers")),
    default="numpy",
    show_default=True,
    help="What the replicas compute with; this version has numpy.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Start from this model of the numpy engine.  [default: a fresh one]",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="New or empty directory for all that is written; it is kept.  [default: a temporary one]",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Go on serving when the training is over, page and all, until Ctrl-C; and keep the temporary directory.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, writable=True),
    metavar="FILE.html",
    help="Write a report, one page.",
)
@pass_context
def demo(
    ctx: Context,
    *,
    steps: int,
    replicas: int,
    seed: int,
    engine: str,
    model: str | None,
    state_dir: str | None,
    keep: bool,
    report: str | None,
) -> None:
    """Train a small model on this machine, its weights hot-loaded after every step.

    Starts the emulator (API, bucket, replicas), creates a deployment, publishes the base, then trains by policy
    gradient: rollouts, an update, a delta, a hot-load, the next rollouts from the new weights. Needs no account. Exit
    code 0 only if the reward rose and the bytes on every replica are the trainer's.

    Example: cwtrain demo --report demo.html
    """
    if engine != "numpy":
        raise ConfigError(f"the engine {engine!r} comes with a later version of the demo", hint="leave --engine out")

    if report:
        folder = os.path.dirname(report) or "."
        if not os.path.isdir(folder):
            raise click.BadParameter(f"the directory of {report} does not exist", param_hint="--report")
        if not os.path.exists(report) and not os.access(folder, os.W_OK):
            raise click.BadParameter(f"nothing can be written into the directory of {report}", param_hint="--report")

    # Sums in one order whatever the number of cores, so that a seed gives the same rewards again; and for matrices this
    # small, more threads only get into each other's way. Numpy looks when it is loaded.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

    from cwtrain.cli._output import LiveTable
    from cwtrain.waits import serving
    from cwtrain_demo.loop import DemoConfig, run_demo
    from cwtrain_demo.report import human_bytes, report_html
    from cwtrain_demo.result import DemoResult, Step, Version
    from cwtrain_emulator import Emulator

    config = DemoConfig(steps=steps, replicas=replicas, seed=seed, model=model, state_dir=state_dir, keep=keep)
    with LiveTable(_COLUMNS, title="cwtrain demo", quiet=ctx.out.quiet) as table:

        def show(step: Step, version: Version) -> None:
            table.row(
                step.step,
                f"{step.reward:.3f}",
                version.version,
                version.kind.lower(),
                human_bytes(version.bytes),
                f"{version.ratio:.1f}x" if version.kind == "DELTA" else "",
                f"{version.upload_seconds + version.hot_load_seconds:.2f} s",
                step.example,
            )

        def tell(result: DemoResult) -> None:
            if report:
                try:
                    with open(report, "w", encoding="utf-8") as file:
                        file.write(report_html(result))
                except OSError as exc:
                    # What was trained and served is told all the same.
                    ctx.out.say(f"warning: the report {report} could not be written: {exc.strerror}")
                else:
                    ctx.out.say(f"report: {report}")
            ctx.out.say(
                f"reward {result.reward_start:.3f} -> {result.reward_end:.3f} in {steps} steps, "
                f"{len(result.versions)} versions, {result.seconds['total']:.1f} s; "
                f"weights {'match' if result.weights_match else 'DIFFER'}"
            )
            ctx.out.data(result.as_json(), ids=[version.identity for version in result.versions])

        def hold(result: DemoResult, emulator: Emulator) -> None:
            tell(result)
            sys.stdout.flush()
            with contextlib.suppress(KeyboardInterrupt, Terminated), serving():
                ctx.out.say(f"the emulator goes on: its page is {emulator.page_url}; Ctrl-C ends it")
                while True:
                    time.sleep(3600)

        result = run_demo(config, on_step=show, say=ctx.out.say, hold=hold if keep else None)
    if not keep:
        tell(result)
    if not result.ok:
        for problem in result.problems():
            ctx.out.say(f"error: {problem}")
        click.get_current_context().exit(1)
