"""Between the wire (camelCase, prefixed enums, ``{spec, status}``) and ``cwtrain.models.service``, and out to the CLI.

Reading is tolerant: enums as names or numbers, in any case, with or without prefix; unknown keys stay in ``raw``; null
and absent are the same. A value that is not known becomes UNSPECIFIED and is logged once. A bare number never stands
for a state that ends a wait, because the numbers are not documented.
"""

from __future__ import annotations

import datetime as dt
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override

from cwtrain._process import renew_locks_after_fork
from cwtrain.errors import UnexpectedAnswerError
from cwtrain.infra._json import claim_to_json, deployment_to_json, gateway_to_json, hot_load_to_json, replica_to_json
from cwtrain.models import service as m

__all__ = [
    "claim_to_json",
    "deployment_to_json",
    "enum_to_wire",
    "gateway_to_json",
    "hot_load_to_json",
    "metadata_to_wire",
    "read",
    "read_enum",
    "replica_to_json",
    "time_to_wire",
]

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

logger = logging.getLogger("cwtrain.infra")


@attrs.frozen
class _Names:
    """How an enum is spelt: its prefix on the wire, and the members that a bare number may not stand for."""

    prefix: str
    only_by_name: frozenset[str] = frozenset()


_ENUMS: dict[type[StrEnum], _Names] = {
    m.SnapshotType: _Names("SNAPSHOT_TYPE_"),
    m.CompressionFormat: _Names("COMPRESSION_FORMAT_"),
    m.ChecksumFormat: _Names("CHECKSUM_FORMAT_"),
    m.PromptCachePolicy: _Names("PROMPT_CACHE_POLICY_"),
    m.HotLoadState: _Names("HOT_LOAD_STATE_", frozenset({"COMPLETED", "FAILED", "CANCELED"})),
    m.ReplicaState: _Names("HOT_LOAD_REPLICA_STATE_", frozenset({"READY", "ERROR"})),
    m.TransitionMode: _Names("TRANSITION_MODE_"),
    m.ResourceStatus: _Names("STATUS_", frozenset({"READY", "FAILED", "DELETING"})),
    m.ConditionStatus: _Names("STATUS_"),
}
"""Members stand in the order of their numbers."""

_logged: set[tuple[str, str]] = set()
_logging = threading.Lock()
renew_locks_after_fork(sys.modules[__name__], "_logging")


def read_enum(kind: type[E], value: Any) -> E:
    """Return the member that ``value`` stands for; UNSPECIFIED for 0, nothing, and anything unknown (logged once)."""
    unspecified = kind("UNSPECIFIED")
    names = _ENUMS[kind]
    if value is None or isinstance(value, bool) or value == "":
        return unspecified
    text = str(value).strip()
    number = int(text) if text.isdecimal() else int(value) if isinstance(value, float) and value.is_integer() else None
    if number is not None:
        members = list(kind)
        member = members[number] if 0 <= number < len(members) else None
        if number != 0 and (member is None or member.name in names.only_by_name):
            _log_once(kind, text, "a bare number is not taken as the end of anything")
            return unspecified
        return member or unspecified
    name = re.sub(r"[\s-]+", "_", text).upper().removeprefix(names.prefix)
    name = {"CANCELLED": "CANCELED", "INPROGRESS": "IN_PROGRESS"}.get(name, name)
    if name in kind.__members__:
        return kind[name]
    _log_once(kind, text, "this version does not know it")
    return unspecified


def enum_to_wire(member: StrEnum) -> str:
    """Return the full name of ``member`` as the service spells it."""
    return f"{_ENUMS[type(member)].prefix}{member.name}"


def _log_once(kind: type[StrEnum], text: str, why: str) -> None:
    with _logging:
        if (kind.__name__, text) in _logged:
            return
        _logged.add((kind.__name__, text))
    logger.warning("the service says %s %r: %s; treated as UNSPECIFIED, waits go on", kind.__name__, text[:100], why)


def metadata_to_wire(metadata: m.IncrementalSnapshotMetadata) -> dict[str, str]:
    """Return the ``incrementalSnapshotMetadata`` of a create call: exactly three fields."""
    return {
        "previousSnapshotIdentity": metadata.previous_snapshot_identity,
        "compressionFormat": enum_to_wire(metadata.compression_format),
        "checksumFormat": enum_to_wire(metadata.checksum_format),
    }


def time_to_wire(value: dt.datetime) -> str:
    """Return ``value`` (with a time zone) as RFC 3339 in UTC."""
    return value.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")


# Reading -------------------------------------------------------------------------------------------------------------


def read(kind: type[T], data: Any, where: str) -> T:
    """Return ``data`` as a ``kind`` of the models, with ``data`` itself in ``raw``.

    Raises ``UnexpectedAnswerError`` naming ``where`` and the path inside when that is not possible, or the id is empty.
    """
    if not isinstance(data, Mapping):
        raise UnexpectedAnswerError(f"unexpected answer to {where}: an object is expected, not {type(data).__name__}")
    try:
        flat = _FLAT[kind](data) if kind in _FLAT else data
        value = _converter.structure(flat, kind)
    except (cattrs.BaseValidationError, TypeError, ValueError, AttributeError) as exc:
        problems = "; ".join(_problems(exc))
        raise UnexpectedAnswerError(f"unexpected answer to {where}: {problems}") from exc
    if isinstance(value, (m.Gateway, m.Deployment, m.CapacityClaim, m.HotLoad)) and not value.id:
        raise UnexpectedAnswerError(
            f"unexpected answer to {where}: the {_words(kind)} in it has no id",
            hint="the call may have taken effect: list what there is before you make it again",
        )
    return attrs.evolve(value, raw=data)  # type: ignore[misc]


