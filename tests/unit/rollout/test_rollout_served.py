"""What is known to be served: spans, a reader that polls little, waiting for a base and for versions, files."""

from __future__ import annotations

import asyncio
import pickle
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest

from cwtrain.errors import ConfigError, PermissionDeniedError, UnavailableError
from cwtrain.hotload.status import BaselineState, BaselineStatus
from cwtrain.plugins import Plugins
from cwtrain_rollout import (
    Group,
    Load,
    RolloutConfig,
    RolloutError,
    RolloutRequestError,
    Sampler,
    SamplingParams,
    StaleWeightsError,
    WeightSpan,
)
from cwtrain_rollout.served import FileSource, ServedWeights
from cwtrain_rollout.spans import History, version_number
from helpers.completions_server import CompletionsServer, Raw, good

PARAMS = SamplingParams(max_tokens=4)


def load(number: int, state: str = "COMPLETED", mark: str = "") -> Load:
    return Load(id=f"id-{number}{mark}", identity=f"run-v{number:06d}", state=state)


def base(state: BaselineState, **more: Any) -> BaselineStatus:
    return BaselineStatus(deployment_id="d-1", run_id="run", identity="run-v000000", state=state, **more)


@attrs.define
class Script:
    """A source that gives histories in turn (the last one for ever); an exception among them is raised."""

    steps: list[Any]
    base: list[BaselineStatus | None] = attrs.field(factory=lambda: [None])
    reads: int = 0

    def history(self) -> History:
        self.reads += 1
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        return History(tuple(step))

    def baseline(self) -> BaselineStatus | None:
        return self.base.pop(0) if len(self.base) > 1 else self.base[0]


def served(script: Any, *, poll: float = 0.01, patience: float = 5.0) -> ServedWeights:
    return ServedWeights(script, poll=poll, patience=patience)


def sampler(server: CompletionsServer, script: Any, **settings: Any) -> Sampler:
    config = RolloutConfig(base_url=server.url, model="m", deadline=5, **settings)
    return Sampler(config, served=served(script), plugins=Plugins())


def test_numbers_are_read_from_identities() -> None:
    names = ("run-v000012", "run-v000012-full", "run.2-v000001", "step_000100", "v7", "")
    assert [version_number(name) for name in names] == [12, 12, 1, None, None, None]


def test_a_span_is_exact_where_both_ends_are_one_hot_load() -> None:
    exact, wide = WeightSpan(load(1), load(1)), WeightSpan(load(1), load(2, "FAILED"))
    assert (exact.exact, exact.identities, exact.oldest_version, exact.newest_version) == (
        True, ("run-v000001",), 1, 1,
    )  # fmt: skip
    assert (wide.exact, wide.identities) == (False, ("run-v000001", "run-v000002"))
    assert not WeightSpan(load(1), load(1, mark="again")).exact, "an identity that is served twice"
    assert WeightSpan(None, None).exact
    assert not WeightSpan(None, load(1)).exact
    assert exact.is_only(1)
    assert exact.is_only("run-v000001")
    assert exact.is_only("id-1")
    assert not exact.is_only(2)
    assert not wide.is_only(1)
    assert pickle.loads(pickle.dumps(wide)) == wide


def test_what_is_served_at_least() -> None:
    history = History((load(3, "IN_PROGRESS"), load(1, mark="b"), load(2), load(1)))
    assert history.newest == load(3, "IN_PROGRESS")
    assert history.served == load(1, mark="b")
    assert not history.settled
    assert history.serves_at_least(1)
    assert history.serves_at_least("run-v000001")
    assert history.serves_at_least("id-2"), "it came before what is served now"
    assert not history.serves_at_least(2), "but a rollback serves no newer version"
    assert not history.serves_at_least("run-v000002")
    assert not history.serves_at_least("run-v000003")
    assert not History().serves_at_least(0)


def test_the_ends_are_what_was_known_before_and_what_is_seen_after() -> None:
    script = Script([[load(1)], [load(2, "PENDING"), load(1)]])
    with CompletionsServer() as server:
        one = sampler(server, script)
        (group,) = one.sample_groups([Group(prompt=[1], n=2)], PARAMS)
        assert server.requests[0]["nvext"]["cache_salt"] == "id-1"
    span = group.samples[0].weights
    assert span is not None
    assert (span.oldest_version, span.newest_version, span.exact) == (1, 2, False)
    assert one.totals.spanned_samples == 2


