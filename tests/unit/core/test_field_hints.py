"""The next step of an error reaches whoever sees the error, once: in a traceback, in another process, from the CLI."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import subprocess
import sys
import traceback

import pytest

from cwtrain import errors
from cwtrain.cli._errors import report

with contextlib.suppress(ImportError):  # core alone has fewer classes
    pass

HINT = "do this, with `the command`"


def everything(cls: type[errors.CWTrainError] = errors.CWTrainError) -> list[type[errors.CWTrainError]]:
    """Every class of the tree, those of the distributions above core among them."""
    ours = [one for one in cls.__subclasses__() if one.__module__.startswith("cwtrain")]
    return [cls, *(found for one in ours for found in everything(one))]


CLASSES = sorted(set(everything()), key=lambda one: one.__qualname__)


def traced(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_the_tree_is_all_of_it() -> None:
    assert {getattr(errors, name) for name in errors.__all__} <= set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_a_traceback_shows_it_once_however_the_error_came(cls: type[errors.CWTrainError]) -> None:
    error = cls("what happened", hint=HINT)
    assert traced(error).rstrip().endswith(f"what happened\nnext: {HINT}")
    error.add_note("and this, too")
    error.add_note("and that")
    for came in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), pickle.loads(pickle.dumps(error, 2))):
        for _ in range(2):
            with pytest.raises(cls):
                raise came
        assert traced(came).count(HINT) == 1
        assert came.__notes__ == ["and this, too", "and that", f"next: {HINT}"]
        assert came.notes == ("and this, too", "and that")
        assert str(came) == "what happened"
    again = copy.copy(error)
    again.add_note("of the copy")
    assert error.notes == ("and this, too", "and that")
    bare = cls("what happened")  # some have a next step of their own
    assert getattr(bare, "__notes__", []) == ([f"next: {bare.hint}"] if bare.hint else [])
    assert bare.notes == ()


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_the_command_line_tells_it_once(cls: type[errors.CWTrainError], verbose: bool) -> None:
    error = cls("what happened", hint=HINT)
    error.add_note("and this, too")
    told = report(error, verbose=verbose)
    for text in (told.text(), told.json()):
        assert text.count(HINT) == 1
        assert text.count("and this, too") == 1
    data = json.loads(told.json())["error"]
    assert (data["hint"], data["notes"]) == (HINT, ["and this, too"])


def test_a_python_program_shows_the_next_step() -> None:
    program = "from cwtrain import HotLoader; HotLoader(None, '')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\nnext: ") == 1


def test_a_store_that_fails_for_a_while_has_its_next_step_in_the_traceback_too() -> None:
    """Its hint was set when the error was there already, and so was no note of it."""
    from botocore.exceptions import ClientError

    from cwtrain.storage._translate import translate

    for code, status in (("SlowDown", 503), ("InternalError", 500)):
        refused = ClientError(
            {"Error": {"Code": code, "Message": "later"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject"
        )
        error = translate(refused, action="s3:PutObject", bucket="weights", key="k")
        assert error.hint
        assert traced(error).count(error.hint) == 1
