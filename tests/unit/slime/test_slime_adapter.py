"""The hook's decisions about ranks, with a publisher that only remembers: who publishes, for how long, what is told."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import types
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cwtrain.config import HotLoadConfig
from cwtrain.errors import ConfigError, CWTrainError, HotLoadFailedError, IntegrationError
from cwtrain.events import WeightsWritten
from cwtrain.hotload.publisher import PublishOutcome, PublishState
from cwtrain.models.sync import SnapshotChoice
from cwtrain.plugins import Plugins, hookimpl
from cwtrain_slime import hook
from cwtrain_slime._args import RunArgs
from cwtrain_slime._parts import refuse_mirror, spread_of
from cwtrain_slime._post_write import APART_SECONDS, Adapter
from cwtrain_slime._ranks import Ranks, Work, _portable, find_ranks
from cwtrain_slime._talk import Done, Talk
from cwtrain_slime._tracking import STEP_KEY, track


class Remembering:
    """Stands where a publisher stands, and remembers what it was asked."""

    def __init__(self, settings: HotLoadConfig, **given: Any) -> None:
        self.settings, self.given = settings, given
        self.asked: list[tuple[str, Any]] = []
        self.closed = False
        self.run_id = settings.run_id or "made-up"
        self.baseline_running = False
        self.error: CWTrainError | None = None

    def baseline(self, *, wait_seconds: float) -> PublishOutcome:
        self.asked.append(("baseline", wait_seconds))
        return self._outcome(0)

    def publish_directory(self, path: Any, *, deadline: float | None) -> PublishOutcome:
        self.asked.append((Path(path).name, deadline))
        if self.error is not None:
            raise self.error
        return self._outcome(int(Path(path).name.removeprefix("weight_v")))

    def note_checkpoint(self, directory: Path, *, step: int) -> str:
        self.asked.append((directory.name, step))
        return ""

    def close(self) -> None:
        self.closed = True

    def _outcome(self, number: int) -> PublishOutcome:
        return PublishOutcome(
            identity=f"run-v{number:06d}",
            kind=SnapshotChoice.DELTA,
            number=number,
            epoch=1,
            state=PublishState.COMPLETED,
            metrics={"hotload/total_seconds": 1.0},
        )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Remembering]:
    monkeypatch.setenv("CWTRAIN_HOTLOAD_DEPLOYMENT_ID", "d")
    return []


@pytest.fixture
def adapter(tmp_path: Path, made: list[Remembering]) -> Adapter:
    def make(settings: HotLoadConfig, **given: Any) -> Any:
        made.append(Remembering(settings, **given))
        return made[-1]

    return Adapter(tmp_path, make=make, plugins=Plugins())


def run_args(folder: Path, *, rank: int = 0, world_size: int = 1, mode: str = "delta", **more: Any) -> RunArgs:
    return RunArgs.of(
        Namespace(
            update_weight_mode=mode,
            update_weight_disk_dir=str(folder),
            hf_checkpoint="/base",
            rank=rank,
            world_size=world_size,
            **more,
        )
    )


def test_a_baseline_call_is_rank_0s_alone_and_bounded(
    adapter: Adapter, made: list[Remembering], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B12: the other ranks stand in a barrier of 30 minutes; whatever is set, the call ends before that."""
    monkeypatch.setenv("CWTRAIN_HOTLOAD_BASELINE_WAIT", "7200")
    assert adapter.post_write(run_args(tmp_path, rank=1, world_size=2), str(tmp_path)) is None
    assert made == []
    outcome = adapter.post_write(run_args(tmp_path, world_size=2), f"{tmp_path}/")
    assert outcome is not None
    assert made[0].asked == [("baseline", APART_SECONDS)]
    assert made[0].given["base"] == Path("/base")
    assert made[0].given["framework"] == "slime"


def test_a_numbered_call_has_no_deadline_where_the_ranks_can_beat(
    adapter: Adapter, made: list[Remembering], tmp_path: Path
) -> None:
    adapter.post_write(run_args(tmp_path), str(tmp_path / "weight_v000007"))
    assert made[0].asked == [("weight_v000007", None)]


