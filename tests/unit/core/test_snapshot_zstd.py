"""zstd through ctypes or not: the probe, the choice, and what stands in when the library cannot be used."""

import random
import shutil

import pytest
import zstandard

from cwtrain.errors import ConfigError
from cwtrain.snapshots import _codec, _zstd
from cwtrain.snapshots._adler import find_adler32
from cwtrain.snapshots._frames import FRAME_END, frame_head, zero_blocks
from helpers import snapshot_files as sf
from helpers.zstd_decoders import decoders

CHUNK = _codec.CHUNK_BYTES


def test_the_library_of_the_wheel_passes_the_probe():
    found = _zstd.library()
    assert found is not None, "the zstandard wheel for this platform has no usable library; the public interface works"
    assert _zstd.TESTED[0] <= found.versionNumber() <= _zstd.TESTED[1]
    assert _zstd.library() is found
    assert _zstd.encoder_library() is found


def test_the_encoder_can_be_chosen(monkeypatch):
    assert _zstd.encoder_library("public") is None
    assert _codec.delta_codec("public").name == "public"
    monkeypatch.setenv(_zstd.ENCODER_VARIABLE, "public")
    assert _codec.delta_codec().name == "public"
    assert _codec.delta_codec("sequences").name == "sequences"  # an argument wins
    monkeypatch.setenv(_zstd.ENCODER_VARIABLE, "fastest")
    with pytest.raises(ConfigError, match="CWTRAIN_DELTA_ENCODER='fastest' is unknown"):
        _codec.delta_codec()
    monkeypatch.setenv(_zstd.ENCODER_VARIABLE, " ")
    assert _codec.delta_codec().name == "sequences"


def test_a_library_that_cannot_be_used(tmp_path):
    """Not there, not a library, without the functions, of another version: then the public interface stands in."""
    with pytest.raises(OSError, match=r"none\.so"):
        _zstd.Library(str(tmp_path / "none.so"))
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(OSError, match=r"text\.so"):
        _zstd.Library(str(tmp_path / "text.so"))
    import _ctypes

    if getattr(_ctypes, "__file__", None):
        with pytest.raises(AttributeError, match="ZSTD_"):
            _zstd.Library(_ctypes.__file__)
    found = _zstd.library()
    assert found is not None
    with pytest.raises(AttributeError, match="has no function ZSTD_other"):
        found.other()
    for path in (tmp_path / "_cffi.so", tmp_path / "_cffi_2.so"):
        path.write_text("not a library")
    assert _zstd.find_library(str(tmp_path)) is None
    shutil.copy(found.path, tmp_path / "good_cffi.so")
    assert _zstd.find_library(str(tmp_path)) is not None
    assert _zstd.find_library(str(tmp_path), tested=(10600, 10700)) is None
    assert _zstd.encoder_library(find=lambda: None) is None
    with pytest.raises(ConfigError, match="cannot be used through ctypes"):
        _zstd.encoder_library("sequences", find=lambda: None)


def test_errors_of_the_library_have_words():
    found = _zstd.library()
    assert found is not None
    compressor = _zstd.SequenceCompressor(found)
    source, target = bytearray(random.Random(1).randbytes(1000)), bytearray(8)
    addresses = _zstd.address_of(target), _zstd.address_of(source)
    with pytest.raises(_zstd.ZstdError, match="too small"):
        compressor.compress(addresses[0], 8, addresses[1], 0, addresses[1], 1000)
    assert _zstd.address_of(bytearray()) == 0


@pytest.mark.parametrize("count", [1, 3, 4, 5, 100, 128 << 10, (128 << 10) + 1, (1 << 20) + 7])
def test_runs_of_zeros(count):
    """A frame never begins with an RLE block; every decoder reads the rest."""
    codec = _codec.delta_codec("sequences")
    frame = codec.head(count) + codec.zeros(count, first=True) + codec.end()
    assert frame == frame_head(count) + codec.zeros(count, first=True) + FRAME_END
    for decode in decoders().values():
        assert decode(frame) == bytes(count)
    assert len(zero_blocks(count)) == 4 * -(-count // (128 << 10))


SIZES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 7]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["first", "last", "begin of the last chunk", "all", "some", "most"])
def test_real_chunks_by_every_decoder_that_is_fast_enough(size, where):
    random_bytes = random.Random(size)
    old = random_bytes.randbytes(size)
    new = bytearray(old)
    places = {
        "first": [0],
        "last": [size - 1],
        "begin of the last chunk": [(size - 1) // CHUNK * CHUNK],
        "some": range(0, size, 97),
        "most": range(0, size, 3),
    }
    if where == "all":
        new = bytearray(random_bytes.randbytes(size))
    for place in places.get(where, ()):
        new[place] ^= 0x81
    frame = _codec.encode_xor(old, bytes(new), "sequences")
    want = sf.xor(old, bytes(new))
    for decode in decoders(slow=False).values():
        assert decode(frame) == want
    for decoder in _zstd.ENCODERS:
        assert _codec.decode_xor(frame, old, decoder) == bytes(new)
    assert zstandard.get_frame_parameters(frame).content_size == size
    assert zstandard.get_frame_parameters(frame).window_size == 128 << 10


def test_a_real_chunk_by_the_letter_of_the_format():
    old = bytes(2 * CHUNK + 100)
    new = bytearray(old)
    for place in range(5, len(new), 1009):
        new[place : place + 2] = b"\x03\x80"
    frame = _codec.encode_xor(old, bytes(new), "sequences")
    assert decoders()["RFC 8878"](frame) == new


def test_sparse_updates_are_much_smaller_than_by_search():
    random_bytes = random.Random(2)
    old = random_bytes.randbytes(CHUNK)
    new = bytearray(old)
    for _ in range(5000):
        new[random_bytes.randrange(CHUNK // 2) * 2] ^= random_bytes.choice([1, 2, 3])
    ours, theirs = (len(_codec.encode_xor(old, bytes(new), encoder)) for encoder in ("sequences", "public"))
    assert ours < 0.72 * theirs


def test_the_fastest_adler_that_counts_right():
    """One that is missing, is something else, or counts wrongly is passed over; zlib is always there."""
    import sys
    import types

    assert find_adler32(())[0] == "zlib"
    wrong = types.ModuleType("wrong_adler")
    wrong.adler32 = lambda data, value=1: 7
    sys.modules["wrong_adler"] = wrong
    try:
        assert find_adler32((("a", "no.such.module"), ("b", "json"), ("c", "wrong_adler")))[0] == "zlib"
    finally:
        del sys.modules["wrong_adler"]
    name, function = find_adler32()
    assert name in ("zlib-ng", "isal", "zlib")
    assert function(b"cwtrain", 1) == 0x0BF502F9
