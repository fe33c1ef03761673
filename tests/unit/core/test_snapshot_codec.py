"""The codec on buffers: XOR, frames, Adler-32."""

import random
import zlib

import pytest
import zstandard

from cwtrain.snapshots import _codec
from cwtrain.snapshots._decoder import Decoder, decoded_pieces
from cwtrain.snapshots._zstd import ENCODERS, encoder_library
from helpers import snapshot_files as sf

CHUNK = _codec.CHUNK_BYTES


def changed(size, positions):
    old = random.Random(1).randbytes(size)
    new = bytearray(old)
    for position in positions:
        new[position] ^= 0x55
    return old, bytes(new)


@pytest.mark.parametrize(
    ("size", "positions"),
    [
        (1, [0]),
        (7, [6]),
        (CHUNK, [0, CHUNK - 1]),
        (CHUNK + 1, [CHUNK]),
        (3 * CHUNK + 5, [0]),
        (3 * CHUNK + 5, [2 * CHUNK + 1]),  # two equal chunks, then a difference
        (3 * CHUNK + 5, [3 * CHUNK + 4]),
    ],
)
def test_round_trip_by_our_decoder_and_by_a_foreign_one(size, positions):
    old, new = changed(size, positions)
    frame = _codec.encode_xor(old, new)
    assert zstandard.get_frame_parameters(frame).content_size == size
    assert zstandard.ZstdDecompressor().decompress(frame) == sf.xor(old, new)
    assert _codec.decode_xor(frame, old) == new
    assert _codec.decode_xor(sf.frame(sf.xor(old, new)), old) == new


def test_equal_and_empty_tensors():
    for old in (b"", b"abc"):
        frame = _codec.encode_xor(old, old)
        assert zstandard.get_frame_parameters(frame).content_size == len(old)
        assert _codec.decode_xor(frame, old) == old
    with pytest.raises(ValueError, match="2 bytes in one version and 1 in the other"):
        _codec.encode_xor(b"ab", b"a")


def test_an_encoder_can_be_used_again_and_writes_nothing_for_equal_bytes():
    old, new = changed(2 * CHUNK, [5, CHUNK + 5])
    fresh = _codec.encode_xor(old, new)
    encoder = _codec.DeltaEncoder()

    def run(before, after):
        pieces = []
        result = encoder.encode(
            len(before), _codec._reader(memoryview(before)), _codec._reader(memoryview(after)), pieces.append
        )
        return result, b"".join(pieces)

    result, frame = run(old, new)
    assert frame == fresh
    assert result.frame_bytes == len(frame)
    assert result.changed_bytes == 2
    assert result.checksum == f"{zlib.adler32(new):08x}"
    result, frame = run(new, new)
    assert (result.changed_bytes, result.frame_bytes, frame) == (0, 0, b"")
    assert run(old, new)[1] == fresh


def test_checksums_are_padded():
    assert _codec.adler32_hex(_codec.adler32(b"")) == "00000001"
    assert _codec.adler32_hex(_codec.adler32(b"c", _codec.adler32(b"ab"))) == f"{zlib.adler32(b'abc'):08x}"


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_bomb_is_decoded_in_a_small_buffer_or_refused(encoder):
    bomb = sf.frame(bytes(256 << 20))
    view = memoryview(bomb)
    decoder = Decoder(encoder_library(encoder))
    buffer = memoryview(bytearray(CHUNK))
    pieces = decoded_pieces(decoder.open(_codec._reader(view), len(view), size=256 << 20), buffer)
    assert sum(map(len, pieces)) == 256 << 20
    with pytest.raises(_codec.FrameError, match="claims"):
        decoder.fill(_codec._reader(view), len(view), buffer[:16])
    view = memoryview(sf.streamed_frame(bytes(64 << 20)))
    with pytest.raises(_codec.FrameError, match="decodes to more"):
        decoder.fill(_codec._reader(view), len(view), buffer[:16])


@pytest.mark.parametrize("encoder", ENCODERS)
def test_frames_larger_than_the_read_buffer(encoder):
    raw = random.Random(3).randbytes(3 * CHUNK + 17)  # does not compress: raw blocks
    assert _codec.decode_xor(sf.frame(raw), bytes(len(raw)), encoder) == raw
    assert _codec.decode_xor(sf.streamed_frame(raw), bytes(len(raw)), encoder) == raw
