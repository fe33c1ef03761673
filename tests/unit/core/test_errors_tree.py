"""The error tree: complete in its own picture, picklable with everything it carries."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from cwtrain import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


def example(cls: type[errors.CWTrainError]) -> errors.CWTrainError:
    """An instance with every extra set to something that is not its default."""
    values: dict[str, object] = {
        "hint": "do this next",
        "problems": ("one", "two"),
        "details": ({"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "X"},),
        "differences": ("name", "runtime.engine"),
        "objects": ("model.safetensors",),
        "status": 418,
        "retry_after": 2.5,
        "hot_load": {"id": "h-1"},
        "resource": {"id": "d-1"},
    }
    names = [name for name, p in inspect.signature(cls).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return cls("what happened, and where", **{name: values.get(name, f"the {name}") for name in names})


def test_every_class_is_exported():
    defined = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined == set(errors.__all__)


def test_the_picture_names_every_class_and_no_other():
    picture = (errors.__doc__ or "").split("\n\n")[1]
    drawn = re.findall(r"\b(\w*Error)\b(?!\))", picture)
    assert sorted(drawn) == sorted(errors.__all__)


def test_one_root_and_keyword_extras_with_defaults():
    for cls in CLASSES:
        assert issubclass(cls, errors.CWTrainError)
        first, *others = list(inspect.signature(cls).parameters.values())
        assert first.name == "message"
        assert all(
            p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is not inspect.Parameter.empty for p in others
        )
        assert cls.__doc__


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickle_keeps_message_hint_attributes_and_notes(cls, protocol):
    error = example(cls)
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is cls
    assert str(again) == str(error) == "what happened, and where"
    assert again.hint == "do this next"
    assert vars(again) == vars(error)
    assert again.__notes__ == ["a note", "next: do this next"]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_bare_and_copied(cls):
    error = cls("short")
    assert (str(error), error.message, error.hint) == ("short", "short", None)
    assert "hint" not in repr(error)
    assert vars(copy.copy(error)) == vars(error)


def test_built_in_bases_that_callers_expect():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.SnapshotError, ValueError)
    assert issubclass(errors.WaitTimeoutError, TimeoutError)
    assert issubclass(errors.RequestTimeoutError, TimeoutError)
    assert issubclass(errors.ConnectionFailedError, ConnectionError)
