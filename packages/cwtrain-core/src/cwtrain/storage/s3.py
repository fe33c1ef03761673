"""A boto3 client that follows the rules of CoreWeave AI Object Storage: endpoint, region, addressing, checksums.

Every decision about how the bucket is reached is made here, and ``s3_settings`` says what was decided and why.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.utils import get_environ_proxies

from cwtrain._process import renew_after_fork, renew_locks_after_fork
from cwtrain.config import StorageConfig
from cwtrain.config._env import sources
from cwtrain.config.api import is_loopback
from cwtrain.config.network import proxy_for
from cwtrain.errors import ConfigError, CWTrainError, StorageRegionError
from cwtrain.storage._signing import sign_known_bodies, watch_credentials
from cwtrain.storage._translate import translate
from cwtrain.storage._wire import leave_connections, send_with_own_sockets

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client

__all__ = ["DEFAULT_ENDPOINT", "S3Settings", "check_bucket", "s3_client", "s3_settings"]

DEFAULT_ENDPOINT = "https://cwobject.com"
_OWN_HOSTS = ("cwobject.com", "cwlota.com")
"""The service's own endpoints, which refuse path style."""
_REGION_EXAMPLE = "US-EAST-04A"

_BUCKET_LABEL = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_BUCKET_HINT = "the store puts the bucket into the host name: 3 to 63 lower-case letters, digits and hyphens, no dots"
_ATTEMPTS = 5
_EXPLICIT_KEYS = {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}


@attrs.frozen(kw_only=True)
class S3Settings:
    """How a client reaches the store, and where each setting came from (for messages and ``cwtrain doctor``)."""

    endpoint_url: str
    endpoint_source: str
    region: str
    region_source: str
    addressing: str
    """``virtual`` (the bucket is in the host name) or ``path``."""
    max_pool_connections: int
    addressing_source: str = "the default"
    checksums: str = ""
    """``when_supported`` or ``when_required``: whether every body goes with a checksum; empty where it is not known."""

    @property
    def real(self) -> bool:
        """Whether the endpoint is a named host outside this machine."""
        return not _is_local(self.endpoint_url)

    @property
    def own(self) -> bool:
        """Whether the endpoint is one of the service's own, which address buckets in the host name only."""
        return _is_own(self.endpoint_url)

    @property
    def in_host_name(self) -> bool:
        """Whether the bucket has to be part of a host name."""
        return self.addressing == "virtual" or (self.addressing != "path" and self.real)

    def config(self) -> Config:
        """Return what another client needs beside endpoint and region to reach the store in the same way."""
        checksums = {"request_checksum_calculation": self.checksums} if self.checksums else {}
        return Config(s3={"addressing_style": self.addressing}, **checksums)


# botocore sessions fill caches that two threads must not fill at once, so clients are made one at a time.
_CREATING = threading.Lock()
renew_locks_after_fork(sys.modules[__name__], "_CREATING")
_SETTINGS: weakref.WeakKeyDictionary[Any, S3Settings] = weakref.WeakKeyDictionary()


