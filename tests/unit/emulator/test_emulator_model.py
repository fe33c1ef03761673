from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cwtrain_emulator.engine.model_io import (
    bf16_to_f32,
    f32_to_bf16,
    load_model,
    make_model,
    save_model,
    stored_dtype,
    tensor_shapes,
)
from cwtrain_emulator.engine.numpy_engine import NumpyEngine
from cwtrain_emulator.engine.safetensors import FormatError, read_header
from cwtrain_emulator.engine.sampling import log_softmax
from cwtrain_emulator.engine.tokenizer import ByteTokenizer, TextError
from helpers import numpy_model


def _small(directory: Path, **changes: Any) -> Any:
    return make_model(directory, **{"vocab_size": 11, "hidden_size": 5, "context": 3, "seed": 1, **changes})


def test_bf16_rounds_to_nearest_with_ties_to_even() -> None:
    def pattern(bits: int) -> int:
        return int(f32_to_bf16(np.array([bits], np.uint32).view(np.float32))[0])

    assert pattern(0x3F800000) == 0x3F80
    assert pattern(0x3F808000) == 0x3F80
    assert pattern(0x3F818000) == 0x3F82
    assert pattern(0x3F808001) == 0x3F81
    assert pattern(0x7F800000) == 0x7F80
    assert np.isnan(bf16_to_f32(f32_to_bf16(np.array([np.nan], np.float32)))[0])


def test_a_model_survives_the_disk_and_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    made = _small(tmp_path / "a")
    _small(tmp_path / "b")
    read = load_model(tmp_path / "a")
    assert read.config == made.config
    assert {name: values.shape for name, values in read.tensors.items()} == tensor_shapes(
        vocab_size=11, hidden_size=5, context=3
    )
    for name, values in made.tensors.items():
        assert np.array_equal(values, read.tensors[name])
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    assert "generation_config.json" in names


def test_checkpoints_are_ordinary_safetensors_files_with_an_index(tmp_path: Path) -> None:
    made = _small(tmp_path, shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == 3
    for name in files:
        header = read_header(tmp_path / name)
        assert {tensor for tensor, file in index["weight_map"].items() if file == name} == set(header.tensors)
        assert all(info.dtype == stored_dtype(tensor) for tensor, info in header.tensors.items())
    biases = {"lm_head.bias", "model.context.bias"}
    assert {name for name in made.tensors if stored_dtype(name) == "F32"} == biases
    # numpy has no bfloat16, so the independent reader is asked for the F32 tensors only.
    for name in files:
        if set(read_header(tmp_path / name).tensors) <= biases:
            for tensor, values in load_file(tmp_path / name).items():
                assert np.array_equal(values, made.tensors[tensor])


def test_the_engine_computes_what_the_page_says(tmp_path: Path) -> None:
    made = _small(tmp_path)
    rng = np.random.default_rng(3)
    for name, values in made.tensors.items():
        made.tensors[name] = values + rng.standard_normal(values.shape).astype(np.float32)
    save_model(tmp_path, made)
    tensors = numpy_model.read_tensors(tmp_path)
    engine = NumpyEngine.load(tmp_path)
    for ids in ([4], [4, 9], [0, 1, 2], [3, 1, 4, 1, 5, 9, 2, 6]):
        batch = engine.start(ids[:1])
        step_by_step = engine.read(batch)
        engine.repeat(batch, 2)
        for token in ids[1:]:
            engine.extend(batch, np.array([token, token]))
            step_by_step = engine.read(batch)
        begun = engine.start(ids[:-1])
        engine.read(begun)
        expected = numpy_model.next_token_logprobs(tensors, ids, 3)
        remembered = engine.start(ids, engine.cut(engine.remember(begun, 0), len(ids) - 1))
        for logits in (*step_by_step, *engine.read(engine.start(ids)), *engine.read(remembered)):
            assert np.abs(log_softmax(logits.astype(np.float64)) - expected).max() < 1e-5


def test_what_was_read_before_a_swap_keeps_the_old_rows(tmp_path: Path) -> None:
    _small(tmp_path / "old", seed=1)
    _small(tmp_path / "new", seed=2)
    old, new = NumpyEngine.load(tmp_path / "old"), NumpyEngine.load(tmp_path / "new")
    assert new.shape == old.shape
    batch = old.start([1, 2])
    old.read(batch)
    memory = old.remember(batch, 0)
    assert (memory.length, memory.size_bytes) == (2, memory.rows.nbytes)
    stale = new.read(new.start([1, 2, 3], memory))
    assert not np.allclose(stale, new.read(new.start([1, 2, 3])))
    # What the page says: the old E for what was read with it, and all else new. Two ids more make room for both.
    tensors, before = numpy_model.read_tensors(tmp_path / "new"), numpy_model.read_tensors(tmp_path / "old")
    embed = np.concatenate([tensors["model.embed_tokens.weight"], before["model.embed_tokens.weight"][[1, 2]]])
    size = len(tensors["model.embed_tokens.weight"])
    mixed = {**tensors, "model.embed_tokens.weight": embed}
    expected = numpy_model.next_token_logprobs(mixed, [size, size + 1, 3], 3)
    assert np.abs(log_softmax(stale[0].astype(np.float64)) - expected).max() < 1e-5
    _small(tmp_path / "other", hidden_size=6)
    assert NumpyEngine.load(tmp_path / "other").shape != old.shape


def test_a_checkpoint_that_does_not_fit_its_config_is_refused_by_name(tmp_path: Path) -> None:
    made = _small(tmp_path)
    made.config["hidden_size"] = 6
    save_model(tmp_path, made)
    with pytest.raises(FormatError, match=r"lm_head\.weight"):
        load_model(tmp_path)
    made.config["model_type"] = "llama"
    save_model(tmp_path, made)
    with pytest.raises(FormatError, match="model_type"):
        load_model(tmp_path)


def test_sizes_that_make_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        _small(tmp_path, vocab_size=1)
    with pytest.raises(ValueError, match="shards"):
        _small(tmp_path, shards=0)


def test_bytes_are_tokens(tmp_path: Path) -> None:
    wide = ByteTokenizer(vocab_size=300, byte_offset=0)
    assert wide.decode(wide.encode("Grüße")) == "Grüße"
    assert wide.decode([72, 105, 299, 280]) == "Hi"
    _small(tmp_path, vocab_size=64)
    narrow = ByteTokenizer.load(tmp_path, vocab_size=64)
    assert narrow.encode(" A") == [0, 33]
    assert narrow.decode([33, 63]) == "A"
    with pytest.raises(TextError, match="0x7e"):
        narrow.encode("~")
