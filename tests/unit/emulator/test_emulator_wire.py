from __future__ import annotations

from typing import Any

import pytest

from cwtrain_emulator.api.errors import ApiError, Violation
from cwtrain_emulator.api.paging import page_size, page_token, read_page_token
from cwtrain_emulator.api.wire import Reader, as_int32, pruned, timestamp


def _reader(values: dict[str, Any]) -> tuple[Reader, list[Violation]]:
    problems: list[Violation] = []
    return Reader(values, problems), problems


def test_fields_come_in_either_spelling_and_null_is_absent() -> None:
    reader, problems = _reader({"gateway_ids": ["a"], "deploymentId": "b", "name": None})
    assert reader.texts("gatewayIds") == ["a"]
    assert reader.text("deploymentId") == "b"
    assert reader.text("name") == ""
    assert not reader.has("name")
    assert problems == []


def test_enums_come_as_names_or_numbers() -> None:
    reader, problems = _reader(
        {"a": "SNAPSHOT_TYPE_FULL", "b": 2, "f": "FULL", "g": "incremental", "c": "SNAPSHOT_TYPE_", "d": 7, "e": True}
    )
    assert [reader.enum(name, "SnapshotType") for name in "abx"] == ["FULL", "INCREMENTAL", "UNSPECIFIED"]
    assert [reader.enum(name, "SnapshotType") for name in "fg"] == ["FULL", "INCREMENTAL"]
    for name in "cde":
        assert reader.enum(name, "SnapshotType") == "UNSPECIFIED"
    assert [field for field, _ in problems] == ["c", "d", "e"]


def test_every_problem_is_noted_with_its_path() -> None:
    reader, problems = _reader({"m": {"n": 1, "f": "x", "t": ["a", 2], "o": {"k": 3}}, "l": "no", "s": "\ud800"})
    nested = reader.message("m")
    nested.text("n")
    nested.flag("f")
    nested.texts("t")
    nested.text_map("o")
    reader.texts("l")
    reader.text("s")
    reader.message("absent", required=True).text("inner", required=True)
    assert [field for field, _ in problems] == ["m.n", "m.f", "m.t[1]", "m.o['k']", "l", "s", "absent"]


@pytest.mark.parametrize(
    ("value", "number"),
    [(5, 5), ("5", 5), (5.0, 5), ("-3", -3), (True, None), (5.5, None), ("x", None), (2**31, None), (1e400, None)],
)
def test_integers(value: object, number: int | None) -> None:
    assert as_int32(value) == number


def test_zero_values_are_left_out_and_times_are_rfc_3339() -> None:
    assert pruned({"a": 0, "b": "", "c": [], "d": False, "e": None, "f": {}, "g": 1}) == {"g": 1}
    assert timestamp(0.5) == "1970-01-01T00:00:00.500000Z"
    assert timestamp(None) is None


def test_page_sizes() -> None:
    assert [page_size(value) for value in (None, "", "0", "7", "1000", "5000")] == [50, 50, 50, 7, 1000, 1000]
    for value in ("-1", "x", "99999999999"):
        with pytest.raises(ApiError) as caught:
            page_size(value)
        assert caught.value.code == "INVALID_ARGUMENT"


def test_a_page_token_is_good_for_its_own_list_only() -> None:
    token = page_token("key", "hotLoads/a", [1, "x"])
    assert read_page_token("key", "hotLoads/a", token) == [1, "x"]
    for key, scope, text in (
        ("key", "hotLoads/b", token),
        ("other", "hotLoads/a", token),
        ("key", "hotLoads/a", token[:-2]),
        ("key", "hotLoads/a", "not a token"),
        ("key", "hotLoads/a", "ünicode"),
        ("key", "hotLoads/a", "A"),
    ):
        with pytest.raises(ApiError) as caught:
            read_page_token(key, scope, text)
        assert caught.value.code == "INVALID_ARGUMENT"
