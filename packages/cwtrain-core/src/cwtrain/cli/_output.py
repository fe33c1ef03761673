"""What the person and the program see: data on standard output, everything else on standard error.

Data goes out as JSON unless ``--output`` says otherwise. rich is imported only here, and only when something is drawn.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

import click

from cwtrain.models.text import duration, printable, printable_lines, size
from cwtrain.waits import SILENCE_SECONDS, current, waiting

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress, TaskID

    from cwtrain.cli._table import Columns
    from cwtrain.hotload import ProgressEvent
    from cwtrain.storage import UploadProgress

__all__ = [
    "FORMATS",
    "STDOUT",
    "Heart",
    "LiveTable",
    "LogHandler",
    "Output",
    "ProgressLine",
    "is_terminal",
    "naming_stdout",
    "say",
    "terminal_width",
    "to_json",
]

FORMATS: Final = ("json", "jsonl", "table", "id")
STDOUT: Final = "standard output"
"""The name of standard output in an error."""
_RATE_SECONDS: Final = 2.0
"""How long bytes have to go for a rate, and for the time that the rest takes."""
_LONGEST_LEFT: Final = 86400.0
"""A rest that takes longer is not worth a number: the rate is that of something that stands still."""
_BAR: Final = 12


def is_terminal() -> bool:
    """Return whether standard error is a terminal that lines can be redrawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") != "dumb"


def say(text: str, *, quiet: bool = False) -> None:
    """Write a line for the person to standard error, unless ``quiet``."""
    if quiet:
        return
    _heard()
    text = printable_lines(text)
    if _drawing:
        _drawing[-1].print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        click.echo(text, err=True)


class Output:
    """Writes a command's data in the format that ``--output`` names; it may be used once or line by line."""

    def __init__(self, output: str = "json", *, quiet: bool = False) -> None:
        self.format = output
        self.quiet = quiet

    def data(self, value: Any, *, ids: Sequence[str] | None = None, columns: Columns = (), table: Any = None) -> None:
        """Write ``value``, plain JSON data. ``ids`` are its ids.

        ``columns`` is what a table shows of its lists; ``table`` is drawn in place of ``value``.
        """
        match self.format:
            case "id":
                if ids is None:
                    self.refuse_ids()
                _write("".join(f"{printable(one)}\n" for one in ids or ()))
            case "jsonl":
                items = value if isinstance(value, list) else [value]
                _write("".join(to_json(item) + "\n" for item in items))
            case "table":
                _write(_table(value if table is None else table, columns))
            case _:
                _write(to_json(value, indent=2) + "\n")

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
        known = f"{what}: nothing is known yet"

        def tell(done: int, total: int) -> None:
            nonlocal known
            known = f"{what}: {size(done)} of {size(total)}"
            line.bytes_done(what, done, total)

        with ProgressLine(quiet=self.quiet) as line, waiting(lambda: known):
            yield tell


def to_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON in which nothing but its own line ends and printable characters stand."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if text.isascii():  # what is below a blank is escaped already
        return text.replace("\x7f", "\\u007f")
    return "".join(
        char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text
    )  # fmt: skip


def _table(value: Any, columns: Columns) -> str:
    """Return ``value`` as a table: as wide as the terminal, or away from one with each row in a line."""
    from cwtrain.cli._table import table

    if not sys.stdout.isatty():
        return table(value, columns)
    return table(value, columns, width=terminal_width(sys.stdout), now=dt.datetime.now(dt.UTC))


