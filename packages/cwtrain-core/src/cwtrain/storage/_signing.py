"""Signing with what is known already, and with credentials that were renewed.

Over plain http nothing else vouches for the bytes, so a single PUT is signed over the SHA-256 of its body: the store
then refuses other bytes. It costs nothing, because the hash is known when the request is made; botocore alone would
read the body once more for it. Over https a body asks for it (``signed``) that nobody hashes while it is sent.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import botocore.session
from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError

from cwtrain._process import renew_locks_after_fork
from cwtrain.errors import ConfigError

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client

__all__ = ["Credentials", "check_credentials", "credentials_of", "sign_known_bodies", "watch_credentials"]

_USUAL = ("v4", "s3v4")
"""What S3 requests are signed with: the first as the endpoint's rules call it, the second as the signer does."""
_OURS = "s3v4-cwtrain"


class _KnownBodyAuth(S3SigV4Auth):  # type: ignore[misc]
    """As botocore signs for S3, but a body that knows its ``sha256`` is not read for it."""

    def payload(self, request: Any) -> str:
        known = getattr(request.body, "sha256", None)
        if known is None or self._is_streaming_checksum_payload(request):
            return str(super().payload(request))
        asked = request.url.startswith("http://") or getattr(request.body, "signed", False)
        if asked or self._should_sha256_sign_payload(request):
            return str(known)
        return str(super().payload(request))


def sign_known_bodies(client: S3Client) -> None:
    """Let the single PUTs of ``client`` be signed over their bodies' SHA-256 where that is known and of use."""
    AUTH_TYPE_MAPS.setdefault(_OURS, _KnownBodyAuth)

    def choose(signature_version: Any, **_: Any) -> str | None:
        return _OURS if signature_version in _USUAL else None

    client.meta.events.register("choose-signer.s3.PutObject", choose)


_PARTS = (
    ("access_key", "the access key", ("AWS_ACCESS_KEY_ID",)),
    ("secret_key", "the secret key", ("AWS_SECRET_ACCESS_KEY",)),
    ("token", "the session token", ("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")),
)
"""Each part of credentials: botocore's name, its name for people, its variables."""


def check_credentials(credentials: Any) -> None:
    """Raise ConfigError for credentials with a character that none has, naming where they come from, never them.

    In a header a line end makes the HTTP library quote the header, signature and all; in a secret key it only makes the
    signature wrong.
    """
    if credentials is None:
        return
    frozen, method = credentials.get_frozen_credentials(), getattr(credentials, "method", None)
    for attribute, words, variables in _PARTS:
        value = getattr(frozen, attribute, None)
        bad = {char for char in value if not "!" <= char <= "~"} if isinstance(value, str) else None
        if not bad:
            continue
        name = words if not method or method == "explicit" else f"{words} that comes from {method!r}"
        if method == "env":
            name = next((one for one in variables if os.environ.get(one) == value), name)
        raise ConfigError(
            f"{name} holds {_kind(bad)} and cannot be used", hint="set it again, without blanks, line ends or notes"
        )


def _kind(bad: set[str]) -> str:
    """Return the worst of the characters in words."""
    if bad & {"\r", "\n"}:
        return "a line end"
    if any(char < " " or char == "\x7f" for char in bad):
        return "a control character"
    return "a blank" if " " in bad else "a character that is not ASCII"


class Credentials:
    """Where a client's credentials come from, and how to look there again when the store says they have expired."""

    def __init__(self, client: S3Client, profile: str | None, *, renewable: bool) -> None:
        self._signer: Any = getattr(client, "_request_signer", None)
        self._profile = profile
        self._renewable = renewable and hasattr(self._signer, "_credentials")
        self._lock = threading.Lock()
        renew_locks_after_fork(self, "_lock")

    @property
    def source(self) -> str | None:
        """The provider's name as botocore spells it (``env``, ``shared-credentials-file``), never a key."""
        return getattr(self._now, "method", None)

    @property
    def _now(self) -> Any:
        return getattr(self._signer, "_credentials", None)

    def renew(self, refused: Any) -> bool:
        """Look for other credentials than ``refused`` (see ``snapshot``) and return whether there are some now.

        Keys that were given in the program are never replaced.
        """
        if not self._renewable:
            return False
        with self._lock:
            if self.snapshot() != refused:
                return True  # another thread was first
            try:
                fresh = botocore.session.Session(profile=self._profile).get_credentials()
                if fresh is None or _frozen(fresh) == refused:
                    return False
            except BotoCoreError:
                return False
            self._signer._credentials = fresh
            return True

    def snapshot(self) -> Any:
        """Return something that is equal for equal credentials."""
        return _frozen(self._now)


def _frozen(credentials: Any) -> Any:
    return None if credentials is None else credentials.get_frozen_credentials()


_CREDENTIALS: weakref.WeakKeyDictionary[Any, Credentials] = weakref.WeakKeyDictionary()


def watch_credentials(client: S3Client, profile: str | None, *, renewable: bool) -> None:
    """Note where the credentials of ``client`` come from, and have them checked before a request is signed with them.

    Raises ConfigError at once for those that are known now; others may have to be fetched over the network first.
    """
    _CREDENTIALS[client] = Credentials(client, profile, renewable=renewable)
    known = getattr(getattr(client, "_request_signer", None), "_credentials", None)
    if not isinstance(known, RefreshableCredentials):
        check_credentials(known)

    def check(request_signer: Any, **_: Any) -> None:
        check_credentials(request_signer._credentials)

    client.meta.events.register_first("before-sign.s3", check)


def credentials_of(client: Any) -> Credentials | None:
    """Return what was noted, None for a client that is not ours."""
    return _CREDENTIALS.get(client)