def s3_client(
    endpoint_url: str | None = None,
    *,
    region_name: str | None = None,
    max_pool_connections: int = 64,
    session: boto3.Session | None = None,
    **kwargs: Any,
) -> S3Client:
    """Return a boto3 S3 client for CoreWeave AI Object Storage, or for another store where one is configured.

    - Endpoint: ``endpoint_url``, then ``CW_S3_ENDPOINT``, then the AWS configuration (``AWS_ENDPOINT_URL_S3``,
      ``AWS_ENDPOINT_URL``, the profile's ``services`` section and ``endpoint_url``, unless
      ``ignore_configured_endpoint_urls`` is set), then ``https://cwobject.com``.
    - Region: ``region_name``, ``AWS_REGION``, ``AWS_DEFAULT_REGION``, then the profile's. It is the bucket's zone, in
      its own spelling, and has no default.
    - Credentials: whatever boto3 finds, refreshed as boto3 does, and looked for again when the store says that they
      have expired (not those that are given here or in ``session``).
    - Buckets are addressed in the host name, as the store demands, and by path for IP addresses and localhost; or as
      the ``addressing_style`` of ``config``, ``CW_S3_ADDRESSING_STYLE`` or the AWS profile says, where it can be.
    - No checksum trailers are added, unless the AWS configuration or ``config`` asks for them. Payloads are sent as
      UNSIGNED-PAYLOAD, unless ``CWTRAIN_S3_SIGN_PAYLOAD=1``; over plain http a single PUT of a file is signed over its
      SHA-256, which is known by then.
    - Large bodies go over sockets of our own, except through a proxy, with a client certificate, or with
      ``CWTRAIN_S3_OWN_SENDING=0``. Event handlers see those requests like any other.

    ``max_pool_connections`` should be at least the number of threads that use the client. ``session`` is a boto3
    session to take credentials and profile from; a private one is made without it, and the default session of boto3 is
    never touched. ``kwargs`` go to ``session.client("s3", ...)``; a ``config`` among them is merged and wins where it
    does not break the store's addressing. The client may be shared by threads.

    Raises StorageRegionError when no region is set, ConfigError for an endpoint or addressing that cannot work.
    """
    given: Config = kwargs.pop("config", None) or Config()
    with _CREATING:
        try:
            own_session = session is None
            session = session or boto3.Session(botocore_session=botocore.session.Session())
            core: botocore.session.Session = session._session
            profile: Mapping[str, Any] = core.get_scoped_config()
            if (usual := core.get_default_client_config()) is not None:
                given = usual.merge(given)
            endpoint, endpoint_source = _endpoint(endpoint_url, core, profile, given)
            region, region_source = _region(region_name, core, profile, given)
            style, style_source = _addressing(endpoint, core, profile, given)
            config = _config(given, profile, endpoint, style, max_pool_connections)
            client: S3Client = session.client("s3", endpoint_url=endpoint, region_name=region, config=config, **kwargs)
        except CWTrainError:
            raise
        except BotoCoreError as error:
            raise translate(error, what="the S3 client cannot be made") from error
        except ValueError as error:
            raise ConfigError(
                f"the S3 client cannot be made: {error}",
                hint="check the endpoint (CW_S3_ENDPOINT, such as https://cwobject.com) and the region (AWS_REGION)",
            ) from error
        _check_ca_bundle(client)
        settings = S3Settings(
            endpoint_url=endpoint,
            endpoint_source=endpoint_source,
            region=region,
            region_source=region_source,
            addressing=style,
            addressing_source=style_source,
            checksums=str(client.meta.config.request_checksum_calculation or ""),
            max_pool_connections=config.max_pool_connections,
        )
        _SETTINGS[client] = settings
        # Keys in the program, or in a session that the caller made, are the caller's to renew.
        watch_credentials(client, core.profile, renewable=own_session and not _EXPLICIT_KEYS & kwargs.keys())
        sign_known_bodies(client)
        if StorageConfig.from_env().own_sending:
            send_with_own_sockets(client)
        renew_after_fork(client, leave_connections)

    def refuse_unaddressable(params: Any, **_: Any) -> None:
        # botocore would silently fall back to path style, which the store refuses with a riddle.
        if isinstance(params, Mapping) and isinstance(bucket := params.get("Bucket"), str):
            check_bucket(bucket, settings)

    client.meta.events.register_first("before-parameter-build.s3", refuse_unaddressable)
    return client


def s3_settings(client: Any) -> S3Settings:
    """Return how ``client`` reaches the store; also for a client that was not made by ``s3_client``."""
    if (settings := _SETTINGS.get(client)) is not None:
        return settings
    config = client.meta.config
    style = (config.s3 or {}).get("addressing_style") or "auto"
    return S3Settings(
        endpoint_url=client.meta.endpoint_url,
        endpoint_source="the client that was given",
        region=client.meta.region_name or "",
        region_source="the client that was given",
        addressing=style,
        checksums=str(getattr(config, "request_checksum_calculation", None) or ""),
        max_pool_connections=config.max_pool_connections,
    )