def terminal_width(stream: TextIO) -> int:
    """Return the columns of the terminal behind ``stream``: ``COLUMNS``, then what the terminal says, then 80."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


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


# For people ----------------------------------------------------------------------------------------------------------

_drawing: list[Console] = []
"""The console that draws now, if any: lines go above what it draws."""


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


class Heart:
    """Says what is waited for whenever nothing was said for a while, so that no command is ever silent.

    Inside the block a thread calls ``beat``. ``every`` is in seconds.
    """

    def __init__(
        self,
        *,
        every: float = SILENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        quiet: Callable[[], bool] = bool,
    ) -> None:
        self._every = every
        self._clock = clock
        self._quiet = quiet
        self._heard_at = clock()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        _hearts.append(self)
        threading.Thread(target=self._run, daemon=True, name="cwtrain-heart").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        _hearts.remove(self)

    def heard(self) -> None:
        """Note that something was said just now."""
        self._heard_at = self._clock()

    def beat(self) -> float:
        """Say what is waited for if nothing was said for long; return the seconds until it may be time again."""
        silent = self._clock() - self._heard_at
        if silent >= self._every:
            self.heard()
            words = current()
            if words is not None:
                say(words, quiet=self._quiet())
            return self._every
        return self._every - silent

    def _run(self) -> None:
        pause = self._every
        while not self._ended.wait(pause):
            pause = self.beat()


_hearts: list[Heart] = []


def _heard() -> None:
    for heart in _hearts:
        heart.heard()


class ProgressLine:
    """Tells how far something is: one redrawn line on a terminal, else a plain line for each change of state."""

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet
        self._clock = clock
        self._mark: tuple[object, ...] = ()
        self._shown: tuple[object, ...] = ()
        self._hot_load_id = ""
        self._began: float | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if not self._quiet and is_terminal():
            from rich.progress import BarColumn, Progress, TextColumn

            console = _console()
            columns = (BarColumn(bar_width=_BAR), TextColumn("{task.description}", markup=False))
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
        if event.already_served:  # the only news, and it stays
            say(event.summary())
            return
        done, total = _share(event)
        if self._bar is not None and event.hot_load is not None and event.hot_load.id != self._hot_load_id:
            # Above the line that is redrawn, where it can be copied: the line has no room for it.
            self._hot_load_id = event.hot_load.id
            say(f"hot-load {event.hot_load.id} of {event.hot_load.identity}")
        short = _short(event) if self._bar is not None else _line(event)
        self._tell(short, _mark(event), done, total)

    def bytes_done(self, what: str, done: int, total: int) -> None:
        """Tell that ``what`` is at ``done`` of ``total`` bytes, with the rate and the time that the rest takes."""
        if self._quiet:
            return
        now = self._clock()
        self._began = now if self._began is None else self._began
        text, spent = f"{what}: {size(done)} of {size(total)}", now - self._began
        if done >= total:
            text += f", {duration(spent)}"
        elif done and spent >= _RATE_SECONDS:
            text += _rate(done / spent, spent * (total - done) / done)
        self._tell(text, (what, done >= total), done, total)

    def _tell(self, text: str, mark: tuple[object, ...], done: int, total: int) -> None:
        if self._bar is not None and self._task is not None:
            if (*mark, done) != self._shown:  # the seconds alone are no news
                self._shown = (*mark, done)
                _heard()
            room = terminal_width(sys.stderr) - _BAR - 2
            text = printable(text)
            text = text if len(text) <= room else f"{text[: room - 1]}…"
            self._bar.update(self._task, description=text, completed=done, total=total or None)
        elif mark != self._mark:
            self._mark = mark
            say(text)


def _line(event: ProgressEvent) -> str:
    """Return the event in one line, an upload with its rate and the time it still takes."""
    return event.summary() + (_upload_rate(event.upload) if event.upload is not None else "")


def _short(event: ProgressEvent) -> str:
    """Return the event for a line that is as wide as the terminal: what changes first, what can be cut last."""
    if event.upload is not None:
        upload = event.upload
        if not upload.total_bytes:
            return event.summary()
        moved = f"{size(upload.sent_bytes)} of {size(upload.total_bytes)}{_upload_rate(upload)}"
        return f"uploading {moved}, {upload.objects_done} of {upload.objects} objects"
    words = [f"{event.ready}/{event.total} replicas"] if event.total else []
    words.append(duration(round(event.elapsed)))
    if event.waiting_on is not None:
        words.append(f"waiting for another hot-load: {event.waiting_on.state}, {event.waiting_on.id}")
    elif event.hot_load is not None:
        words.append(f"{event.hot_load.state}, {event.hot_load.identity}")
    if event.problem:
        words.append(f"last poll failed: {event.problem}")
    return ", ".join(words)


def _upload_rate(upload: UploadProgress) -> str:
    if upload.seconds < _RATE_SECONDS or upload.sent_bytes >= upload.total_bytes or not upload.bytes_per_second:
        return ""
    return _rate(upload.bytes_per_second, upload.remaining_seconds or 0.0)


def _rate(bytes_per_second: float, left: float) -> str:
    """Return a rate and what is left at it, as the end of a sentence."""
    rest = f"{duration(max(1, round(left)))} left" if left <= _LONGEST_LEFT else "more than a day left"
    return f", {size(bytes_per_second)}/s, {rest}"


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
            table.add_row(*(Text(printable(cell)) for cell in row))
        return table


class LogHandler(logging.Handler):
    """Writes log records as lines to standard error, above whatever is being drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``."""
        try:
            message, *trace = self.format(record).split("\n") if record.exc_info else [record.getMessage()]
            say(f"{record.levelname.lower()}: {message}")
            for line in trace:
                say(line)
        except Exception:  # noqa: BLE001 - logging's own rule: never fail the caller for a log line
            self.handleError(record)
