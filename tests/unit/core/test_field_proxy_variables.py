"""The kind: proxy and CA variables that cannot be read, in the spellings that sites and containers leave behind.

What is not used is left out; what is used and cannot be is named with its variable: never as a mistake in the program,
never with the proxy's password, and alike for the API, the bucket and rollouts.
"""

from __future__ import annotations

import base64
import importlib.util

import pytest

from cwtrain.cli._errors import report
from cwtrain.errors import ConfigError, ConnectionFailedError, CWTrainError
from cwtrain.infra import InferenceClient
from cwtrain.storage import s3_client
from helpers.scripted_api import deployment
from helpers.scripted_http import Reply, ScriptedServer
from helpers.scripted_s3 import aws_session

API = "https://api.example.invalid"
SECRET = "hunter2secret"


@pytest.fixture
def variables(monkeypatch):
    """Set variables as given; no other proxy variable is set."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setenv("AWS_REGION", "US-EAST-04A")

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def api(url=API):
    return InferenceClient("token", base_url=url, retry_seconds=0, timeout=5)


def rollout():
    transport = pytest.importorskip("cwtrain_rollout._http").HttpTransport
    config = pytest.importorskip("cwtrain_rollout.config").RolloutConfig
    return transport(config(base_url=f"{API}/v1", model="m", trust_env=True))


CLIENTS = {
    "api": lambda: api().close(),
    "storage": lambda: s3_client("https://store.example.invalid", session=aws_session()),
    "rollout": rollout,
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "value",
    [
        "localhost,fe80::/10",
        "localhost,[::1]:80",
        "10.0.0.0/8,fe80::/10, 127.0.0.1:http",
        "[fe80::1%eth0]",
        "http://foo:bar",
        "exa mple.com, ,",
        "*.internal,::,:::::,/,1.2.3.4/99",
        "\u2603.example,xn--",
    ],
)
def test_what_cannot_be_read_in_no_proxy_is_left_out(variables, client, value):
    variables(NO_PROXY=value, HTTPS_PROXY="http://proxy.example.invalid:3128")
    CLIENTS[client]()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "value",
    [
        "http://proxy:port",
        f"http://user:{SECRET}@proxy:port",
        f"http://user:{SECRET}/@proxy:3128",
        "http://proxy:99999",
        "http://[::1",
        "http://:3128",
        "http://pro xy:3128",
        f"http://user:{SECRET}\x01@proxy:3128",
        f"carrier-pigeon://user:{SECRET}@loft",
        f'"http://user:{SECRET}@proxy:3128"',
        f"http://user:{SECRET}@" + "a" * 70 + ".example:3128",
    ],
)
def test_a_proxy_that_cannot_be_used_is_named_by_its_variable(variables, client, value):
    name = "https_proxy" if "@" in value else "HTTPS_PROXY"
    variables(**{name: value})
    with pytest.raises(ConfigError) as caught:
        CLIENTS[client]()
    assert str(caught.value).startswith(f"{name} cannot be used as the proxy for")
    assert name in caught.value.hint
    assert "NO_PROXY" in caught.value.hint
    assert SECRET not in f"{caught.value!r} {caught.value} {caught.value.hint} {caught.value.__cause__}"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "values",
    [
        {"http_proxy": "http://proxy:port"},  # not used for https
        {"HTTPS_PROXY": "http://proxy:port", "https_proxy": ""},  # a blank one in lower case unsets it
        {"HTTPS_PROXY": "http://proxy:port", "NO_PROXY": ".invalid"},
        {"HTTPS_PROXY": "http://proxy:port", "NO_PROXY": "*"},
        {"https_proxy": " http://proxy:3128\n"},
        {"https_proxy": "proxy:3128"},
        {"https_proxy": f"http://user:{SECRET}@{SECRET}@proxy:3128/"},
    ],
)
def test_what_is_not_used_or_can_be_read_is_no_problem(variables, client, values):
    variables(**values)
    CLIENTS[client]()


@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "socks4", "socks"])
def test_socks_without_its_package_is_named(variables, scheme):
    if importlib.util.find_spec("socksio"):
        pytest.skip("the package for SOCKS is installed")
    variables(ALL_PROXY=f"{scheme}://user:{SECRET}@proxy:1080")
    with pytest.raises(ConfigError, match=r"ALL_PROXY .*SOCKS") as caught:
        api()
    assert "httpx[socks]" in caught.value.hint
    assert SECRET not in str(caught.value)
    s3_client("https://store.example.invalid", session=aws_session())  # ALL_PROXY was never a variable of boto3's


def test_the_command_line_says_so_too(variables):
    """What it said was: this is a mistake in the program."""
    variables(NO_PROXY="localhost,fe80::/10", HTTPS_PROXY=f"http://user:{SECRET}@proxy:port")
    with pytest.raises(CWTrainError) as caught:
        api()
    said = report(caught.value)
    assert "mistake" not in str(said)
    assert SECRET not in str(said)


@pytest.mark.parametrize(
    ("no_proxy", "host", "used"),
    [
        ("localhost,fe80::/10", "api.example.invalid", True),
        ("example.invalid", "api.example.invalid", False),
        (".example.invalid", "api.example.invalid", False),
        ("*.example.invalid", "api.example.invalid", False),
        ("http://api.example.invalid/", "api.example.invalid", False),
        ("api.example.invalid:80", "api.example.invalid", False),
        ("api.example.invalid:81", "api.example.invalid", True),
        ("ample.invalid", "api.example.invalid", True),
        ("192.0.2.0/24", "192.0.2.7", False),
        ("192.0.2.0/30", "192.0.2.7", True),
        ("2001:db8::/32", "[2001:db8::7]", False),
        ("[2001:db8::7]:80", "[2001:db8::7]", False),
        ("192.0.2.7:80", "192.0.2.7", False),
    ],
)
def test_no_proxy_takes_names_addresses_ranges_and_ports(variables, no_proxy, host, used):
    from cwtrain.config.network import proxy_for

    variables(NO_PROXY=no_proxy, http_proxy="http://proxy:3128")
    assert (proxy_for(f"http://{host}") is not None) == used


def test_a_password_with_an_at_sign_reaches_the_proxy_and_no_message(variables):
    with ScriptedServer([Reply(200, deployment("d-1")), Reply(drop="before")]) as proxy:
        variables(http_proxy=proxy.url.replace("//", f"//user:{SECRET}@%2F@"), NO_PROXY="fe80::/10")
        with api("http://api.example.invalid") as client:
            assert client.get_deployment("d-1").id == "d-1"
            given = proxy.requests[0].headers["proxy-authorization"].removeprefix("Basic ")
            assert base64.b64decode(given).decode() == f"user:{SECRET}@/"
            with pytest.raises(ConnectionFailedError, match=r"through the proxy 127\.0\.0\.1 of http_proxy") as caught:
                client.get_deployment("d-1")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_a_ca_bundle_that_is_not_there_is_named(variables, name):
    variables(**{name: "/nowhere/ca.pem"})
    for client in ("api", "rollout"):
        with pytest.raises(ConfigError, match=rf"{name}=.*/nowhere/ca\.pem"):
            CLIENTS[client]()


def test_a_ca_bundle_of_the_bucket_that_is_not_there_is_named(variables, tmp_path):
    variables(AWS_CA_BUNDLE="/nowhere/ca.pem")
    with pytest.raises(ConfigError, match=r"/nowhere/ca\.pem") as caught:
        CLIENTS["storage"]()
    assert "AWS_CA_BUNDLE" in caught.value.hint


def test_a_folder_of_certificates_may_be_one_of_several(variables, tmp_path):
    variables(SSL_CERT_DIR=f"/nowhere:{tmp_path}")
    CLIENTS["api"]()


def test_a_netrc_that_cannot_be_read_is_nobodys_business(variables, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine api.example.invalid login only\nnonsense {{{")
    variables(NETRC=str(tmp_path / "netrc"))
    for make in CLIENTS.values():
        make()


def test_the_emulators_own_client_uses_no_proxy(variables):
    variables(http_proxy="http://proxy:port", NO_PROXY="fe80::/10", ALL_PROXY="socks5://proxy:1")
    emulator = pytest.importorskip("cwtrain_emulator.control_client")
    with ScriptedServer([Reply(200, {"faults": []})]) as server:
        assert emulator.Control(server.url, "token").faults() == []
    with pytest.raises(emulator.ControlError, match="no emulator answers"):
        emulator.Control("http://127.0.0.1:9", "token").faults()
