"""Where the objects of a deployment's snapshots stand: every key of the bucket is spelled here."""

from __future__ import annotations

import attrs

from cwtrain.errors import ConfigError

__all__ = ["Location"]


def _prefix(value: str) -> str:
    return value.strip("/")


def _no_dots(_: object, __: object, value: str) -> None:
    if any(segment in ("..", ".") for segment in value.split("/")):
        raise ConfigError(
            f"the path prefix {value!r} has a '.' or '..' segment",
            hint="use the deployment's hotLoad.pathPrefix as it stands, such as 'rl/run-7'",
        )


def _named(_: object, __: object, value: str) -> None:
    if not value:
        raise ConfigError(
            "no bucket is given", hint="the deployment's hotLoad.bucket names it; it is set when it is created"
        )


@attrs.frozen
class Location:
    """A bucket and the path prefix under which a deployment's snapshots stand.

    ``path_prefix`` is without slashes at its ends; empty means the bucket itself. Raises ConfigError for an empty
    bucket and for a prefix with ``..`` in it.
    """

    bucket: str = attrs.field(validator=_named)
    path_prefix: str = attrs.field(default="", converter=_prefix, validator=_no_dots)

    @property
    def root(self) -> str:
        """The prefix of all keys: empty, or with one slash at its end."""
        return f"{self.path_prefix}/" if self.path_prefix else ""

    def prefix(self, identity: str) -> str:
        """Return what every key of the snapshot ``identity`` begins with, a slash at its end."""
        return f"{self.root}{identity}/"

    def key(self, identity: str, name: str) -> str:
        """Return the key of the object ``name`` of the snapshot ``identity``."""
        return f"{self.prefix(identity)}{name}"

    def uri(self, identity: str) -> str:
        """Return the ``s3://`` URI of the snapshot ``identity``, without a slash at its end."""
        return f"s3://{self.bucket}/{self.root}{identity}"

    def claim_key(self, identity: str) -> str:
        """Return the key of the object that says who may write under ``identity``."""
        return f"{self.root}_claims/{identity}.json"

    def manifest_key(self, identity: str) -> str:
        """Return the key of the manifest of ``identity``."""
        return f"{self.root}_manifests/{identity}.json"

    def status_key(self, deployment_id: str) -> str:
        """Return the key of the object that says how the base of a run gets into a deployment: it is overwritten."""
        return f"{self.root}_manifests/{deployment_id}.status"

    def preflight_key(self, name: str) -> str:
        """Return the key of an object that only an access check asks for."""
        return f"{self.root}_preflight/{name}"
