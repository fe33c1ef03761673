"""For all inputs: frames decode to what was encoded, whoever reads or writes them, and damage never passes silently."""

import struct
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cwtrain.snapshots import _codec
from cwtrain.snapshots._adler import combine
from cwtrain.snapshots._decoder import Decoder, decoded_pieces
from cwtrain.snapshots._frames import FrameError
from cwtrain.snapshots._overwrite import OverwriteDecoder
from cwtrain.snapshots._sequences import MIN_RUN
from cwtrain.snapshots._zstd import ENCODERS, encoder_library
from helpers import plain_zstd
from helpers import snapshot_files as sf
from helpers.zstd_decoders import by_rfc, by_zstandard

_quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)

WIDTHS = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
CHUNKS = [8, 64, 256, 1 << 20]


@st.composite
def versions(draw):
    """Two versions of up to some thousand bytes that differ in a few places."""
    old = draw(st.binary(max_size=2000)) * draw(st.sampled_from([1, 1, 1, 3]))
    new = bytearray(old)
    if old:
        for position, value in draw(
            st.lists(st.tuples(st.integers(0, len(old) - 1), st.integers(0, 255)), max_size=20)
        ):
            new[position] = value
    return old, bytes(new)


@st.composite
def updates(draw):
    """An update of a tensor of some dtype as training makes it: a part of the elements, mostly in their low bits.

    Sizes lie around every border there is: words, chunks, blocks; densities go from none to all.
    """
    width = draw(st.sampled_from(sorted(WIDTHS.values())))
    chunk = draw(st.sampled_from(CHUNKS[:3]))
    border = draw(st.sampled_from([0, 8, chunk, 2 * chunk, 3 * chunk]))
    size = max(0, border + draw(st.integers(-9, 9)))
    if draw(st.booleans()):
        size -= size % width
    random = draw(st.randoms(use_true_random=False))
    density = draw(st.sampled_from([0.0, 0.01, 0.08, 0.4, 0.54, 0.56, 1.0]))
    old = random.randbytes(size)
    new = bytearray(old)
    for element in range(0, size, width):
        if random.random() < density:
            new[element] ^= random.randrange(1, 256)
            if random.random() < 0.1:
                last = min(element + width, size) - 1
                new[last] ^= random.randrange(256)
    return old, bytes(new), chunk


@_quick
@given(versions(), st.sampled_from(ENCODERS), st.sampled_from(CHUNKS))
def test_round_trip(pair, encoder, chunk):
    old, new = pair
    frame = _codec.encode_xor(old, new, encoder, chunk_bytes=chunk)
    for decoder in ENCODERS:
        assert _codec.decode_xor(frame, old, decoder) == new
    assert by_zstandard(frame) == by_rfc(frame) == sf.xor(old, new)
    assert zstandard.get_frame_parameters(frame).content_size == len(old)


@settings(_quick, max_examples=150)
@given(updates(), st.sampled_from(ENCODERS))
def test_round_trip_of_updates_around_every_border(update, encoder):
    old, new, chunk = update
    frame = _codec.encode_xor(old, new, encoder, chunk_bytes=chunk)
    for decoder in ENCODERS:
        assert _codec.decode_xor(frame, old, decoder) == new
    assert by_zstandard(frame) == by_rfc(frame) == sf.xor(old, new)


@settings(_quick, max_examples=40)
@given(st.lists(updates(), min_size=1, max_size=12))
def test_neighbours_in_one_batch_get_the_frames_that_they_get_alone(pairs):
    """Many small tensors are read, XORed and searched together; a frame depends on its own tensor alone."""
    pairs = [(old, new) for old, new, _ in pairs if old]
    if not pairs:
        return
    codec = _codec.delta_codec("sequences", chunk_bytes=1 << 16)
    worker = codec.worker()
    old_views, new_views = worker.place([len(old) for old, _ in pairs], 5, 4093, 17)
    for (old, new), old_view, new_view in zip(pairs, old_views, new_views, strict=True):
        old_view[:], new_view[:] = old, new
    diffs = worker.diff([(0, len(old)) for old, _ in pairs])
    for (old, new), diff in zip(pairs, diffs, strict=True):
        alone = codec.worker()
        (one,), (two,) = alone.place([len(old)])
        one[:], two[:] = old, new
        assert alone.diff([(0, len(old))]) == [diff]
        assert diff.checksum == zlib.adler32(new)
        assert diff.changed_bytes == sum(a != b for a, b in zip(old, new, strict=True))
        assert (diff.piece is None) == (old == new)


@_quick
@given(versions(), st.integers(-3, 12), st.booleans(), st.booleans(), st.sampled_from(ENCODERS))
def test_frames_of_other_writers(pair, level, checksum, sized, decoder):
    old, new = pair
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=checksum, write_content_size=sized)
    frame = compressor.compress(sf.xor(old, new))
    assert _codec.decode_xor(frame, old, decoder) == new


@_quick
@given(st.binary(max_size=5000), st.lists(st.integers(1, 700), min_size=1, max_size=9), st.sampled_from(ENCODERS))
def test_a_frame_can_be_read_in_pieces_of_any_size(data, sizes, decoder):
    frame = memoryview(sf.frame(data))
    reader = Decoder(encoder_library(decoder)).open(_codec._reader(frame), len(frame), size=None)
    out = b""
    while len(out) < len(data):
        view = memoryview(bytearray(sizes[len(out) % len(sizes)]))
        out += view[: reader.read(view)]
    reader.finish()
    assert out == data


