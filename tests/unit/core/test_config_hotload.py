"""Settings of the hot-load hooks, the store and the plugins; and the settings as a table."""

from __future__ import annotations

import logging

import attrs
import pytest

from cwtrain.config import (
    CONFIGS,
    ApiConfig,
    HotLoadConfig,
    PluginConfig,
    StorageConfig,
    describe,
    located,
)
from cwtrain.errors import ConfigError
from cwtrain.models.service import PromptCachePolicy

P = "CWTRAIN_HOTLOAD_"
ID = {P + "DEPLOYMENT_ID": "d"}


def test_the_defaults_are_those_of_the_table():
    config = HotLoadConfig.from_env(ID)
    assert attrs.asdict(config) == {
        "deployment_id": "d",
        "run_id": None,
        "wait": True,
        "timeout": 1800.0,
        "deadline": None,
        "publish_baseline": True,
        "baseline_wait": 600.0,
        "full_every": 20,
        "mirror": None,
        "verify": False,
        "state_dir": None,
        "prompt_cache_policy": PromptCachePolicy.UNSPECIFIED,
        "upload_workers": 8,
        "cleanup": False,
        "files_wait": 90.0,
    }
    assert config.keeps_mirror


def test_every_setting_is_read_and_blank_means_unset():
    config = HotLoadConfig.from_env(
        {
            P + "DEPLOYMENT_ID": " d ",
            P + "RUN_ID": "run",
            P + "WAIT": "0",
            P + "TIMEOUT": "2.5",
            P + "DEADLINE": "1500",
            P + "PUBLISH_BASELINE": "no",
            P + "BASELINE_WAIT": "  ",
            P + "FULL_EVERY": "0",
            P + "MIRROR": "1",
            P + "VERIFY": "yes",
            P + "STATE_DIR": "/state",
            P + "PROMPT_CACHE_POLICY": "reset_all",
            P + "UPLOAD_WORKERS": "3",
            P + "CLEANUP": "1",
        }
    )
    assert config.deployment_id == "d"
    assert not config.wait
    assert config.timeout == 2.5
    assert config.deadline == 1500
    assert config.baseline_wait == 600
    assert config.full_every == 0
    assert config.keeps_mirror
    assert config.prompt_cache_policy is PromptCachePolicy.RESET_ALL
    assert config.upload_workers == 3
    assert not HotLoadConfig.from_env({**ID, P + "FULL_EVERY": "0"}).keeps_mirror


def test_arguments_win():
    assert HotLoadConfig.from_env({**ID, P + "TIMEOUT": "5"}, timeout=7.0, deployment_id="e").timeout == 7
    assert HotLoadConfig.from_env({}, deployment_id="e", prompt_cache_policy="preserve").prompt_cache_policy is (
        PromptCachePolicy.PRESERVE
    )


def test_all_problems_are_told_at_once_with_variable_and_meaning():
    bad = {
        P + "TIMEOUT": "nan",
        P + "DEADLINE": "inf",
        P + "BASELINE_WAIT": "0",
        P + "FULL_EVERY": "65",
        P + "UPLOAD_WORKERS": "0",
        P + "WAIT": "maybe",
        P + "PROMPT_CACHE_POLICY": "forget",
    }
    with pytest.raises(ConfigError) as caught:
        HotLoadConfig.from_env(bad)
    assert len(caught.value.problems) == len(bad) + 1
    for name in (*bad, P + "DEPLOYMENT_ID"):
        assert any(name in problem for problem in caught.value.problems), name
    assert "from 0 to 64" in str(caught.value)
    assert "preserve or reset_all" in str(caught.value)


def test_an_unknown_setting_is_a_warning_with_the_nearest_name(caplog):
    with caplog.at_level(logging.WARNING, "cwtrain"):
        HotLoadConfig.from_env({**ID, P + "TIMEOUTS": "5", P + "XYZ": "1", "CWTRAIN_OTHER": "1"})
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert any("CWTRAIN_HOTLOAD_TIMEOUTS" in text and "did you mean CWTRAIN_HOTLOAD_TIMEOUT?" in text for text in told)


def test_storage_settings():
    assert StorageConfig.from_env({}) == StorageConfig()
    config = StorageConfig.from_env(
        {
            "CW_S3_ENDPOINT": "http://127.0.0.1:1",
            "AWS_REGION": " ",
            "AWS_DEFAULT_REGION": "US-EAST-04A",
            "CWTRAIN_S3_SIGN_PAYLOAD": "1",
        }
    )
    assert (config.endpoint_url, config.region, config.sign_payload) == ("http://127.0.0.1:1", "US-EAST-04A", True)


def test_plugin_settings():
    config = PluginConfig.from_env(
        {"CWTRAIN_DISABLED_PLUGINS": "a, b,,", "CWTRAIN_STRICT_PLUGINS": "1", "CWTRAIN_TRACE_PLUGINS": "0"}
    )
    assert (config.disabled, config.strict, config.trace) == (("a", "b"), True, False)


# -- the table --------------------------------------------------------------------------------------------------------


def test_every_setting_is_described():
    for cls in CONFIGS:
        for setting in describe(cls):
            assert setting.variables, setting
            assert setting.help, setting
            assert not setting.help.endswith("."), setting
    table = {setting.field: setting for setting in describe(HotLoadConfig)}
    assert table["deployment_id"].required
    assert table["timeout"].default == "1800"
    assert table["wait"].default == "1"
    assert table["run_id"].default == ""
    names = [name for cls in CONFIGS for setting in describe(cls) for name in setting.variables]
    assert len(set(names)) == len(names)


def test_where_a_setting_comes_from_and_secrets_are_masked():
    environ = {"COREWEAVE_API_TOKEN": " ", "CW_API_TOKEN": "s3cret", "CWTRAIN_API_HEADERS": '{"X": "hidden"}'}
    found = {
        item.setting.field: item for item in located(ApiConfig, environ=environ, overrides={"base_url": "http://x"})
    }
    assert (found["token"].value, found["token"].source) == ("********", "CW_API_TOKEN")
    assert (found["headers"].value, found["headers"].source) == ("********", "CWTRAIN_API_HEADERS")
    assert (found["base_url"].value, found["base_url"].source) == ("http://x", "argument")
    assert found["verify"].source == "default"
    assert "s3cret" not in repr(found)
    assert "hidden" not in repr(found)


def test_what_cannot_be_used_is_told_for_its_own_setting_only():
    found = {
        item.setting.field: item
        for item in located(HotLoadConfig, environ={P + "TIMEOUT": "nan", P + "WAIT": "1", P + "DEADLINE": "x"})
    }
    assert "nan" in (found["timeout"].problem or "")
    assert "DEADLINE" in (found["deadline"].problem or "")
    assert [name for name, item in found.items() if item.problem] == ["timeout", "deadline"]
    assert found["deployment_id"].source == "unset"
    secret = located(ApiConfig, environ={"COREWEAVE_API_TOKEN": "bad s3cret"})[0]
    assert secret.problem is not None
    assert "s3cret" not in repr(secret)
