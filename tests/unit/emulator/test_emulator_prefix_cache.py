"""The prefix cache: what it finds, whose KV it says that is, and what it forgets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from cwtrain_emulator.engine.model_io import make_model
from cwtrain_emulator.engine.numpy_engine import NumpyEngine
from cwtrain_emulator.engine.prefix_cache import PrefixCache
from cwtrain_emulator.gateway.completion_request import parse_completion
from cwtrain_emulator.replica.generate import Completion, Context, complete
from cwtrain_emulator.replica.materialise import Generation
from cwtrain_emulator.replica.serving import Served, load

HIDDEN = 4


def engine_of(root: Path, *, hidden: int = HIDDEN) -> NumpyEngine:
    make_model(root, vocab_size=40, hidden_size=hidden, context=2, seed=1)
    return NumpyEngine.load(root)


def remembered(cache: PrefixCache, engine: NumpyEngine, tokens: list[int], identity: str, salt: str = "") -> None:
    batch = engine.start(tokens)
    engine.read(batch)
    cache.put(engine, salt, tokens, lambda: engine.remember(batch, 0), [identity] * len(tokens))


def test_the_longest_known_beginning_is_found_and_never_the_last_token(tmp_path: Path) -> None:
    engine, cache = engine_of(tmp_path), PrefixCache(1 << 20)
    sequence = list(range(35))
    remembered(cache, engine, sequence, "v0")
    for prompt, known in (
        (sequence, 34),
        ([*sequence, 1, 2], 35),
        ([*sequence[:20], 39, 39], 16),
        ([*sequence[:32], 39, 39], 32),
        (sequence[:10], None),
        ([7, *sequence], None),
    ):
        found = cache.find(engine, "", prompt)
        assert (None if found is None else found.memory.length) == known
        if found is not None:
            assert found.read_with == ["v0"] * found.memory.length
            assert np.array_equal(found.memory.rows, engine.cut(found.memory, known or 0).rows)


def test_salts_and_shapes_are_apart(tmp_path: Path) -> None:
    engine, cache = engine_of(tmp_path / "a"), PrefixCache(1 << 20)
    remembered(cache, engine, [1, 2, 3], "v0", salt="x")
    assert cache.find(engine, "", [1, 2, 3]) is None
    assert cache.find(engine_of(tmp_path / "b", hidden=5), "x", [1, 2, 3]) is None
    assert cache.find(engine, "x", [1, 2, 3]) is not None


def test_what_is_known_stays_and_the_longest_unused_goes(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    row = HIDDEN * 4
    cache = PrefixCache(9 * row)
    remembered(cache, engine, [1, 2, 3], "v0")
    remembered(cache, engine, [1, 2, 3], "v1")
    assert (len(cache), cache.size_bytes) == (1, 3 * row)
    remembered(cache, engine, [4, 5, 6], "v1")
    remembered(cache, engine, [7, 8, 9], "v1")
    found = cache.find(engine, "", [1, 2, 3, 4])
    assert found is not None
    assert found.read_with == ["v0"] * 3
    remembered(cache, engine, [10, 11, 12], "v1")
    assert cache.find(engine, "", [4, 5, 6, 1]) is None
    assert cache.find(engine, "", [1, 2, 3, 4]) is not None
    remembered(cache, engine, list(range(20)), "v1")
    assert (len(cache), cache.size_bytes) == (3, 9 * row), "what is larger than the cache does not empty it"
    cache.clear()
    assert (len(cache), cache.size_bytes, cache.epoch) == (0, 0, 1)
    assert cache.find(engine, "", [1, 2, 3, 4]) is None


def served(root: Path, identity: str, seed: int) -> Served:
    make_model(root / identity / "checkpoint", vocab_size=40, hidden_size=HIDDEN, context=2, seed=seed)
    return load(Generation(root / identity, identity, ()))


def ask(context: Context, **body: Any) -> Completion:
    asked = parse_completion({"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, **body})
    request = {**asked.for_replica, "draws": [0], "max_model_len": None}
    return asyncio.run(complete(request, context, mode="raw_logprobs"))


def test_what_began_before_the_cache_was_emptied_does_not_come_back_into_it(tmp_path: Path) -> None:
    old, new = served(tmp_path, "v0", 1), served(tmp_path, "v1", 2)
    cache = PrefixCache(1 << 20)
    looks = 0

    def current() -> Served:
        nonlocal looks
        looks += 1
        if looks == 4:
            cache.clear()
        return old if looks < 4 else new

    done = ask(Context(current, cache=cache))
    assert done.record[0]["runs"] == [["v0", 2], ["v1", 2]]
    assert len(cache) == 0
    assert ask(Context(lambda: new, cache=cache)).cached_tokens == 0
    assert ask(Context(lambda: new, cache=cache)).cached_tokens == 2


def test_prefix_caching_can_be_turned_off(tmp_path: Path) -> None:
    cache = PrefixCache(1 << 20)
    context = Context(lambda: now, cache=cache)
    now = served(tmp_path, "v0", 1)
    asked = parse_completion({"model": "m", "prompt": [1, 2, 3], "max_tokens": 4})
    request = {**asked.for_replica, "draws": [0], "max_model_len": None, "prefix_caching": False}
    for _ in range(2):
        assert asyncio.run(complete(request, context, mode="raw_logprobs")).cached_tokens == 0
    assert len(cache) == 0


def test_all_choices_of_a_request_begin_with_the_same_kv_and_repeat(tmp_path: Path) -> None:
    now = served(tmp_path, "v0", 1)
    context = Context(lambda: now, cache=PrefixCache(1 << 20))
    first = ask(context, n=3, seed=5, logprobs=0, return_token_ids=True)
    again = ask(context, n=3, seed=5, logprobs=0, return_token_ids=True)
    assert (first.cached_tokens, again.cached_tokens) == (0, 2)
    assert again.choices == first.choices
