"""The tokenizer of the numpy engine's models: one token per byte."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cwtrain_emulator.engine.base import TextError

__all__ = ["ByteTokenizer", "TextError"]


class ByteTokenizer:
    """Byte x is the id ``x - byte_offset``; the last id of the vocabulary is the end token and no byte."""

    def __init__(self, *, vocab_size: int, byte_offset: int) -> None:
        self._offset = byte_offset
        self._bytes = max(0, min(256 - byte_offset, vocab_size - 1))

    @classmethod
    def load(cls, directory: Path, *, vocab_size: int) -> ByteTokenizer:
        """Return the tokenizer of a checkpoint; without a usable ``tokenizer_config.json``, the usual offset."""
        offset: object = None
        try:
            values = json.loads((directory / "tokenizer_config.json").read_text())
            offset = values.get("byte_offset") if isinstance(values, dict) else None
        except (OSError, ValueError):
            pass
        if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset < 256:
            offset = 0 if vocab_size > 256 else 32
        return cls(vocab_size=vocab_size, byte_offset=offset)

    @property
    def eos_id(self) -> int | None:
        """None: the checkpoint's config names the end token."""
        return None

    def encode(self, text: str) -> list[int]:
        """Return a text's ids; raise TextError when a byte has none."""
        ids = [byte - self._offset for byte in text.encode("utf-8", errors="replace")]
        for token in ids:
            if not 0 <= token < self._bytes:
                raise TextError(f"the byte {token + self._offset:#04x} is not in the vocabulary of this model")
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of some ids; ids that are no byte give nothing."""
        return bytes(token + self._offset for token in ids if token < self._bytes)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids, with U+FFFD where bytes are no UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def detokenizer(self, prompt: Sequence[int], *, skip_special: bool) -> _ByteDetokenizer:
        """Return a new detokenizer; bytes need no neighbours, and the end token has no text to be skipped."""
        return _ByteDetokenizer(self)

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Return ``[role] content`` of each message with blanks between them, and ``[assistant] `` to be gone on with.

        Nothing outside printable ASCII, since most of these models have no other bytes.
        """
        parts = [f"[{message.get('role')}] {message.get('content') or ''}" for message in messages]
        text = " ".join(parts)
        if not options.get("continue_final_message") and options.get("add_generation_prompt", True):
            text += " [assistant] "
        return self.encode(text)


class _ByteDetokenizer:
    """Waits for the rest of a character."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
