"""The command line. ``main`` is the only place that catches whatever comes: it turns it into a message and a code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import click

from cwtrain._streams import UnfailingStderr
from cwtrain.cli._context import GlobalOptions, logging_to_stderr
from cwtrain.cli._errors import DONE, FAILED, INTERRUPTED, TERMINATED, Terminated, report
from cwtrain.cli._output import Heart, naming_stdout, say
from cwtrain.cli._root import root
from cwtrain.waits import SILENCE_SECONDS

if TYPE_CHECKING:
    import asyncio

__all__ = ["main"]


def main(args: Sequence[str] | None = None, *, heartbeat: float = SILENCE_SECONDS) -> int:
    """Run ``cwtrain`` with ``args`` (``sys.argv[1:]``) and return its exit code.

    While it waits it says so whenever it said nothing for ``heartbeat`` seconds.
    """
    with UnfailingStderr():
        return _main(list(sys.argv[1:] if args is None else args) or ["--help"], heartbeat)


def _main(words: list[str], heartbeat: float) -> int:
    # A shell that completes shows nothing but what can be completed.
    quiet = "--quiet" in words or "_CWTRAIN_COMPLETE" in os.environ
    given = GlobalOptions(verbose="--verbose" in words, quiet=quiet, errors=_errors_format(words))
    heart = Heart(every=heartbeat, quiet=lambda: given.quiet)
    try:
        with logging_to_stderr(verbose=given.verbose, quiet=given.quiet), _terminated_by_sigterm(), heart:
            code = root.main(words, prog_name="cwtrain", standalone_mode=False, obj=given)
            _flush()
    except (KeyboardInterrupt, click.Abort) as stop:
        return _interrupted(given, stop, INTERRUPTED, "interrupted")
    except Terminated as stop:
        return _interrupted(given, stop, TERMINATED, "terminated")
    except BrokenPipeError:  # whoever read standard output has gone, and needs no message
        return FAILED
    except Exception as exc:  # noqa: BLE001 - the one broad except of the command line
        told = report(exc, verbose=given.verbose)
        click.echo(told.json() if given.errors == "json" else told.text(), err=True)
        return told.exit_code
    # A command that calls `ctx.exit(3)` has its code returned here; any other return value is no code.
    return code if isinstance(code, int) and not isinstance(code, bool) else DONE


def _flush() -> None:
    """Write what is left for standard output."""
    if sys.stdout is not None:
        with naming_stdout():
            sys.stdout.flush()


def _interrupted(given: GlobalOptions, stop: BaseException, code: int, word: str) -> int:
    """Say what goes on: what was known where the interrupt arrived, else what the command said of itself before."""
    known = _notes(stop)
    say("\n".join([word, *(f"  {text}" for text in known or given.running)]))
    return code


def _notes(stop: BaseException) -> list[str]:
    """Return the notes of an interrupt, and of what it was made from: click makes an ``Abort`` of Ctrl-C."""
    return [note for one in (stop, stop.__cause__) for note in getattr(one, "__notes__", ())]


def _errors_format(words: Sequence[str]) -> str:
    """Return what ``--errors`` says, also when the rest of the command line cannot be parsed."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--errors=json" or (word == "--errors" and following == "json"):
            return "json"
    return "text"


@contextmanager
def _terminated_by_sigterm() -> Iterator[None]:
    """Turn the first SIGTERM into ``Terminated``, so that clean-up code runs; a second one ends the process at once.

    While an event loop runs, the exception is raised by a callback of its own and the loop cancels its tasks: raised
    in whatever task happens to run, it would become the result of a task that nobody awaits, and asyncio prints those.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if loop := _running_loop():
            loop.call_soon_threadsafe(terminate)
        else:
            terminate()

    def terminate() -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; asyncio is not imported for the answer."""
    if "asyncio" not in sys.modules:
        return None
    import asyncio

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
