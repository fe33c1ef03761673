"""What a file or a server calls something cannot act on a reader's terminal, and cannot pass for a line of ours.

The kind: a name that is shown as it came, in a table, an id, an error, a log line or the line of progress. And names
that no tensor may have are refused before anything is published, all of them at once.
"""

from __future__ import annotations

import json
import logging
import sys

import numpy as np
import pytest

from cwtrain.cli._errors import report
from cwtrain.cli._output import LiveTable, LogHandler, Output, ProgressLine, say
from cwtrain.errors import CWTrainError, SnapshotError, SnapshotLayoutError
from cwtrain.hotload import ProgressEvent, SnapshotWriter
from cwtrain.models.service import HotLoad, HotLoadSpec, HotLoadState, HotLoadStatus
from cwtrain.snapshots import inspect_snapshot
from cwtrain.storage import Location, MemoryStore
from helpers.run_cli import run
from helpers.snapshot_files import write_delta, write_full

NASTY = "a\0b\n\x1b[31mred\x9b2J\u202eevil\u2028\x7f"
NAMES = [NASTY, "", "  ", "tab\tname", "line\nend"]


def harmless(text, *, lines=None):
    assert all(char.isprintable() or char == "\n" for char in text), text
    if lines is not None:
        assert len(text.splitlines()) == lines, text


@pytest.mark.parametrize("output", ["json", "jsonl", "table", "id"])
def test_data_has_no_control_characters_in_any_format(output, capfdbinary):
    rows = [{"name": NASTY, NASTY: 1, "list": [NASTY], "inner": {"deep": NASTY}}]
    Output(output).data(rows, ids=[NASTY])
    text = capfdbinary.readouterr().out.decode("utf-8")
    harmless(text, lines={"jsonl": 1, "id": 1, "table": 3}.get(output))
    if output.startswith("json"):
        assert json.loads(text) == (rows if output == "json" else rows[0])


def test_a_snapshot_is_shown_and_its_names_are_harmless(tmp_path):
    write_full(tmp_path / "full", {name: ("BF16", [1], b"ab") for name in ["good.w", NASTY]})
    for words in (["-o", "table"], ["-o", "id"], ["-o", "jsonl"], []):
        done = run(*words, "snapshot", "show", str(tmp_path / "full"))
        assert done.code == 0, done.err
        harmless(done.out + done.err)
    assert len(run("-o", "id", "snapshot", "show", str(tmp_path / "full")).out.splitlines()) == 2


def test_errors_logs_and_words_have_none(capfd):
    for told in (
        report(CWTrainError(f"cannot read {NASTY}", hint=f"look at {NASTY}")),
        report(OSError(2, "No such file", f"/tmp/{NASTY}")),
        report(ValueError(NASTY), verbose=True),
    ):
        harmless(told.text())
        harmless(told.json(), lines=1)
        assert "red" in told.text()
    harmless(report(CWTrainError(f"cannot read {NASTY}")).text(), lines=1)
    listed = report(CWTrainError("two problems:\n  - one\n  - two")).text()
    assert listed.splitlines()[1:] == ["  - one", "  - two"]
    say(f"removed {NASTY}")
    with ProgressLine() as line:
        spec = HotLoadSpec(id="h", identity=NASTY)
        line.event(ProgressEvent(hot_load=HotLoad(spec=spec, status=HotLoadStatus(state=HotLoadState.PENDING))))
        line.bytes_done(f"reading {NASTY}", 1, 2)
    with LiveTable(("step", "example")) as table:
        table.row(1, NASTY)
    logger = logging.Logger("cwtrain.test")
    logger.addHandler(LogHandler())
    logger.warning("found %s", NASTY)
    try:
        raise ValueError(NASTY)
    except ValueError:
        logger.exception("failed")
    harmless(capfd.readouterr().err)


def test_what_is_waited_for_has_none():
    from cwtrain.cli._output import Heart
    from cwtrain.waits import waiting

    with waiting(f"reading {NASTY}"):
        heart = Heart(every=0.0)
        heart.beat()


def test_names_that_no_tensor_may_have_are_refused_all_at_once(tmp_path):
    tensors = {name: ("BF16", [1], b"ab") for name in ["good.w", *NAMES]}
    write_full(tmp_path / "full", tensors)
    with pytest.raises(SnapshotLayoutError) as refused:
        inspect_snapshot(tmp_path / "full")
    assert all(repr(name) in str(refused.value) for name in NAMES)
    assert "good.w" not in str(refused.value)
    changed = {name: ("BF16", [1], b"cd") for name in tensors}
    write_delta(tmp_path / "delta", tensors, changed)
    done = run("hotload", "inspect", str(tmp_path / "delta"))
    assert done.code == 1
    harmless(done.err)
    assert all(repr(name) in done.err for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_writer_refuses_them_before_anything_is_readable(name, tmp_path):
    write_full(tmp_path, {"w": ("F32", [1], bytes(4))})
    store = MemoryStore()
    writer = SnapshotWriter(store, Location("memory", "rl"), "v1", kind="full", side_files=tmp_path)
    with pytest.raises(SnapshotError, match="no name of a tensor"), writer:
        writer.add(name, np.zeros(2, np.float32))
    assert not [one.key for one in store.list_objects("") if one.key.endswith("index.json")]


def test_a_state_dict_with_such_names_is_refused_with_all_of_them():
    from cwtrain.errors import ConfigError
    from cwtrain.hotload._publish.arguments import named_tensors

    with pytest.raises(ConfigError) as refused:
        named_tensors({name: np.zeros(1, np.float32) for name in ["good.w", *NAMES]})
    assert all(repr(name) in str(refused.value) for name in NAMES)


@pytest.mark.skipif(sys.platform == "win32", reason="such names cannot be")
def test_paths_and_arguments_are_harmless_too(tmp_path):
    place = tmp_path / "red\x1b[31m\nname"
    for words in (["hotload", "inspect", str(place)], ["snapshot", "show", str(place)], [NASTY.replace("\0", "")]):
        done = run(*words)
        assert done.code == 2
        harmless(done.err)
    place.mkdir()
    done = run("hotload", "inspect", str(place))
    assert done.code == 1
    harmless(done.err)