def test_the_salt_before_any_hot_load_and_one_that_is_given() -> None:
    with CompletionsServer() as server:
        one = sampler(server, Script([[]]), deployment_id="d-1")
        (group,) = one.sample_groups([Group(prompt=[1])], PARAMS)
        assert group.samples[0].weights == WeightSpan(None, None)
        one.sample_groups([Group(prompt=[1])], PARAMS, cache_salt="mine")
    assert [request["nvext"]["cache_salt"] for request in server.requests] == ["base-d-1", "mine"]
    assert "cache_salt" not in server.requests[0], "Dynamo has it in nvext alone"


def test_the_list_is_read_at_the_start_at_the_end_and_not_for_each_sample() -> None:
    script = Script([[load(1)]])
    with CompletionsServer() as server:
        config = RolloutConfig(base_url=server.url, model="m")
        one = Sampler(config, served=served(script, poll=60), plugins=Plugins())
        one.sample_groups([Group(prompt=[1])] * 40, PARAMS)
    assert script.reads == 2


def test_a_rollout_begins_with_what_is_served_now() -> None:
    """A trainer samples right after it published: neither the salt nor the span may be those of the version before."""
    script = Script([[load(1)], [load(1)], [load(2), load(1)]])
    with CompletionsServer() as server:
        config = RolloutConfig(base_url=server.url, model="m")
        one = Sampler(config, served=served(script, poll=3600), plugins=Plugins())
        one.sample_groups([Group(prompt=[1])], PARAMS)
        (group,) = one.sample_groups([Group(prompt=[1])], PARAMS)
    assert group.samples[0].weights == WeightSpan(load(2), load(2))
    assert [request["cache_salt"] for request in server.requests] == ["id-1", "id-2"]


def test_calls_that_end_while_others_go_on_share_their_last_reads() -> None:
    """Many callers with a group each, as agents are: none waits for a poll interval, and reads are few."""
    script = Script([[load(1)]])

    async def scenario(one: Sampler) -> None:
        await asyncio.gather(*[one.sample([Group(prompt=[1])], PARAMS) for _ in range(60)])

    with CompletionsServer() as server:
        config = RolloutConfig(base_url=server.url, model="m", concurrency=4)
        one = Sampler(config, served=served(script, poll=3600), plugins=Plugins())
        asyncio.run(scenario(one))
    assert script.reads <= 10


def test_a_404_while_weights_change_is_waited_out_and_else_final() -> None:
    missing = Raw(404, "no such model")
    with CompletionsServer(missing, missing) as server:
        one = sampler(server, Script([[load(2, "IN_PROGRESS"), load(1)]]))
        assert one.sample_groups([Group(prompt=[1])], PARAMS)[0].whole
        assert one.totals.refusals == 2
    with CompletionsServer(missing) as server, pytest.raises(RolloutRequestError):
        sampler(server, Script([[load(1)]])).sample_groups([Group(prompt=[1])], PARAMS)


def test_the_base_of_a_run_is_waited_for() -> None:
    coming = base(BaselineState.PUBLISHING)
    old = load(7, mark="of the first attempt")
    script = Script([[old], [load(0, "IN_PROGRESS"), old], [load(0), old]], [coming])
    with CompletionsServer() as server:
        (group,) = sampler(server, script).sample_groups([Group(prompt=[1])], PARAMS)
    assert group.samples[0].weights == WeightSpan(load(0), load(0))


def test_a_base_that_is_served_is_not_waited_for_whatever_came_after_it() -> None:
    done = base(BaselineState.SERVED)
    with CompletionsServer() as server:
        assert sampler(server, Script([[load(3)]], [done])).sample_groups([Group(prompt=[1])], PARAMS)


