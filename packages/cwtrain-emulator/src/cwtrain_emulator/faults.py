"""Faults that a test asks for: what a rule may say, and which of them a request meets. In memory, and counted.

A rule looks at the requests (or replicas' loads) of its target that match it; it lets `after` of them pass and strikes
the next `times`. Nothing is random unless a rule has a `probability`, drawn from its `seed`. Rules are asked
in the order in which they were added; the first one that ends a request is the last one that sees it.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "COMMON_OPTIONS",
    "FAULT_OPTIONS",
    "KINDS",
    "MATCH_OPTIONS",
    "TARGETS",
    "Fault",
    "FaultBook",
    "FaultError",
    "FaultKind",
    "Option",
    "parse_fault",
]

TARGETS = ("api", "endpoint", "store", "replica", "directory")
"""What a fault can strike: control plane, endpoint, object store, replicas, a directory that a trainer reads."""

_COUNT = 1 << 40
_SECONDS = 86_400.0
_LOOK_SECONDS = 0.05
_HTTP = ("api", "endpoint", "store")


class FaultError(ValueError):
    """A rule cannot be used; the message names every problem."""


@dataclass(frozen=True)
class Option:
    """One setting of a kind of fault: its type, its bounds where it is a number, its default (None: none)."""

    type: type
    default: Any = None
    least: float = 0
    most: float = math.inf
    required: bool = False
    choices: tuple[str, ...] = ()
    help: str = ""


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault: what it strikes, and what can be said about it. `ends`: it answers the request itself."""

    targets: tuple[str, ...]
    help: str
    options: Mapping[str, Option] = field(default_factory=dict)
    ends: bool = True


_RETRY_AFTER = Option(str, help="value of the header Retry-After: seconds, or a date")
_MESSAGE = Option(str, help="text of the refusal")
_ON = Option(str, default="load", choices=("load", "request"), help="a load of weights, or a completions request")

