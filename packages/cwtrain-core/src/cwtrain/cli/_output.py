"""What the person and the program see: data on standard output, everything else on standard error.

Data goes out as JSON unless ``--output`` says otherwise. rich is imported only here, and only when something is drawn.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress, TaskID

    from cwtrain.hotload import ProgressEvent

__all__ = [
    "FORMATS",
    "HEARTBEAT",
    "STDOUT",
    "LiveTable",
    "LogHandler",
    "Output",
    "ProgressLine",
    "is_terminal",
    "naming_stdout",
    "say",
]

FORMATS: Final = ("json", "jsonl", "table", "id")
STDOUT: Final = "standard output"
"""The name of standard output in an error."""
HEARTBEAT: Final = 30.0
"""Seconds between two plain lines while nothing changes."""


def is_terminal() -> bool:
    """Return whether standard error is a terminal that lines can be redrawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") != "dumb"


def say(text: str, *, quiet: bool = False) -> None:
    """Write a line for the person to standard error, unless ``quiet``."""
    if quiet:
        return
    if _drawing:
        _drawing[-1].print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        click.echo(text, err=True)


class Output:
    """Writes a command's data in the format that ``--output`` names; it may be used once or line by line."""

    def __init__(self, output: str = "json", *, quiet: bool = False) -> None:
        self.format = output
        self.quiet = quiet

    def data(self, value: Any, *, ids: Sequence[str] | None = None, columns: Sequence[str] = ()) -> None:
        """Write ``value``, plain JSON data. ``ids`` are its ids; ``columns`` the dotted keys that a table shows."""
        match self.format:
            case "id":
                if ids is None:
                    self.refuse_ids()
                _write("".join(f"{one}\n" for one in ids or ()))
            case "jsonl":
                items = value if isinstance(value, list) else [value]
                _write("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
            case "table":
                _write(_table(value, columns))
            case _:
                _write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")

    def refuse_ids(self) -> None:
        """Raise a usage error for ``id``: a command that gives no ids says so before it begins its work."""
        if self.format == "id":
            raise click.UsageError("this command has no ids to print", click.get_current_context(silent=True))

    @property
    def streams(self) -> bool:
        """Whether a waiting command writes a line for each change (``jsonl``)."""
        return self.format == "jsonl"

    def say(self, text: str) -> None:
        """Write a line for the person to standard error, unless ``--quiet``."""
        say(text, quiet=self.quiet)

    @contextmanager
    def progress(self) -> Iterator[Callable[[ProgressEvent], None]]:
        """Give a callback for ``on_progress`` that tells the person how far a publish or a wait is."""
        with ProgressLine(quiet=self.quiet) as line:
            yield line.event

    @contextmanager
    def bytes_done(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Give a callback for ``on_progress`` of work on bytes: how many are done, and of how many."""
        with ProgressLine(quiet=self.quiet) as line:
            yield lambda done, total: line.bytes_done(what, done, total)


@contextmanager
def naming_stdout() -> Iterator[None]:
    """Have an error of a write inside the block name standard output; one that nobody reads is left as it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, STDOUT) from exc


def _write(text: str) -> None:
    # Bytes, so that neither the locale nor a file name that is no UTF-8 can break the output.
    with naming_stdout():
        click.echo(text.encode("utf-8", errors="backslashreplace"), nl=False)


# Tables --------------------------------------------------------------------------------------------------------------


def _table(value: Any, columns: Sequence[str]) -> str:
    """Return a table of a list's items, or of one object's fields."""
    import io

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    if isinstance(value, list):
        rows = [_flat(item) for item in value]
        names = list(columns) or list(dict.fromkeys(key for row in rows for key in row))
        cells = [[row.get(name, "") for name in names] for row in rows]
    else:
        names, cells = ["field", "value"], [[key, text] for key, text in _flat(value).items()]
    for name in names:
        table.add_column(Text(name), overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    terminal = sys.stdout.isatty()
    # Away from a terminal nothing is folded, so that a line stays a row.
    columns_wide = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    width = Console().width if terminal else max(80, sum(columns_wide) + 3 * len(columns_wide))
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=terminal and not os.environ.get("NO_COLOR")).print(table)
    return text.getvalue()


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Return nested objects as one mapping from dotted keys to text."""
    if not isinstance(value, Mapping):
        return {prefix or "value": _cell(value)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        flat |= _flat(item, name) if isinstance(item, Mapping) and item else {name: _cell(item)}
    return flat


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case str():
            return value
        case list() if not any(isinstance(item, Mapping | list) for item in value):
            return ", ".join(map(_cell, value))
        case _:
            return json.dumps(value, ensure_ascii=False)


# For people ----------------------------------------------------------------------------------------------------------

_drawing: list[Console] = []
"""The console that draws now, if any: lines go above what it draws."""


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


class ProgressLine:
    """Tells how far something is: one redrawn line on a terminal, else a plain line for each change of state.

    Without a change there is at most one plain line in 30 seconds.
    """

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet
        self._clock = clock
        self._mark: tuple[object, ...] = ()
        self._told = 0.0
        self._began: float | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if not self._quiet and is_terminal():
            from rich.progress import BarColumn, Progress, TextColumn

            console = _console()
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
            self._bar = Progress(*columns, console=console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None)
            _drawing.append(console)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            _drawing.pop()
            self._bar.stop()
            self._bar = None

    def event(self, event: ProgressEvent) -> None:
        """Tell ``event``."""
        if self._quiet:
            return
        done, total = _share(event)
        self._tell(_line(event), _mark(event), done, total)

    def bytes_done(self, what: str, done: int, total: int) -> None:
        """Tell that ``what`` is at ``done`` of ``total`` bytes, with the rate and the time that the rest takes."""
        if self._quiet:
            return
        now = self._clock()
        self._began = now if self._began is None else self._began
        text, spent = f"{what}: {done:,}/{total:,} bytes", now - self._began
        if done and spent > 0:
            text += f", {done / spent / 1e6:.1f} MB/s"
            text += f", {spent * (total - done) / done:.0f} s left" if done < total else f", {spent:.1f} s"
        self._tell(text, (what, done >= total), done, total)

    def _tell(self, text: str, mark: tuple[object, ...], done: int, total: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text, completed=done, total=total or None)
            return
        now = self._clock()
        if mark != self._mark or now - self._told >= HEARTBEAT:
            self._mark, self._told = mark, now
            say(text)


def _line(event: ProgressEvent) -> str:
    """Return the event in one line, an upload with its rate and the time it still takes."""
    upload = event.upload
    if upload is None or upload.remaining_seconds is None or upload.sent_bytes >= upload.total_bytes:
        return event.summary()
    return f"{event.summary()}, {upload.bytes_per_second / 1e6:.1f} MB/s, {upload.remaining_seconds:.0f} s left"


def _mark(event: ProgressEvent) -> tuple[object, ...]:
    """Return what has to change for a new plain line."""
    if event.upload is not None:
        return ("upload", event.upload.sent_bytes >= event.upload.total_bytes)
    hot_load = event.waiting_on or event.hot_load
    known = (hot_load.id, hot_load.state) if hot_load is not None else ()
    return (event.waiting_on is not None, *known, event.ready, event.total, event.problem is not None)


def _share(event: ProgressEvent) -> tuple[int, int]:
    if event.upload is not None:
        return event.upload.sent_bytes, event.upload.total_bytes
    return event.ready, event.total


class LiveTable:
    """A table on standard error that grows row by row: redrawn on a terminal, plain lines elsewhere.

    with LiveTable(("step", "reward")) as table:
        table.row(1, "0.25")
    """

    def __init__(self, columns: Sequence[str], *, title: str = "", quiet: bool = False) -> None:
        self._columns = tuple(columns)
        self._title = title
        self._quiet = quiet
        self._rows: list[tuple[str, ...]] = []
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if not self._quiet and is_terminal():
            from rich.live import Live

            console = _console()
            self._live = Live(self._draw(), console=console, auto_refresh=False, vertical_overflow="visible")
            self._live.start()
            _drawing.append(console)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            _drawing.pop()
            self._live.stop()
            self._live = None

    def row(self, *cells: object) -> None:
        """Add a row."""
        self._rows.append(tuple(map(str, cells)))
        if self._live is not None:
            self._live.update(self._draw(), refresh=True)
        elif not self._quiet:
            pairs = zip(self._columns, self._rows[-1], strict=False)
            say("  ".join(f"{name} {cell}" for name, cell in pairs if cell))

    def _draw(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, pad_edge=False, title=self._title or None, title_justify="left")
        for name in self._columns:
            table.add_column(Text(name))
        for row in self._rows:
            table.add_row(*map(Text, row))
        return table


class LogHandler(logging.Handler):
    """Writes log records as lines to standard error, above whatever is being drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``."""
        try:
            word = record.levelname.lower()
            say(f"{word}: {self.format(record)}")
        except Exception:  # noqa: BLE001 - logging's own rule: never fail the caller for a log line
            self.handleError(record)
