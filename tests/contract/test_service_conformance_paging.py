"""Rules of the two lists that have pages: hot-loads, newest first, and their replicas, by zone and name.

A thousand hot-loads take too long to run, so the emulator is started on a state that already remembers them; what is
judged are its answers alone.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cwtrain_emulator.emulator import Emulator
from cwtrain_emulator.store import HotLoadRow, ReplicaRow, Store
from helpers.conformance import ABSENT, refused
from helpers.emulator_api import Api

MANY, FEW = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))
ZONES = ("US-EAST-02A", "US-EAST-04A", "US-WEST-04A")
TOTAL, FEW_TOTAL, REPLICAS = 1010, 7, 1005


def ended_row(number: int, deployment_id: str) -> HotLoadRow:
    """The row of a hot-load that ended a while ago; the larger the number, the later."""
    hot_load_id = str(uuid.UUID(int=(number << 64) + random.Random(number).getrandbits(32)))
    entry = {
        "identity": f"v{number}",
        "type": "FULL",
        "bucket": "b",
        "prefix": f"v{number}/",
        "hot_load_id": hot_load_id,
    }
    return HotLoadRow(
        id=hot_load_id,
        deployment_id=deployment_id,
        identity=f"v{number}",
        state="COMPLETED",
        spec={
            "id": hot_load_id,
            "deploymentId": deployment_id,
            "identity": f"v{number}",
            "type": "SNAPSHOT_TYPE_FULL",
        },
        chain=[{**entry, "digest": ""}],
        created_at=1e9 + number,
        updated_at=1e9 + number + 0.5,
        finished_at=1e9 + number + 0.5,
    )


def remember(path: Path) -> list[HotLoadRow]:
    """Write the history, every hundredth hot-load of it the other deployment's, and return it."""
    rows = []
    store = Store(path)
    for number in range(TOTAL + FEW_TOTAL):
        row = ended_row(number, FEW if number % 100 == 50 and number < 100 * FEW_TOTAL else MANY)
        replicas = [ReplicaRow(row.id, "only", ZONES[0], "READY", row.identity, 1e9, 1e9)]
        if number == 0:
            names = [(zone, f"dep-{ordinal}") for zone in ZONES for ordinal in range(REPLICAS // len(ZONES))]
            random.Random(0).shuffle(names)
            replicas = [ReplicaRow(row.id, name, zone, "READY", row.identity, 1e9, 1e9) for zone, name in names]
        store.add_hot_load(row, replicas)
        rows.append(row)
    store.close()
    return rows


@pytest.fixture(scope="module")
def history() -> list[HotLoadRow]:
    return []


@pytest.fixture(scope="module")
def api(history: list[HotLoadRow], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    directory = tmp_path_factory.mktemp("long-history")
    history += remember(directory / "state.sqlite3")
    with Emulator(directory, replicas=1) as emulator:
        made = Api(emulator.base_url, emulator.admin_token)
        yield made
        made.close()


def page(api: Api, **query: Any) -> tuple[list[str], str]:
    """Return the ids on a page of hot-loads, and the token of the next one."""
    answer = api.ok("GET", "/hotLoads", params=query)
    assert set(answer) <= {"hotLoads", "nextPageToken"}
    return [row["spec"]["id"] for row in answer["hotLoads"]], answer.get("nextPageToken", "")


def pages(api: Api, **query: Any) -> list[list[str]]:
    """Return all pages."""
    found: list[list[str]] = []
    token, seen = "", set()
    while True:
        ids, token = page(api, **query, **({"pageToken": token} if token else {}))
        found.append(ids)
        if not token:
            return found
        assert token not in seen
        seen.add(token)


def newest_first(history: list[HotLoadRow], deployment_id: str | None = None) -> list[str]:
    return [row.id for row in reversed(history) if deployment_id in (None, row.deployment_id)]


def crowded() -> str:
    """The id of the oldest hot-load, which has many replicas."""
    return str(uuid.UUID(int=random.Random(0).getrandbits(32)))


# Sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "entries"),
    [
        (None, 50),
        ("", 50),
        (0, 50),
        (1, 1),
        (7, 7),
        (50, 50),
        (999, 999),
        (1000, 1000),
        (1001, 1000),
        (2**31 - 1, 1000),
    ],
)
def test_page_sizes(api: Api, size: Any, entries: int) -> None:
    """`maxPageSize` absent or 0 is 50, above 1000 is 1000; the first page of more has a token."""
    query = {} if size is None else {"maxPageSize": size}
    ids, token = page(api, **query)
    assert len(ids) == entries
    assert token
    first = api.ok("GET", f"/hotLoads/{crowded()}/replicas", params=query)
    assert len(first["replicas"]) == entries
    assert first["nextPageToken"]


@pytest.mark.parametrize("size", [-1, -(2**31), 2**31, "x", "1.5", " 1", "1e3"])
def test_other_sizes_are_refused(api: Api, size: Any) -> None:
    """A negative size, and what is no 32-bit integer, is INVALID_ARGUMENT."""
    for path in ("/hotLoads", f"/hotLoads/{crowded()}/replicas"):
        answer = refused(api, "GET", path, params={"maxPageSize": size})
        assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {"maxPageSize"})


# Order and completeness ----------------------------------------------------------------------------------------------


def test_hot_loads_are_newest_first_over_all_pages(api: Api, history: list[HotLoadRow]) -> None:
    """Every hot-load is on exactly one page, the newest on the first; the last page has no token."""
    found = pages(api, maxPageSize=300)
    assert [len(ids) for ids in found] == [300, 300, 300, TOTAL + FEW_TOTAL - 900]
    assert list(itertools.chain.from_iterable(found)) == newest_first(history)


@pytest.mark.parametrize("deployment_id", [MANY, FEW, FEW.upper(), ABSENT])
def test_lists_of_one_deployment(api: Api, history: list[HotLoadRow], deployment_id: str) -> None:
    """`parentDeploymentId` lists one deployment's; an unknown one has none, and what is no UUID is refused."""
    found = pages(api, maxPageSize=400, parentDeploymentId=deployment_id)
    assert list(itertools.chain.from_iterable(found)) == newest_first(history, deployment_id.lower())
    assert refused(api, "GET", "/hotLoads", params={"parentDeploymentId": "x"}).fields == {"parentDeploymentId"}


def test_a_page_that_is_just_full_is_the_last(api: Api) -> None:
    """There is no token to an empty page."""
    ids, token = page(api, maxPageSize=FEW_TOTAL, parentDeploymentId=FEW)
    assert (len(ids), token) == (FEW_TOTAL, "")
    ids, token = page(api, maxPageSize=FEW_TOTAL - 1, parentDeploymentId=FEW)
    assert len(ids) == FEW_TOTAL - 1
    assert page(api, pageToken=token, parentDeploymentId=FEW)[1] == ""


def test_replicas_are_ordered_by_zone_and_name(api: Api) -> None:
    """Replicas come by (zone, name), over all pages."""
    path, token, found = f"/hotLoads/{crowded()}/replicas", "", []
    while True:
        answer = api.ok("GET", path, params={"maxPageSize": 400, "pageToken": token})
        assert set(answer) <= {"replicas", "nextPageToken"}
        found += [(replica["zone"], replica["name"]) for replica in answer["replicas"]]
        token = answer.get("nextPageToken", "")
        if not token:
            break
    assert found == sorted(found)
    assert len(set(found)) == len(found) == REPLICAS


# Tokens --------------------------------------------------------------------------------------------------------------


def test_a_token_is_good_for_its_filter_alone(api: Api) -> None:
    """A token goes with the filter it was made for: another deployment, or none, or the other list, is refused."""
    _, unfiltered = page(api, maxPageSize=2)
    _, many = page(api, maxPageSize=2, parentDeploymentId=MANY)
    _, few = page(api, maxPageSize=2, parentDeploymentId=FEW)
    wrong = [
        {"pageToken": unfiltered, "parentDeploymentId": MANY},
        {"pageToken": many},
        {"pageToken": many, "parentDeploymentId": FEW},
        {"pageToken": few, "parentDeploymentId": MANY},
    ]
    for query in wrong:
        answer = refused(api, "GET", "/hotLoads", params=query)
        assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {"pageToken"})
    path = f"/hotLoads/{crowded()}/replicas"
    replicas = api.ok("GET", path, params={"maxPageSize": 2})["nextPageToken"]
    newest = api.ok("GET", "/hotLoads", params={"maxPageSize": 1})["hotLoads"][0]["spec"]["id"]
    for where, token in ((path, unfiltered), (f"/hotLoads/{newest}/replicas", replicas), ("/hotLoads", replicas)):
        assert refused(api, "GET", where, params={"pageToken": token}).fields == {"pageToken"}