def test_ranks_that_cannot_beat_have_a_deadline(
    adapter: Adapter, made: list[Remembering], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B12: a fork of a trainer that keeps its gloo group elsewhere; the others wait in its barrier."""
    adapter.post_write(run_args(tmp_path, world_size=4), str(tmp_path / "weight_v000001"))
    assert made[0].asked == [("weight_v000001", APART_SECONDS)]
    assert "cannot beat together" in caplog.text
    assert adapter.post_write(run_args(tmp_path, rank=2, world_size=4), str(tmp_path / "weight_v000001")) is None


def test_after_an_error_the_publisher_is_let_go(adapter: Adapter, made: list[Remembering], tmp_path: Path) -> None:
    """B05: the hook never returns after a failed publish. Another process may take the run over, or this one again."""
    adapter.post_write(run_args(tmp_path), str(tmp_path / "weight_v000001"))
    made[0].error = HotLoadFailedError("hot-load failed", hint="look")
    with pytest.raises(HotLoadFailedError):
        adapter.post_write(run_args(tmp_path), str(tmp_path / "weight_v000002"))
    assert made[0].closed
    adapter.post_write(run_args(tmp_path), str(tmp_path / "weight_v000002"))
    assert len(made) == 2


def test_a_fault_tolerant_trainer_goes_on_in_another_process(
    adapter: Adapter, made: list[Remembering], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """miles retries a failed update on another cell while the first one lives: nothing is held between two calls."""
    monkeypatch.setenv("MILES_EXPERIMENTAL_FT_TRAINER", "1")
    common = {"update_weight_disk_dir": str(tmp_path), "hf_checkpoint": "/base", "rank": 0, "world_size": 1}
    run = RunArgs.of(Namespace(update_weight_transfer_mode="disk-delta", **common))
    adapter.post_write(run, str(tmp_path))
    for number in (1, 2):
        adapter.post_write(run, str(tmp_path / f"weight_v{number:06d}"))
    assert [one.closed for one in made] == [True, True, True]
    assert [one.settings.run_id for one in made] == [None, "made-up", "made-up"]


def test_full_mode_keeps_no_mirror(adapter: Adapter, made: list[Remembering], tmp_path: Path) -> None:
    adapter.post_write(run_args(tmp_path, mode="full"), str(tmp_path / "weight_v000001"))
    assert (made[0].settings.keeps_mirror, made[0].settings.full_every) == (False, 0)


def test_all_problems_of_the_environment_at_once(
    adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CWTRAIN_HOTLOAD_TIMEOUT", "0")
    monkeypatch.setenv("CWTRAIN_HOTLOAD_FULL_EVERY", "65")
    with pytest.raises(ConfigError) as caught:
        adapter.post_write(run_args(tmp_path), str(tmp_path / "weight_v000001"))
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("more", "noted"),
    [({}, True), ({"update_weights_interval": 2}, False), ({"async_save": True}, False)],
    ids=["each step", "rarer updates", "saves behind"],
)
def test_a_note_beside_the_trainers_checkpoint(
    more: dict[str, Any], noted: bool, adapter: Adapter, made: list[Remembering], tmp_path: Path
) -> None:
    """The pair to resume from; an older checkpoint, and steps without one, get none."""
    saved = tmp_path / "saved"
    for iteration in (19, 39):
        (saved / f"iter_{iteration:07d}").mkdir(parents=True)
    tracker = saved / "latest_checkpointed_iteration.txt"
    tracker.write_text("19")
    run = run_args(tmp_path, save=str(saved), **more)
    adapter.post_write(run, str(tmp_path / "weight_v000019"))
    tracker.write_text("39\n")
    for number in (39, 40):
        adapter.post_write(run, str(tmp_path / f"weight_v{number:06d}"))
    notes = [one for one in made[0].asked if one[0].startswith("iter_")]
    assert notes == ([("iter_0000039", 39)] if noted else [])


def test_plugins_of_the_other_ranks_hear_of_the_files(tmp_path: Path) -> None:
    heard: list[WeightsWritten] = []

    class Ear:
        @hookimpl
        def cwtrain_post_write(self, event: WeightsWritten) -> None:
            heard.append(event)

    plugins = Plugins()
    plugins.register(Ear(), name="ear")
    other = Adapter(tmp_path, plugins=plugins)
    other.post_write(run_args(tmp_path, rank=3, world_size=4), str(tmp_path / "weight_v000012"))
    assert [(one.version, one.rank, one.world_size, str(one.mode)) for one in heard] == [(12, 3, 4, "delta")]


def test_the_hook_is_a_plain_function_that_needs_no_engines() -> None:
    assert isinstance(hook, types.FunctionType)
    with pytest.raises(IntegrationError):
        hook(Namespace(), "/nowhere", [])


def test_importing_the_hook_is_cheap() -> None:
    """Every rank imports it at the start of its actor: no network library, no torch, and slime is not changed."""
    code = (
        "import sys; from cwtrain.integrations.slime import hook;"
        "assert not {'boto3', 'httpx', 'numpy', 'torch', 'ray', 'slime'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_hook_of_miles_is_the_same_and_as_cheap() -> None:
    pytest.importorskip("cwtrain_miles")
    code = (
        "import sys; from cwtrain.integrations.miles import hook; from cwtrain.integrations.slime import hook as other;"
        "assert hook is other; assert not {'boto3', 'httpx', 'numpy', 'torch', 'ray', 'miles'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Ranks ---------------------------------------------------------------------------------------------------------------


def test_without_torch_a_rank_is_what_its_arguments_say(tmp_path: Path) -> None:
    ranks = find_ranks(run_args(tmp_path, rank=1, world_size=2))
    assert (ranks.rank, ranks.size, ranks.meet) == (1, 2, False)
    assert find_ranks(run_args(tmp_path)).meet


def test_an_error_travels_to_the_other_ranks_as_it_is_or_in_words() -> None:
    error = HotLoadFailedError("no", hint="look")
    assert _portable(error) is error
    lost = _portable(KeyError("x"))
    assert isinstance(lost, IntegrationError)
    assert "KeyError" in str(lost)
    stuck = CWTrainError("stuck", hint="h")
    stuck.thing = lambda: None  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(_portable(stuck))).hint == "h"


def test_a_rank_alone_beats_until_its_work_is_done(caplog: pytest.LogCaptureFixture) -> None:
    """B12: what goes on is told while it goes on, with bytes and state."""
    caplog.set_level("INFO", logger="cwtrain.slime")
    asked = threading.Event()

    def progress() -> str:
        asked.set()
        return "uploading: 1/2 objects, 5/10 bytes"

    ranks = Ranks(rank=0, size=1, beat_seconds=0.01, told_every=0.0)
    assert ranks.together(Work(lambda: asked.wait(30)), what="the publish", progress=progress) == [True]
    assert "the publish goes on after 0 s: uploading: 1/2 objects, 5/10 bytes" in caplog.text
    with pytest.raises(ZeroDivisionError):
        ranks.together(Work(lambda: 1 // 0), what="it")


def test_a_talk_asks_and_is_answered() -> None:
    talk = Talk(lambda one: [*one.ask("which?"), "end"])
    assert talk.next() == "which?"
    talk.answer(["a", "b"])
    assert talk.next() == Done(["a", "b", "end"])


def test_a_talk_that_is_given_up_ends_with_an_error() -> None:
    talk = Talk(lambda one: one.ask("which?"))
    assert talk.next() == "which?"
    talk.give_up()
    with pytest.raises(IntegrationError, match="another rank failed"):
        talk.next()


# Nodes that share no disk --------------------------------------------------------------------------------------------


def _seen(shards: list[str], named: list[str] | None = None) -> Mapping[str, Any]:
    return {"shards": dict.fromkeys(shards, 1), "named": named}


def test_who_sends_which_shard() -> None:
    assert spread_of([_seen(["a", "b"], ["a", "b"]), _seen(["a", "b"])]) is None
    spread = spread_of([_seen(["a"], ["a", "b", "c"]), _seen(["b"]), _seen(["b", "c"])])
    assert spread is not None
    assert dict(spread.owners) == {"a": 0, "b": 1, "c": 2}
    assert spread_of([_seen(["a"], ["a", "gone"]), _seen([])]) is None, "inspection names what nobody has"
    assert spread_of([_seen([], []), _seen([])]) is None, "an empty version"
    assert spread_of([_seen(["a"]), _seen(["b"])]) is None, "no index: inspection says so"


@pytest.mark.parametrize(
    ("settings", "full_mode", "hint"),
    [
        ({}, False, "CWTRAIN_HOTLOAD_MIRROR=0 and CWTRAIN_HOTLOAD_FULL_EVERY=0"),
        ({"mirror": True, "full_every": 0}, False, "CWTRAIN_HOTLOAD_MIRROR=0"),
        ({"mirror": False, "full_every": 20}, False, "CWTRAIN_HOTLOAD_FULL_EVERY=0"),
        ({"mirror": False, "full_every": 0}, True, "--update-weight-mode delta"),
    ],
)
def test_a_mirror_or_full_mode_is_refused_there(settings: dict[str, Any], full_mode: bool, hint: str) -> None:
    with pytest.raises(ConfigError, match="share no disk") as caught:
        refuse_mirror(HotLoadConfig(deployment_id="d", **settings), full_mode=full_mode, late=["b"], version_dir="/v")
    assert hint in str(caught.value.hint)


def test_deltas_alone_are_fine_there() -> None:
    settings = HotLoadConfig(deployment_id="d", mirror=False, full_every=0)
    refuse_mirror(settings, full_mode=False, late=["b"], version_dir="/v")


# The tracker ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def slime_tracker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    def put(
        *, main: bool = True, wandb_runs: bool | None = None, fails: bool = False, home: str = "observability"
    ) -> list[Any]:
        logged: list[Any] = []

        def log(args: Any, metrics: dict[str, float], step_key: str) -> None:
            if fails:
                raise ValueError("no writer")
            logged.append((metrics, step_key))

        modules = {
            f"slime.{home}.logging_utils": {"log": log},
            "slime.backends.megatron_utils.initialize": {"is_megatron_main_rank": lambda: main},
        }
        if wandb_runs is not None:
            modules["wandb"] = {"run": object() if wandb_runs else None}
        for name, values in modules.items():
            module = types.ModuleType(name)
            module.__dict__.update(values)
            monkeypatch.setitem(sys.modules, name, module)
        return logged

    return put


@pytest.mark.parametrize("home", ["observability", "utils"])
def test_metrics_go_to_the_trainers_tracker_where_it_runs(
    home: str, slime_tracker: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """In slime 0.3.1 the log function lies elsewhere than in its main branch."""
    run = run_args(tmp_path, use_wandb=True, use_tensorboard=False)
    logged = slime_tracker(wandb_runs=True, home=home)
    assert track(run, {"hotload/bytes": 3.0}, version=7)
    assert logged == [({"hotload/bytes": 3.0, STEP_KEY: 7}, STEP_KEY)]


@pytest.mark.parametrize(
    ("put", "given"),
    [
        ({"main": False}, {"use_tensorboard": True}),
        ({"wandb_runs": False}, {"use_wandb": True}),
        ({}, {}),
        ({"fails": True}, {"use_tensorboard": True}),
    ],
    ids=["another rank", "not started", "not asked for", "it fails"],
)
def test_a_tracker_that_is_not_there_stops_nothing(
    slime_tracker: Callable[..., list[Any]], put: dict[str, Any], given: dict[str, Any], tmp_path: Path
) -> None:
    logged = slime_tracker(**put)
    assert not track(run_args(tmp_path, **given), {"hotload/bytes": 3.0}, version=7)
    assert logged == []


def test_no_trainer_no_tracker(tmp_path: Path) -> None:
    assert not track(run_args(tmp_path, use_tensorboard=True), {"hotload/bytes": 3.0}, version=7)
