from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import attrs
import pytest

import cwtrain_rollout
from cwtrain.config._env import env_vars
from cwtrain.errors import ConfigError
from cwtrain_rollout import RolloutConfig
from cwtrain_rollout.config import PREFIX
from helpers.run_cli import run

REQUIRED = {"CWTRAIN_ROLLOUT_BASE_URL": "http://frontend:8000", "CWTRAIN_ROLLOUT_MODEL": "policy"}
KEY = "sk-very-secret-0123456789"


def test_from_env_takes_every_setting(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\r\n")
    given = {
        "API_KEY_FILE": str(file),
        "CONCURRENCY": "12",
        "CONCURRENCY_MAX": "99",
        "REPLICAS": "3",
        "TIMEOUT": "5",
        "IDLE_TIMEOUT": "7",
        "DEADLINE": "6.5",
        "MAX_ATTEMPTS": "3",
        "CONTEXT_LENGTH": "4096",
        "LOGPROBS": "0",
        "LOGPROBS_MODE": "Raw",
        "TOKEN_IDS": "no",
        "TOKEN_ID_PROMPTS": "1",
        "TEXT_FALLBACK": "yes",
        "GROUP_REQUESTS": "0",
        "ROUTED_EXPERTS": "0",
        "SEEDS": "no",
        "TRUST_ENV": "1",
        "ON_FAILURE": "Drop",
        "POLL": "0.5",
        "DEPLOYMENT_ID": " d-1 ",
        "RECORD": "rollouts.jsonl",
    }
    config = RolloutConfig.from_env(REQUIRED | {f"{PREFIX}{name}": value for name, value in given.items()})
    assert attrs.asdict(config) == {
        "base_url": "http://frontend:8000/v1",
        "model": "policy",
        "api_key": None,
        "api_key_file": str(file),
        "concurrency": 12,
        "concurrency_max": 99,
        "replicas": 3,
        "timeout": 5.0,
        "idle_timeout": 7.0,
        "deadline": 6.5,
        "max_attempts": 3,
        "context_length": 4096,
        "logprobs": False,
        "logprobs_mode": "raw",
        "token_ids": False,
        "token_id_prompts": True,
        "text_fallback": True,
        "group_requests": False,
        "routed_experts": False,
        "seeds": False,
        "trust_env": True,
        "on_failure": "drop",
        "poll": 0.5,
        "deployment_id": "d-1",
        "served_identity_file": None,
        "record": "rollouts.jsonl",
    }
    assert config.current_api_key() == KEY


def test_defaults_are_those_of_the_table() -> None:
    config = RolloutConfig.from_env(REQUIRED)
    assert (config.concurrency, config.fixed_concurrency) == ("auto", None)
    assert (config.timeout, config.idle_timeout, config.deadline, config.max_attempts, config.poll) == (
        3600,
        600,
        1800,
        8,
        5,
    )
    assert config.on_failure == "raise"
    assert config.logprobs
    assert config.token_ids
    assert config.token_id_prompts
    assert config.group_requests
    assert config.seeds
    assert not (config.text_fallback or config.routed_experts or config.trust_env)


def test_the_deployment_of_hot_loads_is_the_one_whose_versions_are_known() -> None:
    assert RolloutConfig.from_env(REQUIRED | {"CWTRAIN_HOTLOAD_DEPLOYMENT_ID": "d-2"}).deployment_id == "d-2"


class TrainerArgs:
    use_tis = True
    use_rollout_routing_replay = True
    rollout_max_context_len = 8192


def test_a_trainer_s_flags_turn_on_what_they_need() -> None:
    config = RolloutConfig.for_trainer(TrainerArgs(), environ=REQUIRED)
    assert config.routed_experts
    assert config.context_length == 8192
    assert RolloutConfig.for_trainer(None, environ=REQUIRED) == RolloutConfig.from_env(REQUIRED)
    with pytest.raises(ConfigError, match="--use-tis") as caught:
        RolloutConfig.for_trainer(
            TrainerArgs(), environ=REQUIRED | {"CWTRAIN_ROLLOUT_LOGPROBS": "0", "CWTRAIN_ROLLOUT_TOKEN_IDS": "0"}
        )
    assert len(caught.value.problems) == 2


def test_settings_that_contradict_each_other_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_env(
            REQUIRED,
            token_ids=False,
            routed_experts=True,
            deployment_id="d",
            served_identity_file="f",
        )
    assert len(caught.value.problems) == 3


def test_arguments_win_over_the_environment() -> None:
    config = RolloutConfig.from_env(REQUIRED, model="other", concurrency=3)
    assert (config.model, config.concurrency) == ("other", 3)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://h", "http://h/v1"),
        ("http://h/", "http://h/v1"),
        ("https://h:8/v1/", "https://h:8/v1"),
        ("https://h/proxy/openai/v1", "https://h/proxy/openai/v1"),
        ("https://h/custom", "https://h/custom"),
    ],
)
def test_v1_is_added_to_a_bare_origin_only(given: str, used: str) -> None:
    assert RolloutConfig(base_url=given, model="m").base_url == used


