"""How to reach the object store. Credentials, profiles and the AWS endpoint settings are read by boto3 itself."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cwtrain.config._env import boolean, env, load, whole_number
from cwtrain.errors import ConfigError

__all__ = ["StorageConfig"]

_at_least_one = whole_number(1)


def _rate(value: object) -> int:
    return _at_least_one(value)


def _style(value: object) -> str:
    text = str(value).strip().lower()
    if text not in ("auto", "path", "virtual"):
        raise ConfigError("must be path, virtual or auto")
    return text


@attrs.frozen(kw_only=True)
class StorageConfig:
    """Endpoint, region, signing and sending of the object store, as far as they are cwtrain's to decide."""

    endpoint_url: str | None = attrs.field(
        default=None,
        metadata=env(
            "CW_S3_ENDPOINT",
            help="endpoint of the object store; without it boto3's configuration, then https://cwobject.com",
        ),
    )
    region: str | None = attrs.field(
        default=None,
        metadata=env(
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            help="region of the bucket, which is its zone, like US-EAST-04A; without it the profile's",
        ),
    )
    addressing_style: str | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(_style),
        metadata=env(
            "CW_S3_ADDRESSING_STYLE",
            "AWS_S3_ADDRESSING_STYLE",
            help="path or virtual, for another store than the service's own; without it boto3's configuration, then "
            "virtual, and path for IP addresses and localhost",
        ),
    )
    sign_payload: bool = attrs.field(
        default=False,
        converter=boolean,
        metadata=env("CWTRAIN_S3_SIGN_PAYLOAD", help="1 signs the bytes of every part, which costs a pass over them"),
    )

    own_sending: bool = attrs.field(
        default=True,
        converter=boolean,
        metadata=env(
            "CWTRAIN_S3_OWN_SENDING",
            help="0 leaves the sending of large bodies to boto3, which costs more CPU",
        ),
    )
    max_bytes_per_second: int | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(_rate),
        metadata=env(
            "CWTRAIN_UPLOAD_MAX_BYTES_PER_SECOND",
            help="limits the bandwidth of each upload, in bytes a second; without it there is no limit",
        ),
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> StorageConfig:
        """Return the configuration from ``overrides``, then ``environ``, then defaults. Raises ``ConfigError``."""
        return load(cls, environ, overrides)
