"""The rules of the S3 client: endpoint, region, addressing, checksums, credentials, threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.config import Config
from botocore.credentials import CredentialProvider, Credentials

from cwtrain.errors import ConfigError, StorageAccessError, StorageError, StorageRegionError
from cwtrain.storage import S3Store, s3_client, s3_settings

ZONE = "US-EAST-04A"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.fixture
def zone(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", ZONE)


def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


# ---- endpoint


@pytest.mark.usefixtures("zone")
def test_endpoint_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert s3_settings(s3_client()).endpoint_url == "https://cwobject.com"
    profile(
        tmp_path,
        monkeypatch,
        "[default]\nendpoint_url = https://profile.example\nservices = mine\n"
        "[services mine]\ns3 =\n  endpoint_url = https://services.example\n",
    )
    found = []
    for name, url in (
        (None, None),
        ("AWS_ENDPOINT_URL", "https://all.example"),
        ("AWS_ENDPOINT_URL_S3", "https://s3.amazonaws.com"),
        ("CW_S3_ENDPOINT", " https://own.example/ "),
    ):
        if name and url:
            monkeypatch.setenv(name, url)
        settings = s3_settings(s3_client())
        found.append(settings.endpoint_url)
        if name:
            assert settings.endpoint_source == name
    assert found == [
        "https://services.example",
        "https://all.example",
        "https://s3.amazonaws.com",
        "https://own.example",
    ]
    assert s3_settings(s3_client("https://given.example")).endpoint_url == "https://given.example"


@pytest.mark.usefixtures("zone")
def test_the_profile_s_endpoint_without_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile(tmp_path, monkeypatch, "[profile lab]\nendpoint_url = https://lab.example\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    settings = s3_settings(s3_client())
    assert (settings.endpoint_url, settings.endpoint_source) == (
        "https://lab.example",
        "endpoint_url of the AWS profile 'lab'",
    )


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("how", ["environment", "profile", "config"])
def test_configured_aws_endpoints_can_be_ignored(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://all.example")
    config = None
    if how == "environment":
        monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    elif how == "profile":
        profile(tmp_path, monkeypatch, "[default]\nignore_configured_endpoint_urls = true\n")
    else:
        config = Config(ignore_configured_endpoint_urls=True)
    client = s3_client(config=config)
    assert client.meta.endpoint_url == "https://cwobject.com"
    monkeypatch.setenv("CW_S3_ENDPOINT", "https://own.example")
    assert s3_client(config=config).meta.endpoint_url == "https://own.example"


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("url", ["cwobject.com", "ftp://cwobject.com", "https://"])
def test_an_endpoint_that_is_no_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CW_S3_ENDPOINT", url)
    with pytest.raises(ConfigError, match="CW_S3_ENDPOINT"):
        s3_client()


def test_a_profile_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        s3_client()


# ---- region (B36)


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("empty", [None, "", "  "])
def test_no_region_is_an_error_with_an_example(empty: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """B36: a missing or empty region is found before any request, and the message says what to set."""
    if empty is not None:
        monkeypatch.setenv("AWS_REGION", empty)
        monkeypatch.setenv("AWS_DEFAULT_REGION", empty)
    with pytest.raises(StorageRegionError) as missing:
        s3_client()
    assert "AWS_REGION=US-EAST-04A" in (missing.value.hint or "")


@pytest.mark.usefixtures("keys")
def test_region_order_and_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B36: argument, AWS_REGION, AWS_DEFAULT_REGION, profile; the spelling is passed on as given."""
    profile(tmp_path, monkeypatch, "[default]\nregion = Eu-Profile-1\n")
    found = [s3_settings(s3_client())]
    monkeypatch.setenv("AWS_REGION", "")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-default-01a")
    found.append(s3_settings(s3_client()))
    monkeypatch.setenv("AWS_REGION", ZONE)
    found.append(s3_settings(s3_client()))
    found.append(s3_settings(s3_client(region_name="us-east-04a")))
    assert [(one.region, one.region_source) for one in found] == [
        ("Eu-Profile-1", "the AWS profile 'default'"),
        ("us-default-01a", "AWS_DEFAULT_REGION"),
        (ZONE, "AWS_REGION"),
        ("us-east-04a", "the argument region_name"),
    ]
    assert s3_client().meta.region_name == ZONE


# ---- addressing


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("https://cwobject.com", "https://weights.cwobject.com/a/b"),
        ("http://cwlota.com", "http://weights.cwlota.com/a/b"),
        ("https://s3.internal:8443", "https://weights.s3.internal:8443/a/b"),
        ("http://127.0.0.1:9000", "http://127.0.0.1:9000/weights/a/b"),
        ("http://[::1]:9000", "http://[::1]:9000/weights/a/b"),
        ("http://10.1.2.3", "http://10.1.2.3/weights/a/b"),
        ("http://localhost:9000", "http://localhost:9000/weights/a/b"),
    ],
)
def test_where_the_bucket_goes(endpoint: str, url: str) -> None:
    client = s3_client(endpoint)
    signed = client.generate_presigned_url("get_object", Params={"Bucket": "weights", "Key": "a/b"})
    assert signed.partition("?")[0] == url


