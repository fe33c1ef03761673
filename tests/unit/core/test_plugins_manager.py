"""Plugins: isolation, choices, vetoes, conflicts, loading from entry points."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from cwtrain.config import PluginConfig, Setting, SettingValue
from cwtrain.errors import PluginConflictError, PluginError, PluginLoadError
from cwtrain.events import RolloutRetried, SyncSkipped, WeightsWritten, WriteMode
from cwtrain.models.snapshot import Chain, PublishPlan, SnapshotKind
from cwtrain.models.sync import (
    Integration,
    RolloutBackendFactory,
    SnapshotChoice,
    WeightSyncRequest,
    WeightSyncResult,
)
from cwtrain.plugins import Plugins, get_plugins, hookimpl, specs
from cwtrain.plugins.specs import KINDS, HookKind

WRITTEN = WeightsWritten(framework="toy", path="/ckpt", mode=WriteMode.DELTA, version=3)
PLAN = PublishPlan(
    deployment_id="d",
    identity="i",
    kind=SnapshotKind.FULL,
    reason="",
    bucket="b",
    path_prefix="",
    uri="s3://b/i",
    files=(),
    total_bytes=0,
    upload_bytes=0,
)
REQUEST = WeightSyncRequest(deployment_id="d", path="/ckpt", identity="i", choice=SnapshotChoice.FULL)


def plugin(**hooks):
    """Return a plugin object with these hooks."""
    return SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})


def integration(name, distribution):
    return Integration(name=name, distribution=distribution, documented=f"{name}.hook", status="works")


def test_every_spec_has_a_kind_and_a_docstring():
    names = {name for name in vars(specs) if name.startswith("cwtrain_")}
    assert names == set(KINDS)
    assert all(getattr(specs, name).__doc__ for name in names)
    assert {kind: sum(1 for one in KINDS.values() if one is kind) for kind in HookKind} == {
        HookKind.REGISTER: 4,
        HookKind.CHOOSE: 3,
        HookKind.GUARD: 1,
        HookKind.OBSERVE: 3,
    }


# -- observe ----------------------------------------------------------------------------------------------------------


def test_an_observer_that_raises_does_not_keep_the_others_from_hearing(caplog):
    heard = []
    plugins = Plugins()

    @hookimpl(tryfirst=True)
    def fail(event):
        raise ValueError("no")

    plugins.register(plugin(cwtrain_weight_sync=lambda event: heard.append(("first", event))), name="first")
    plugins.register(SimpleNamespace(cwtrain_weight_sync=fail), name="bad", distribution="bad-dist", version="1.0")
    plugins.register(plugin(cwtrain_weight_sync=lambda event: heard.append(("last", event))), name="last")
    event = SyncSkipped(reason="empty")
    with caplog.at_level(logging.WARNING, "cwtrain"):
        plugins.notify(event)
        plugins.notify(event)
    assert heard == [("last", event), ("first", event)] * 2
    assert plugins.failures == {("bad", "cwtrain_weight_sync"): 2}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "'bad' (bad-dist 1.0)" in warnings[0]
    assert "ValueError: no" in warnings[0]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_observer_cannot_swallow_an_interrupt(stop):
    def raises(event):
        raise stop

    plugins = Plugins()
    plugins.register(plugin(cwtrain_post_write=raises))
    with pytest.raises(stop):
        plugins.notify(WRITTEN)


def test_each_event_goes_to_its_own_hook():
    heard = []
    plugins = Plugins()
    plugins.register(
        plugin(
            cwtrain_post_write=lambda event: heard.append("post_write"),
            cwtrain_weight_sync=lambda event: heard.append("weight_sync"),
            cwtrain_rollout_backend=lambda event: heard.append("rollout_backend"),
        )
    )
    for event in (WRITTEN, SyncSkipped(reason=""), RolloutRetried(backend="b", reason="", attempt=1, delay=0.1)):
        plugins.notify(event)
    assert heard == ["post_write", "weight_sync", "rollout_backend"]


def test_every_kind_of_event_can_be_told():
    from typing import get_args

    import attrs

    from cwtrain import events

    heard = []
    plugins = Plugins()
    plugins.register(
        plugin(
            cwtrain_post_write=lambda event: heard.append(event),
            cwtrain_weight_sync=lambda event: heard.append(event),
            cwtrain_rollout_backend=lambda event: heard.append(event),
        )
    )
    kinds = get_args(events.AnyEvent)
    for kind in kinds:
        needed = {field.name: None for field in attrs.fields(kind) if field.default is attrs.NOTHING}
        plugins.notify(kind(**needed))
    assert [type(event) for event in heard] == list(kinds)


def test_a_plugin_that_leaves_is_not_told_any_more():
    heard = []
    plugins = Plugins()
    plugins.register(plugin(cwtrain_post_write=lambda event: heard.append(event)), name="one")
    plugins.notify(WRITTEN)
    plugins.unregister("one")
    plugins.unregister("one")
    plugins.notify(WRITTEN)
    assert heard == [WRITTEN]
    assert plugins.loaded == ()


# -- choose and guard -------------------------------------------------------------------------------------------------


def test_the_first_opinion_wins_and_none_is_no_opinion():
    plugins = Plugins()
    assert plugins.choose_snapshot(WRITTEN, Chain()) is None
    assert plugins.name_snapshot(WRITTEN) is None
    assert plugins.sync_weights(REQUEST) is None
    plugins.register(plugin(cwtrain_choose_snapshot=lambda written, chain: SnapshotChoice.FULL), name="full")
    plugins.register(plugin(cwtrain_choose_snapshot=lambda written: "SKIP"), name="skip")
    plugins.register(plugin(cwtrain_choose_snapshot=lambda: None), name="shy")
    plugins.register(plugin(cwtrain_name_snapshot=lambda written: f"v{written.version}"), name="namer")
    assert plugins.choose_snapshot(WRITTEN, Chain()) is SnapshotChoice.SKIP
    assert plugins.name_snapshot(WRITTEN) == "v3"


def test_what_a_chooser_raises_reaches_the_caller_and_names_the_plugin():
    def fail(written, chain):
        raise ZeroDivisionError("oops")

    plugins = Plugins()
    plugins.register(plugin(cwtrain_choose_snapshot=lambda: None), name="fine")
    plugins.register(plugin(cwtrain_choose_snapshot=fail), name="guilty", distribution="guilty-dist", version="2")
    with pytest.raises(ZeroDivisionError, match="oops") as caught:
        plugins.choose_snapshot(WRITTEN, Chain())
    assert caught.value.__notes__ == ["raised by plugin 'guilty' (guilty-dist 2) in the hook cwtrain_choose_snapshot"]


def test_a_choice_that_is_none_of_the_three_is_an_error_that_says_so():
    plugins = Plugins()
    plugins.register(plugin(cwtrain_choose_snapshot=lambda: "HALF"), name="odd")
    with pytest.raises(PluginError, match=r"returned 'HALF', expected .*FULL, DELTA, SKIP.*odd"):
        plugins.choose_snapshot(WRITTEN, Chain())
    plugins.register(plugin(cwtrain_name_snapshot=lambda: 7), name="seven")
    with pytest.raises(PluginError, match="returned 7"):
        plugins.name_snapshot(WRITTEN)
    plugins.register(plugin(cwtrain_sync_weights=lambda: True), name="yes")
    with pytest.raises(PluginError, match="WeightSyncResult"):
        plugins.sync_weights(REQUEST)


def test_sync_weights_can_be_wrapped_and_the_wrapped_one_is_blamed():
    order = []

    @hookimpl(wrapper=True)
    def around(request):
        order.append("before")
        try:
            return (yield)
        finally:
            order.append("after")

    def handle(request):
        order.append("handle")
        if request.identity == "bad":
            raise RuntimeError("cannot")
        return WeightSyncResult(identity=request.identity, hot_load_id="h", seconds=1.0)

    plugins = Plugins()
    plugins.register(plugin(cwtrain_sync_weights=handle), name="handler")
    plugins.register(SimpleNamespace(cwtrain_sync_weights=around), name="timer")
    result = plugins.sync_weights(REQUEST)
    assert result is not None
    assert result.hot_load_id == "h"
    assert order == ["before", "handle", "after"]
    with pytest.raises(RuntimeError) as caught:
        plugins.sync_weights(WeightSyncRequest(**{**_fields(REQUEST), "identity": "bad"}))
    assert "'handler'" in caught.value.__notes__[0]
    assert "'timer'" not in caught.value.__notes__[0]


def _fields(value):
    import attrs

    return {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}


def test_any_guard_can_veto():
    asked = []

    def veto(plan):
        asked.append("veto")
        raise PluginError("not on a Friday")

    plugins = Plugins()
    plugins.register(plugin(cwtrain_before_publish=veto), name="veto")
    plugins.register(plugin(cwtrain_before_publish=lambda plan: asked.append("fine")), name="fine")
    with pytest.raises(PluginError, match="Friday") as caught:
        plugins.before_publish(PLAN)
    assert asked == ["fine", "veto"]
    assert "'veto'" in caught.value.__notes__[0]


# -- register ---------------------------------------------------------------------------------------------------------


def test_integrations_are_flattened_and_one_that_raises_is_marked_broken(caplog):
    def fail():
        raise RuntimeError("no torch\nhere")

    plugins = Plugins()
    plugins.register(plugin(cwtrain_register_integration=lambda: integration("slime", "a")), name="one")
    plugins.register(
        plugin(cwtrain_register_integration=lambda: [integration("miles", "b"), integration("nemo", "b")]), name="two"
    )
    plugins.register(plugin(cwtrain_register_integration=lambda: (item for item in ())), name="none")
    plugins.register(plugin(cwtrain_register_integration=fail), name="bad")
    plugins.register(plugin(cwtrain_register_integration=lambda: "slime"), name="odd")
    with caplog.at_level(logging.WARNING, "cwtrain"):
        assert [item.name for item in plugins.integrations()] == ["miles", "nemo", "slime"]
        plugins.integrations()
    assert [(item.name, item.where) for item in plugins.broken] == [
        ("bad", "cwtrain_register_integration"),
        ("odd", "cwtrain_register_integration"),
    ]
    assert plugins.broken[0].error == "RuntimeError: no torch here"
    assert len([record for record in caplog.records if "'bad'" in record.getMessage()]) == 1


def test_two_integrations_of_one_name_name_both_distributions():
    plugins = Plugins()
    for name in ("a", "b"):
        plugins.register(
            plugin(cwtrain_register_integration=lambda: integration("slime", "x")),
            name=name,
            distribution=f"{name}-dist",
            version="1",
        )
    with pytest.raises(PluginConflictError, match=r"'slime'.*b-dist 1 and a-dist 1") as caught:
        plugins.integrations()
    named = re.search(r"leave one out with (\w+)=<name>", str(caught.value.hint))
    assert named is not None
    assert PluginConfig.from_env({named[1]: "b"}).disabled == ("b",), "the hint names the variable that is read"


def test_a_rollout_backend_is_found_by_name_or_the_names_are_told():
    plugins = Plugins()
    with pytest.raises(PluginError, match="there are: none"):
        plugins.rollout_backend("http")
    backend = RolloutBackendFactory(name="http", distribution="d", create=dict)
    plugins.register(plugin(cwtrain_register_rollout_backend=lambda: backend), name="one")
    assert plugins.rollout_backend("http") is backend
    with pytest.raises(PluginError, match="'grpc'; there are: http"):
        plugins.rollout_backend("grpc")


def test_settings_of_plugins_are_put_together_and_one_that_gives_something_else_is_marked_broken(caplog):
    value = SettingValue(
        setting=Setting(field="size", variables=("MY_SIZE",), help="how big", default="1"), value="1", source="default"
    )
    plugins = Plugins()
    plugins.register(plugin(cwtrain_register_settings=lambda: [value]), name="one")
    plugins.register(plugin(cwtrain_register_settings=lambda: {"MY_SIZE": 1}), name="two")
    assert plugins.settings() == (value,)
    assert [(broken.name, broken.where) for broken in plugins.broken] == [("two", "cwtrain_register_settings")]


def test_commands_are_merged_core_keeps_its_own_and_a_shared_name_fails_naming_both():
    def offers(*names):
        def register(cli):
            for name in names:
                cli.add_command(click.Command(name, callback=lambda: None))

        return register

    def fail(cli):
        raise RuntimeError("no")

    plugins = Plugins()
    plugins.register(plugin(cwtrain_register_commands=offers("one", "both", "core")), name="a", distribution="a-dist")
    plugins.register(plugin(cwtrain_register_commands=offers("two", "both")), name="b", distribution="b-dist")
    plugins.register(plugin(cwtrain_register_commands=fail), name="c")
    group = click.Group("cli")
    owners = plugins.register_commands(group, reserved=["core"])
    assert owners == {"one": "a", "two": "b", "both": "b"}
    assert set(group.commands) == {"one", "two", "both"}
    with pytest.raises(PluginConflictError, match="b-dist and a-dist"):
        group.commands["both"].main(["--any", "thing"], standalone_mode=False)
    assert {(item.name, item.where) for item in plugins.broken} == {
        ("a", "cwtrain_register_commands"),
        ("a", "command both"),
        ("c", "cwtrain_register_commands"),
    }


# -- registration -----------------------------------------------------------------------------------------------------


def test_an_unknown_hook_is_an_error_with_the_nearest_name():
    plugins = Plugins()
    with pytest.raises(PluginLoadError, match="unknown hooks: cwtrain_post_wirte") as caught:
        plugins.register(plugin(cwtrain_post_wirte=lambda event: None), name="typo")
    assert caught.value.hint is not None
    assert "cwtrain_post_write" in caught.value.hint
    assert plugins.loaded == ()
    # The refusal leaves nothing behind: another plugin can be added and called.
    plugins.register(plugin(cwtrain_post_write=lambda event: None), name="typo")
    plugins.notify(WRITTEN)


def test_an_optional_hook_of_another_version_is_accepted():
    plugins = Plugins()
    plugins.register(SimpleNamespace(cwtrain_of_the_future=hookimpl(optionalhook=True)(lambda: None)), name="new")
    assert [item.name for item in plugins.loaded] == ["new"]


def test_an_argument_that_the_hook_does_not_have_is_refused_and_leaves_nothing_behind():
    plugins = Plugins()
    bad = plugin(cwtrain_post_write=lambda event, extra: None)
    with pytest.raises(PluginLoadError, match="extra"):
        plugins.register(bad, name="bad")
    assert plugins.loaded == ()
    plugins.notify(WRITTEN)
    assert plugins.failures == {}


def test_a_name_is_taken_once():
    plugins = Plugins()
    plugins.register(plugin(), name="one", distribution="first-dist", version="1")
    with pytest.raises(PluginConflictError, match="first-dist 1 and second-dist"):
        plugins.register(plugin(), name="one", distribution="second-dist")


def test_calls_are_logged_when_traced(caplog):
    plugins = Plugins(config=PluginConfig(trace=True))
    plugins.register(plugin(cwtrain_post_write=lambda event: None), name="ear")
    with caplog.at_level(logging.INFO, "cwtrain.plugins"):
        plugins.notify(WRITTEN)
    assert [record.getMessage() for record in caplog.records] == [
        "cwtrain_post_write(event=WeightsWritten) -> ear",
        "cwtrain_post_write done",
    ]


# -- entry points -----------------------------------------------------------------------------------------------------


def distribution(folder: Path, name: str, module: str, source: str, *, entry: str | None = None) -> None:
    """Write an installed distribution with one module and one entry point."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[cwtrain]\n{entry or name} = {module}\n")