KINDS: dict[str, FaultKind] = {
    "status": FaultKind(
        _HTTP,
        "answers with a status, and does nothing",
        {
            "status": Option(int, default=503, least=200, most=599, help="HTTP status"),
            "retry_after": _RETRY_AFTER,
            "message": _MESSAGE,
            "code": Option(str, help="S3 error code (store)"),
        },
    ),
    "latency": FaultKind(
        _HTTP,
        "waits before the request is looked at",
        {"seconds": Option(float, required=True, most=_SECONDS, help="how long")},
        ends=False,
    ),
    "hold": FaultKind(
        _HTTP,
        "does what was asked, and holds the answer back, until the fault is cleared at the latest",
        {"seconds": Option(float, required=True, most=_SECONDS, help="how long")},
        ends=False,
    ),
    "drop": FaultKind(_HTTP, "closes the connection without an answer; nothing is done"),
    "cut": FaultKind(
        _HTTP,
        "does what was asked, and closes the connection after some bytes of the answer's body",
        {"bytes": Option(int, default=0, most=_COUNT, help="bytes that still go out; 0: not even the head")},
        ends=False,
    ),
    "frames": FaultKind(
        ("endpoint",),
        "a streamed answer comes in other frames: long lines, other line ends, comments, events that have a name",
        {
            "bytes": Option(int, default=0, most=1 << 30, help="bytes by which the data of each event grows"),
            "ends": Option(str, default="lf", choices=("lf", "crlf", "cr"), help="what ends a line"),
            "event": Option(str, help="name of another event in front of each; none: there is none"),
            "note": Option(str, default="{}", help="data of that event"),
            "comment": Option(str, help="comment in front of each event, as to keep a connection alive"),
        },
        ends=False,
    ),
    "html": FaultKind(
        _HTTP,
        "answers with an HTML page, as a proxy in between does",
        {"status": Option(int, default=502, least=200, most=599, help="HTTP status"), "retry_after": _RETRY_AFTER},
    ),
    "error_body": FaultKind(_HTTP, "answers 200 with an error as body; nothing is done", {"message": _MESSAGE}),
    "denied": FaultKind(
        ("store",),
        "refuses one permission: 403 AccessDenied",
        {
            "permission": Option(
                str,
                default="",
                choices=(
                    "",
                    "s3:GetObject",
                    "s3:PutObject",
                    "s3:ListBucket",
                    "s3:AbortMultipartUpload",
                    "s3:ListBucketMultipartUploads",
                    "s3:DeleteObject",
                ),
                help="the permission; none: all of them",
            )
        },
    ),
    "slow_down": FaultKind(("store",), "refuses with 503 SlowDown", {"retry_after": _RETRY_AFTER}),
    "precondition_failed": FaultKind(("store",), "refuses with 412 PreconditionFailed"),
    "lost_object": FaultKind(
        ("store",),
        "objects are gone: 404 NoSuchKey, and listings leave them out",
        {"key": Option(str, required=True, help="regular expression that is searched in the key")},
        ends=False,
    ),
    "late_object": FaultKind(
        ("store",),
        "objects that are written from now on show late: until then 404 NoSuchKey, and listings leave them out",
        {
            "key": Option(str, required=True, help="regular expression that is searched in the key"),
            "seconds": Option(float, required=True, most=_SECONDS, help="how long after the write"),
        },
        ends=False,
    ),
    "checksum_required": FaultKind(
        ("store",),
        "refuses objects and parts without Content-MD5 or x-amz-checksum-*, as a bucket with object lock does: "
        "400 InvalidRequest",
        ends=False,
    ),
    "operation_aborted": FaultKind(
        ("store",),
        "refuses with 409 OperationAborted: another operation on the same resource is in progress",
        {"retry_after": _RETRY_AFTER},
    ),
    "clock_skew": FaultKind(
        ("store",),
        "refuses with 403 RequestTimeTooSkewed; the answer's Date is that of the other clock",
        {"seconds": Option(float, default=3600.0, least=-_SECONDS, most=_SECONDS, help="how far that clock is ahead")},
    ),
    "expired_credentials": FaultKind(
        ("store",),
        "refuses an access key: 400 ExpiredToken",
        {"access_key": Option(str, default="", help="regular expression for the access key; none: every key")},
    ),
    "throttle": FaultKind(
        ("store",),
        "bodies go through no faster than this, either way, each request for itself",
        {"bytes_per_second": Option(int, required=True, least=1, most=_COUNT, help="the rate")},
        ends=False,
    ),
    "late": FaultKind(
        ("directory",),
        "`view` shows the files of `source` late, as a shared disk shows those of another node (a stand-in: it copies)",
        {
            "source": Option(str, required=True, help="directory that is written to"),
            "view": Option(str, required=True, help="directory that shows it; files of its own stay"),
            "seconds": Option(float, required=True, most=_SECONDS, help="how long after a file's last change"),
            "first": Option(
                str,
                default="absent",
                choices=("absent", "empty", "short"),
                help="how a file looks until then: not there, there without bytes, there with half of them",
            ),
        },
        ends=False,
    ),
    "stuck": FaultKind(
        ("replica",),
        "a load (or a request) stands still until the fault is cleared",
        {"on": _ON},
        ends=False,
    ),
    "slow": FaultKind(
        ("replica",),
        "a load (or a request) takes longer",
        {"on": _ON, "seconds": Option(float, required=True, most=_SECONDS, help="how much")},
        ends=False,
    ),
    "damage": FaultKind(
        ("replica",),
        "bytes are damaged after they were fetched: the load fails at its checksum, the old weights stay",
        {"on": Option(str, default="load", choices=("load",), help="always a load")},
        ends=False,
    ),
    "finish": FaultKind(
        ("replica",),
        "a request's choices end with another finish_reason, as engines and routers say that they gave one up",
        {
            "on": Option(str, default="request", choices=("request",), help="always a request"),
            "reason": Option(str, default="abort", help="the reason, in any spelling; null: none is told"),
            "tokens": Option(int, default=None, most=_COUNT, help="tokens before; none: as many as there would be"),
            "choice": Option(int, default=None, most=_COUNT, help="index of the choice; none: every one"),
        },
        ends=False,
    ),
    "too_long": FaultKind(
        ("replica",),
        "a request beyond the context is refused in the words of an engine, or in words that say nothing",
        {
            "on": Option(str, default="request", choices=("request",), help="always a request"),
            "words": Option(
                str,
                default="vllm",
                choices=("vllm", "vllm-length", "vllm-old", "sglang", "sglang-input", "none"),
                help="whose words",
            ),
            "answer": Option(int, default=400, least=400, most=599, help="HTTP status of that refusal"),
        },
        ends=False,
    ),
    "expand": FaultKind(
        ("replica",),
        "a prompt becomes longer at the server than it was sent, as placeholders of images do",
        {
            "on": Option(str, default="request", choices=("request",), help="always a request"),
            "by": Option(int, required=True, least=1, most=_COUNT, help="tokens that each prompt becomes longer"),
        },
        ends=False,
    ),
    "die": FaultKind(
        ("replica",),
        "the process is killed in the middle of a load (or of a request); the pool starts it again",
        {"on": _ON, "tokens": Option(int, default=1, most=_COUNT, help="tokens that a request makes before")},
        ends=False,
    ),
}
"""Every kind of fault by name."""

