"""For all inputs: frames decode to what was encoded, whoever reads or writes them, and damage never passes silently."""

import zlib

import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cwtrain.snapshots import _codec
from helpers import snapshot_files as sf

_quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def versions(draw):
    old = draw(st.binary(max_size=2000)) * draw(st.sampled_from([1, 1, 1, 3]))
    new = bytearray(old)
    if old:
        for position, value in draw(
            st.lists(st.tuples(st.integers(0, len(old) - 1), st.integers(0, 255)), max_size=20)
        ):
            new[position] = value
    return old, bytes(new)


@_quick
@given(versions())
def test_round_trip(pair):
    old, new = pair
    frame = _codec.encode_xor(old, new)
    assert _codec.decode_xor(frame, old) == new
    assert zstandard.ZstdDecompressor().decompressobj().decompress(frame) == sf.xor(old, new)
    assert zstandard.get_frame_parameters(frame).content_size == len(old)


@_quick
@given(versions(), st.integers(-3, 12), st.booleans(), st.booleans())
def test_frames_of_other_writers(pair, level, checksum, sized):
    old, new = pair
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=checksum, write_content_size=sized)
    frame = compressor.compress(sf.xor(old, new))
    assert _codec.decode_xor(frame, old) == new


@_quick
@given(versions(), st.data())
def test_damage_is_refused_or_changes_the_checksum(pair, data):
    old, new = pair
    frame = bytearray(_codec.encode_xor(old, new))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    try:
        result = _codec.decode_xor(bytes(frame), old)
    except _codec.FrameError:
        return
    assert len(result) == len(old)
    assert result == new or zlib.adler32(result) != zlib.adler32(new)


@_quick
@given(st.binary(max_size=300), st.integers(0, 100))
def test_arbitrary_bytes_never_do_worse_than_a_frame_error(raw, size):
    for data in (raw, b"\x28\xb5\x2f\xfd" + raw):
        try:
            result = _codec.decode_xor(data, bytes(size))
        except _codec.FrameError:
            continue
        assert len(result) == size