def test_a_base_that_failed_is_an_error_with_its_reason() -> None:
    failed = base(BaselineState.FAILED, error="no room in the bucket")
    with CompletionsServer() as server:
        with pytest.raises(StaleWeightsError, match="'run-v000000' of the run was not published: no room"):
            sampler(server, Script([[]], [failed])).sample_groups([Group(prompt=[1])], PARAMS)
        assert server.requests == []
        # A failure that was made good is none.
        assert sampler(server, Script([[load(0)]], [failed])).sample_groups([Group(prompt=[1])], PARAMS)


def test_an_api_that_does_not_answer_is_waited_out_and_a_token_without_leave_is_not() -> None:
    down = UnavailableError("the API is away", code="UNAVAILABLE", status=503)
    with CompletionsServer() as server:
        one = sampler(server, Script([down, down, [load(1)]]))
        assert one.sample_groups([Group(prompt=[1])], PARAMS)[0].samples[0].weights == WeightSpan(load(1), load(1))
        refused = PermissionDeniedError("needs Inference Viewer", code="PERMISSION_DENIED", status=403)
        with pytest.raises(PermissionDeniedError):
            sampler(server, Script([refused])).sample_groups([Group(prompt=[1])], PARAMS)
        slow = Sampler(
            RolloutConfig(base_url=server.url, model="m"),
            served=served(Script([down]), patience=0.05),
            plugins=Plugins(),
        )
        with pytest.raises(RolloutError, match="could not be read"):
            slow.sample_groups([Group(prompt=[1])], PARAMS)


def test_versions_need_somebody_who_knows_them() -> None:
    with CompletionsServer() as server:
        one = Sampler(RolloutConfig(base_url=server.url, model="m"), plugins=Plugins())
        with pytest.raises(ConfigError, match="need to know what is served"):
            one.sample_groups([Group(prompt=[1])], PARAMS, min_version=1)


def test_a_sample_that_never_is_exact_is_an_error_by_name() -> None:
    broken = [load(2, "FAILED"), load(1)]
    with CompletionsServer() as server:
        one = sampler(server, Script([broken]))
        with pytest.raises(StaleWeightsError, match="not of one weight version"):
            one.sample_groups([Group(prompt=[1])], PARAMS, exact_version=True)


def test_a_file_says_what_is_served_where_there_is_no_api(tmp_path: Path) -> None:
    file = tmp_path / "served"
    file.write_text("run-v000003 load-9\n")

    def while_loading(request: dict[str, Any]) -> dict[str, Any]:
        file.write_text("run-v000003 load-9\nrun-v000004 load-10\n")
        return good(request)

    with CompletionsServer(while_loading) as server:
        config = RolloutConfig(base_url=server.url, model="m", served_identity_file=str(file), poll=0.01)
        one = Sampler(config, plugins=Plugins())
        (group,) = one.sample_groups([Group(prompt=[1])], PARAMS)
        span = group.samples[0].weights
        assert span is not None
        assert (span.oldest_version, span.newest_version) == (3, 4)
        assert server.requests[0]["cache_salt"] == "load-9"
        file.write_text("run-v000004 load-10\n")
        (group,) = one.sample_groups([Group(prompt=[1])], PARAMS, exact_version=4)
        assert server.requests[-1]["cache_salt"] == "load-10"
        file.unlink()
        with pytest.raises(ConfigError, match="SERVED_IDENTITY_FILE"):
            one.sample_groups([Group(prompt=[1])], PARAMS)
        file.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="no UTF-8 text"):
            one.sample_groups([Group(prompt=[1])], PARAMS)
        file.write_bytes(b"")
        with pytest.raises(RolloutError, match="is empty"):
            FileSource(file).history()
    assert FileSource(file).baseline() is None


def test_one_reader_for_several_loops() -> None:
    """B09, B66: the reader blocks nobody's loop, and serves all of them."""
    going = threading.Event()

    class Slow:
        def history(self) -> History:
            assert going.wait(20)
            return History((load(1),))

        def baseline(self) -> None:
            return None

    reader = served(Slow())
    found: list[History] = []

    async def read() -> None:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while beats < 5:
                beats += 1
                await asyncio.sleep(0.001)
            going.set()

        heart = asyncio.create_task(beat())
        found.append(await reader.fresh(float("-inf")))
        await heart

    threads = [threading.Thread(target=lambda: asyncio.run(read())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [history.served for history in found] == [load(1)] * 3
    reader.close()