COMMON_OPTIONS: dict[str, Option] = {
    "after": Option(int, default=0, most=_COUNT, help="matching requests that pass before the first is struck"),
    "times": Option(int, default=None, least=1, most=_COUNT, help="how many are struck; none: all"),
    "probability": Option(float, default=None, most=1.0, help="strike by chance, drawn from the seed"),
    "seed": Option(int, default=0, least=-_COUNT, most=_COUNT, help="seed of the draws"),
}
"""What every rule may say about when it strikes."""

MATCH_OPTIONS: dict[str, dict[str, Option]] = {
    **{
        target: {
            "method": Option(str, help="regular expression for the whole method"),
            "path": Option(str, help="regular expression searched in the path"),
        }
        for target in _HTTP
    },
    "replica": {
        "replica": Option(str, help="regular expression searched in the replica's name"),
        "identity": Option(str, help="regular expression for the whole identity that is loaded, or served"),
    },
    "directory": {},
}
"""What a rule of each target may say about the requests that it matches."""

MATCH_OPTIONS["store"]["caller"] = Option(
    str, choices=("trainer", "service", "other"), help="whose key signs: the trainer's, or the service's own"
)


def _all_options() -> dict[str, Option]:
    found = dict(COMMON_OPTIONS)
    for table in (*MATCH_OPTIONS.values(), *(kind.options for kind in KINDS.values())):
        found |= {name: option for name, option in table.items() if name not in found}
    return found


FAULT_OPTIONS = _all_options()
"""Every setting that some fault has, by name."""

_PATTERNS = ("method", "path", "replica", "identity", "key", "access_key")


@dataclass
class Fault:
    """One rule. `seen` counts the requests that matched it, `struck` those that it struck."""

    id: str
    target: str
    kind: str
    values: dict[str, Any]
    seen: int = 0
    struck: int = 0
    patterns: dict[str, re.Pattern[str]] = field(default_factory=dict)
    random: random.Random = field(default_factory=random.Random)

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def ends(self) -> bool:
        """True when the fault answers the request itself."""
        return KINDS[self.kind].ends

    def to_json(self) -> dict[str, Any]:
        """Return the rule as the API shows it."""
        said = {name: value for name, value in self.values.items() if value is not None and value != ""}
        return {
            "id": self.id,
            "target": self.target,
            "kind": self.kind,
            **said,
            "seen": self.seen,
            "struck": self.struck,
        }

    def matches(self, subject: Mapping[str, Any]) -> bool:
        """Say whether the rule is about a request; `subject` has what is known of it."""
        for name in ("method", "identity"):
            if name in self.patterns and not self.patterns[name].fullmatch(subject[name]):
                return False
        for name in ("path", "replica", "access_key"):
            if name in self.patterns and not self.patterns[name].search(subject[name]):
                return False
        for name in ("on", "caller", "permission"):
            if self.values.get(name) and self.values[name] != subject[name]:
                return False
        if self.kind == "checksum_required":
            return bool(subject["writes"])
        if self.kind not in ("lost_object", "late_object"):
            return True
        return bool(subject["listing"] or (subject["key"] and self.hides(subject["key"], subject["ages"])))

    def hides(self, key: str, ages: Mapping[str, float]) -> bool:
        """Say whether an object is not to be seen; `ages` are the seconds since objects were written."""
        if not self.patterns["key"].search(key):
            return False
        return self.kind == "lost_object" or ages.get(key, math.inf) < self.values["seconds"]

    def strikes(self) -> bool:
        """Count a request that matches, and say whether it is struck."""
        self.seen += 1
        times = self.values.get("times")
        if self.seen <= self.values["after"] or (times is not None and self.struck >= times):
            return False
        chance = self.values.get("probability")
        if chance is not None and self.random.random() >= chance:
            return False
        self.struck += 1
        return True


