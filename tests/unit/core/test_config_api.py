"""ApiConfig: token, origin, headers and TLS from arguments and the environment."""

from __future__ import annotations

import os
import pickle

import pytest

from cwtrain.config import ApiConfig
from cwtrain.config.api import is_loopback
from cwtrain.errors import ConfigError
from cwtrain.infra import InferenceClient, token_from_env

TOKEN = "tok-" + "a1b2" * 4


@pytest.mark.parametrize(
    ("environ", "token", "source"),
    [
        ({"COREWEAVE_API_TOKEN": TOKEN}, TOKEN, "COREWEAVE_API_TOKEN"),
        ({"COREWEAVE_API_TOKEN": TOKEN + "\n"}, TOKEN, "COREWEAVE_API_TOKEN"),
        ({"COREWEAVE_API_TOKEN": TOKEN + "\r\n"}, TOKEN, "COREWEAVE_API_TOKEN"),
        ({"COREWEAVE_API_TOKEN": f"\t  {TOKEN} "}, TOKEN, "COREWEAVE_API_TOKEN"),
        ({"COREWEAVE_API_TOKEN": "", "CW_API_TOKEN": TOKEN}, TOKEN, "CW_API_TOKEN"),
        ({"COREWEAVE_API_TOKEN": " \n", "CW_API_TOKEN": TOKEN}, TOKEN, "CW_API_TOKEN"),
        ({"COREWEAVE_API_TOKEN": TOKEN, "CW_API_TOKEN": "other"}, TOKEN, "COREWEAVE_API_TOKEN"),
    ],
)
def test_b43_token_sources(environ, token, source):
    """B43: blanks and line ends go, empty means unset, the documented order holds, and the source is known."""
    config = ApiConfig.from_env(environ)
    assert (config.token, config.token_source) == (token, source)
    assert token_from_env(environ) == token
    assert TOKEN not in repr(config)


@pytest.mark.parametrize(
    "bad",
    [
        TOKEN[:-1] + "\u00e7",
        f"\u201c{TOKEN}\u201d",
        TOKEN + "\nX-Evil: 1",
        TOKEN + "\r\nX-Evil: 1",
        "a\x00" + TOKEN,
        TOKEN + "\x7f" + TOKEN,
        "Bearer " + TOKEN,
        "\ufeff" + TOKEN,
    ],
)
@pytest.mark.parametrize("by", ["variable", "argument"])
def test_b43_refused_without_showing_it(bad, by):
    """B43: what no header can hold is refused, and no text of the error holds the token."""
    environ, overrides = ({"COREWEAVE_API_TOKEN": bad}, {}) if by == "variable" else ({}, {"token": bad})
    with pytest.raises(ConfigError) as caught:
        ApiConfig.from_env(environ, **overrides)
    if by == "variable":
        with pytest.raises(ConfigError, match="COREWEAVE_API_TOKEN"):
            token_from_env(environ)
    everything = (
        f"{caught.value!r} {caught.value} {caught.value.hint} {caught.value.problems} {caught.value.__cause__!r}"
    )
    assert TOKEN[:8] not in everything
    assert caught.value.hint
    assert ("COREWEAVE_API_TOKEN" if by == "variable" else "token") in str(caught.value)


def test_b43_argument_wins_and_an_empty_one_does_not():
    """B43: `--token ''` is as good as none."""
    environ = {"COREWEAVE_API_TOKEN": "from-env"}
    assert ApiConfig.from_env(environ, token="mine").token_source == "the token argument"
    assert ApiConfig.from_env(environ, token="mine").token == "mine"
    assert ApiConfig.from_env(environ, token="  ").token == "from-env"
    assert ApiConfig.from_env(environ, token="mine", token_source="--token").token_source == "--token"


def test_b43_no_token_says_what_to_set():
    """B43: nothing is sent without a token."""
    with pytest.raises(ConfigError, match="neither COREWEAVE_API_TOKEN nor CW_API_TOKEN") as caught:
        token_from_env({"COREWEAVE_API_TOKEN": ""})
    assert "COREWEAVE_API_TOKEN" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="no API token"):
        InferenceClient()