def check_bucket(bucket: str, settings: S3Settings) -> None:
    """Raise ConfigError when ``bucket`` cannot be part of a host name and the endpoint needs that."""
    if settings.in_host_name and not _BUCKET_LABEL.fullmatch(bucket):
        other = "" if settings.own else "; a store that takes path style: CW_S3_ADDRESSING_STYLE=path"
        raise ConfigError(
            f"the bucket {bucket!r} cannot be reached at {settings.endpoint_url}: its name is no host label",
            hint=_BUCKET_HINT + other,
        )


def _set(value: Any) -> str | None:
    """Return text without blanks around it; None for nothing but blanks."""
    return (value.strip() or None) if isinstance(value, str) else None


def _endpoint(
    given: str | None, core: botocore.session.Session, profile: Mapping[str, Any], config: Config
) -> tuple[str, str]:
    url, source = _find_endpoint(given, core, profile, config)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"the S3 endpoint {url!r} (from {source}) is no http or https URL", hint="such as https://cwobject.com"
        )
    return url.rstrip("/"), source


def _find_endpoint(
    given: str | None, core: botocore.session.Session, profile: Mapping[str, Any], config: Config
) -> tuple[str, str]:
    if url := _set(given):
        return url, "the argument endpoint_url"
    if url := _set(os.environ.get("CW_S3_ENDPOINT")):
        return url, "CW_S3_ENDPOINT"
    ignored = getattr(config, "ignore_configured_endpoint_urls", None)
    if ignored is None:
        ignored = core.get_config_variable("ignore_configured_endpoint_urls")
    if not ignored:
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if url := _set(os.environ.get(name)):
                return url, name
        services = core.full_config.get("services", {}).get(profile.get("services") or "", {})
        section = services.get("s3") if isinstance(services, Mapping) else None
        if isinstance(section, Mapping) and (url := _set(section.get("endpoint_url"))):
            return url, f"services section {profile.get('services')!r} of the AWS configuration"
        if url := _set(profile.get("endpoint_url")):
            return url, f"endpoint_url of the AWS profile {core.profile or 'default'!r}"
    return DEFAULT_ENDPOINT, "the default"


def _region(
    given: str | None, core: botocore.session.Session, profile: Mapping[str, Any], config: Config
) -> tuple[str, str]:
    for value, source in (
        (given, "the argument region_name"),
        (getattr(config, "region_name", None), "region_name of the argument config"),
        (core.instance_variables().get("region"), "the session that was given"),
        (os.environ.get("AWS_REGION"), "AWS_REGION"),
        (os.environ.get("AWS_DEFAULT_REGION"), "AWS_DEFAULT_REGION"),
        (profile.get("region"), f"the AWS profile {core.profile or 'default'!r}"),
    ):
        if region := _set(value):
            return region, source
    raise StorageRegionError(
        "no region is set for the bucket",
        hint=f"set AWS_REGION to the bucket's zone in capitals, for example AWS_REGION={_REGION_EXAMPLE}",
    )


