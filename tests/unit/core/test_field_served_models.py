"""What an engine would not load, or would read otherwise than it was trained, is told before anything is uploaded.

The kind: a checkpoint that is well formed and is still not the model that the deployment serves: a wrapper's names,
another quantisation, other ends of an answer, files beside the weights that are missing or differ.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cwtrain.errors import SnapshotError, SnapshotLayoutError
from cwtrain.hotload import HotLoader, SnapshotWriter, WeightMirror
from cwtrain.hotload.delta import write_delta, write_full_snapshot
from cwtrain.plugins import Plugins
from cwtrain.snapshots import inspect_snapshot
from cwtrain.storage import Location, MemoryStore
from helpers.fake_service import Clock, FakeService
from helpers.run_cli import run
from helpers.tiny_checkpoint import tiny_tensors, write_full

RAW = ("BF16", (2, 2), bytes(8))
WRAPPED = [
    ["base_model.model.model.layers.0.q_proj.base_layer.weight"],
    [
        "base_model.model.model.layers.0.q_proj.base_layer.weight",
        "base_model.model.model.layers.0.q_proj.lora_A.weight",
    ],
    ["base_model.model.model.embed_tokens.weight"],
    ["model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.base_layer.bias"],
    ["model.layers.0.q_proj.weight", "model.layers.0.q_proj.lora_B.default.weight"],
    ["model.embed_tokens.weight", "model.embed_tokens.lora_embedding_A.default"],
    ["model.layers.0.q_proj.weight", "model.layers.0.q_proj.lora_magnitude_vector.default.weight"],
    ["lm_head.modules_to_save.default.weight", "lm_head.original_module.weight"],
]


def checkpoint(root: Path, names: list[str] | None = None, **files: Any) -> Path:
    """Write a full checkpoint with a tokenizer; ``files`` are JSON files, by their names without the ending."""
    tensors = tiny_tensors() if names is None else dict.fromkeys(names, RAW)
    write_full(root, tensors, shards=1)
    (root / "tokenizer.json").write_text("{}")
    for name, value in files.items():
        (root / f"{name}.json").write_text(json.dumps(value))
    return root


def warnings_of(root: Path) -> str:
    return "\n".join(inspect_snapshot(root).warnings)


class World:
    def __init__(self) -> None:
        self.service, self.store, clock = FakeService(), MemoryStore("weights"), Clock()
        self.loader = HotLoader(self.service, "dep", s3=self.store, plugins=Plugins(), clock=clock, sleep=clock.sleep)


@pytest.mark.parametrize("names", WRAPPED)
@pytest.mark.parametrize("left_over", [False, True])
def test_a_wrapped_model_is_refused_with_the_way_to_merge_it(tmp_path: Path, names: list[str], left_over: bool) -> None:
    root = checkpoint(tmp_path / "c", [*names, "model.norm.weight"])
    if left_over:
        (root / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    world = World()
    for call in (
        lambda: inspect_snapshot(root),
        lambda: world.loader.plan(root, "v0"),
        lambda: world.loader.publish(root, "v0"),
    ):
        with pytest.raises(SnapshotLayoutError, match="PEFT") as caught:
            call()
        assert "merge_and_unload" in str(caught.value)
        assert names[-1] in str(caught.value)
    assert not world.store.objects
    assert run("hotload", "inspect", str(root)).code == 1
    with pytest.raises(SnapshotLayoutError, match="PEFT"):
        write_delta(root, root, tmp_path / "d", version=1, base_version=0)
    store = MemoryStore("weights")
    sides = checkpoint(tmp_path / "sides")
    with SnapshotWriter(store, Location("weights", "run"), "v0", kind="full", side_files=sides) as writer:
        wrapped = next(name for name in names if "base_" in name or "lora" in name or "module" in name)
        with pytest.raises(SnapshotError, match="merge_and_unload"):
            writer.add(wrapped, np.zeros((2, 2), np.float32))
    assert not store.objects


@pytest.mark.parametrize(
    "names",
    [
        ["model._orig_mod.layers.0.weight"],
        ["model._fsdp_wrapped_module.layers.0.weight"],
        ["model._fpw_module.layers.0.weight"],
        ["model.layers.0._checkpoint_wrapped_module.weight"],
        ["module.model.layers.0.weight", "module.lm_head.weight"],
    ],
)
def test_other_wrappers_are_named(tmp_path: Path, names: list[str]) -> None:
    root = checkpoint(tmp_path / "c", names)
    with pytest.raises(SnapshotLayoutError, match="save the module inside it") as caught:
        inspect_snapshot(root)
    assert "merge" not in str(caught.value)


def test_what_is_left_of_a_merged_adapter_is_no_matter(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "c", adapter_config={"peft_type": "LORA", "r": 8})
    found = inspect_snapshot(root)
    assert "adapter_config.json" in found.left_out
    assert "adapter_config.json: left out" in "\n".join(found.warnings)
    assert "merge_and_unload" not in "\n".join(found.warnings)
    world = World()
    world.loader.publish(root, "v0")
    assert not [key for key in world.store.objects if "adapter" in key]
    written = World()
    with SnapshotWriter(written.store, written.loader.location, "v0", kind="full", side_files=root) as writer:
        writer.add("a", np.zeros(2, np.float32))
        writer.finalise([writer.close()])
    assert not [key for key in written.store.objects if "adapter" in key]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_its_base_is_not_merged(tmp_path: Path, name: str) -> None:
    root = checkpoint(tmp_path / "c", adapter_config={"peft_type": "LORA"})
    (root / name).write_bytes(b"")
    with pytest.raises(SnapshotLayoutError, match=name) as caught:
        inspect_snapshot(root)
    assert "merge_and_unload" in str(caught.value)


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
Q = "layers.0.q_proj"


@pytest.mark.parametrize(
    ("config", "dtypes", "says"),
    [
        ({}, {f"{Q}.weight": "F8_E4M3", f"{Q}.weight_scale_inv": "F32"}, "has no quantization_config"),
        ({}, {f"{Q}.qweight": "I32", f"{Q}.qzeros": "I32", f"{Q}.scales": "F16"}, "has no quantization_config"),
        ({}, {f"{Q}.weight": "U8", f"{Q}.weight.absmax": "F32"}, "has no quantization_config"),
        ({}, {"e.down_blocks": "U8", "e.down_scales": "U8"}, "has no quantization_config"),
        ({}, {"router_scales": "F32", "module.weight": "BF16"}, None),
        (FP8, {f"{Q}.weight": "BF16"}, "says fp8, but no tensor is quantised"),
        ({"text_config": FP8}, {f"{Q}.weight": "BF16"}, "says fp8, but no tensor is quantised"),
        (FP8, {f"{Q}.weight": "F8_E4M3"}, "have no scales|has no scales"),
        (
            FP8,
            {f"{Q}.weight": "F8_E4M3", f"{Q}.weight_scale_inv": "F32", "layers.1.k_proj.weight": "F8_E4M3"},
            "layers.1.k_proj.weight",
        ),
        (FP8, {f"{Q}.weight": "F8_E4M3", f"{Q}.weight_scale_inv": "F32", "norm.weight": "BF16"}, None),
        (GPTQ, {f"{Q}.qweight": "I32", f"{Q}.scales": "F16"}, None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, {"e.down_blocks": "U8", "e.down_scales": "U8"}, None),
        ({}, {f"{Q}.weight": "BF16", "norm.weight": "F32"}, None),
    ],
)  # fmt: skip
def test_quantisation_that_config_and_tensors_disagree_on(
    tmp_path: Path, config: dict[str, Any], dtypes: dict[str, str], says: str | None
) -> None:
    size = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}
    tensors = {name: (dtype, (4,), bytes(4 * size.get(dtype, 1))) for name, dtype in dtypes.items()}
    write_full(tmp_path / "c", tensors, shards=1)
    (tmp_path / "c" / "tokenizer.json").write_text("{}")
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    found = inspect_snapshot(tmp_path / "c").warnings
    if says is None:
        assert found == ()
    else:
        assert len(found) == 1
        assert any(part in found[0] for part in says.split("|"))


def test_what_differs_from_the_chain_that_is_served_is_told_before_the_upload(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", config=FP8 | {"model_type": "toy"}, generation_config={"top_k": 1})
    new = checkpoint(tmp_path / "new", ["model.embed.weight", "layer.weight"], config={"model_type": "toy"}, extra={})
    (new / "tokenizer.json").write_text('{"version": 2}')
    world = World()
    world.loader.publish(base, "v0")
    told = "\n".join(world.loader.plan(new, "v1").warnings)
    assert "'model.embed.weight') are not in v0" in told or "'model.embed.weight' are not in v0" in told
    assert "'embed.weight'" in told
    assert "config.json: has no quantization_config, and that of v0 says fp8" in told
    assert "config.json, tokenizer.json differ from those of v0" in told
    assert "extra.json are not in v0" in told
    assert "generation_config.json are missing" in told
    again = HotLoader(world.service, "dep", s3=world.store, plugins=Plugins())
    assert "\n".join(again.plan(new, "v1").warnings) == told, "another process reads it in the bucket"
    same = checkpoint(tmp_path / "same", config=FP8 | {"model_type": "toy"}, generation_config={"top_k": 1})
    assert [one for one in world.loader.plan(same, "v2").warnings if "v0" in one] == []


def test_a_diff_says_that_quantisations_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = checkpoint(tmp_path / "base", config=FP8)
    new = checkpoint(tmp_path / "new", config={})
    with caplog.at_level(logging.WARNING, logger="cwtrain"):
        write_delta(base, new, tmp_path / "d", version=1, base_version=0)
    assert "has no quantization_config, and that of" in caplog.text


def test_a_writer_says_that_its_tensors_are_not_quantised_as_their_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = checkpoint(tmp_path / "c", config=FP8)
    with (
        caplog.at_level(logging.WARNING, logger="cwtrain"),
        SnapshotWriter(MemoryStore("w"), Location("w", "r"), "v0", kind="full", side_files=root) as writer,
    ):
        writer.add(f"{Q}.weight", np.zeros((2, 2), np.float32))
        writer.finalise([writer.close()])
    assert "v0: config.json: quantization_config says fp8, but no tensor is quantised" in caplog.text


@pytest.mark.parametrize(
    ("config", "generation", "warned"),
    [
        (2, [2, 3], True),
        ([2], 3, True),
        (2, 2, False),
        ([2, 3], [3, 2], False),
        (2, None, False),
        (None, [2], False),
    ],
)
def test_ends_of_an_answer_that_differ(tmp_path: Path, config: Any, generation: Any, warned: bool) -> None:
    root = checkpoint(
        tmp_path / "c", config={"text_config": {"eos_token_id": config}}, generation_config={"eos_token_id": generation}
    )
    assert ("eos_token_id is" in warnings_of(root)) is warned


@pytest.mark.parametrize(
    ("files", "warned"),
    [
        ([], True),
        (["tokenizer_config.json", "special_tokens_map.json"], True),
        (["vocab.json"], True),
        (["vocab.json", "merges.txt"], False),
        (["tokenizer.json"], False),
        (["tokenizer.model"], False),
        (["tokenizer.model.v3"], False),
        (["qwen.tiktoken"], False),
        (["bpe.model"], False),
        (["source.spm"], False),
        (["sentence.vocab"], False),
        (["bpe.codes"], True),
        (["tekken.json"], False),
        (["vocab.txt"], False),
    ],
)
def test_a_model_without_a_tokenizer(tmp_path: Path, files: list[str], warned: bool) -> None:
    root = checkpoint(tmp_path / "c")
    (root / "tokenizer.json").unlink()
    for name in files:
        (root / name).write_text("{}")
    assert ("no tokenizer file" in warnings_of(root)) is warned


def test_a_tokenizer_of_bytes_has_no_file(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "c", tokenizer_config={"tokenizer_class": "ByT5Tokenizer"})
    (root / "tokenizer.json").unlink()
    assert warnings_of(root) == ""
    (root / "tokenizer_config.json").write_text("[]")
    assert "tokenizer_config.json: is not a JSON object" in warnings_of(root)
    assert "no tokenizer file" in warnings_of(root)


def test_all_files_of_a_tokenizer_are_uploaded_and_kept_by_copies(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "c")
    (root / "qwen.tiktoken").write_text("IQ== 0")
    (root / "target.spm").write_text("x")
    (root / "additional_chat_templates").mkdir()
    for name in ("rag.jinja", "tool_use.jinja", "notes.md", ".hidden.jinja"):
        (root / "additional_chat_templates" / name).write_text(name)
    (root / "other").mkdir()
    (root / "other" / "x.jinja").write_text("x")
    beside = ["additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja", "qwen.tiktoken"]
    beside.append("target.spm")

    def files(place: Path) -> set[str]:
        return {
            file.name for file in inspect_snapshot(place).files if not file.name.endswith((".safetensors", ".json"))
        }

    assert files(root) == set(beside)
    assert "other/" in inspect_snapshot(root).left_out
    world = World()
    world.loader.publish(root, "v0")
    assert [name for name in beside if world.store.head(f"run/v0/{name}") is None] == []
    assert world.loader.verify("v0").problems == ()
    write_full_snapshot(root, tmp_path / "copy")
    assert files(tmp_path / "copy") == set(beside)
    with WeightMirror.create(root, tmp_path / "mirror"):
        assert files(tmp_path / "mirror") == set(beside)
    with WeightMirror.from_bucket(tmp_path / "back", store=world.store, location=world.loader.location, identity="v0"):
        assert files(tmp_path / "back") == set(beside)
    written = World()
    with SnapshotWriter(written.store, written.loader.location, "v0", kind="full", side_files=root) as writer:
        writer.add("a", np.zeros(2, np.float32))
        writer.finalise([writer.close()])
    assert [name for name in beside if written.store.head(f"run/v0/{name}") is None] == []
