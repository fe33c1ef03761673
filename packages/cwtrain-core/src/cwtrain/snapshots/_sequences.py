"""Where the zeros are: from the XOR of two versions to the matches that zstd is given.

The XOR of a sparse update is a byte or two, then a run of zeros. zstd's own search finds that slowly and badly; we know
it exactly. Each run of at least five zeros becomes one sequence: the pending bytes and the first zero as literals, the
rest of the run as a match at offset 1. It works on bytes, so it serves every dtype; but what lies between the first and
the last non-zero byte of one 8-byte word is always literals, which costs under 1 % of the size and saves half of the
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cwtrain.snapshots._buffers import MAX_PARTS, WORD_BYTES, Bytes, round_up
from cwtrain.snapshots._xor import xor_words

MIN_RUN = 5
"""A shorter run of zeros costs less as literals."""

CLUMPED, CLUMPED_RUN = 0.8, 17
"""With fewer runs than this for each non-zero word the changes lie close together, where zeros are cheap literals: only
runs of so many zeros are worth a match there. That takes half of the time, for half a percent more bytes."""

DENSE = 0.55
"""From this part of non-zero words on, matches do not pay: literals only."""

FEW = 16
"""Up to so many parts it is faster to look at each by itself than at all of them together."""

RECORD_BYTES = 16
"""Length of one sequence as zstd takes it: four uint32."""

EQUAL = -1

_Words = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.intp]


class Found(NamedTuple):
    """What was found in one part: bytes that are not zero, and its sequences among the records of the builder.

    ``records`` is how many, ``EQUAL`` where all bytes are zero, 0 where all are literals.
    """

    changed_bytes: int
    first: int
    records: int


_NOTHING = Found(0, 0, EQUAL)

# For each mask of non-zero bytes of a word: the first of them, and two past the last, where a match may begin (after
# one more zero). A match goes from one word's second number to the next word's first. `_BOTH` has both in one int64.
_FIRST = np.array([max(0, (mask & -mask).bit_length() - 1) for mask in range(256)], np.int32)
_AFTER = np.array([mask.bit_length() + 1 for mask in range(256)], np.int32)
_BOTH = np.stack((_FIRST, _AFTER), axis=1).view(np.int64).ravel()
_COUNT = np.array([mask.bit_count() for mask in range(256)], np.uint8)
_WORD_IN_BOTH = WORD_BYTES * (1 + (1 << 32))  # times a word's number: where it begins, in both halves of an int64

_SPARSE = (0.04, 0.1)  # parts of non-zero words between which numpy's search for them has its slow spot


class SequenceBuilder:
    """One worker's scratch arrays: about 5 MiB for chunks of 1 MiB, of which sparse data touches a fraction."""

    def __init__(self, chunk_bytes: int) -> None:
        words = chunk_bytes // WORD_BYTES + MAX_PARTS
        entries = words + MAX_PARTS
        self._flags = np.ones(words + words // 12, np.bool_)  # the last twelfth stays true, see _places
        self._most = words
        self._bytes = np.empty(words * WORD_BYTES, np.bool_)
        self._gathered = np.empty(words, np.uint64)
        self._base = np.empty(words, np.int64)
        self._edges = np.empty(2 * words + 3, np.int32)
        self._gaps = np.empty(entries, np.int32)
        self._kept = np.empty(entries, np.bool_)
        self._from = np.empty(entries, np.int32)
        self._to = np.empty(entries, np.int32)
        self._records = np.zeros((entries, 4), np.int32)  # memory is touched, and so taken, where it is used
        self._subtracted: tuple[Bytes, Sequence[int], Sequence[int]] = (self._bytes.view(np.uint8)[:0], (), ())
        self._ready = 0  # records that have their offset, which is always 1
        self.address = int(self._records.ctypes.data)
        """Address of the records: offset, literals, match length, 0."""

    def records_of(self, found: Found) -> npt.NDArray[np.int32]:
        """Return the records of a part, which stay valid until the next call."""
        return self._records[found.first : found.first + max(0, found.records)]

    def subtract(self, old: Bytes, new: Bytes, lengths: Sequence[int], positions: Sequence[int]) -> None:
        """Set ``old`` to old XOR new; both have whole words, and these parts of them are meant."""
        xor_words(old, new)
        self._subtracted = (old, lengths, positions)

    def found(self) -> list[Found]:
        """Return what is in each part that was subtracted last; see ``find``."""
        return self.find(*self._subtracted)

    def find(self, data: Bytes, lengths: Sequence[int], positions: Sequence[int]) -> list[Found]:
        """Return what is in each part of ``data``: XORed bytes, each part from its position on, zeros between them.

        The records stay valid until the next call.
        """
        words = data.view(np.uint64)
        begin = self._most - words.size
        nonzero = np.not_equal(words, 0, out=self._flags[begin : self._most])
        count = int(np.count_nonzero(nonzero))
        if not count:
            return [_NOTHING] * len(lengths)
        if len(lengths) == 1 and count > DENSE * words.size:
            return [Found(self._count(data), 0, 0)]
        where = self._places(begin, count)
        if len(lengths) == 1:
            return [self._find_one(words, where, lengths[0], 0)]
        if len(lengths) <= FEW:
            return self._find_few(words, where, lengths, positions)
        return self._find_many(data, words, where, lengths, positions)

    def _places(self, begin: int, count: int) -> _Places:
        """Return which of the flags from ``begin`` on are true; ``count`` of them are.

        numpy looks for the next one with ``memchr`` where less than a tenth is true, which is slower than its other way
        unless far less is. A few more at the end make it take the other way.
        """
        low, high = (share * (self._most - begin) for share in _SPARSE)
        if low < count <= high:
            return self._flags[begin:].nonzero()[0][:count]
        return self._flags[begin : self._most].nonzero()[0]

    def _find_few(self, words: _Words, where: _Places, lengths: Sequence[int], positions: Sequence[int]) -> list[Found]:
        """Look at one part after the other."""
        begins = [position // WORD_BYTES for position in positions]
        borders = [*where.searchsorted(begins).tolist(), where.size]
        found = []
        first = 0
        for number, begin in enumerate(begins):
            mine = where[borders[number] : borders[number + 1]]
            if not mine.size:
                found.append(_NOTHING)
                continue
            part = words[begin : begin + round_up(lengths[number]) // WORD_BYTES]
            if mine.size > DENSE * part.size:
                found.append(Found(self._count(part.view(np.uint8)), 0, 0))
                continue
            found.append(self._find_one(part, mine - begin, lengths[number], first))
            first += found[-1].records
        return found

    def _find_one(self, words: _Words, where: _Places, length: int, first: int) -> Found:
        """Return what is in a part whose non-zero words are ``where``; its records go from number ``first`` on."""
        count = where.size
        gathered, masks = self._gather(words, where)
        # The edges are: 1, first 0, after 0, first 1, after 1, ..., length. All but the outer ones come in pairs.
        edges = self._edges[1 : 2 * count + 3]
        pairs = self._edges[2 : 2 * count + 2].view(np.int64)
        base = np.multiply(where, _WORD_IN_BOTH, out=self._base[:count])
        np.add(_BOTH.take(masks, out=pairs, mode="clip"), base, out=pairs)
        edges[0], edges[-1] = 1, length
        gaps = np.subtract(edges[1::2], edges[::2], out=self._gaps[: count + 1])
        kept = self._long_enough(gaps, MIN_RUN)
        if kept.size < CLUMPED * count:
            kept = self._long_enough(gaps, CLUMPED_RUN)
        self._write_records(edges, edges[1:], np.left_shift(kept, 1, out=self._base[: kept.size]), first)
        changed = np.count_nonzero(np.not_equal(gathered, 0, out=self._bytes[: gathered.size]))
        return Found(int(changed), first, kept.size)

    def _find_many(
        self, data: Bytes, words: _Words, where: _Places, lengths: Sequence[int], positions: Sequence[int]
    ) -> list[Found]:
        begins, sizes = np.array(positions, np.int64), np.array(lengths, np.int64)
        borders = np.searchsorted(where, np.append(begins // WORD_BYTES, words.size))
        counts = np.diff(borders)
        dense = counts > DENSE * ((sizes + WORD_BYTES - 1) // WORD_BYTES)
        if np.all(dense | (counts == 0)):
            return [
                Found(self._count(data[at : at + round_up(length)]), 0, 0) if count else _NOTHING
                for at, length, count in zip(positions, lengths, counts.tolist(), strict=True)
            ]
        _, masks = self._gather(words, where)
        base = (where * WORD_BYTES).astype(np.int32)
        # Each part has one run more than non-zero words: the one before its first, or the one after its last.
        match_from = np.insert(_AFTER.take(masks) + base, borders[:-1], begins + 1)
        match_to = np.insert(_FIRST.take(masks) + base, borders[1:], begins + sizes)
        kept = self._long_enough(np.subtract(match_to, match_from, out=self._gaps[: match_to.size]), MIN_RUN)
        self._write_records(match_from, match_to, kept, 0)
        records = np.searchsorted(kept, borders + np.arange(borders.size))  # the first record of each part
        own = np.flatnonzero(
            np.diff(records)
        )  # parts that have any: their first takes its literals from their begin on
        leading = records[own]
        self._records[leading, 1] = self._from[leading] - begins[own]
        totals = np.concatenate(([0], np.cumsum(_COUNT.take(masks), dtype=np.int64)))[borders]
        return [
            Found(changed, first, 0 if is_dense else last - first) if count else _NOTHING
            for changed, first, last, count, is_dense in zip(
                np.diff(totals).tolist(),
                records[:-1].tolist(),
                records[1:].tolist(),
                counts.tolist(),
                dense.tolist(),
                strict=True,
            )
        ]

    def _gather(self, words: _Words, where: _Places) -> tuple[Bytes, Bytes]:
        """Return the bytes of the non-zero words, and for each such word the mask of its non-zero bytes."""
        gathered = words.take(where, out=self._gathered[: where.size], mode="clip").view(np.uint8)
        return gathered, np.packbits(gathered, bitorder="little")

    def _long_enough(self, lengths: npt.NDArray[np.int32], shortest: int) -> _Places:
        """Return which matches are of a run of at least ``shortest`` zeros."""
        return np.greater_equal(lengths, shortest - 1, out=self._kept[: lengths.size]).nonzero()[0]

    def _write_records(
        self,
        match_from: npt.NDArray[np.int32],
        match_to: npt.NDArray[np.int32],
        where: npt.NDArray[np.int64],
        first: int,
    ) -> None:
        """Write a record for each match whose begin and end lie at the places ``where``, as if all were of one part.

        The records go from number ``first`` on.
        """
        count = where.size
        if first + count > self._ready:
            self._records[self._ready : first + count, 0] = 1
            self._ready = first + count
        if count:
            records = self._records[first : first + count]
            begins = match_from.take(where, out=self._from[:count], mode="clip")
            ends = match_to.take(where, out=self._to[:count], mode="clip")
            np.subtract(ends, begins, out=records[:, 2])
            np.subtract(begins[1:], ends[:-1], out=records[1:, 1])
            records[0, 1] = begins[0]

    def _count(self, data: Bytes) -> int:
        """Return how many bytes are not zero."""
        return int(np.count_nonzero(np.not_equal(data, 0, out=self._bytes[: data.size])))
