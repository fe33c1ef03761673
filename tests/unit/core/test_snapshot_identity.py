"""Identities: what may be published, what may be a predecessor, and trainers' version numbers."""

import pytest

from cwtrain.errors import SnapshotError
from cwtrain.snapshots.identity import (
    RESERVED,
    check_identity,
    check_previous_identity,
    identity_for_version,
    version_number,
)


@pytest.mark.parametrize("identity", ["a", "step_000100", "run.2-v000001-full", "-", "...", "x" * 128, "Initial"])
def test_identity_is_taken_as_it_is(identity):
    assert check_identity(identity) == identity


@pytest.mark.parametrize("identity", ["", "a/b", "a b", "a\n", "x" * 129, "é", "a:b", None, 7, b"a", *sorted(RESERVED)])
def test_identity_is_refused_with_a_hint(identity):
    with pytest.raises(SnapshotError) as caught:
        check_identity(identity)
    assert caught.value.hint


def test_predecessor_may_be_anything_the_service_has_but_initial():
    for identity in ("v1", "someone's / own", "x" * 300):
        assert check_previous_identity(identity) == identity
    for identity in ("", "  ", "initial", None, 3):
        with pytest.raises(SnapshotError) as caught:
            check_previous_identity(identity)
        assert caught.value.hint


def test_version_numbers_are_ascii_digits_only():
    assert [version_number(text) for text in ("0", "000007", "1000000")] == [0, 7, 1000000]
    for text in ("", "-1", "+1", " 1", "1\n", "1.0", "latest", "١", "²", "0x1", "1" * 19, 7, None, True):
        assert version_number(text) is None


def test_default_identity_has_six_digits_or_more():
    assert identity_for_version(7) == "weight_v000007"
    assert identity_for_version(1234567) == "weight_v1234567"
    for version in (-1, True, "7"):
        with pytest.raises(SnapshotError):
            identity_for_version(version)