def test_a_token_goes_with_any_page_size_and_more_than_once(api: Api, history: list[HotLoadRow]) -> None:
    """The size of the next page is the next call's; a token that is used twice gives the same page."""
    _, token = page(api, maxPageSize=3, parentDeploymentId=MANY.upper())
    expected = newest_first(history, MANY)[3:]
    for size in (1, 100, 1):
        ids, _ = page(api, maxPageSize=size, pageToken=token, parentDeploymentId=MANY)
        assert ids == expected[:size]


@pytest.mark.parametrize("token", ["x", "AAAA", "é", "%", "=" * 50, "A" * 5000, "MTIz"])
def test_a_made_up_token_is_refused(api: Api, token: str) -> None:
    """Tokens are opaque: one that the service did not make, or that was changed, is INVALID_ARGUMENT."""
    _, good = page(api, maxPageSize=2)
    changed = good[:-1] + ("A" if good[-1] != "A" else "B")
    for wrong in (token, good + "A", changed, good[:-4]):
        for path in ("/hotLoads", f"/hotLoads/{crowded()}/replicas"):
            assert refused(api, "GET", path, params={"pageToken": wrong}).fields == {"pageToken"}


def test_what_comes_in_between_does_not_shift_the_pages(api: Api, history: list[HotLoadRow]) -> None:
    """A page begins after the last entry of the page before: old tokens stay good, and nothing is shown twice."""
    first, token = page(api, maxPageSize=10)
    second, _ = page(api, maxPageSize=10, pageToken=token)
    assert first + second == newest_first(history)[:20]