def test_defaults_and_environment():
    config = ApiConfig.from_env({})
    assert (config.token, config.token_source, config.base_url) == (None, "", "https://api.coreweave.com")
    assert (dict(config.headers), config.verify) == ({}, True)
    config = ApiConfig.from_env(
        {"COREWEAVE_API_URL": " http://127.0.0.1:8080/ ", "CWTRAIN_API_HEADERS": '{"X-Secret": "hush"}'}
    )
    assert config.base_url == "http://127.0.0.1:8080"
    assert config.headers == {"X-Secret": "hush"}
    assert "hush" not in repr(config)
    assert "X-Secret" in repr(config)
    assert ApiConfig.from_env({"CWTRAIN_API_HEADERS": '{"A": "b"}'}, headers={"C": "d"}).headers == {"C": "d"}


def test_verify_from_the_environment(tmp_path):
    bundle = tmp_path / "ca.pem"
    bundle.write_text("x")
    both = {"CWTRAIN_API_INSECURE": "1", "SSL_CERT_FILE": str(bundle)}
    assert ApiConfig.from_env({"CWTRAIN_API_INSECURE": "1"}).verify is False
    assert ApiConfig.from_env({"CWTRAIN_API_INSECURE": "0"}).verify is True
    assert ApiConfig.from_env({"CWTRAIN_API_INSECURE": "0", "SSL_CERT_FILE": str(bundle)}).verify == str(bundle)
    assert ApiConfig.from_env(both).verify is False
    assert ApiConfig.from_env(both, verify=True).verify == str(bundle), "an explicit True is not undone by a variable"
    assert ApiConfig.from_env(both, verify=False).verify is False
    assert ApiConfig.from_env({}, verify=str(bundle)).verify == str(bundle)
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE=.*does not exist"):
        ApiConfig.from_env({"SSL_CERT_FILE": str(tmp_path / "no.pem")})


@pytest.mark.parametrize(
    "url",
    [
        "https://api.coreweave.com/v1alpha1/inference",
        "https://api.coreweave.com/v1",
        "https://api.coreweave.com//",
        "https://api.coreweave.com?x=1",
        "https://api.coreweave.com/#x",
        "https://api.coreweave.com?",
        "https://me:secret@api.coreweave.com",
        "https://",
        "https:///x",
        "api.coreweave.com",
        "ftp://api.coreweave.com",
        "https://api.coreweave.com:port",
        "https://api.core weave.com",
        "https://[::1",
    ],
)
def test_only_an_origin_is_a_base_url(url):
    for make in (lambda: ApiConfig(base_url=url), lambda: ApiConfig.from_env({"COREWEAVE_API_URL": url})):
        with pytest.raises(ConfigError) as caught:
            make()
        assert "https://api.coreweave.com" in (caught.value.hint or "")
        assert "secret" not in f"{caught.value}{caught.value.problems}"


@pytest.mark.parametrize("url", ["https://API.Example.com:8443", "http://[::1]:80", "http://10.0.0.1", "https://a"])
def test_origins(url):
    assert ApiConfig(base_url=url).base_url == url
    assert ApiConfig(base_url=url + "/").base_url == url


def test_loopback():
    assert all(map(is_loopback, ["http://127.0.0.1:1", "http://127.8.8.8", "https://[::1]", "http://localhost:2"]))
    assert not any(map(is_loopback, ["http://10.0.0.1", "https://localhost.example.com", "https://api.coreweave.com"]))


@pytest.mark.parametrize(
    "headers",
    ["[]", "{", '"x"', '{"X": 1}', '{"X Y": "z"}', '{"X": "a\\nb"}', '{"X": "\u00e7"}', '{"authorization": "Basic x"}'],
)
def test_headers_that_cannot_be_sent(headers):
    with pytest.raises(ConfigError, match="CWTRAIN_API_HEADERS"):
        ApiConfig.from_env({"CWTRAIN_API_HEADERS": headers})


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        ApiConfig.from_env(
            {
                "COREWEAVE_API_TOKEN": TOKEN + "\n" + TOKEN,
                "COREWEAVE_API_URL": "https://user:hunter2@host/v1",
                "CWTRAIN_API_INSECURE": "perhaps",
            }
        )
    assert [problem.partition("=")[0].partition(" ")[0] for problem in caught.value.problems] == [
        "COREWEAVE_API_TOKEN",
        "COREWEAVE_API_URL",
        "CWTRAIN_API_INSECURE",
    ]
    assert "hunter2" not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_it_reads_the_real_environment_and_pickles():
    os.environ["COREWEAVE_API_TOKEN"] = TOKEN
    os.environ["COREWEAVE_API_URL"] = "http://localhost:9"
    config = ApiConfig.from_env()
    assert (config.token, config.base_url) == (TOKEN, "http://localhost:9")
    assert pickle.loads(pickle.dumps(config)) == config
