"""How to reach the Dedicated Inference API: token, origin, extra headers, TLS.

Variables: ``COREWEAVE_API_TOKEN`` (then ``CW_API_TOKEN``), ``COREWEAVE_API_URL``, ``CWTRAIN_API_HEADERS``,
``CWTRAIN_API_INSECURE``, ``SSL_CERT_FILE``.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

import attrs

from cwtrain.config._env import UNSET, boolean, env, env_vars, find, json_object, load, sources
from cwtrain.errors import ConfigError

__all__ = ["DEFAULT_BASE_URL", "ApiConfig", "clean_token", "is_loopback", "missing_token", "origin", "token_from_env"]

DEFAULT_BASE_URL = "https://api.coreweave.com"
"""The public service."""

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SECRET_NAME = re.compile(r"auth|cookie|key|pass|secret|token|credential", re.IGNORECASE)
TOKEN_VARIABLES = ("COREWEAVE_API_TOKEN", "CW_API_TOKEN")


def clean_token(value: str | None) -> str | None:
    """Return ``value`` without blanks and line ends around it, None when nothing is left.

    Raises ``ConfigError``, without the token in its text, for characters that no bearer token has.
    """
    token = (value or "").strip()
    if not token:
        return None
    bad = next((char for char in token if not "!" <= char <= "~"), None)
    if bad is None:
        return token
    if bad == " ":
        raise ConfigError("has a blank inside", hint="give the bare token, without the word Bearer or a second value")
    what = "a line end" if bad in "\r\n" else "a control character" if bad < " " else "a character that is not ASCII"
    raise ConfigError(
        f"holds {what} and cannot be sent in a header", hint="copy the token again, without quotes or notes"
    )


def origin(value: str) -> str:
    """Return ``value`` as ``scheme://host[:port]``. Raises ``ConfigError`` for anything more or less than an origin."""
    text = value.strip()
    hint = f"give an origin and nothing more, like {DEFAULT_BASE_URL}"
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as exc:
        raise ConfigError(f"is no URL: {exc}", hint=hint) from exc
    if parts.scheme not in ("https", "http"):
        raise ConfigError("must begin with https:// (or http:// for a test server)", hint=hint)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("must not hold a user name or password", hint=hint)
    if not parts.hostname or any(char.isspace() or char in '\\"<>^`{|}' for char in parts.netloc):
        raise ConfigError("names no host", hint=hint)
    if parts.path not in ("", "/") or "?" in text or "#" in text:
        raise ConfigError("must be an origin, without path, query or fragment", hint=hint)
    return f"{parts.scheme}://{parts.netloc}"