def _words(kind: type[Any]) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"-\1", kind.__name__).lower()


def _problems(exc: Exception) -> list[str]:
    if isinstance(exc, cattrs.BaseValidationError):
        return [re.sub(r" @ \$\.?", " at ", text) for text in cattrs.transform_error(exc)]
    return [str(exc)]


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be an object, not {type(value).__name__}")
    return value


def _parts(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return _object(data.get("spec"), "spec"), _object(data.get("status"), "status")


def _common(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what gateways, deployments and claims have in common, on one level."""
    spec, status = _parts(data)
    return {
        **{key: spec.get(key) for key in ("id", "name", "organizationId")},
        **{key: status.get(key) for key in ("status", "conditions", "createdAt", "updatedAt")},
    }


def _flat_gateway(data: Mapping[str, Any]) -> dict[str, Any]:
    spec, status = _parts(data)
    return {**_common(data), "zones": spec.get("zones"), "endpoints": status.get("endpoints")}


def _flat_deployment(data: Mapping[str, Any]) -> dict[str, Any]:
    spec, _ = _parts(data)
    model = _object(spec.get("model"), "spec.model")
    return {
        **_common(data),
        "gatewayIds": spec.get("gatewayIds"),
        "disabled": spec.get("disabled"),
        "modelName": model.get("name"),
        "modelBucket": model.get("bucket"),
        "modelPath": model.get("path"),
        "engine": _object(spec.get("runtime"), "spec.runtime").get("engine"),
        "hotLoad": spec.get("hotLoad") or None,
    }


def _flat_claim(data: Mapping[str, Any]) -> dict[str, Any]:
    spec, status = _parts(data)
    resources = _object(spec.get("resources"), "spec.resources")
    return {
        **_common(data),
        **{key: resources.get(key) for key in ("instanceId", "instanceCount", "capacityType", "zones")},
        **{key: status.get(key) for key in ("allocatedInstances", "pendingInstances")},
    }


_FLAT: dict[type[Any], Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    m.Gateway: _flat_gateway,
    m.Deployment: _flat_deployment,
    m.CapacityClaim: _flat_claim,
}

_ABSENT: dict[type[Any], dict[str, Any]] = {
    m.Gateway: {"id": ""},
    m.Deployment: {"id": ""},
    m.CapacityClaim: {"id": ""},
    m.HotLoad: {"spec": {}},
    m.HotLoadSpec: {"id": ""},
    m.HotLoadReplica: {"name": ""},
    m.HotLoadTarget: {"bucket": ""},
    m.SnapshotChainEntry: {"identity": ""},
    m.IncrementalSnapshotMetadata: {"previousSnapshotIdentity": "", "compressionFormat": 0, "checksumFormat": 0},
}
"""What stands for an absent field where the model has no default, or one that is not the wire's zero value."""


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda match: match[1].upper(), name)


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter()

    def reader(cls: type[Any]) -> Callable[[Any, Any], Any]:
        fields = {field.name: field for field in attrs.fields(cls)}
        ours = [name for name in ("raw", "timings") if name in fields]
        texts = [name for name in ("state", "status") if f"{name}_text" in fields]
        lists = [name for name, field in fields.items() if field.default == ()]
        names: dict[str, Any] = {
            name: override(omit=True) if name in ours else override(rename=_camel(name)) for name in fields
        }
        inner = make_dict_structure_fn(cls, converter, **names)

        def structure(data: Any, _: Any) -> Any:
            known = {key: value for key, value in _object(data, "it").items() if value is not None and value != {}}
            for name in lists:
                if not isinstance(known.get(_camel(name), []), list):
                    raise TypeError(f"{_camel(name)} must be a list")
            for name in texts:
                known[_camel(f"{name}_text")] = str(known.get(name, ""))
            return inner({**_ABSENT.get(cls, {}), **known}, cls)

        return structure

    converter.register_structure_hook_factory(lambda cls: attrs.has(cls), reader)
    for kind in _ENUMS:
        converter.register_structure_hook(kind, lambda value, cls: read_enum(cls, value))
    converter.register_structure_hook(dt.datetime, lambda value, _: _read_time(value))
    converter.register_structure_hook(str, lambda value, _: _read_text(value))
    converter.register_structure_hook(int, lambda value, _: _read_int(value))
    converter.register_structure_hook(bool, lambda value, _: _read_bool(value))
    return converter


def _read_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise TypeError(f"text is expected, not {type(value).__name__}")


def _read_int(value: Any) -> int:
    """Return a number; proto3 JSON writes 64-bit ones as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or int(value) != float(value):
        raise TypeError(f"a whole number is expected, not {value!r:.60}")
    return int(value)


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError(f"true or false is expected, not {value!r:.60}")


def _read_time(value: Any) -> dt.datetime | None:
    """Return an RFC 3339 time; None for Go's zero time and for what cannot be read: no wait shall stop for a clock."""
    try:
        at = dt.datetime.fromisoformat(value.strip().upper())
    except (AttributeError, ValueError):
        return None
    if at.year <= 1:
        return None
    return at if at.tzinfo else at.replace(tzinfo=dt.UTC)


_converter = _make_converter()
