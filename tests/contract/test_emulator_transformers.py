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
        assert done["status"]["state"] == "HOT_LOAD_STATE_COMPLETED", done
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