def _config(given: Config, profile: Mapping[str, Any], endpoint: str, style: str, pool: int) -> Config:
    """Return ``given`` with our defaults wherever neither it nor the AWS configuration decides."""
    ours: dict[str, Any] = {"max_pool_connections": pool}
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if not _configured(name, profile):
            ours[name] = "when_required"
    if not (_configured("retry_mode", profile) or _configured("max_attempts", profile)):
        ours["retries"] = {"mode": "standard", "total_max_attempts": _ATTEMPTS}
    if is_loopback(endpoint):
        ours["proxies"] = {}  # no proxy of the site can reach this machine's own store; the API's client does the same
    elif getattr(given, "proxies", None) is None:
        # botocore fails in the middle of a request on what it cannot read; it knows neither SOCKS nor ALL_PROXY.
        proxy, scheme = proxy_for(endpoint, all_proxy=False), urlsplit(endpoint).scheme
        wanted = {} if proxy is None else {scheme: proxy.url}
        if get_environ_proxies(endpoint).get(scheme) != wanted.get(scheme):
            ours["proxies"] = wanted
    s3: dict[str, Any] = dict(getattr(given, "s3", None) or {})
    s3["addressing_style"] = style
    s3.setdefault("payload_signing_enabled", StorageConfig.from_env().sign_payload)
    return Config(**ours).merge(given).merge(Config(s3=s3))


def _check_ca_bundle(client: Any) -> None:
    """Raise ConfigError for a CA bundle that is not there: it would be found out in the middle of an upload."""
    bundle = getattr(getattr(getattr(client, "_endpoint", None), "http_session", None), "_verify", None)
    if isinstance(bundle, str) and not os.path.exists(bundle):
        raise ConfigError(
            f"the CA bundle {bundle!r} of the S3 client does not exist",
            hint="correct AWS_CA_BUNDLE (or REQUESTS_CA_BUNDLE, the profile's ca_bundle, or verify=), or unset it",
        )


def _configured(name: str, profile: Mapping[str, Any]) -> bool:
    return bool(_set(os.environ.get(f"AWS_{name.upper()}")) or _set(str(profile.get(name) or "")))


def _addressing(
    endpoint: str, core: botocore.session.Session, profile: Mapping[str, Any], config: Config
) -> tuple[str, str]:
    """Return how buckets are addressed at ``endpoint``, and who says so."""
    wanted, source = _wanted_addressing(core, profile, config)
    local, ip = _is_local(endpoint), _is_ip(urlsplit(endpoint).hostname or "")
    if wanted == "path" and _is_own(endpoint):
        raise ConfigError(
            f"path-style addressing, which {source} asks for, is refused by the store at {endpoint}",
            hint=f"take it out of {source}: buckets are addressed in the host name there",
        )
    if wanted == "virtual" and ip:
        if source.startswith("the AWS profile"):
            # The service's own guide has people set this for its store; at an address it cannot be meant.
            return "path", "the default"
        raise ConfigError(
            f"virtual-hosted addressing, which {source} asks for, is impossible at {endpoint}: a bucket cannot stand "
            "before an IP address",
            hint=f"take it out of {source}, or use a host name that resolves to it",
        )
    if wanted in ("path", "virtual"):
        return wanted, source
    return ("path" if local else "virtual"), "the default"


def _wanted_addressing(core: botocore.session.Session, profile: Mapping[str, Any], config: Config) -> tuple[str, str]:
    if style := (getattr(config, "s3", None) or {}).get("addressing_style"):
        return style, "addressing_style of the argument config"
    storage = StorageConfig.from_env()
    if storage.addressing_style is not None:
        return storage.addressing_style, sources(StorageConfig)["addressing_style"]
    section = profile.get("s3")
    style = _set(section.get("addressing_style")) if isinstance(section, Mapping) else None
    source = f"the AWS profile {core.profile or 'default'!r} (addressing_style)"
    if style is not None and style.lower() not in ("auto", "path", "virtual"):
        raise ConfigError(f"{source} is {style!r}, and must be path, virtual or auto", hint="correct ~/.aws/config")
    return (style or "auto").lower(), source


def _is_own(endpoint: str) -> bool:
    host = (urlsplit(endpoint).hostname or "").rstrip(".")
    return any(host == own or host.endswith(f".{own}") for own in _OWN_HOSTS)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=64)  # asked at every request
def _is_local(endpoint: str) -> bool:
    host = (urlsplit(endpoint).hostname or "").rstrip(".")
    return _is_ip(host) or host == "localhost" or host.endswith(".localhost")
