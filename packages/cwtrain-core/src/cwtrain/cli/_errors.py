"""From an exception to what a person reads, what a program reads, and the exit code."""

from __future__ import annotations

import errno
import traceback
from typing import Any, Final

import attrs
import click

from cwtrain.cli._output import STDOUT, to_json
from cwtrain.errors import APIError, ConfigError, CWTrainError, StorageRegionError
from cwtrain.models.text import printable, printable_lines

__all__ = ["DONE", "FAILED", "INTERRUPTED", "TERMINATED", "WRONG_USAGE", "Report", "Terminated", "report"]

DONE: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2
INTERRUPTED: Final = 130
TERMINATED: Final = 143


class Terminated(SystemExit):
    """SIGTERM arrived. Not an ``Exception``, so that nothing but clean-up code sees it.

    A ``SystemExit``, because an event loop swallows every other exception that a signal raises inside one of its
    callbacks, and the process would go on.
    """

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@attrs.frozen(kw_only=True)
class Report:
    """An error on its way to the person: message and next step, the same for programs, and the exit code."""

    exit_code: int
    message: str
    kind: str
    hint: str | None = None
    code: str | None = None
    request_id: str | None = None
    notes: tuple[str, ...] = ()
    traceback: str | None = None

    def text(self) -> str:
        """Return the lines for people."""
        about = ", ".join(
            part
            for part in (
                self.code.upper() if self.code and self.code.lower() not in self.message.lower() else None,
                f"request {self.request_id}" if self.request_id and self.request_id not in self.message else None,
            )
            if part
        )
        lines = [f"error: {self.message}{f' ({about})' if about else ''}"]
        lines += [f"  {note}" for note in self.notes]
        if self.hint:
            lines.append(f"  next: {self.hint}")
        trace = self.traceback.rstrip().split("\n") if self.traceback else []
        return "\n".join([*map(printable, trace), *map(printable_lines, lines)])

    def json(self) -> str:
        """Return one JSON object, in one line, for programs."""
        error: dict[str, Any] = {
            "type": self.kind,
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "request_id": self.request_id,
        }
        if self.notes:
            error["notes"] = list(self.notes)
        if self.traceback:
            error["traceback"] = self.traceback
        return to_json({"error": error})


def report(exc: BaseException, *, verbose: bool = False) -> Report:
    """Return what to say about ``exc``; ``verbose`` adds the traceback."""
    trace = _trace(exc) if verbose else None
    kind = type(exc).__name__
    notes = exc.notes if isinstance(exc, CWTrainError) else tuple(getattr(exc, "__notes__", ()))
    match exc:
        case ConfigError() | StorageRegionError(status=None):  # a region that is not set is a setting, too
            return Report(
                exit_code=WRONG_USAGE, message=str(exc), kind=kind, hint=exc.hint, notes=notes, traceback=trace
            )
        case CWTrainError():
            api = exc if isinstance(exc, APIError) else None
            return Report(
                exit_code=FAILED,
                message=str(exc),
                kind=kind,
                hint=exc.hint,
                code=api.code if api else None,
                request_id=api.request_id if api else None,
                notes=notes,
                traceback=trace,
            )
        case click.ClickException():
            return Report(
                exit_code=exc.exit_code, message=exc.format_message(), kind=kind, hint=_usage_hint(exc), traceback=trace
            )
        case OSError():
            return Report(
                exit_code=FAILED, message=_os_message(exc), kind=kind, hint=_os_hint(exc), notes=notes, traceback=trace
            )
        case _:
            return Report(
                exit_code=FAILED,
                message=f"{kind}: {exc}" if str(exc) else kind,
                kind=kind,
                hint=None
                if verbose
                else "this is a mistake in the program; --verbose shows where it came from, please report it",
                notes=notes,
                traceback=trace,
            )


def _trace(exc: BaseException) -> str:
    """Return the traceback; the last error's notes are left out of it, as they are told with its message."""
    shown = traceback.TracebackException.from_exception(exc)
    shown.__notes__ = None
    return "".join(shown.format())


def _usage_hint(exc: click.ClickException) -> str | None:
    hint = getattr(exc, "hint", None)
    if hint:
        return str(hint)
    context = exc.ctx if isinstance(exc, click.UsageError) else None
    return f"{context.command_path} --help" if context is not None else None


def _os_hint(exc: OSError) -> str:
    if exc.filename == STDOUT:
        return "only this output is lost, what the command did is done: look at that before you run it again"
    match exc.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "make room there, or write to another place; then run it again"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "give this user access to it, or choose another place"
        case errno.ENOENT | errno.ENOTDIR | errno.EISDIR:
            return "check the path"
        case errno.EMFILE | errno.ENFILE:
            return "raise the limit of open files (ulimit -n), then run it again"
        case _:
            return "put that right, then run it again; --verbose shows where it came from"


def _os_message(exc: OSError) -> str:
    if exc.filename is not None and exc.strerror:
        return f"{exc.filename}: {exc.strerror}"
    return f"{type(exc).__name__}: {exc}"
