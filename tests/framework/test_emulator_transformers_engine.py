"""The transformers engine without HTTP: weights in place, tied ones, swaps under way, text."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cwtrain_emulator.gateway.completion_request import parse_completion
from cwtrain_emulator.replica.generate import Completion, Context, RequestError, complete
from cwtrain_emulator.replica.materialise import Generation, SnapshotError
from cwtrain_emulator.replica.serving import Served, activate, load
from helpers.requirements import require

PROMPT = [4, 8, 15, 16, 23, 42]


@pytest.fixture(scope="module", autouse=True)
def torch() -> Any:
    require("torch")
    import torch

    torch.set_num_threads(1)
    return torch


@pytest.fixture(scope="module")
def checkpoints(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from helpers import hf_reference
    from make_tiny_model import make_tiny_model

    root = tmp_path_factory.mktemp("engine")
    found = {
        "a": make_tiny_model(root / "a" / "checkpoint"),
        "tied": make_tiny_model(root / "t" / "checkpoint", tied=True),
    }
    for name, base in (("b", "a"), ("tied-b", "tied")):
        found[name] = Path(shutil.copytree(found[base], root / name / "checkpoint"))
        hf_reference.perturb(found[name], seed=1, scale=0.05)
    return found


def served(checkpoint: Path, identity: str, previous: Served | None = None) -> Served:
    return load(Generation(checkpoint.parent, identity, ()), engine="transformers", previous=previous)


def read(now: Served, ids: list[int]) -> Any:
    assert now.engine is not None
    return now.engine.read(now.engine.start(ids))[0]


def expected(checkpoint: Path, ids: list[int]) -> Any:
    import torch

    from helpers import hf_reference

    with torch.inference_mode():
        return hf_reference.load(checkpoint)(torch.tensor([ids])).logits[0, -1].numpy()


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("tied", "tied-b")])
def test_new_weights_go_into_the_model_that_is_there(checkpoints: dict[str, Path], first: str, second: str) -> None:
    old = served(checkpoints[first], "v0")
    activate(old)
    assert np.abs(read(old, PROMPT) - expected(checkpoints[first], PROMPT)).max() < 1e-4
    new = served(checkpoints[second], "v1", old)
    assert new.engine._shared is old.engine._shared  # type: ignore[union-attr]
    assert np.abs(read(old, PROMPT) - expected(checkpoints[first], PROMPT)).max() < 1e-4, "until it is activated"
    activate(new)
    assert np.abs(read(new, PROMPT) - expected(checkpoints[second], PROMPT)).max() < 1e-4


def test_a_checkpoint_with_both_names_of_a_tied_tensor(
    checkpoints: dict[str, Path], tmp_path: Path, torch: Any
) -> None:
    from safetensors.torch import load_file, save_file

    both = Path(shutil.copytree(checkpoints["tied-b"], tmp_path / "both" / "checkpoint"))
    index = json.loads((both / "model.safetensors.index.json").read_text())
    home = both / index["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(home)

    def write(head: Any) -> None:
        save_file({**tensors, "lm_head.weight": head}, home, metadata={"format": "pt"})

    index["weight_map"]["lm_head.weight"] = home.name
    (both / "model.safetensors.index.json").write_text(json.dumps(index))
    write(tensors["model.embed_tokens.weight"].clone())
    old = served(checkpoints["tied"], "v0")
    new = served(both, "v1", old)
    assert new.engine._shared is old.engine._shared  # type: ignore[union-attr]
    activate(new)
    assert np.abs(read(new, PROMPT) - expected(checkpoints["tied-b"], PROMPT)).max() < 1e-4
    # Two values: transformers does not tie them then, and neither does the engine.
    write(tensors["model.embed_tokens.weight"] * 2)
    apart = served(both, "v2", new)
    assert apart.engine._shared is not old.engine._shared  # type: ignore[union-attr]
    activate(apart)
    assert np.abs(read(apart, PROMPT) - expected(both, PROMPT)).max() < 1e-4


def test_a_request_under_way_reads_with_the_new_weights_behind_its_old_kv(
    checkpoints: dict[str, Path], torch: Any
) -> None:
    from transformers import DynamicCache

    from helpers import hf_reference

    state: dict[str, Any] = {"now": served(checkpoints["a"], "v0"), "looks": 0}
    activate(state["now"])

    def current() -> Served:
        state["looks"] += 1
        if state["looks"] == 5:
            state["now"] = served(checkpoints["b"], "v1", state["now"])
            activate(state["now"])
        found: Served = state["now"]
        return found

    done = ask(Context(current), max_tokens=6)
    (choice,) = done.choices
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert done.record[0]["runs"] == [["v0", 3], ["v1", 3]]
    assert done.record[0]["kv"] == [["v0", len(PROMPT) + 2], ["v1", 3]]
    # The same by transformers' own means: one cache, two models.
    cache = DynamicCache()
    old, new = hf_reference.load(checkpoints["a"]), hf_reference.load(checkpoints["b"])
    pending = PROMPT
    for position, token in enumerate(tokens):
        model = old if position < 3 else new
        with torch.inference_mode():
            logits = model(torch.tensor([pending]), cache=cache, use_cache=True).logits[0, -1].double()
        assert int(logits.argmax()) == token
        assert abs(float(torch.log_softmax(logits, -1)[token]) - logprobs[position]) < 1e-4
        pending = [token]


def ask(context: Context, **body: Any) -> Completion:
    asked = parse_completion(
        {"model": "m", "prompt": PROMPT, "temperature": 0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        | body
    )
    return asyncio.run(
        complete({**asked.for_replica, "draws": [0], "max_model_len": None}, context, mode="raw_logprobs")
    )


def test_choices_in_a_batch_are_those_that_come_alone(checkpoints: dict[str, Path]) -> None:
    now = served(checkpoints["a"], "v0")
    body = {"temperature": 1.0, "seed": 5, "max_tokens": 8}
    together = ask(Context(lambda: now), n=3, stop_token_ids=[9, 10, 11, 12], **body)
    alone = ask(Context(lambda: now), stop_token_ids=[9, 10, 11, 12], **body)
    assert together.choices[0]["token_ids"] == alone.choices[0]["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in together.choices}) == 3


def test_what_cannot_be_served_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    strange = Path(shutil.copytree(checkpoints["a"], tmp_path / "checkpoint"))
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    with pytest.raises(SnapshotError, match=r"lacks tensors of its model: .*layers\.2"):
        served(strange, "v0")
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    with pytest.raises(SnapshotError, match="transformers cannot load it"):
        served(strange, "v0")


def test_without_a_tokenizer_token_ids_do(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    bare = tmp_path / "checkpoint"
    shutil.copytree(checkpoints["a"], bare, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    now = served(bare, "v0")
    assert ask(Context(lambda: now), max_tokens=2).choices[0]["text"] == ""
    with pytest.raises(RequestError, match="has no tokenizer, send token ids"):
        ask(Context(lambda: now), prompt="text")


def test_text_comes_out_whole_whatever_the_ids(checkpoints: dict[str, Path]) -> None:
    from helpers import hf_reference

    now = served(checkpoints["a"], "v0")
    assert now.tokenizer is not None
    tokenizer = now.tokenizer
    for text in ("a small model", "grün 猫 🙂 end", " leading"):
        ids = tokenizer.encode(text)
        stream = tokenizer.detokenizer(tokenizer.encode("say: "), skip_special=True)
        assert "".join([*map(stream.push, ids), stream.finish()]) == text == hf_reference.decode(checkpoints["a"], ids)
    half = tokenizer.encode("🙂")[:2]
    stream = tokenizer.detokenizer([], skip_special=True)
    pieces = [stream.push(token) for token in half]
    assert [*pieces, stream.finish()][:2] == ["", ""]
    special = now.eos_ids
    for skip, shown in ((True, "x"), (False, "<|im_end|>x")):
        stream = tokenizer.detokenizer([], skip_special=skip)
        ids = [*special, *tokenizer.encode("x")]
        assert "".join([*map(stream.push, ids), stream.finish()]) == shown
