from __future__ import annotations

import logging
import pickle
from pathlib import Path

import attrs
import pytest

import cwtrain_rollout
from cwtrain.config._env import env_vars
from cwtrain.errors import ConfigError
from cwtrain_rollout import RolloutConfig
from cwtrain_rollout.config import PREFIX

REQUIRED = {"CWTRAIN_ROLLOUT_BASE_URL": "http://frontend:8000", "CWTRAIN_ROLLOUT_MODEL": "policy"}
KEY = "sk-very-secret-0123456789"


def test_from_env_takes_every_setting(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\r\n")
    config = RolloutConfig.from_env(
        REQUIRED
        | {
            "CWTRAIN_ROLLOUT_API_KEY_FILE": str(file),
            "CWTRAIN_ROLLOUT_CONCURRENCY": "12",
            "CWTRAIN_ROLLOUT_TIMEOUT": "5",
            "CWTRAIN_ROLLOUT_DEADLINE": "6.5",
            "CWTRAIN_ROLLOUT_MAX_ATTEMPTS": "3",
            "CWTRAIN_ROLLOUT_LOGPROBS": "0",
            "CWTRAIN_ROLLOUT_LOGPROBS_MODE": "Raw",
            "CWTRAIN_ROLLOUT_SEEDS": "no",
            "CWTRAIN_ROLLOUT_TRUST_ENV": "1",
        }
    )
    assert attrs.asdict(config) == {
        "base_url": "http://frontend:8000/v1",
        "model": "policy",
        "api_key": None,
        "api_key_file": str(file),
        "concurrency": 12,
        "timeout": 5.0,
        "deadline": 6.5,
        "max_attempts": 3,
        "logprobs": False,
        "logprobs_mode": "raw",
        "seeds": False,
        "trust_env": True,
    }
    assert config.current_api_key() == KEY


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
                "CWTRAIN_ROLLOUT_CONCURRENCY": "auto",
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
    assert set(named) == {name for name in _names() if not name.endswith(("SEEDS", "TRUST_ENV"))}
    assert KEY not in str(caught.value)
    assert KEY not in repr(caught.value)


def _names() -> list[str]:
    # longest first, so that API_KEY_FILE is not taken for API_KEY
    return sorted((name for var in env_vars(RolloutConfig).values() for name in var.names), key=len, reverse=True)


@pytest.mark.parametrize(
    "url", ["http://user:pass@h/v1", "http://h/v1?key=1", "ftp://h", "http://", "http://h:port", "h"]
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
    assert pickle.loads(pickle.dumps(config)) == config


def test_unknown_variables_are_warned_about_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cwtrain.rollout"):
        RolloutConfig.from_env(REQUIRED | {"CWTRAIN_ROLLOUT_TIMEOUTS": "3", "CWTRAIN_ROLLOUT_ROUTED_EXPERTS": "1"})
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "CWTRAIN_ROLLOUT_ROUTED_EXPERTS is no setting of this version" in texts[0]
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