class FaultBook:
    """All rules of one emulator. Thread-safe.

    `on_added(rule)` is called with each new rule, `on_cleared(ids)` with the ids of rules that are gone.
    """

    def __init__(self) -> None:
        self._rules: list[Fault] = []
        self._lock = threading.Lock()
        self._made = 0
        self.on_cleared: Callable[[list[str]], None] = lambda _ids: None
        self.on_added: Callable[[Fault], None] = lambda _rule: None
        self.targets: tuple[str, ...] = TARGETS

    def add(self, body: Mapping[str, Any]) -> Fault:
        """Add a rule and return it; raise FaultError that names all that is wrong with it."""
        rule = parse_fault(body)
        if rule.target not in self.targets:
            raise FaultError(f"target: {rule.target} cannot be struck here: the store is not the emulator's own")
        with self._lock:
            self._made += 1
            rule.id = f"fault-{self._made}"
            self._rules.append(rule)
        self.on_added(rule)
        return rule

    def rules(self) -> list[Fault]:
        """Return all rules, oldest first."""
        with self._lock:
            return list(self._rules)

    def get(self, fault_id: str) -> Fault | None:
        """Return one rule, or None."""
        return next((rule for rule in self.rules() if rule.id == fault_id), None)

    def clear(self, fault_id: str | None = None) -> list[str]:
        """Remove one rule, or all of them; return the ids of those that were there."""
        with self._lock:
            gone = [rule.id for rule in self._rules if fault_id in (None, rule.id)]
            self._rules = [rule for rule in self._rules if rule.id not in gone]
        self.on_cleared(gone)
        return gone

    async def held(self, fault: Fault) -> None:
        """Return when an answer has been held back long enough, or when its rule is gone."""
        loop = asyncio.get_running_loop()
        end = loop.time() + fault["seconds"]
        while (left := end - loop.time()) > 0 and self.get(fault.id) is not None:
            await asyncio.sleep(min(left, _LOOK_SECONDS))

    def take(self, target: str, **subject: Any) -> list[Fault]:
        """Return the rules that strike a request, in order, and count it."""
        struck: list[Fault] = []
        with self._lock:
            for rule in self._rules:
                if rule.target == target and rule.matches(subject) and rule.strikes():
                    struck.append(rule)
                    if rule.ends:
                        break
        return struck


def parse_fault(body: Mapping[str, Any]) -> Fault:
    """Return the rule in a request's body, without an id; raise FaultError."""
    target, kind = body.get("target"), body.get("kind")
    if target not in TARGETS:
        raise FaultError(f"target: must be one of {', '.join(TARGETS)}")
    known = [name for name, found in KINDS.items() if target in found.targets]
    if kind not in known:
        raise FaultError(f"kind: must be one of {', '.join(known)} for the target {target}")
    options = {**COMMON_OPTIONS, **MATCH_OPTIONS[target], **KINDS[kind].options}
    problems = [f"{name}: unknown for {target} {kind}" for name in body if name not in {"target", "kind", *options}]
    values: dict[str, Any] = {}
    for name, option in options.items():
        value = body.get(name)
        if value is None:
            values[name] = option.default
            if option.required:
                problems.append(f"{name}: is required")
            continue
        problem = _problem(option, value)
        if problem:
            problems.append(f"{name}: {problem}")
        else:
            values[name] = option.type(value)
    patterns: dict[str, re.Pattern[str]] = {}
    for name in _PATTERNS:
        if values.get(name):
            try:
                patterns[name] = re.compile(values[name])
            except re.error as exc:
                problems.append(f"{name}: is not a regular expression ({exc})")
    if kind == "late":
        problems += [
            f"{name}: must be an absolute path" for name in ("source", "view") if not str(values[name]).startswith("/")
        ]
    if problems:
        raise FaultError("; ".join(problems))
    return Fault("", str(target), str(kind), values, patterns=patterns, random=random.Random(values["seed"]))  # noqa: S311


def _problem(option: Option, value: object) -> str:
    """Return what is wrong with a value, or nothing."""
    if option.type is str:
        if option.choices and value not in option.choices:
            return f"must be one of {', '.join(filter(None, option.choices))}"
        # Retry-After is a text to HTTP and a number to most people.
        if isinstance(value, int | float) and not isinstance(value, bool):
            return ""
        usable = isinstance(value, str) and len(value) <= 1000 and value.isprintable()
        return "" if usable else "must be a text of up to 1000 printable characters"
    number = isinstance(value, int) or (option.type is float and isinstance(value, float))
    if isinstance(value, bool) or not number:
        return "must be an integer" if option.type is int else "must be a number"
    if not option.least <= value <= option.most:  # type: ignore[operator]
        return f"must be from {option.least:.15g} to {option.most:.15g}"
    return ""
