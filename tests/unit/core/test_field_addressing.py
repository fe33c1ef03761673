"""The kind: an explicit setting of the user that was set aside without a word. How buckets are addressed.

``config``, the environment and the AWS profile win, in this order, for every store but the service's own, which takes
one style only and says why.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config

from cwtrain.errors import ConfigError, ConnectionFailedError
from cwtrain.hotload import HotLoader
from cwtrain.storage import S3Store, s3_client, s3_settings
from helpers.fake_service import FakeService

OTHER = "https://s3.internal:8443"
PATH, VIRTUAL = f"{OTHER}/weights/a", "https://weights.s3.internal:8443/a"
OWN = ["https://cwobject.com", "http://cwlota.com", "https://CWObject.com:443/", "https://zone.cwobject.com"]


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Set who asks for which style."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "US-EAST-04A")

    def put(who: str, style: str) -> dict[str, Any]:
        if who == "config":
            return {"config": Config(s3={"addressing_style": style})}
        if who == "profile":
            (tmp_path / "config").write_text(
                f"[default]\ns3 =\n  addressing_style = {style}\n[profile other]\ns3 =\n  addressing_style = {style}\n"
            )
            monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        else:
            monkeypatch.setenv(who, style)
        return {}

    return put


def url(client: Any) -> str:
    signed: str = client.generate_presigned_url("get_object", Params={"Bucket": "weights", "Key": "a"})
    return signed.partition("?")[0]


WHO = ["config", "profile", "CW_S3_ADDRESSING_STYLE", "AWS_S3_ADDRESSING_STYLE"]


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(("style", "where"), [("path", PATH), ("virtual", VIRTUAL), ("auto", VIRTUAL)])
def test_what_is_asked_for_wins_at_another_store(setting: Any, who: str, style: str, where: str) -> None:
    given = setting(who, style)
    client = s3_client(OTHER, **given)
    assert url(client) == where
    assert s3_settings(client).addressing == ("path" if style == "path" else "virtual")
    if style != "auto":
        word = {"config": "argument config", "profile": "AWS profile 'default'"}.get(who, who)
        assert word in s3_settings(client).addressing_source


@pytest.mark.parametrize(("who", "endpoint"), list(zip(WHO, OWN, strict=True)))
def test_path_style_is_refused_at_the_services_own_endpoints(setting: Any, who: str, endpoint: str) -> None:
    given = setting(who, "path")
    with pytest.raises(ConfigError, match="refused by the store") as caught:
        s3_client(endpoint, **given)
    word = {"config": "argument config", "profile": "AWS profile 'default'"}.get(who, who)
    assert word in str(caught.value), "it says who asks for it"
    assert word in str(caught.value.hint)


@pytest.mark.parametrize(("who", "endpoint"), list(zip(WHO, OWN, strict=True)))
def test_the_services_own_style_is_fine_there(setting: Any, who: str, endpoint: str) -> None:
    assert s3_settings(s3_client(endpoint, **setting(who, "virtual"))).addressing == "virtual"


def test_config_wins_over_the_environment_and_that_over_the_profile(setting: Any) -> None:
    setting("profile", "path")
    assert url(s3_client(OTHER)) == PATH
    setting("CW_S3_ADDRESSING_STYLE", "virtual")
    assert url(s3_client(OTHER)) == VIRTUAL
    assert url(s3_client(OTHER, **setting("config", "path"))) == PATH


def test_another_profile_counts_too(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    setting("profile", "path")
    monkeypatch.setenv("AWS_PROFILE", "other")
    monkeypatch.setenv("CW_S3_ENDPOINT", OTHER)
    client = s3_client()
    assert url(client) == PATH
    assert "'other'" in s3_settings(client).addressing_source


def test_a_host_name_of_this_machine_takes_either(setting: Any) -> None:
    assert url(s3_client("http://localhost:9000")) == "http://localhost:9000/weights/a"
    setting("profile", "virtual")
    assert url(s3_client("http://localhost:9000")) == "http://weights.localhost:9000/a"


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9000", "http://[::1]:9000"])
def test_an_address_cannot_have_a_bucket_before_it(setting: Any, endpoint: str) -> None:
    setting("profile", "virtual")  # as the service's guide says; it is meant for the service
    assert url(s3_client(endpoint)) == f"{endpoint}/weights/a"
    for who in ("config", "CW_S3_ADDRESSING_STYLE"):
        with pytest.raises(ConfigError, match="IP address"):
            s3_client(endpoint, **setting(who, "virtual"))


def test_a_word_that_is_no_style_is_named(setting: Any) -> None:
    setting("profile", "sideways")
    with pytest.raises(ConfigError, match=r"AWS profile 'default' .*'sideways'"):
        s3_client(OTHER)
    setting("CW_S3_ADDRESSING_STYLE", "sideways")
    with pytest.raises(ConfigError, match="CW_S3_ADDRESSING_STYLE='sideways' must be path, virtual or auto"):
        s3_client(OTHER)


def test_a_bucket_with_dots_can_be_reached_by_path(setting: Any) -> None:
    S3Store(s3_client(OTHER, **setting("config", "path")), "my.bucket")
    with pytest.raises(ConfigError, match="host label") as caught:
        S3Store(s3_client(OTHER), "my.bucket")
    assert "CW_S3_ADDRESSING_STYLE=path" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="host label") as caught:
        S3Store(s3_client("https://cwobject.com"), "my.bucket")
    assert "path" not in str(caught.value.hint)


def test_a_store_without_a_host_name_for_its_bucket_gets_the_hint() -> None:
    config = Config(retries={"total_max_attempts": 1}, connect_timeout=5)
    store = S3Store(s3_client("http://s3.example.invalid:9", config=config), "weights")
    with pytest.raises(ConnectionFailedError) as caught:
        store.head("a")
    assert "CW_S3_ADDRESSING_STYLE=path" in str(caught.value.hint)


@pytest.mark.parametrize("style", ["path", "virtual", "auto"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_loader_in_another_process_reaches_the_store_in_the_same_way(style: str, stored: bool) -> None:
    given = s3_client(
        OTHER, config=Config(s3={"addressing_style": style}, request_checksum_calculation="when_supported")
    )
    loader = HotLoader(FakeService(), "dep", s3=S3Store(given, "weights") if stored else given)
    store: Any = pickle.loads(pickle.dumps(loader)).store
    again = store.inner._client
    assert url(again) == url(given)
    assert again.meta.config.request_checksum_calculation == "when_supported"
