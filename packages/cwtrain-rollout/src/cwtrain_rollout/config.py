"""Settings of the sampler, from arguments and ``CWTRAIN_ROLLOUT_*``."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import attrs

from cwtrain.config._env import boolean, env, env_vars, load, positive_seconds, whole_number
from cwtrain.config.api import clean_token
from cwtrain.errors import ConfigError

__all__ = ["RolloutConfig"]

log = logging.getLogger("cwtrain.rollout")

PREFIX = "CWTRAIN_ROLLOUT_"


def _base_url(value: str) -> str:
    """Return ``value`` without a slash at its end, with ``/v1`` where it has no path."""
    text = value.strip().rstrip("/")
    hint = "give it like http://frontend:8000/v1"
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as exc:
        raise ConfigError(f"is no URL: {exc}", hint=hint) from exc
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("must begin with http:// or https:// and name a host", hint=hint)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("must not hold a user name or password", hint=f"give the key as {PREFIX}API_KEY")
    if parts.query or parts.fragment:
        raise ConfigError("must have no query and no fragment", hint=hint)
    return text if parts.path else f"{text}/v1"


def _model(value: str) -> str:
    text = value.strip()
    if not text:
        raise ConfigError("must not be blank")
    return text


def _concurrency(value: object) -> int:
    if isinstance(value, str) and value.strip().lower() == "auto":
        raise ConfigError("must be a whole number: this version has a fixed window, it cannot find one by itself")
    return whole_number(1)(value)


def _attempts(value: object) -> int:
    return whole_number(1)(value)


def _mode(value: str) -> str:
    text = value.strip().lower()
    if text not in ("auto", "processed", "raw"):
        raise ConfigError("must be auto, processed or raw")
    return text


def _key_file(value: str | os.PathLike[str] | None) -> str | None:
    if value is None:
        return None
    path = os.fspath(value)
    if _read_key(path) is None:
        raise ConfigError("names an empty file", hint="write the key into the file")
    return path


def _read_key(path: str) -> str | None:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise ConfigError(f"cannot be read: {exc.strerror or type(exc).__name__}", hint="check path and mode") from exc
    return clean_token(text)


@attrs.frozen(kw_only=True)
class RolloutConfig:
    """Where rollouts are sampled and how patient the sampler is. Keys are never shown.

    ``RolloutConfig(base_url=..., model=...)`` checks its arguments one by one; ``from_env`` reports all problems at
    once, each with its variable's name.
    """

    base_url: str = attrs.field(
        converter=_base_url,
        metadata=env(f"{PREFIX}BASE_URL", help="URL of the OpenAI-compatible endpoint; /v1 is added to a bare origin"),
    )
    model: str = attrs.field(converter=_model, metadata=env(f"{PREFIX}MODEL", help="name of the served model"))
    api_key: str | None = attrs.field(
        default=None,
        repr=False,
        converter=clean_token,
        metadata=env(f"{PREFIX}API_KEY", help="key of the endpoint, sent as a bearer token", secret=True),
    )
    api_key_file: str | None = attrs.field(
        default=None,
        converter=_key_file,
        metadata=env(f"{PREFIX}API_KEY_FILE", help="file with the key, read for every request, so it may be rotated"),
    )
    concurrency: int = attrs.field(
        default=64,
        converter=_concurrency,
        metadata=env(f"{PREFIX}CONCURRENCY", help="choices in flight; a request for n choices counts n"),
    )
    timeout: float = attrs.field(
        default=3600.0,
        converter=positive_seconds,
        metadata=env(f"{PREFIX}TIMEOUT", help="seconds for one answer"),
    )
    deadline: float = attrs.field(
        default=1800.0,
        converter=positive_seconds,
        metadata=env(f"{PREFIX}DEADLINE", help="seconds from a group's first failure to the start of its last retry"),
    )
    max_attempts: int = attrs.field(
        default=8,
        converter=_attempts,
        metadata=env(f"{PREFIX}MAX_ATTEMPTS", help="bad answers of one group until it fails"),
    )
    logprobs: bool = attrs.field(
        default=True,
        converter=boolean,
        metadata=env(f"{PREFIX}LOGPROBS", help="1: a sample without exact log-probs is an error"),
    )
    logprobs_mode: str = attrs.field(
        default="auto",
        converter=_mode,
        metadata=env(f"{PREFIX}LOGPROBS_MODE", help="what the server reports: processed, raw, or auto to find out"),
    )
    seeds: bool = attrs.field(
        default=True,
        converter=boolean,
        metadata=env(f"{PREFIX}SEEDS", help="1: a single sample without a seed gets a random one"),
    )
    trust_env: bool = attrs.field(
        default=False,
        converter=boolean,
        metadata=env(f"{PREFIX}TRUST_ENV", help="1: proxies of the environment are used"),
    )

    def __attrs_post_init__(self) -> None:
        if self.api_key and self.api_key_file:
            raise ConfigError(
                f"{PREFIX}API_KEY and {PREFIX}API_KEY_FILE are both set", hint="unset one of them: a key has one source"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> RolloutConfig:
        """Return the configuration from ``overrides``, then ``environ``, then defaults.

        Raises ``ConfigError`` with every problem. A ``CWTRAIN_ROLLOUT_*`` variable that this version does not know is
        warned about with the nearest name.
        """
        environ = os.environ if environ is None else environ
        known = [name for var in env_vars(cls).values() for name in var.names]
        for name in sorted(environ):
            if name.startswith(PREFIX) and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
                log.warning(
                    "%s is no setting of this version and has no effect%s",
                    name,
                    f"; did you mean {near[0]}?" if near else "",
                )
        return load(cls, environ, overrides)

    def current_api_key(self) -> str | None:
        """Return the key to send now: from the file where there is one, so that a rotated key works."""
        if self.api_key_file is None:
            return self.api_key
        try:
            return _read_key(self.api_key_file)
        except ConfigError as exc:
            raise ConfigError(f"{PREFIX}API_KEY_FILE={self.api_key_file!r} {exc}", hint=exc.hint) from exc

    def without_key(self, text: str) -> str:
        """Return ``text`` without the key, for messages that quote a server."""
        try:
            key = self.current_api_key()
        except ConfigError:
            return "(not shown: the key to be hidden cannot be read)"
        return text.replace(key, "***") if key else text