def is_loopback(base_url: str) -> bool:
    """Return whether ``base_url`` points at this machine by name or address."""
    host = (urlsplit(base_url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _headers(value: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError("must be an object of header names and values")
    for name, text in value.items():
        if (
            not isinstance(name, str)
            or not name
            or not all("!" <= c <= "~" and c not in '()<>@,;:\\"/[]?={}' for c in name)
        ):
            raise ConfigError(f"holds {name!r}, which is no header name")
        if not isinstance(text, str) or not all(" " <= c <= "~" for c in text):
            raise ConfigError(f"gives {name} a value that is not printable ASCII text")
        if name.lower() == "authorization":
            raise ConfigError("must not set Authorization", hint=f"give the token as {TOKEN_VARIABLES[0]}")
    return dict(value)


def _verify(value: bool | str) -> bool | str:
    if isinstance(value, bool):
        return value
    path = os.fspath(value)
    if not os.path.exists(path):
        raise ConfigError("names a CA bundle that does not exist", hint="give the path of a PEM file")
    return path


def is_secret(name: str) -> bool:
    """Return whether a header of this name holds a secret, as far as its name says."""
    return _SECRET_NAME.search(name) is not None


@attrs.frozen(kw_only=True, slots=False)
class ApiConfig:
    """Where the API is and how to talk to it. ``repr`` shows neither the token nor header values.

    A pickle holds no secret: whoever unpickles it reads the token, and headers whose name speaks of one, from the
    environment of its own process. What is not there is told by the first call.
    """

    token: str | None = attrs.field(
        default=None,
        repr=False,
        converter=clean_token,
        metadata=env(*TOKEN_VARIABLES, help="API access token", secret=True),
    )
    token_source: str = ""
    """Where the token came from, in words for an error: a variable's name or ``the token argument``; "" without one."""
    base_url: str = attrs.field(
        default=DEFAULT_BASE_URL, converter=origin, metadata=env("COREWEAVE_API_URL", help="origin of the API")
    )
    headers: Mapping[str, str] = attrs.field(
        factory=dict,
        converter=_headers,
        repr=lambda headers: str(sorted(headers)),
        metadata=env(
            "CWTRAIN_API_HEADERS", help="more headers for every call, a JSON object", secret=True, parse=json_object
        ),
    )
    verify: bool | str = attrs.field(
        default=True,
        converter=_verify,
        metadata=env(
            "CWTRAIN_API_INSECURE",
            "SSL_CERT_FILE",
            help="CWTRAIN_API_INSECURE=1 turns TLS checks off, SSL_CERT_FILE is a CA bundle",
            parse={"CWTRAIN_API_INSECURE": lambda text: False if boolean(text) else UNSET, "SSL_CERT_FILE": str},
        ),
    )
    """True (checked with the default certificates), False (not checked), or the path of a CA bundle."""
    _left_out: ClassVar[tuple[str, ...]] = ()
    """Which secrets a pickle did not hold and this process's environment does not have: ``token``, names of headers."""

    @property
    def missing(self) -> ConfigError | None:
        """The error of what is missing to make a call; None where nothing is."""
        if self.token is None and "token" in self._left_out:
            return ConfigError(
                "no API token: a pickled client holds none, and this process has neither "
                + " nor ".join(TOKEN_VARIABLES),
                hint=f"set {TOKEN_VARIABLES[0]} where the client is unpickled, or make the client there",
            )
        if self.token is None:
            return missing_token()
        if headers := [name for name in self._left_out if name != "token"]:
            return ConfigError(
                f"a pickled client holds no secrets, and this process does not know the header {', '.join(headers)}",
                hint="set CWTRAIN_API_HEADERS, a JSON object, where the client is unpickled, or make the client there",
            )
        return None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy in the same process is no pickle: it keeps the secrets

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but secrets, and which there are."""
        kept = {name: text for name, text in self.headers.items() if not is_secret(name)}
        absent = (*self._left_out, *(["token"] if self.token else []), *(self.headers.keys() - kept.keys()))
        return {"base_url": self.base_url, "headers": kept, "verify": self.verify, "_left_out": absent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the secrets from this process's environment."""
        found: dict[str, Any] = {"token": None, "token_source": "", **state}
        absent = set(state["_left_out"])
        token, headers = _from_environment("token", clean_token), _from_environment("headers", _headers)
        if "token" in absent and token is not None:
            found.update(token_source=token[0], token=token[1])
            absent.discard("token")
        known = {name: text for name, text in headers[1].items() if name in absent} if headers else {}
        found.update(headers={**state["headers"], **known}, _left_out=tuple(sorted(absent - known.keys())))
        self.__dict__.update(found)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> ApiConfig:
        """Return the configuration from ``overrides``, then ``environ``, then defaults. Raises ``ConfigError``.

        A bare ``verify=True`` asks for checked TLS and still uses the bundle of ``SSL_CERT_FILE``.
        """
        environ = os.environ if environ is None else environ
        if overrides.get("verify") is True:
            overrides["verify"] = environ.get("SSL_CERT_FILE", "").strip() or True
        config = load(cls, environ, overrides)
        if config.token is None or config.token_source:
            return config
        source = sources(cls, environ, overrides)["token"]
        return attrs.evolve(config, token_source="the token argument" if source == "argument" else source)


def _from_environment(field: str, read: Callable[[Any], Any]) -> tuple[str, Any] | None:
    """Return (variable, value) of a field of ``ApiConfig``; None where no variable says it, or none that can be read.

    What is missing is told by who needs it.
    """
    try:
        found = find(env_vars(ApiConfig)[field], os.environ)
        return None if found is None else (found[0], read(found[1]))
    except ConfigError:
        return None


def token_from_env(environ: Mapping[str, str] | None = None) -> str:
    """Return the API token of ``COREWEAVE_API_TOKEN``, then ``CW_API_TOKEN``, without blanks and line ends.

    Raises ``ConfigError`` when neither is set or the value cannot be a token; the message never holds it.
    """
    found = find(env_vars(ApiConfig)["token"], os.environ if environ is None else environ)
    if found is None:
        raise missing_token()
    name, text = found
    try:
        return clean_token(text) or ""
    except ConfigError as exc:
        raise ConfigError(f"{name} {exc}", hint=exc.hint) from exc


def missing_token() -> ConfigError:
    """Return the error for "there is no token anywhere"."""
    names = " nor ".join(TOKEN_VARIABLES)
    return ConfigError(
        f"no API token: neither {names} is set, and none was given",
        hint=f"set {TOKEN_VARIABLES[0]} to a CoreWeave API access token",
    )