@pytest.mark.usefixtures("zone")
def test_addressing_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="path-style"):
        s3_client(config=Config(s3={"addressing_style": "path"}))
    with pytest.raises(ConfigError, match="IP address"):
        s3_client("http://127.0.0.1:9000", config=Config(s3={"addressing_style": "virtual"}))
    named = s3_client("http://localhost:9000", config=Config(s3={"addressing_style": "virtual"}))
    url = named.generate_presigned_url("get_object", Params={"Bucket": "weights", "Key": "x"})
    assert url.startswith("http://weights.localhost:9000/x?")


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize(
    "bucket", ["my.bucket", "My-Bucket", "my_bucket", "ab", "arn:aws:s3:us-west-2:1:accesspoint/x"]
)
def test_a_bucket_that_is_no_host_label(bucket: str) -> None:
    client = s3_client()
    with pytest.raises(ConfigError, match="host label") as refused:
        client.head_object(Bucket=bucket, Key="x")
    assert bucket in str(refused.value)
    with pytest.raises(ConfigError):
        S3Store(client, bucket)
    S3Store(s3_client("http://127.0.0.1:9000"), "my.bucket")


# ---- checksums, signing, pool, retries


@pytest.mark.usefixtures("zone")
def test_checksums_only_when_required() -> None:
    """B07: set by us for our own sessions and for a caller's, which may have no opinion."""
    for client in (s3_client(), s3_client(session=boto3.Session()), s3_client(config=Config(connect_timeout=3))):
        config = client.meta.config
        assert config.request_checksum_calculation == "when_required"
        assert config.response_checksum_validation == "when_required"


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("how", ["environment", "profile", "argument", "session"])
def test_the_user_s_own_checksum_setting_stays(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B07: a setting of the user is not overridden."""
    arguments: dict[str, Any] = {}
    wanted = Config(request_checksum_calculation="when_supported")
    if how == "environment":
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    elif how == "profile":
        profile(tmp_path, monkeypatch, "[default]\nrequest_checksum_calculation = when_supported\n")
    elif how == "argument":
        arguments["config"] = wanted
    else:
        core = botocore.session.Session()
        core.set_default_client_config(wanted)
        arguments["session"] = boto3.Session(botocore_session=core)
    config = s3_client(**arguments).meta.config
    assert config.request_checksum_calculation == "when_supported"
    assert config.response_checksum_validation == "when_required"


@pytest.mark.usefixtures("zone")
def test_payloads_are_signed_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert s3_client().meta.config.s3["payload_signing_enabled"] is False
    monkeypatch.setenv("CWTRAIN_S3_SIGN_PAYLOAD", "1")
    assert s3_client().meta.config.s3["payload_signing_enabled"] is True


@pytest.mark.usefixtures("zone")
def test_pool_retries_and_passed_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """B40: the pool is at least as wide as asked for, and what the caller says in a config wins."""
    client = s3_client(max_pool_connections=80)
    assert client.meta.config.max_pool_connections == 80
    assert s3_settings(client).max_pool_connections == 80
    assert client.meta.config.retries["mode"] == "standard"
    given = s3_client(config=Config(max_pool_connections=5, read_timeout=7, retries={"mode": "adaptive"}), use_ssl=True)
    assert (given.meta.config.max_pool_connections, given.meta.config.read_timeout) == (5, 7)
    assert given.meta.config.retries["mode"] == "adaptive"
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    assert s3_client().meta.config.retries["total_max_attempts"] == 2


# ---- credentials and threads


@pytest.mark.usefixtures("zone")
def test_no_credentials_is_said_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    client = s3_client("http://127.0.0.1:9")
    sent: list[object] = []
    client.meta.events.register("before-send.s3", lambda request, **_: sent.append(request))
    with pytest.raises(StorageAccessError, match="no usable S3 credentials") as missing:
        S3Store(client, "weights").head("x")
    assert "AWS_ACCESS_KEY_ID" in (missing.value.hint or "")
    assert sent == []


@pytest.mark.usefixtures("zone")
def test_half_of_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageAccessError, match="no usable S3 credentials"):
        s3_client()


class _SlowOnce(CredentialProvider):  # type: ignore[misc]
    """A provider that is asked by several threads at once, if anything is."""

    METHOD = "slow"
    asked_at_once = 0
    _inside = 0

    def load(self) -> Credentials:
        type(self)._inside += 1
        type(self).asked_at_once = max(type(self).asked_at_once, type(self)._inside)
        threading.Event().wait(0.02)
        type(self)._inside -= 1
        return Credentials("key", "secret", method=self.METHOD)


def test_many_threads_make_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """B39: clients are made one at a time, from private sessions or the caller's; the default one stays untouched."""
    monkeypatch.setenv("AWS_REGION", ZONE)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # another test's library may have made one
    core = botocore.session.Session()
    core.get_component("credential_provider").insert_before("env", _SlowOnce())
    shared = boto3.Session(botocore_session=core)
    gate = threading.Barrier(16)
    clients: list[Any] = []
    errors: list[BaseException] = []

    def make(session: boto3.Session | None) -> None:
        gate.wait()
        try:
            clients.append(s3_client(session=session))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(shared if n % 4 else None,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len({id(client) for client in clients}) == 16
    assert _SlowOnce.asked_at_once == 1
    assert boto3.DEFAULT_SESSION is None


def test_importing_the_room_loads_no_s3_library() -> None:
    code = (
        "import sys; import cwtrain.storage as s\n"
        "s.MemoryStore, s.upload_objects, s.plan_upload, s.Location, s.ObjectStore, s.check_access\n"
        "assert not {'boto3', 'botocore', 'numpy', 'httpx'} & set(sys.modules)\n"
        "assert all(getattr(s, name) for name in s.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_refused() -> None:
    import cwtrain.storage

    with pytest.raises(AttributeError, match="nothing_like_it"):
        cwtrain.storage.nothing_like_it  # noqa: B018
    assert issubclass(StorageRegionError, StorageError)
