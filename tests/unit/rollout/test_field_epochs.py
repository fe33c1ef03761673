"""Numbers that stand alone: a trainer that starts again counts from the beginning, in a new epoch.

A bare number is a version of the run's newest epoch. Versions of other epochs and other runs meet none, wherever
numbers are compared: in what is waited for, in what is found, in what a sample says of itself.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cwtrain.errors import ConfigError
from cwtrain.hotload.status import BaselineState, BaselineStatus, read_status, write_status
from cwtrain.plugins import Plugins
from cwtrain.storage import Location, MemoryStore
from cwtrain_rollout import Group, Load, RolloutConfig, Sampler, SamplingParams, StaleWeightsError, WeightSpan
from cwtrain_rollout.served import ServedWeights
from cwtrain_rollout.spans import History, version_number
from helpers.endpoint_model import EndpointModel

PARAMS = SamplingParams(max_tokens=4)


def load(identity: str, state: str = "COMPLETED", mark: str = "") -> Load:
    return Load(id=f"id of {identity}{mark}", identity=identity, state=state)


def history(*loads: Load | str, **more: Any) -> History:
    return History(tuple(load(one) if isinstance(one, str) else one for one in loads), **more)


COMING = load("run.2-v000001", "IN_PROGRESS")


def test_an_older_epoch_s_number_meets_no_minimum_of_a_newer_one() -> None:
    found = history(COMING, "run-v000039", "run-v000038")
    for wanted in (0, 1, 38, 39):
        assert not found.serves_at_least(wanted)
    assert found.epoch == "run.2"
    assert found.find(1) == COMING
    assert found.find(39) is None
    assert found.serves_at_least("run-v000039"), "named in full it is what it always was"
    assert found.serves_at_least("run-v000038")
    assert not found.serves_at_least("run.2-v000001")


def test_within_an_epoch_numbers_are_compared_as_ever() -> None:
    found = history(load("run.2-v000005", "PENDING"), "run.2-v000003-full", "run.2-v000002", "run-v000039")
    assert [found.serves_at_least(wanted) for wanted in (0, 1, 2, 3, 4, 39)] == [True] * 4 + [False] * 2
    assert history("run-v000039").serves_at_least(1)


def test_a_rollback_to_an_older_epoch_makes_that_no_newer() -> None:
    found = history(load("run-v000039", mark=" again"), "run.2-v000001", "run-v000039")
    assert not found.serves_at_least(1)
    assert found.epoch == "run.2"


@pytest.mark.parametrize(
    ("other", "numbered"),
    [
        ("another-v000050", True),
        ("run2-v000050", True),
        ("run.x-v000050", True),
        ("step_000050", False),
        ("v50", False),
    ],
)
def test_other_runs_meet_no_minimum(other: str, numbered: bool) -> None:
    found = history(load("run-v000002", "PENDING"), other, "run-v000001")
    assert not found.serves_at_least(1)
    assert found.find(50) is None
    assert (version_number(other) == 50) is numbered


def test_runs_whose_names_read_like_epochs() -> None:
    """A run may be called ``exp.1``, and its second epoch ``exp.1.2``."""
    assert history(load("exp.1.2-v000001", "PENDING"), "exp.1-v000009").epoch == "exp.1.2"
    assert history("exp.1-v000009", "exp.1.2-v000001").epoch == "exp.1.2"
    assert history("exp.1-v000009").epoch == "exp.1"
    assert history("exp.10-v000001", "exp.9-v000001").epoch == "exp.10", "numbers, not texts"


def test_the_base_of_a_run_is_the_version_0_of_all_its_epochs() -> None:
    found = history("run-v000000", "run.2-v000004", "run-v000039")
    assert found.serves_at_least(0)
    assert not found.serves_at_least(1)
    assert found.find(0) == load("run-v000000")


def test_a_version_that_was_written_again_is_that_version() -> None:
    names = ("run-v000007-r2", "run-v000007-full-r3", "run-v000007-full", "run-v000007-x")
    assert [version_number(name) for name in names] == [7, 7, 7, None]
    assert history("run-v000007-r2").serves_at_least(7)


EPOCHS = st.integers(1, 4)
VERSIONS = st.integers(0, 6)
STATES = st.sampled_from(["COMPLETED", "PENDING", "IN_PROGRESS", "FAILED", "CANCELED"])


@given(st.lists(st.tuples(EPOCHS, VERSIONS, STATES), min_size=1, max_size=6), VERSIONS, st.none() | EPOCHS)
def test_whatever_was_loaded_only_the_newest_epoch_meets_a_number(
    made: list[tuple[int, int, str]], wanted: int, begun: int | None
) -> None:
    def prefix(epoch: int) -> str:
        return "run" if epoch == 1 else f"run.{epoch}"

    loads = [
        Load(id=str(place), identity=f"{prefix(epoch)}-v{number:06d}", state=state)
        for place, (epoch, number, state) in enumerate(made)
    ]
    found = History(tuple(loads), begun=prefix(begun) if begun else None)
    newest = max([epoch for epoch, _, _ in made] + [begun or 1])
    served = next((one for one in made if one[2] == "COMPLETED"), None)
    base = served is not None and served[:2] == (1, 0) and wanted == 0
    expected = served is not None and (base or (served[0] == newest and served[1] >= wanted))
    assert found.serves_at_least(wanted) is expected
    for one in loads:
        span = WeightSpan(one, one, epoch=found.epoch)
        mine = made[int(one.id)]
        assert span.is_only(mine[1]) is (mine[0] == newest or mine[:2] == (1, 0))


# What a sample says --------------------------------------------------------------------------------------------------


def test_a_sample_s_numbers_are_of_the_newest_epoch() -> None:
    old, new = load("run-v000039"), load("run.2-v000001")
    wide = WeightSpan(old, new)
    assert (wide.oldest_version, wide.newest_version) == (None, 1), "39 is not newer than 1"
    stale = WeightSpan(old, old, epoch="run.2")
    assert (stale.exact, stale.oldest_version, stale.is_only(39)) == (True, None, False)
    assert stale.is_only("run-v000039")
    assert stale.is_only("id of run-v000039")
    assert WeightSpan(old, old).is_only(39)
    assert pickle.loads(pickle.dumps(stale)).oldest_version is None


# What is waited for --------------------------------------------------------------------------------------------------


@attrs.define
class Script:
    """Histories in turn, the last for ever, and what the publisher told of its base."""

    steps: list[History]
    base: BaselineStatus | None = None

    def history(self) -> History:
        return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def baseline(self) -> BaselineStatus | None:
        return self.base


def told(epoch: int | None, state: BaselineState = BaselineState.SERVED, **more: Any) -> BaselineStatus:
    return BaselineStatus(
        deployment_id="d",
        run_id="run",
        identity="run-v000000",
        state=state,
        **({"epoch": epoch} if epoch else {}),
        **more,
    )


def sample(script: Script, **options: Any) -> Any:
    endpoint = EndpointModel(service=0.0)
    one = Sampler(
        RolloutConfig(base_url="http://h", model="m"),
        served=ServedWeights(script, poll=0.001, patience=0.05),
        transport=endpoint,
        plugins=Plugins(),
    )
    (group,) = one.sample_groups([Group(prompt=[1])], PARAMS, **options)
    return json.loads(json.dumps(endpoint.bodies[0]))["cache_salt"], group.samples[0].weights


def test_a_minimum_waits_for_the_new_epoch_s_version_and_not_for_the_old_one_s() -> None:
    old, new = "run-v000039", load("run.2-v000001")
    steps = [history(COMING, old), history(COMING, old), history(new, old)]
    salt, weights = sample(Script(steps), min_version=1)
    assert (salt, weights.oldest_version, weights.exact) == (new.id, 1, True)


def test_a_minimum_right_after_a_restart_waits_too() -> None:
    """The epoch has begun, as its publisher told, and nothing of it is loaded yet."""
    old, new = "run-v000039", load("run.2-v000001")
    salt, weights = sample(Script([history(old), history(old), history(new, old)], told(2)), min_version=1)
    assert (salt, weights.oldest_version) == (new.id, 1)
    with pytest.raises(StaleWeightsError, match="version 1 is not served") as caught:
        sample(Script([history(old)], told(2)), min_version=1)
    assert "run.2" in (caught.value.hint or "")
    assert sample(Script([history(old)], told(1)), min_version=1)
    assert sample(Script([history(old)], told(None)), min_version=1), "an older publisher does not say it"
    _, weights = sample(Script([history(old)], told(2)))
    assert (weights.exact, weights.oldest_version) == (True, None)


def test_a_failed_version_of_an_older_epoch_fails_no_wait_for_the_new_one_s() -> None:
    failed = load("run-v000002", "FAILED")
    steps = [history(COMING, failed, "run-v000001"), history("run.2-v000002", failed, "run-v000001")]
    _, weights = sample(Script(steps), min_version=2)
    assert weights.oldest_version == 2
    with pytest.raises(StaleWeightsError, match="will not be served"):
        sample(Script([history(load("run.2-v000002", "FAILED"), "run.2-v000001", "run-v000002")]), min_version=2)


def test_an_exact_version_of_an_older_epoch_is_not_it() -> None:
    steps = [history(COMING, "run-v000001"), history(load("run.2-v000001"), "run-v000001")]
    salt, weights = sample(Script(steps), exact_version=1)
    assert (salt, weights.is_only(1)) == ("id of run.2-v000001", True)


def test_a_base_that_failed_is_not_made_good_by_an_older_epoch() -> None:
    failed = told(2, BaselineState.FAILED, error="no room")
    with pytest.raises(StaleWeightsError, match="no room"):
        sample(Script([history("run-v000039")], failed))
    assert sample(Script([history("run-v000000", "run-v000039")], failed))


@pytest.mark.parametrize("wanted", [np.int64(1), np.uint8(1), np.array(1)], ids=["int64", "uint8", "array"])
@pytest.mark.parametrize("name", ["min_version", "exact_version"])
def test_a_number_of_numpy_is_that_version(name: str, wanted: Any) -> None:
    _, weights = sample(Script([history("run-v000001")]), **{name: wanted})
    assert weights.oldest_version == 1


@pytest.mark.parametrize("wanted", [1.0, -1, "", b"1", [1], True, np.bool_(True)])
def test_what_is_no_version_is_refused_by_name(wanted: Any) -> None:
    with pytest.raises(ConfigError, match="min_version is"):
        sample(Script([history("run-v000001")]), min_version=wanted)
    if isinstance(wanted, bool | np.bool_):
        assert sample(Script([history("run-v000001")]), exact_version=wanted)
    else:
        with pytest.raises(ConfigError, match="exact_version is"):
            sample(Script([history("run-v000001")]), exact_version=wanted)


# What the publisher tells --------------------------------------------------------------------------------------------


def test_the_publisher_s_word_has_its_epoch_and_older_words_are_read() -> None:
    store, location = MemoryStore(), Location("memory", "p")
    write_status(store, location, told(2))
    found = read_status(store, location, "d")
    assert found is not None
    assert (found.epoch, found.prefix) == (2, "run.2")
    key = location.status_key("d")
    older = json.loads(store.get(key))
    del older["epoch"]
    store.put(key, json.dumps(older).encode())
    found = read_status(store, location, "d")
    assert found is not None
    assert (found.epoch, found.prefix, found.state) == (None, None, "served")


def test_an_answer_that_names_other_weights_than_its_salt_s_is_of_both() -> None:
    """It says whose tokens these are; the KV under the salt may be of the weights before."""
    before, after = load("run-v000001"), load("run-v000002", "IN_PROGRESS")

    class Names(EndpointModel):
        def _answer(self, request: dict[str, Any], n: int, queued: float) -> bytes:
            made = json.loads(super()._answer(request, n, queued))
            return json.dumps({**made, "identity": self.identity}).encode()

    def span(identity: str, *steps: History) -> WeightSpan:
        endpoint = Names(service=0.0)
        endpoint.identity = identity  # type: ignore[attr-defined]
        reader = ServedWeights(Script(list(steps)), poll=60, patience=5)
        one = Sampler(
            RolloutConfig(base_url="http://h", model="m"), served=reader, transport=endpoint, plugins=Plugins()
        )
        (group,) = asyncio.run(one.sample([Group(prompt=[1])], PARAMS))
        assert group.samples[0].weights is not None
        return group.samples[0].weights

    loading = history(after, before)
    assert span("run-v000002", history(before), loading) == WeightSpan(before, after)
    assert span("run-v000001", history(before), loading) == WeightSpan(before, before), "the loading began later"
    again = load("run-v000001", mark=" again")
    assert span("run-v000001", history(before), history(again, load("run-v000002"), before)) == WeightSpan(
        before, again
    )