def test_all_problems_come_at_once_and_name_their_variables() -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_env(
            {
                "CWTRAIN_ROLLOUT_BASE_URL": "frontend:8000",
                "CWTRAIN_ROLLOUT_MODEL": "  ",
                "CWTRAIN_ROLLOUT_API_KEY": f"{KEY} and more",
                "CWTRAIN_ROLLOUT_API_KEY_FILE": "/no/such/file",
                "CWTRAIN_ROLLOUT_CONCURRENCY": "many",
                "CWTRAIN_ROLLOUT_TIMEOUT": "nan",
                "CWTRAIN_ROLLOUT_DEADLINE": "0",
                "CWTRAIN_ROLLOUT_MAX_ATTEMPTS": "0",
                "CWTRAIN_ROLLOUT_LOGPROBS": "maybe",
                "CWTRAIN_ROLLOUT_LOGPROBS_MODE": "cooked",
            }
        )
    problems = caught.value.problems
    named = [next(name for name in _names() if name in problem) for problem in problems]
    assert len(problems) == 10
    assert set(named) == {
        f"{PREFIX}{name}"
        for name in (
            "BASE_URL",
            "MODEL",
            "API_KEY",
            "API_KEY_FILE",
            "CONCURRENCY",
            "TIMEOUT",
            "DEADLINE",
            "MAX_ATTEMPTS",
            "LOGPROBS",
            "LOGPROBS_MODE",
        )
    }
    assert KEY not in str(caught.value)
    assert KEY not in repr(caught.value)


def _names() -> list[str]:
    # longest first, so that API_KEY_FILE is not taken for API_KEY
    return sorted((name for var in env_vars(RolloutConfig).values() for name in var.names), key=len, reverse=True)


@pytest.mark.parametrize(
    "url", ["http://user:pass@h/v1", "http://h/v1?key=1", "ftp://h", "http://", "http://h:port", "h", "http://a..b/v1"]
)
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(base_url=url, model="m")
    assert "pass" not in str(caught.value).replace("password", "")


def test_a_key_has_one_source(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    with pytest.raises(ConfigError, match="both set") as caught:
        RolloutConfig.from_env(REQUIRED, api_key=KEY, api_key_file=file)
    assert KEY not in str(caught.value)


def test_the_key_file_is_read_again_and_may_not_vanish(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first-key")
    config = RolloutConfig.from_env(REQUIRED, api_key_file=file)
    file.write_text("second-key")
    assert config.current_api_key() == "second-key"
    file.unlink()
    with pytest.raises(ConfigError, match="API_KEY_FILE"):
        config.current_api_key()
    assert "hidden" in config.without_key("a text that may hold it")


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        RolloutConfig(base_url="http://h", model="m", api_key_file=str(file))


def test_keys_are_never_shown() -> None:
    config = RolloutConfig.from_env(REQUIRED | {"CWTRAIN_ROLLOUT_API_KEY": f" {KEY}\n"})
    assert config.current_api_key() == KEY
    assert KEY not in repr(config)
    assert config.without_key(f"bad key {KEY}!") == "bad key ***!"
    assert KEY.encode() not in pickle.dumps(config)
    os.environ["CWTRAIN_ROLLOUT_API_KEY"] = KEY
    assert pickle.loads(pickle.dumps(config)) == config


def test_unknown_variables_are_warned_about_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cwtrain.rollout"):
        RolloutConfig.from_env(REQUIRED | {"CWTRAIN_ROLLOUT_TIMEOUTS": "3", "CWTRAIN_ROLLOUT_FLAVOUR": "1"})
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "CWTRAIN_ROLLOUT_FLAVOUR is no setting of this version" in texts[0]
    assert "did you mean CWTRAIN_ROLLOUT_TIMEOUT?" in texts[1]


def test_the_package_docstring_lists_every_variable_with_its_meaning() -> None:
    lines = (cwtrain_rollout.__doc__ or "").splitlines()
    for field, var in env_vars(RolloutConfig).items():
        (line,) = [line for line in lines if line.split(" ")[0] == var.names[0]]
        assert var.help in line, field
        default = attrs.fields_dict(RolloutConfig)[field].default
        if default not in (attrs.NOTHING, None):
            shown = str(int(default)) if isinstance(default, bool | float) else str(default)
            assert line.endswith(f"({shown})"), field
    assert sum(line.startswith(PREFIX) for line in lines) == len(env_vars(RolloutConfig))


def test_doctor_shows_what_the_sampler_reads_and_names_what_it_does_not() -> None:
    """The settings of the sampler were not in the report, and a misspelled one was nowhere."""
    given = {
        "API_KEY": KEY,
        "TIMEOUT": "-3",
        "MODEL": "policy",
        "BASEURL": "http://frontend:8000",
        "FLAVOUR_OF_THE_DAY": "lime",
    }
    env = {f"{PREFIX}{name}": value for name, value in given.items()}
    done = run("doctor", env={"COREWEAVE_API_URL": "http://127.0.0.1:9", "CWTRAIN_HOTLAOD_WAIT": "0", **env})
    assert done.code == 0, done.err
    assert KEY not in done.out + done.err
    rows = {row["variables"][0]: row for row in done.data["settings"]}
    assert {name for var in env_vars(RolloutConfig).values() for name in var.names[:1]} <= rows.keys()
    assert rows[f"{PREFIX}MODEL"] == {"variables": [f"{PREFIX}MODEL"], "value": "policy", "source": f"{PREFIX}MODEL"}
    assert rows[f"{PREFIX}API_KEY"]["source"] == f"{PREFIX}API_KEY"
    assert rows[f"{PREFIX}BASE_URL"]["source"] == "unset"
    told = "\n".join(done.data["problems"])
    assert f"{PREFIX}TIMEOUT='-3' must be" in told
    assert f"{PREFIX}BASEURL is no setting and has no effect; did you mean {PREFIX}BASE_URL?" in told
    assert f"{PREFIX}FLAVOUR_OF_THE_DAY is no setting of what is installed here" in told
    assert "CWTRAIN_HOTLAOD_WAIT is no setting and has no effect; did you mean CWTRAIN_HOTLOAD_WAIT?" in told
