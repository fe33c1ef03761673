"""The transformers engine over plain HTTP: what it serves is what transformers computes, before and after hot-loads."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cwtrain.hotload.delta import write_delta
from cwtrain_emulator.emulator import Emulator
from helpers.conformance import bucket_of
from helpers.emulator_api import Api
from helpers.requirements import require

PROMPTS = ([1, 5, 9, 200, 31, 7], [300, 2, 2, 17], list(range(40, 75)))
TOKENS = 24
CLOSE = 1e-4
"""Most that log-probs may differ by: float32 sums in another order. Seen: below 1e-5."""


class Served:
    """An emulator with the transformers engine and one deployment of one replica."""

    def __init__(self, emulator: Emulator) -> None:
        self.api = Api(emulator.base_url, emulator.admin_token, patience=200.0)
        self._bucket = bucket_of(emulator)
        self.deployment = self.api.deployment(self.api.gateway()["spec"]["id"], emulator.bucket)
        self.model = self.deployment["spec"]["model"]["name"]

    def load(self, identity: str, directory: Path, previous: str | None = None, **changes: Any) -> dict[str, Any]:
        prefix = self.deployment["spec"]["hotLoad"]["pathPrefix"]
        for path in directory.iterdir():
            self._bucket.client.put_object(
                Bucket=self._bucket.name, Key=f"{prefix}/{identity}/{path.name}", Body=path.read_bytes()
            )
        done = self.api.ended(self.api.hot_load(self.deployment["spec"]["id"], identity, previous, **changes))
        assert done["status"]["state"] == "HOT_LOAD_STATE_COMPLETED", done["status"].get("conditions")
        return done

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request; the answer has what the admin route knows of it as `admin`."""
        headers = {"X-Request-Id": str(uuid.uuid4())}
        answer = self.api.session.post(
            f"{self.api.base_url}/v1/{path}", json={"model": self.model, **body}, headers=headers, timeout=120
        )
        assert answer.status_code == 200, answer.text
        (attempt,) = self.api.own(f"/requests/{headers['X-Request-Id']}")["attempts"]
        found: dict[str, Any] = answer.json()
        return {**found, "admin": attempt["choices"]}

    def greedy(self, prompt: list[int], **more: Any) -> tuple[list[int], list[float], dict[str, Any]]:
        """Return tokens, log-probs and record of a greedy answer."""
        body = {
            "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "logprobs": 0, "ignore_eos": True,
            "return_token_ids": True, **more,
        }  # fmt: skip
        answer = self.post("completions", body)
        (choice,) = answer["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], answer["admin"][0]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    require("torch")
    with Emulator(engine="transformers", replicas=1) as emulator:
        found = Served(emulator)
        yield found
        found.api.close()


@pytest.fixture(scope="module")
def models(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints: `v0`; `v1`, another one altogether; `v2`, a step away from v1; and the delta between those."""
    from helpers import hf_reference
    from make_tiny_model import make_tiny_model

    root = tmp_path_factory.mktemp("tiny")
    found = {name: make_tiny_model(root / name, seed=seed) for name, seed in (("v0", 0), ("v1", 1))}
    found["v2"] = Path(shutil.copytree(found["v1"], root / "v2"))
    hf_reference.perturb(found["v2"], seed=3, scale=0.02)
    write_delta(found["v1"], found["v2"], root / "delta", version=2, base_version=1)
    found["delta"] = root / "delta"
    return found


def agrees(served: Served, directory: Path, salt: str) -> list[list[int]]:
    """Compare greedy answers with transformers' own, and return them."""
    from helpers import hf_reference

    model = hf_reference.load(directory)
    answers = []
    for prompt in PROMPTS:
        expected, their_logprobs = hf_reference.greedy(model, prompt, TOKENS)
        tokens, logprobs, _ = served.greedy(prompt, nvext={"cache_salt": salt})
        assert tokens == expected
        assert max(abs(mine - theirs) for mine, theirs in zip(logprobs, their_logprobs, strict=True)) < CLOSE
        # A second time, now with most of the prompt from the cache, and with a companion in the batch.
        again, logprobs, record = served.greedy(prompt, nvext={"cache_salt": salt})
        assert record["cached_tokens"] == len(prompt) - 1
        assert again == expected
        assert max(abs(mine - theirs) for mine, theirs in zip(logprobs, their_logprobs, strict=True)) < CLOSE
        answers.append(expected)
    return answers


def test_greedy_decoding_is_transformers_own_before_and_after_hot_loads(
    served: Served, models: dict[str, Path]
) -> None:
    served.load("000000", models["v0"])
    first = agrees(served, models["v0"], "a")
    served.load("000001", models["v1"])
    second = agrees(served, models["v1"], "b")
    served.load("000002", models["delta"], "000001")
    third = agrees(served, models["v2"], "c")
    assert first != second != third


def test_stale_kv_is_seen_without_a_salt_and_not_with_one(served: Served, models: dict[str, Path]) -> None:
    from helpers import hf_reference

    prompt = [9, 8, 7, 6, 5, 4, 3, 301]
    served.load("000003", models["v1"])
    served.greedy(prompt)
    done = served.load("000004", models["v0"])
    model = hf_reference.load(models["v0"])
    tokens, logprobs, record = served.greedy(prompt)
    assert set(record["tokens"]) == {"000004"}
    assert record["prompt_kv"] == ["000003"] * (len(prompt) - 1) + ["000004"]
    # Attention looks at everything: the old KV stays with the answer to its end.
    assert record["kv"] == [["000003", "000004"]] * TOKENS
    theirs = hf_reference.score(model, prompt, tokens)
    assert max(abs(mine - other) for mine, other in zip(logprobs, theirs, strict=True)) > 0.01
    tokens, logprobs, record = served.greedy(prompt, nvext={"cache_salt": done["spec"]["id"]})
    assert record["kv"] == [["000004"]] * TOKENS
    expected, theirs = hf_reference.greedy(model, prompt, TOKENS)
    assert tokens == expected
    assert max(abs(mine - other) for mine, other in zip(logprobs, theirs, strict=True)) < CLOSE
    served.load("000005", models["v0"], promptCachePolicy="PROMPT_CACHE_POLICY_RESET_ALL")
    assert served.greedy(prompt)[2]["kv"] == [["000005"]] * TOKENS


def test_chats_use_the_model_s_own_template(served: Served, models: dict[str, Path]) -> None:
    from helpers import hf_reference

    served.load("000006", models["v0"])
    messages = [{"role": "system", "content": "say"}, {"role": "user", "content": "a small question: ä?"}]
    body = {
        "messages": messages, "max_tokens": 12, "seed": 1, "logprobs": True, "top_logprobs": 2, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = served.post("chat/completions", body)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == hf_reference.template_ids(models["v0"], messages)
    assert choice["message"] == {"role": "assistant", "content": hf_reference.decode(models["v0"], choice["token_ids"])}
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2] * 12
    # The same, said by text and by ids.
    again = {"seed": 1, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    text = served.post("completions", {**again, "prompt": "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    ) + "<|im_start|>assistant\n"})  # fmt: skip
    ids = served.post("completions", {**again, "prompt": answer["prompt_token_ids"]})
    assert text["choices"] == ids["choices"]
    assert ids["choices"][0]["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_streams_add_up(served: Served, models: dict[str, Path], path: str) -> None:
    served.load(f"stream-{path[:4]}", models["v0"])
    chat = path.startswith("chat")
    body = {
        "model": served.model, "n": 2, "max_tokens": 40, "seed": 5, "ignore_eos": True, "return_token_ids": True,
        **({"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "one"}),
    }  # fmt: skip
    whole = served.post(path, body)
    events = served.api.streamed(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == whole["usage"]
    assert {event["object"] for event in events} == {"chat.completion.chunk" if chat else "text_completion"}
    parts = [choice for event in events for choice in event["choices"]]
    for choice in whole["choices"]:
        mine = [part for part in parts if part["index"] == choice["index"]]
        text = "".join(part["delta"]["content"] if chat else part["text"] for part in mine)
        assert text == (choice["message"]["content"] if chat else choice["text"])
        assert [token for part in mine for token in part.get("token_ids", [])] == choice["token_ids"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
