"""What only a real socket shows: lost and cut answers, time limits, TLS, proxies, redirects, keep-alive."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cwtrain import errors
from cwtrain.infra import InferenceClient
from cwtrain.infra import _http as http
from helpers.scripted_api import deployment
from helpers.scripted_http import Reply, ScriptedServer

TOKEN = "tok-a1b2c3d4e5f6"
FOUND = Reply(200, deployment("d-1"))


def client(url, **settings):
    return InferenceClient(TOKEN, base_url=url, **{"timeout": 10, **settings})


@pytest.mark.parametrize(
    "lost", [Reply(drop="before"), Reply(200, deployment("d-1"), drop="middle"), Reply(502, "bad")]
)
def test_a_lost_or_cut_answer_is_asked_for_again(lost):
    with ScriptedServer([lost, FOUND]) as server, client(server.url) as api:
        assert api.get_deployment("d-1").id == "d-1"
        assert len(server.requests) == 2
        assert server.requests[0].target == "/v1alpha1/inference/deployments/d-1"
        assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"


def test_b28_a_create_whose_answer_is_lost_keeps_its_id():
    """B28: over a real connection that breaks after the request was read."""
    replies = [Reply(drop="before"), Reply(409, {"code": 6, "message": "exists"}), Reply(200, deployment("d-1"))]
    with ScriptedServer(replies) as server, client(server.url) as api:
        assert api.create_deployment({"id": "d-1", "name": "toy"}).id == "d-1"
    assert [(one.method, (one.json or {}).get("id")) for one in server.requests] == [
        ("POST", "d-1"),
        ("POST", "d-1"),
        ("GET", None),
    ]


def test_nobody_there():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with client(url, retry_seconds=0) as api, pytest.raises(errors.ConnectionFailedError) as caught:
            api.get_deployment("d-1")
    assert url in str(caught.value)
    assert "GET /deployments/d-1" in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.fixture
def silent():
    """A port that takes connections and never answers; what is written to ``drip`` goes out byte by byte."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()
    held = []

    def serve():
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    def drip(connection):
        try:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n")
            while not stop.wait(0.02):
                connection.sendall(b" ")
        except OSError:
            pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop.set()
    listener.close()
    for connection in held:
        connection.close()


def test_an_answer_that_only_drips_has_an_end(silent):
    with (
        client(silent, timeout=0.2, retry_seconds=0) as api,
        pytest.raises(errors.RequestTimeoutError, match=r"within 0\.2 s \(GET /deployments/d-1\)"),
    ):
        api.get_deployment("d-1")


def test_no_answer_within_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            client(url, timeout=0.1, retry_seconds=0) as api,
            pytest.raises(errors.RequestTimeoutError, match=r"no answer within 0\.1 s") as caught,
        ):
            api.get_deployment("d-1")
    assert "safe to make it again" in caught.value.hint


def test_answers_are_bounded(monkeypatch):
    monkeypatch.setattr(http, "LARGEST_ANSWER_BYTES", 1000)
    monkeypatch.setattr(http, "LARGEST_REFUSAL_BYTES", 1000)
    large = deployment("d-1", note="x" * 5000)
    with ScriptedServer([Reply(200, large), Reply(400, "y" * 5000), FOUND]) as server, client(server.url) as api:
        with pytest.raises(errors.UnexpectedAnswerError, match="larger than 1000 bytes"):
            api.get_deployment("d-1")
        with pytest.raises(errors.InvalidArgumentError):
            api.get_deployment("d-1")
        assert api.get_deployment("d-1").id == "d-1"
        assert len(server.requests) == 3


def test_the_token_does_not_follow_a_redirect():
    with ScriptedServer([FOUND]) as other:
        to = f"{other.url}/v1alpha1/inference/deployments/d-1"
        with (
            ScriptedServer([Reply(307, "", {"Location": to})]) as server,
            client(server.url) as api,
            pytest.raises(errors.UnexpectedAnswerError, match="redirected to"),
        ):
            api.get_deployment("d-1")
    assert other.requests == []


def test_connections_are_reused_and_shared_by_threads_and_views():
    with ScriptedServer([FOUND]) as server, client(server.url) as api, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: api.within(5).get_deployment("d-1").id, range(20)))
        assert found == ["d-1"] * 20
        os.environ["COREWEAVE_API_TOKEN"] = "token"
        assert pickle.loads(pickle.dumps(api)).get_deployment("d-1").id == "d-1"


# Proxies -------------------------------------------------------------------------------------------------------------


PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def no_proxies():
    for name in (*PROXIES, "NO_PROXY"):
        os.environ.pop(name, None)
        os.environ.pop(name.lower(), None)