def found(folder: Path) -> list[importlib.metadata.EntryPoint]:
    return [
        entry
        for dist in importlib.metadata.distributions(path=[str(folder)])
        for entry in dist.entry_points
        if entry.group == "cwtrain"
    ]


GOOD = """
from cwtrain.plugins import hookimpl
@hookimpl
def cwtrain_post_write(event): pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_broken_plugins_are_recorded_and_the_others_work(folder, caplog):
    distribution(folder, "good", "t1_good", GOOD)
    distribution(folder, "missing", "t1_missing", "import a_module_that_nobody_has")
    distribution(folder, "typo", "t1_typo", GOOD.replace("write", "wirte"))
    distribution(folder, "syntax", "t1_syntax", "def broken(:")
    distribution(folder, "exits", "t1_exits", "import sys; sys.exit(3)")
    with caplog.at_level(logging.WARNING, "cwtrain"):
        plugins = Plugins.load(config=PluginConfig(), entry_points=found(folder))
    assert [(item.name, item.distribution, item.version, item.hooks) for item in plugins.loaded] == [
        ("good", "good", "1.2", ("cwtrain_post_write",))
    ]
    broken = {item.name: item for item in plugins.broken}
    assert set(broken) == {"missing", "typo", "syntax", "exits"}
    assert {item.where for item in broken.values()} == {"load"}
    assert "a_module_that_nobody_has" in broken["missing"].error
    assert "cwtrain_post_wirte" in broken["typo"].error
    assert "cwtrain_post_write" in broken["typo"].error
    assert broken["missing"].distribution == "missing"
    assert len(caplog.records) == 4
    plugins.notify(WRITTEN)


def test_disabled_plugins_are_not_even_imported(folder):
    distribution(folder, "off", "t2_off", "raise RuntimeError", entry="off_one")
    distribution(folder, "good", "t2_good", GOOD)
    plugins = Plugins.load(config=PluginConfig(disabled="OFF-one, other"), entry_points=found(folder))
    assert plugins.disabled == ("off_one",)
    assert [item.name for item in plugins.loaded] == ["good"]
    assert plugins.broken == ()
    assert "t2_off" not in sys.modules


def test_strict_makes_a_broken_plugin_an_error(folder):
    distribution(folder, "missing", "t3_missing", "import a_module_that_nobody_has")
    with pytest.raises(PluginLoadError, match=r"'missing' \(missing 1.2\).*a_module_that_nobody_has") as caught:
        Plugins.load(config=PluginConfig(strict=True), entry_points=found(folder))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_strict_goes_for_hooks_that_register_too():
    def fail():
        raise RuntimeError("no")

    plugins = Plugins(config=PluginConfig(strict=True))
    plugins.register(plugin(cwtrain_register_integration=fail), name="bad")
    with pytest.raises(PluginLoadError, match="cwtrain_register_integration"):
        plugins.integrations()


def test_two_distributions_with_one_plugin_name_are_both_named(folder):
    distribution(folder, "alpha", "t4_alpha", GOOD, entry="same")
    distribution(folder, "beta", "t4_beta", GOOD, entry="same")
    plugins = Plugins.load(config=PluginConfig(), entry_points=found(folder))
    assert [item.distribution for item in plugins.loaded] == ["alpha"]
    assert [item.distribution for item in plugins.broken] == ["beta"]
    assert "alpha and beta" in plugins.broken[0].error


def test_the_process_wide_plugins_are_loaded_once():
    assert get_plugins() is get_plugins()


def test_the_environment_says_what_is_disabled(folder, monkeypatch):
    distribution(folder, "off", "t5_off", "raise RuntimeError")
    monkeypatch.setenv("CWTRAIN_DISABLED_PLUGINS", "off")
    assert Plugins.load(entry_points=found(folder)).disabled == ("off",)


def test_importing_cwtrain_loads_no_plugin():
    code = "import cwtrain, cwtrain.plugins, sys; sys.exit(any(m.endswith('._plugin') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
