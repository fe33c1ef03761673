"""The secrets of one state directory: made once, kept in a file that only its owner can read."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, fields
from pathlib import Path

__all__ = ["Keys"]

_FILE = "keys.json"


@dataclass(frozen=True, repr=False)
class Keys:
    """Tokens of the API, keys of the store, and the key that signs page tokens."""

    admin_token: str
    viewer_token: str
    s3_admin: tuple[str, str]
    s3_service: tuple[str, str]
    s3_trainer: tuple[str, str]
    page_key: str
    organization_id: str

    def __repr__(self) -> str:
        return f"Keys(organization_id={self.organization_id!r})"

    @classmethod
    def load_or_create(cls, state_dir: Path) -> Keys:
        """Return the keys of `state_dir`; they are made, and kept with mode 0600, the first time."""
        path = state_dir / _FILE
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            keys = cls._fresh()
            _write_private(path, json.dumps(asdict(keys)))
            return keys
        for name in ("s3_admin", "s3_service", "s3_trainer"):
            values[name] = tuple(values[name])
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    @classmethod
    def _fresh(cls) -> Keys:
        def pair(name: str) -> tuple[str, str]:
            return f"cwemu{name}{secrets.token_hex(6)}".upper(), secrets.token_hex(20)

        return cls(
            admin_token=f"cwemu-admin-{secrets.token_hex(16)}",
            viewer_token=f"cwemu-viewer-{secrets.token_hex(16)}",
            s3_admin=pair("root"),
            s3_service=pair("service"),
            s3_trainer=pair("trainer"),
            page_key=secrets.token_hex(16),
            organization_id=f"emulator-{secrets.token_hex(4)}",
        )


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
