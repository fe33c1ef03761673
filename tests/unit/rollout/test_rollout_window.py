"""The adaptive window: its rules one by one, and a model of a server with slots and a queue on a virtual clock."""

from __future__ import annotations

import pytest

from cwtrain_rollout.window import AdaptiveWindow, FixedWindow
from helpers.queueing_model import Model, throughput

SLOTS = 64


def a_round(window: AdaptiveWindow, *, queued: float | None = None, limited: bool = True) -> None:
    """Answer W choices to requests of the present W."""
    if limited:
        window.was_the_limit()
    for _ in range(window.size):
        window.answered(window.epoch, 1, queued)


def test_it_doubles_until_the_first_cut_and_only_where_it_was_the_limit() -> None:
    window = AdaptiveWindow()
    assert window.size == 8
    a_round(window, limited=False)
    assert window.size == 8
    sizes = [window.size]
    for _ in range(6):
        a_round(window)
        sizes.append(window.size)
    assert sizes == [8, 16, 32, 64, 128, 256, 256]


def test_a_long_queue_or_one_refusal_cuts_once_in_a_round() -> None:
    window = AdaptiveWindow(start=100)
    window.was_the_limit()
    sent_in = window.epoch
    window.refused(sent_in)
    assert window.size == 85
    for _ in range(50):  # the answers and refusals of requests that were sent before are no news
        window.refused(sent_in)
        window.answered(sent_in, 1, 9.0)
    assert window.size == 85
    a_round(window, queued=0.6)
    assert window.size == 72


def test_the_mean_is_of_the_round_s_own_answers() -> None:
    window = AdaptiveWindow(start=40)
    a_round(window, queued=0.51)
    assert window.size == 34
    a_round(window, queued=0.0)
    a_round(window, queued=0.49)
    assert window.cuts == 1
    # Weighed by choices: one request of three quarters of the round that queued for long makes the mean.
    window = AdaptiveWindow(start=40)
    window.answered(window.epoch, 10, 0.0)
    window.answered(window.epoch, 30, 0.9)
    assert window.cuts == 1


def test_after_a_cut_it_grows_by_a_tenth_and_feels_its_way_near_the_ceiling() -> None:
    window = AdaptiveWindow(start=100)
    window.refused(window.epoch)  # the ceiling is 100
    sizes = [window.size]
    for _ in range(16):
        a_round(window)
        sizes.append(window.size)
    assert sizes[:3] == [85, 93, 95]
    assert sizes[3:7] == [95, 95, 95, 96]
    assert sizes[7:15] == [96, 96, 96, 97, 97, 97, 97, 98]
    # Nothing happened for twelve rounds: the server takes more than it did.
    assert sizes[15] == 107


def test_it_stays_within_its_bounds_for_each_replica() -> None:
    window = AdaptiveWindow(replicas=3, maximum=10)
    assert window.size == 24
    for _ in range(3):
        a_round(window)
    assert window.size == 30
    for _ in range(40):
        window.refused(window.epoch)
    assert window.size == 3


def test_answers_without_queue_times_leave_refusals_as_the_signal() -> None:
    window = AdaptiveWindow(start=16)
    a_round(window)
    assert window.size == 32
    window.refused(window.epoch)
    assert window.size == 27


@pytest.mark.parametrize("timed", [True, False], ids=["queue times", "refusals only"])
@pytest.mark.parametrize("service", [0.3, 1.0, 3.0, 8.0, 20.0])
def test_it_finds_the_capacity_of_a_server_and_follows_it(service: float, timed: bool) -> None:
    """At least 90 % of the best fixed concurrency, refusals under 2 %; back within 30 x S choices after S changes."""

    def best(slots: int) -> float:
        rates = []
        for size in (slots, slots + slots // 8, slots + slots // 4):
            fixed = Model(FixedWindow(size), slots, service)
            fixed.run(40 * slots)
            rates.append(throughput(fixed.finished[10 * slots :]))
        return max(rates)

    model = Model(AdaptiveWindow(), SLOTS, service, timed=timed, seed=1)
    model.run(100 * SLOTS)
    assert throughput(model.finished[50 * SLOTS :]) >= 0.9 * best(SLOTS)
    assert model.refused < 0.02 * model.sent
    for slots in (SLOTS // 2, SLOTS, 2 * SLOTS):
        model.slots = slots
        refused, sent = model.refused, model.sent
        model.run(30 * slots)
        model.run(50 * slots)
        assert throughput(model.finished[-50 * slots :]) >= 0.9 * best(slots)
        # Where only refusals tell, a halved server has to say so more often.
        assert model.refused - refused < (0.02 if timed else 0.04) * (model.sent - sent)


def test_the_model_can_tell_a_bad_window_from_a_good_one() -> None:
    for size in (SLOTS // 2, 3 * SLOTS):
        model = Model(FixedWindow(size), SLOTS, 1.0)
        model.run(30 * SLOTS)
        too_slow = throughput(model.finished[15 * SLOTS :]) < 0.9 * SLOTS
        assert too_slow or model.refused > 0.02 * model.sent
