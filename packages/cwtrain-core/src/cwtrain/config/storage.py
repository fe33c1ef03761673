"""How to reach the object store. Credentials, profiles and the AWS endpoint settings are read by boto3 itself."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cwtrain.config._env import boolean, env, load

__all__ = ["StorageConfig"]


@attrs.frozen(kw_only=True)
class StorageConfig:
    """Endpoint, region and signing of the object store, as far as they are cwtrain's to decide."""

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
    sign_payload: bool = attrs.field(
        default=False,
        converter=boolean,
        metadata=env("CWTRAIN_S3_SIGN_PAYLOAD", help="1 signs the bytes of every part, which costs a pass over them"),
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> StorageConfig:
        """Return the configuration from ``overrides``, then ``environ``, then defaults. Raises ``ConfigError``."""
        return load(cls, environ, overrides)
