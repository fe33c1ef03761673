"""A zstd decoder in plain Python, written from RFC 8878 and sharing no line with libzstd.

Slow and strict: what it takes is a frame by the letter of the format. It proves that our frames need no kindness of the
library that also wrote their blocks. Content checksums are skipped, dictionaries refused.
"""

from __future__ import annotations

MAGIC = 0xFD2FB528
MAX_BLOCK = 128 << 10

# fmt: off
LENGTH_BASE = [*range(16), 16, 18, 20, 22, 24, 28, 32, 40, 48, *(1 << bits for bits in range(6, 17))]
LENGTH_BITS = [0] * 16 + [1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
MATCH_BASE = [*range(3, 35), 35, 37, 39, 41, 43, 47, 51, 59, 67, 83, 99, *(3 + (1 << bits) for bits in range(7, 17))]
MATCH_BITS = [0] * 32 + [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
LENGTH_DEFAULT = [4, 3, *[2] * 11, 1, 1, 1, *[2] * 9, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1]
MATCH_DEFAULT = [1, 4, 3, 2, 2, 2, 2, 2, 2, *[1] * 37, -1, -1, -1, -1, -1, -1, -1]
OFFSET_DEFAULT = [1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1]
# fmt: on

Cell = tuple[int, int, int]
"""One state of an FSE table: symbol, bits to read for the next state, what to add to them."""


class FormatError(ValueError):
    """The frame is not one."""


def need(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(what)


class Forward:
    """Bits in the order of the bytes, the lowest first."""

    def __init__(self, data: bytes) -> None:
        self.value, self.bits, self.at = int.from_bytes(data, "little"), 8 * len(data), 0

    def read(self, count: int) -> int:
        need(self.at + count <= self.bits, "a table goes on behind its end")
        result = self.value >> self.at & ((1 << count) - 1)
        self.at += count
        return result


class Backward:
    """Bits from the end of the bytes, whose last holds a one above the first of them."""

    def __init__(self, data: bytes) -> None:
        need(bool(data) and data[-1] != 0, "a stream has no end mark")
        self.value = int.from_bytes(data, "little")
        self.left = self.value.bit_length() - 1

    def read(self, count: int) -> int:
        """Return the next bits; behind the begin of the bytes there are zeros."""
        self.left -= count
        shifted = self.value >> self.left if self.left >= 0 else self.value << -self.left
        return shifted & ((1 << count) - 1)


def distribution(data: bytes, most: int) -> tuple[list[int], int, int]:
    """Return the probabilities that ``data`` begins with, their accuracy, and how many bytes that took."""
    bits = Forward(data)
    accuracy = bits.read(4) + 5
    need(accuracy <= most, "a table is too fine")
    left = 1 << accuracy
    found: list[int] = []
    while left:
        width = (left + 1).bit_length()
        value = bits.read(width - 1)
        small = (1 << width) - 1 - (left + 1)
        if value >= small:
            value |= bits.read(1) << (width - 1)
            if value >> (width - 1):
                value -= small
        found.append(value - 1)
        left -= abs(value - 1)
        need(left >= 0, "probabilities sum to more than one")
        if value == 1:
            again = 3
            while again == 3:
                again = bits.read(2)
                found += [0] * again
    return found, accuracy, (bits.at + 7) // 8


def table(probabilities: list[int], accuracy: int) -> list[Cell]:
    """Return the states of an FSE table."""
    size = 1 << accuracy
    symbols = [-1] * size
    end = size
    for symbol, probability in enumerate(probabilities):
        if probability == -1:
            end -= 1
            symbols[end] = symbol
    at = 0
    for symbol, probability in enumerate(probabilities):
        for _ in range(max(0, probability)):
            symbols[at] = symbol
            at = (at + (size >> 1) + (size >> 3) + 3) % size
            while at >= end:
                at = (at + (size >> 1) + (size >> 3) + 3) % size
    need(at == 0, "a table is not filled")
    following = [abs(probability) for probability in probabilities]
    cells = []
    for symbol in symbols:
        number = following[symbol]
        following[symbol] += 1
        width = accuracy - (number.bit_length() - 1)
        cells.append((symbol, width, (number << width) - size))
    return cells


def tree(data: bytes) -> tuple[list[tuple[int, int]], int, int]:
    """Return the Huffman table that ``data`` begins with (symbol, bits), its width, and how many bytes that took."""
    head = data[0]
    if head >= 128:
        count = head - 127
        length = 1 + (count + 1) // 2
        weights = [data[1 + number // 2] >> (4 if number % 2 == 0 else 0) & 15 for number in range(count)]
    else:
        length = 1 + head
        weights = tree_weights(data[1:length])
    need(len(data) >= length, "a tree is cut off")
    total = sum(1 << weight - 1 for weight in weights if weight)
    need(total > 0, "a tree has no leaves")
    width = total.bit_length()
    rest = (1 << width) - total
    need(rest & (rest - 1) == 0, "a tree cannot be completed")
    weights.append(rest.bit_length())
    need(width <= 11, "a tree is too deep")
    cells: list[tuple[int, int]] = []
    for weight in range(1, width + 1):
        for symbol, other in enumerate(weights):
            if other == weight:
                cells += [(symbol, width + 1 - weight)] * (1 << weight - 1)
    need(len(cells) == 1 << width, "a tree is not complete")
    return cells, width, length


def tree_weights(data: bytes) -> list[int]:
    probabilities, accuracy, begin = distribution(data, 6)
    cells = table(probabilities, accuracy)
    bits = Backward(data[begin:])
    states = [bits.read(accuracy), bits.read(accuracy)]
    weights = []
    turn = 0
    while True:  # two states take turns; the stream is at its end when one cannot be followed
        symbol, width, base = cells[states[turn]]
        weights.append(symbol)
        if bits.left < width:
            weights.append(cells[states[1 - turn]][0])
            return weights
        states[turn] = base + bits.read(width)
        turn = 1 - turn


def huffman(data: bytes, cells: list[tuple[int, int]], width: int, count: int) -> bytes:
    bits = Backward(data)
    out = bytearray()
    for _ in range(count):
        symbol, used = cells[bits.read(width)]
        bits.left += width - used
        need(bits.left >= 0, "a Huffman stream ends too early")
        out.append(symbol)
    need(bits.left == 0, "a Huffman stream is longer than its literals")
    return bytes(out)


class Frame:
    """What one block leaves to the next, and what came out so far."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.tree: tuple[list[tuple[int, int]], int] | None = None
        self.tables: dict[str, tuple[list[Cell], int]] = {}
        self.repeats = [1, 4, 8]
        self.window = 0

    def literals(self, data: bytes) -> tuple[bytes, int]:
        kind, form = data[0] & 3, data[0] >> 2 & 3
        if kind < 2:
            length, shift, width = {0: (1, 3, 5), 2: (1, 3, 5), 1: (2, 4, 12), 3: (3, 4, 20)}[form]
            count = int.from_bytes(data[:length], "little") >> shift & ((1 << width) - 1)
            size = 1 if kind == 1 else count
            need(len(data) >= length + size, "literals are cut off")
            return data[length : length + size] * (count if kind == 1 else 1), length + size
        length, width = ((3, 10), (3, 10), (4, 14), (5, 18))[form]
        head = int.from_bytes(data[:length], "little") >> 4
        count, size = head & ((1 << width) - 1), head >> width
        body = data[length : length + size]
        need(len(body) == size, "literals are cut off")
        if kind == 2:
            cells, depth, used = tree(body)
            self.tree, body = (cells, depth), body[used:]
        need(self.tree is not None, "literals repeat a tree that was never there")
        assert self.tree is not None
        if form == 0:
            return huffman(body, *self.tree, count), length + size
        need(len(body) >= 6, "the sizes of four streams are cut off")
        sizes = [int.from_bytes(body[at : at + 2], "little") for at in (0, 2, 4)]
        quarter, at = (count + 3) // 4, 6
        out = b""
        for number in range(4):
            end = at + sizes[number] if number < 3 else len(body)
            out += huffman(body[at:end], *self.tree, quarter if number < 3 else count - 3 * quarter)
            at = end
        return out, length + size

    def codes(self, mode: int, data: bytes, name: str, default: tuple[list[int], int], most: int) -> int:
        """Take the table of one kind of code; return how many bytes that took."""
        if mode == 0:
            self.tables[name] = table(*default), default[1]
            return 0
        if mode == 1:
            self.tables[name] = [(data[0], 0, 0)], 0
            return 1
        if mode == 2:
            probabilities, accuracy, used = distribution(data, most)
            self.tables[name] = table(probabilities, accuracy), accuracy
            return used
        need(name in self.tables, "codes repeat a table that was never there")
        return 0

    def compressed(self, data: bytes) -> None:
        literals, at = self.literals(data)
        count = data[at]
        if count == 255:
            count, at = int.from_bytes(data[at + 1 : at + 3], "little") + 0x7F00, at + 3
        elif count >= 128:
            count, at = (count - 128 << 8) + data[at + 1], at + 2
        else:
            at += 1
        if count == 0:
            need(at == len(data), "bytes follow the literals")
            self.out += literals
            return
        modes = data[at]
        need(modes & 3 == 0, "reserved bits are set")
        at += 1
        at += self.codes(modes >> 6, data[at:], "lengths", (LENGTH_DEFAULT, 6), 9)
        at += self.codes(modes >> 4 & 3, data[at:], "offsets", (OFFSET_DEFAULT, 5), 8)
        at += self.codes(modes >> 2 & 3, data[at:], "matches", (MATCH_DEFAULT, 6), 9)
        bits = Backward(data[at:])
        names = ("lengths", "offsets", "matches")
        states = {name: bits.read(self.tables[name][1]) for name in names}
        used = 0
        for number in range(count):
            length, offset, match = (self.tables[name][0][states[name]][0] for name in names)
            distance = (1 << offset) + bits.read(offset)
            size = MATCH_BASE[match] + bits.read(MATCH_BITS[match])
            taken = LENGTH_BASE[length] + bits.read(LENGTH_BITS[length])
            if number < count - 1:
                for name in ("lengths", "matches", "offsets"):
                    _, width, base = self.tables[name][0][states[name]]
                    states[name] = base + bits.read(width)
            need(bits.left >= 0, "sequences are cut off")
            need(used + taken <= len(literals), "there are too few literals")
            self.out += literals[used : used + taken]
            used += taken
            self.copy(self.distance(distance, taken), size)
        need(bits.left == 0, "bits follow the sequences")
        self.out += literals[used:]

    def distance(self, value: int, taken: int) -> int:
        if value > 3:
            found = value - 3
            self.repeats = [found, *self.repeats[:2]]
            return found
        which = value - 1 + (taken == 0)
        found = self.repeats[0] - 1 if which == 3 else self.repeats[which]
        if which:
            self.repeats = [found, *(self.repeats[:1] if which == 1 else self.repeats[:2]), *self.repeats[2:]][:3]
        return found

    def copy(self, distance: int, size: int) -> None:
        need(0 < distance <= min(len(self.out), self.window), "a match begins before the window")
        start = len(self.out) - distance
        piece = bytes(self.out[start : start + min(size, distance)])
        self.out += (piece * (size // len(piece) + 1))[:size]


def decompress(data: bytes, *, strict_first_block: bool = False) -> bytes:
    """Return what the one frame in ``data`` decodes to. Raises FormatError.

    ``strict_first_block`` refuses a first block in RLE, as the zstd command did up to 1.4.3.
    """
    try:
        return _decompress(data, strict_first_block)
    except IndexError as error:
        raise FormatError("something is cut off") from error


def _decompress(data: bytes, strict_first_block: bool) -> bytes:
    need(int.from_bytes(data[:4], "little") == MAGIC, "no frame")
    descriptor = data[4]
    need(descriptor & 0x0B == 0, "a dictionary, or a reserved bit")
    single = bool(descriptor & 0x20)
    width = (int(single), 2, 4, 8)[descriptor >> 6]
    at = 5 if single else 6
    size = int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0)
    at += width
    frame = Frame()
    frame.window = size if single else (1 << 10 + (data[5] >> 3)) + (1 << 7 + (data[5] >> 3)) * (data[5] & 7)
    last = False
    first = True
    while not last:
        head = int.from_bytes(data[at : at + 3], "little")
        last, kind, length = bool(head & 1), head >> 1 & 3, head >> 3
        need(length <= min(MAX_BLOCK, max(frame.window, 1)), "a block is too large")
        need(not (strict_first_block and first and kind == 1), "the first block is RLE")
        at, before = at + 3, len(frame.out)
        body = data[at : at + (1 if kind == 1 else length)]
        need(len(body) == (1 if kind == 1 else length), "a block is cut off")
        if kind == 0:
            frame.out += body
        elif kind == 1:
            frame.out += body * length
        else:
            need(kind == 2, "a reserved kind of block")
            frame.compressed(body)
        need(len(frame.out) - before <= MAX_BLOCK, "a block decodes to too much")
        at += len(body)
        first = False
    at += 4 if descriptor & 4 else 0
    need(at == len(data), "something follows the frame")
    need(not width or size == len(frame.out), "the content size is wrong")
    return bytes(frame.out)
