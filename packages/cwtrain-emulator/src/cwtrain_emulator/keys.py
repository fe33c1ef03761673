"""The secrets of one state directory: made once, kept in a file that only its owner can read."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass, fields
from pathlib import Path

__all__ = ["Keys", "write_private"]

_FILE = "keys.json"
_SPARES = 8


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

    @property
    def s3_spares(self) -> list[tuple[str, str]]:
        """Further keys of the trainer, for credentials that expire and are renewed; the same for each state."""
        access, secret = self.s3_trainer
        made = [hashlib.sha256(f"{secret} spare {number}".encode()).hexdigest() for number in range(_SPARES)]
        return [(f"{access[:-4]}{digest[:4].upper()}S{number}", digest[:40]) for number, digest in enumerate(made)]

    @classmethod
    def load_or_create(cls, state_dir: Path) -> Keys:
        """Return the keys of `state_dir`; they are made, and kept with mode 0600, the first time."""
        path = state_dir / _FILE
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            keys = cls._fresh()
            write_private(path, json.dumps(asdict(keys)))
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


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
