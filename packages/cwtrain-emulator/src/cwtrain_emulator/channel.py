"""Frames between the service and its replicas, over a loopback connection: a JSON head and, behind it, raw bytes.

A frame is the head's length and the payload's length (4 bytes each, big-endian), the head, the payload. A payload goes
from the replica to the client without being parsed again on the way.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

__all__ = ["read_frame", "write_frame"]

_LENGTHS = struct.Struct("!II")
_MAX_HEAD_BYTES = 64 << 20
_MAX_PAYLOAD_BYTES = 512 << 20

Head = dict[str, Any]


async def read_frame(reader: asyncio.StreamReader) -> tuple[Head, bytes]:
    """Return the next frame; raise asyncio.IncompleteReadError at the end, ValueError for what is no frame."""
    head_bytes, payload_bytes = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    if head_bytes > _MAX_HEAD_BYTES or payload_bytes > _MAX_PAYLOAD_BYTES:
        raise ValueError("frame too long")
    head = json.loads(await reader.readexactly(head_bytes))
    payload = await reader.readexactly(payload_bytes) if payload_bytes else b""
    if not isinstance(head, dict):
        raise ValueError("a frame's head is an object")
    return head, payload


def write_frame(writer: asyncio.StreamWriter, head: Head, payload: bytes = b"") -> None:
    """Queue a frame."""
    raw = json.dumps(head, separators=(",", ":")).encode()
    writer.write(b"".join((_LENGTHS.pack(len(raw), len(payload)), raw, payload)))