def test_a_loopback_service_is_never_asked_through_a_proxy():
    with ScriptedServer([Reply(503, "the proxy says no")]) as proxy, ScriptedServer([FOUND]) as server:
        no_proxies()
        for name in PROXIES:
            os.environ[name] = os.environ[name.lower()] = proxy.url
        with client(server.url) as api:
            assert api.get_deployment("d-1").id == "d-1"
    assert proxy.requests == []


@pytest.mark.parametrize(
    ("scheme", "variable", "status"),
    [
        ("http", "HTTP_PROXY", 200),
        ("https", "HTTPS_PROXY", 503),
        ("https", "https_proxy", 503),
        ("http", "ALL_PROXY", 200),
    ],
)
def test_other_services_are_asked_through_the_proxy_of_the_environment(scheme, variable, status):
    no_proxies()
    with ScriptedServer([Reply(status, deployment("d-1"))]) as proxy:
        os.environ[variable] = proxy.url.replace("//", "//user:hunter2@")
        with client(f"{scheme}://api.example.invalid", retry_seconds=0) as api:
            if status == 200:
                assert api.get_deployment("d-1").id == "d-1"
            else:
                with pytest.raises(
                    errors.ConnectionFailedError, match=f"through the proxy 127.0.0.1 of {variable}"
                ) as caught:
                    api.get_deployment("d-1")
                assert "hunter2" not in str(caught.value)
        assert len(proxy.requests) == 1
        os.environ["NO_PROXY"] = "api.example.invalid"
        with (
            client(f"{scheme}://api.example.invalid", retry_seconds=0) as api,
            pytest.raises(errors.ConnectionFailedError) as caught,
        ):
            api.get_deployment("d-1")
        assert "proxy" not in str(caught.value)
        assert len(proxy.requests) == 1


def test_a_proxy_that_cannot_be_used_is_named():
    no_proxies()
    os.environ["ALL_PROXY"] = "carrier-pigeon://loft"
    with pytest.raises(errors.ConfigError, match=r"api\.example\.com") as caught:
        InferenceClient("t", base_url="https://api.example.com")
    assert "ALL_PROXY" in caught.value.hint


# TLS -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1: (PEM of the certificate, PEM of the key)."""
    openssl = shutil.which("openssl")
    if not openssl:
        pytest.skip("openssl is not installed; apt-get install openssl")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


@pytest.fixture
def https(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with ScriptedServer([FOUND], tls=context) as server:
        yield server


def test_tls_is_checked_by_default_and_a_stranger_is_not_asked_twice(https):
    os.environ.pop("SSL_CERT_FILE", None)
    with client(https.url, retry_seconds=30) as api, pytest.raises(errors.ConnectionFailedError) as caught:
        api.get_deployment("d-1")
    assert "SSL_CERT_FILE or verify=PATH" in caught.value.hint
    assert "tries" not in str(caught.value)
    assert https.requests == []


@pytest.mark.parametrize(
    "how", ["verify=PATH", "SSL_CERT_FILE", "SSL_CERT_FILE, verify=True", "verify=False", "INSECURE"]
)
def test_ways_to_trust_a_test_server(https, certificate, how):
    os.environ.pop("SSL_CERT_FILE", None)
    settings = {"verify=PATH": {"verify": str(certificate[0])}, "verify=False": {"verify": False}}.get(how, {})
    if "SSL_CERT_FILE" in how:
        os.environ["SSL_CERT_FILE"] = str(certificate[0])
    if "verify=True" in how:
        settings = {"verify": True}
    if how == "INSECURE":
        os.environ["CWTRAIN_API_INSECURE"] = "1"
    with client(https.url, **settings) as api:
        os.environ.pop("SSL_CERT_FILE", None)
        os.environ.pop("CWTRAIN_API_INSECURE", None)
        assert api.get_deployment("d-1").id == "d-1"
        os.environ["COREWEAVE_API_TOKEN"] = "token"
        with pickle.loads(pickle.dumps(api)) as again:
            assert again.get_deployment("d-1").id == "d-1"


def test_a_bundle_that_is_none(tmp_path):
    bundle = tmp_path / "ca.pem"
    bundle.write_text("hello")
    with pytest.raises(errors.ConfigError, match=f"^{re.escape(str(bundle))} cannot be used as a CA bundle") as caught:
        client("https://127.0.0.1:1", verify=str(bundle))
    assert caught.value.hint == "give the path of a PEM file with certificates"
    client("https://127.0.0.1:1", verify=str(tmp_path)).close()  # a folder of certificates
