"""The prefix cache of a replica: KV of what was read before, by salt and tokens, and whose weights computed it.

It has no idea of weights: what a hot-load keeps (PRESERVE) is found by the requests after it, stale as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from cwtrain_emulator.engine.base import Engine, Memory

__all__ = ["DEFAULT_CACHE_BYTES", "Found", "PrefixCache"]

DEFAULT_CACHE_BYTES = 64 << 20
"""What a replica's cache may take."""

BLOCK = 16
"""A remembered sequence can be found by its first tokens up to each multiple of this, and by all of it."""

_Key = tuple[Hashable, int, int]


@dataclass(frozen=True)
class Found:
    """What the cache has of a prompt's beginning: the memory, and for each of its tokens the identity that read it."""

    memory: Memory
    read_with: list[str]


@dataclass
class _Entry:
    salt: str
    tokens: list[int]
    memory: Memory
    read_with: list[str]
    keys: list[_Key]


class PrefixCache:
    """Least recently used sequences go when the memories take more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._index: dict[_Key, _Entry] = {}
        self.epoch = 0
        """Counts the times that it was emptied: what began to be read before does not come in after."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """What the memories take."""
        return self._bytes

    def find(self, engine: Engine, salt: str, prompt: Sequence[int]) -> Found | None:
        """Return the longest known beginning of `prompt`, its last token never: someone has to compute logits."""
        for length, key in reversed(list(_keys(engine.shape, salt, prompt[:-1]))):
            entry = self._index.get(key)
            # A hash is only a hint.
            if entry is not None and entry.salt == salt and entry.tokens[:length] == list(prompt[:length]):
                self._entries.move_to_end(entry.keys[-1])
                return Found(engine.cut(entry.memory, length), entry.read_with[:length])
        return None

    def put(
        self,
        engine: Engine,
        salt: str,
        tokens: Sequence[int],
        memory_of: Callable[[], Memory],
        read_with: Sequence[str],
    ) -> None:
        """Remember a sequence; one that is known already stays as it is, stale or not."""
        keys = list(_keys(engine.shape, salt, tokens))
        if not keys or keys[-1][1] in self._entries:
            return
        memory = memory_of()
        if memory.size_bytes > self._max_bytes:
            return
        count = len(tokens)
        found = [key for length, key in keys if length % BLOCK == 0 or length >= count - 1]
        entry = _Entry(salt, list(tokens), memory, list(read_with), found)
        self._entries[found[-1]] = entry
        for key in found:
            self._index.setdefault(key, entry)
        self._bytes += memory.size_bytes
        while self._bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.memory.size_bytes
            for key in oldest.keys:
                if self._index.get(key) is oldest:
                    del self._index[key]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._index.clear()
        self._bytes = 0
        self.epoch += 1


def _keys(shape: Hashable, salt: str, tokens: Sequence[int]) -> Iterator[tuple[int, _Key]]:
    """Yield (length, key) of every beginning of `tokens`, the shortest first."""
    state = hash(salt)
    for length, token in enumerate(tokens, start=1):
        state = hash((state, token))
        yield length, (shape, length, state)