@_quick
@given(st.binary(max_size=400), st.binary(max_size=400))
def test_checksums_of_pieces_combine(one, two):
    assert combine(zlib.adler32(one), zlib.adler32(two), len(two)) == zlib.adler32(one + two)


@_quick
@given(versions(), st.sampled_from(ENCODERS), st.data())
def test_damage_is_refused_or_changes_the_checksum(pair, encoder, data):
    """B05: a damaged frame can still decode; then only the checksum tells."""
    old, new = pair
    frame = bytearray(_codec.encode_xor(old, new, encoder, chunk_bytes=64))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    for decoder in ENCODERS:
        try:
            result = _codec.decode_xor(bytes(frame), old, decoder)
        except FrameError:
            continue
        assert len(result) == len(old)
        assert result == new or zlib.adler32(result) != zlib.adler32(new)


@settings(_quick, max_examples=200)
@given(versions(), st.data())
def test_both_decoders_judge_a_damaged_frame_alike(pair, data):
    """What one of them takes the other takes too, with the same bytes; and what the format forbids neither takes."""
    old, new = pair
    frame = bytearray(_codec.encode_xor(old, new, "sequences", chunk_bytes=64))
    cut = data.draw(st.integers(0, len(frame)))
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "twice"]))
    if kind == "cut":
        del frame[cut:]
    elif kind == "flip" and cut < len(frame):
        frame[cut] ^= data.draw(st.integers(1, 255))
    elif kind == "insert":
        frame[cut:cut] = data.draw(st.binary(min_size=1, max_size=4))
    else:
        frame += frame[:cut]
    results = []
    for decoder in ENCODERS:
        try:
            results.append(_codec.decode_xor(bytes(frame), old, decoder))
        except FrameError:
            results.append(None)
    assert results[0] == results[1]
    if results[0] is not None:
        assert plain_zstd.decompress(bytes(frame)) == sf.xor(old, results[0])


@_quick
@given(st.binary(max_size=300), st.integers(0, 100), st.sampled_from(ENCODERS))
def test_arbitrary_bytes_never_do_worse_than_a_frame_error(raw, size, decoder):
    for data in (raw, b"\x28\xb5\x2f\xfd" + raw):
        try:
            result = _codec.decode_xor(data, bytes(size), decoder)
        except FrameError:
            continue
        assert len(result) == size


@_quick
@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_without_a_known_size(raw, magic):
    data = memoryview((b"\x28\xb5\x2f\xfd" if magic else b"") + raw)
    buffer = memoryview(bytearray(64))
    totals = []
    for decoder in ENCODERS:
        try:
            reader = Decoder(encoder_library(decoder)).open(_codec._reader(data), len(data), size=None)
            totals.append(sum(map(len, decoded_pieces(reader, buffer))))
        except FrameError:
            totals.append(-1)
    assert totals[0] == totals[1]


@st.composite
def overwrites(draw):
    size = draw(st.integers(1, 600))
    positions = sorted(draw(st.sets(st.integers(0, size - 1), max_size=60)))
    values = draw(st.binary(min_size=len(positions), max_size=len(positions)))
    return draw(st.binary(min_size=size, max_size=size)), positions, values


def payload(positions, values):
    return struct.pack(f"<{len(positions) + 1}I", len(positions), *positions) + values


def overwritten(frame, old, step, decoder):
    reader = OverwriteDecoder(encoder_library(decoder)).open(
        _codec._reader(memoryview(frame)), len(frame), size=len(old)
    )
    new = bytearray(old)
    for start in range(0, len(old), step):
        reader.patch(memoryview(new)[start : start + step], start)
    reader.finish()
    return bytes(new)


@_quick
@given(overwrites(), st.integers(1, 300), st.sampled_from(ENCODERS))
def test_overwrites_in_pieces_of_any_size(change, step, decoder):
    old, positions, values = change
    new = bytearray(old)
    for position, value in zip(positions, values, strict=True):
        new[position] = value
    assert overwritten(sf.frame(payload(positions, values)), old, step, decoder) == bytes(new)


@_quick
@given(overwrites(), st.data(), st.sampled_from(ENCODERS))
def test_hostile_overwrites(change, data, decoder):
    """Positions that do not ascend or lie behind the end, a wrong count, too few bytes, too many: refused."""
    old, positions, values = change
    kind = data.draw(st.sampled_from(["order", "behind", "count", "short", "long"]))
    raw = payload(positions, values)
    if kind == "order":
        raw = payload([*positions, positions[-1] if positions else len(old)], values + b"x")
    elif kind == "behind":
        raw = payload([*positions, len(old) + data.draw(st.integers(0, 1 << 31))], values + b"x")
    elif kind == "count":
        raw = struct.pack("<I", len(positions) + data.draw(st.integers(1, 1 << 31))) + raw[4:]
    elif kind == "short":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        raw += data.draw(st.binary(min_size=1, max_size=9))
    with pytest.raises(FrameError):
        overwritten(sf.frame(raw), old, 64, decoder)


def test_the_shortest_run_is_one_that_pays():
    assert MIN_RUN >= 4  # one zero is a literal, and a match has at least three bytes
