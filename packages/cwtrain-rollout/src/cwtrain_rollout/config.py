"""Settings of the sampler, from arguments and ``CWTRAIN_ROLLOUT_*``."""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

import attrs

from cwtrain.config._env import boolean, env, env_vars, load, positive_seconds, whole_number
from cwtrain.config._quotes import Scrubber, quote
from cwtrain.config.api import TOKEN_VARIABLES, clean_token
from cwtrain.errors import ConfigError

__all__ = ["RolloutConfig"]

log = logging.getLogger("cwtrain.rollout")

PREFIX = "CWTRAIN_ROLLOUT_"
_QUOTED_BYTES = 1 << 16
"""Bytes of an answer that are looked at for a quotation: many times what is shown."""
_KEY_VARIABLES = (f"{PREFIX}API_KEY", *TOKEN_VARIABLES, "WANDB_API_KEY")
"""Where a key comes from: its own setting, or what a backend takes for it."""
_KEYS: dict[str, tuple[tuple[int, int, int], str | None]] = {}
"""What key files held when they were last read, and how they looked then."""
_LOGPROB_READERS = ("use_tis", "use_rollout_logprobs", "get_mismatch_metrics")


def _flags(names: list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _text(value: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"must be a text, not {type(value).__name__}")
    return value.strip()


def _base_url(value: str) -> str:
    """Return ``value`` without a slash at its end, with ``/v1`` where it has no path."""
    text = _text(value).rstrip("/")
    hint = "give it like http://frontend:8000/v1"
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as exc:
        raise ConfigError(f"is no URL: {exc}", hint=hint) from exc
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("must begin with http:// or https:// and name a host", hint=hint)
    try:
        parts.hostname.encode("idna")
    except UnicodeError as exc:
        raise ConfigError("names a host that cannot be one", hint=hint) from exc
    if parts.username is not None or parts.password is not None:
        raise ConfigError("must not hold a user name or password", hint=f"give the key as {PREFIX}API_KEY")
    if parts.query or parts.fragment:
        raise ConfigError("must have no query and no fragment", hint=hint)
    return text if parts.path else f"{text}/v1"


def _model(value: str) -> str:
    text = _text(value)
    if not text:
        raise ConfigError("must not be blank")
    return text


def _concurrency(value: object) -> int | str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        return whole_number(1)(value)
    except ConfigError as exc:
        raise ConfigError("must be auto or a whole number of at least 1") from exc


def _failure(value: str) -> str:
    text = _text(value).lower()
    if text not in ("raise", "requeue", "drop"):
        raise ConfigError("must be raise, requeue or drop")
    return text


def _path(value: str | os.PathLike[str] | None) -> str | None:
    path = value if value is None or isinstance(value, str) else getattr(value, "__fspath__", lambda: None)()
    if value is not None and not isinstance(path, str):
        raise ConfigError(f"must be a path, not {type(value).__name__}")
    return path


def _word(value: str | None) -> str | None:
    return None if value is None else _text(value)


def _key(value: str | None) -> str | None:
    return None if value is None else clean_token(_text(value))


def _count(value: object) -> int:
    return whole_number(1)(value)


def _count_or_none(value: object) -> int | None:
    return None if value is None else whole_number(1)(value)


def _mode(value: str) -> str:
    text = _text(value).lower()
    if text not in ("auto", "processed", "raw"):
        raise ConfigError("must be auto, processed or raw")
    return text


def _key_file(value: str | os.PathLike[str] | None) -> str | None:
    if value is None:
        return None
    path = _path(value)
    assert path is not None
    if _read_key(path) is None:
        raise ConfigError("names an empty file", hint="write the key into the file")
    return path


def _read_key(path: str) -> str | None:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise ConfigError(f"cannot be read: {exc.strerror or type(exc).__name__}", hint="check path and mode") from exc
    return clean_token(text)


@attrs.frozen(kw_only=True, slots=False)
class RolloutConfig:
    """Where rollouts are sampled and how patient the sampler is. Keys are never shown, and not pickled.

    A pickle names the variable that the key came from; where that is not set, or the key was given as an argument,
    ``CWTRAIN_ROLLOUT_API_KEY`` is read where it is unpickled. A key that is in none is missed by the first request.

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
        converter=_key,
        metadata=env(f"{PREFIX}API_KEY", help="key of the endpoint, sent as a bearer token", secret=True),
    )
    api_key_file: str | None = attrs.field(
        default=None,
        converter=_key_file,
        metadata=env(f"{PREFIX}API_KEY_FILE", help="file with the key, read for every request, so it may be rotated"),
    )
    concurrency: int | str = attrs.field(
        default="auto",
        converter=_concurrency,
        metadata=env(
            f"{PREFIX}CONCURRENCY",
            help="choices in flight; a request for n choices counts n; auto: found by itself",
        ),
    )
    concurrency_max: int = attrs.field(
        default=256,
        converter=_count,
        metadata=env(f"{PREFIX}CONCURRENCY_MAX", help="choices in flight for each replica at most, where auto"),
    )
    replicas: int = attrs.field(
        default=1,
        converter=_count,
        metadata=env(f"{PREFIX}REPLICAS", help="replicas behind the endpoint: bounds of auto are for each"),
    )
    timeout: float = attrs.field(
        default=3600.0,
        converter=positive_seconds,
        metadata=env(f"{PREFIX}TIMEOUT", help="seconds for one answer"),
    )
    idle_timeout: float = attrs.field(
        default=600.0,
        converter=positive_seconds,
        metadata=env(f"{PREFIX}IDLE_TIMEOUT", help="seconds without a byte of a streamed answer"),
    )
    deadline: float = attrs.field(
        default=1800.0,
        converter=positive_seconds,
        metadata=env(f"{PREFIX}DEADLINE", help="seconds from a group's first failure to the start of its last retry"),
    )
    max_attempts: int = attrs.field(
        default=8,
        converter=_count,
        metadata=env(f"{PREFIX}MAX_ATTEMPTS", help="bad answers to one request until its group fails"),
    )
    context_length: int | None = attrs.field(
        default=None,
        converter=_count_or_none,
        metadata=env(
            f"{PREFIX}CONTEXT_LENGTH",
            help="tokens of prompt and answer together; asked for after a refusal where unset",
        ),
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
    token_ids: bool = attrs.field(
        default=True,
        converter=boolean,
        metadata=env(
            f"{PREFIX}TOKEN_IDS",
            help="1: answers without token ids are an error; 0: text is tokenised again",
        ),
    )
    token_id_prompts: bool = attrs.field(
        default=True,
        converter=boolean,
        metadata=env(
            f"{PREFIX}TOKEN_ID_PROMPTS", help="1: prompts are sent as token ids; 0: as the text that a group brings"
        ),
    )
    text_fallback: bool = attrs.field(
        default=False,
        converter=boolean,
        metadata=env(f"{PREFIX}TEXT_FALLBACK", help="1: a prompt whose token ids are refused is sent as its text"),
    )
    group_requests: bool = attrs.field(
        default=True,
        converter=boolean,
        metadata=env(
            f"{PREFIX}GROUP_REQUESTS", help="1: a group of fresh, equal prompts is one request; 0: one for each sample"
        ),
    )
    routed_experts: bool = attrs.field(
        default=False,
        converter=boolean,
        metadata=env(f"{PREFIX}ROUTED_EXPERTS", help="1: samples bring the experts that each token was routed to"),
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
    on_failure: str = attrs.field(
        default="raise",
        converter=_failure,
        metadata=env(
            f"{PREFIX}ON_FAILURE",
            help="what a failed group does: raise, requeue (once more at the end), drop",
        ),
    )
    poll: float = attrs.field(
        default=5.0,
        converter=positive_seconds,
        metadata=env(f"{PREFIX}POLL", help="seconds between two reads of what is served"),
    )
    deployment_id: str | None = attrs.field(
        default=None,
        converter=_word,
        metadata=env(
            f"{PREFIX}DEPLOYMENT_ID",
            "CWTRAIN_HOTLOAD_DEPLOYMENT_ID",
            help="deployment whose hot-loads are the weight versions; its API token is read as usual",
        ),
    )
    served_identity_file: str | None = attrs.field(
        default=None,
        converter=_path,
        metadata=env(
            f"{PREFIX}SERVED_IDENTITY_FILE",
            help="file that names what is served, for endpoints without that API",
        ),
    )
    record: str | None = attrs.field(
        default=None,
        converter=_path,
        metadata=env(f"{PREFIX}RECORD", help="file that every request and answer is appended to, without secrets"),
    )

    _key_left_out: ClassVar[str] = ""
    """The variables that the key of a pickled configuration was looked for in, without success."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy in the same process is no pickle: it keeps the secrets

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the key, and which variable of the environment has it."""
        state = {**self.__dict__, "api_key": None}
        key = self.api_key
        if key is not None:
            found = [name for name in _KEY_VARIABLES if (os.environ.get(name) or "").strip() == key]
            state["_key_left_out"] = " ".join(dict.fromkeys([*found, _KEY_VARIABLES[0]]))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the key from this process's environment."""
        for name in state.get("_key_left_out", "").split():
            try:
                key = clean_token(os.environ.get(name))
            except ConfigError:  # no key: it is missed by the first request
                continue
            if key is not None:
                state = {**state, "api_key": key, "_key_left_out": ""}
                break
        self.__dict__.update(state)

    def __attrs_post_init__(self) -> None:
        problems = []
        if self.api_key and self.api_key_file:
            problems.append(f"{PREFIX}API_KEY and {PREFIX}API_KEY_FILE are both set: a key has one source")
        if self.deployment_id and self.served_identity_file:
            problems.append(f"{PREFIX}SERVED_IDENTITY_FILE is for endpoints without a deployment, and one is named")
        if not self.token_ids and self.logprobs:
            problems.append(f"{PREFIX}TOKEN_IDS=0 needs {PREFIX}LOGPROBS=0: tokens made from text have no log-probs")
        if self.routed_experts and not (self.token_ids and self.token_id_prompts):
            problems.append(f"{PREFIX}ROUTED_EXPERTS=1 needs token ids both ways: routes line up with nothing else")
        if problems:
            raise ConfigError("; ".join(problems), problems=problems, hint="unset one of the two settings")

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

    @classmethod
    def for_trainer(
        cls, args: object, *, environ: Mapping[str, str] | None = None, **overrides: object
    ) -> RolloutConfig:
        """Return the configuration for a trainer's arguments: an object with its flags as attributes, or None.

        A trainer that reads every sample's log-probs (``use_tis``, ``use_rollout_logprobs``, ``get_mismatch_metrics``)
        needs LOGPROBS=1, one that replays routes (``use_rollout_routing_replay``) gets ROUTED_EXPERTS=1; the settings
        may not say otherwise. ``rollout_max_context_len`` is the context length where no setting gives one. Raises
        ``ConfigError`` with every problem.
        """
        config = cls.from_env(environ, **overrides)
        readers = [flag for flag in _LOGPROB_READERS if getattr(args, flag, False)]
        problems = []
        if readers and not config.logprobs:
            problems.append(f"{PREFIX}LOGPROBS=0, and the trainer reads log-probs: {_flags(readers)}")
        if not config.token_ids and (readers or getattr(args, "use_rollout_routing_replay", False)):
            problems.append(f"{PREFIX}TOKEN_IDS=0: tokens made from text have no log-probs and no routes")
        if problems:
            raise ConfigError("; ".join(problems), problems=problems, hint="unset these variables")
        changes: dict[str, Any] = {}
        if getattr(args, "use_rollout_routing_replay", False):
            changes["routed_experts"] = True
        longest = getattr(args, "rollout_max_context_len", None)
        if config.context_length is None and isinstance(longest, int) and longest > 0:
            changes["context_length"] = longest
        return attrs.evolve(config, **changes) if changes else config

    @property
    def fixed_concurrency(self) -> int | None:
        """The number of choices in flight, or None where the window follows the server."""
        return self.concurrency if isinstance(self.concurrency, int) else None

    def current_api_key(self) -> str | None:
        """Return the key to send now: from the file where there is one, read again when that changed."""
        if self.api_key_file is None:
            if self._key_left_out and self.api_key is None:
                raise ConfigError(
                    f"the key for {self.base_url} is not known here: a pickled configuration holds none, and this "
                    f"process has no {' and no '.join(self._key_left_out.split())}",
                    hint="set it where the sampler is unpickled, or give the key in a file (api_key_file), which that "
                    "process can read",
                )
            return self.api_key
        try:
            found = os.stat(self.api_key_file)
            mark = (found.st_mtime_ns, found.st_size, found.st_ino)
            known = _KEYS.get(self.api_key_file)
            if known is None or known[0] != mark:
                known = _KEYS[self.api_key_file] = (mark, _read_key(self.api_key_file))
            return known[1]
        except OSError as exc:
            why = f"cannot be read: {exc.strerror or type(exc).__name__}"
            raise ConfigError(f"{PREFIX}API_KEY_FILE={self.api_key_file!r} {why}", hint="check path and mode") from exc
        except ConfigError as exc:
            raise ConfigError(f"{PREFIX}API_KEY_FILE={self.api_key_file!r} {exc}", hint=exc.hint) from exc

    def without_key(self, text: str) -> str:
        """Return ``text`` without the key, for messages that quote a server."""
        try:
            key = self.current_api_key()
        except ConfigError:
            return "(not shown: the key to be hidden cannot be read)"
        return _scrubber(key).text(text) if key else text

    def quoted(self, said: str | bytes, *, limit: int = 200) -> str:
        """Return the beginning of what a server said, for a message: without the key, then on one line, then cut."""
        if isinstance(said, bytes):
            said = said[:_QUOTED_BYTES].decode("utf-8", "replace")
        return quote(self.without_key(said), limit)


@functools.lru_cache(maxsize=16)
def _scrubber(key: str) -> Scrubber:
    return Scrubber([key], shortest=1)
