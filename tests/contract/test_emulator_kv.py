"""KV over hot-loads, as the admin route tells it: the stale-KV trap, the salt that avoids it, and swaps under way."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests

from cwtrain_emulator.emulator import Emulator
from cwtrain_emulator.engine.model_io import Model, make_model, save_model
from cwtrain_emulator.pytest_plugin import Bucket
from helpers import numpy_model
from helpers.conformance import bucket_of
from helpers.emulator_api import Api

CONTEXT = 3
PROMPT = [5, 6, 7, 8, 9, 10]
STOP = 20
TOKENS = 12


@pytest.fixture(scope="module")
def api(emulator: Emulator) -> Iterator[Api]:
    made = Api(emulator.base_url, emulator.admin_token)
    yield made
    made.close()


class Run:
    """One deployment, its snapshots, and requests that stay on one replica."""

    def __init__(self, api: Api, deployment: Mapping[str, Any], bucket: Bucket, root: Path) -> None:
        self._api, self._bucket, self._root = api, bucket, root
        self._id = deployment["spec"]["id"]
        self._prefix = deployment["spec"]["hotLoad"]["pathPrefix"]
        self._model = deployment["spec"]["model"]["name"]

    def load(self, identity: str, *, seed: int, stop_bias: float = 0.0, **changes: Any) -> str:
        """Hot-load a model in which all tensors are others than in the last one; return the hot-load's id."""
        directory = self._root / identity
        model: Model = make_model(
            directory, vocab_size=97, hidden_size=8, context=CONTEXT, seed=seed, max_length=1_000_000
        )
        model.tensors["lm_head.bias"][STOP] = stop_bias
        save_model(directory, model)
        for path in directory.iterdir():
            key = f"{self._prefix}/{identity}/{path.name}"
            self._bucket.client.put_object(Bucket=self._bucket.name, Key=key, Body=path.read_bytes())
        done = self._api.ended(self._api.hot_load(self._id, identity, **changes))
        assert done["status"]["state"] == "HOT_LOAD_STATE_COMPLETED", done
        return str(done["spec"]["id"])

    def ask(self, prompt: Sequence[int] = PROMPT, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the one choice of an answer, and the admin route's record of it."""
        request_id = str(uuid.uuid4())
        body = {
            "model": self._model, "prompt": list(prompt), "max_tokens": TOKENS, "logprobs": 0, "ignore_eos": True,
            "return_token_ids": True, **body,
        }  # fmt: skip
        answer = self._api.complete(body, headers={"X-Request-Id": request_id, "X-Session-Id": "one"})
        assert answer.status_code == 200, answer.text
        (attempt,) = self._api.own(f"/requests/{request_id}")["attempts"]
        return answer.json()["choices"][0], attempt["choices"][0]

    def off(self, identity: str, choice: Mapping[str, Any]) -> float:
        """Return how far an answer's log-probs are from those that an identity's weights alone give its tokens."""
        tensors = numpy_model.read_tensors(self._root / identity)
        sequence, worst = list(PROMPT), 0.0
        for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
            worst = max(worst, abs(numpy_model.next_token_logprobs(tensors, sequence, CONTEXT)[token] - logprob))
            sequence.append(token)
        return worst


@pytest.fixture
def run(api: Api, deployment: dict[str, Any], bucket: Bucket, tmp_path: Path) -> Run:
    return Run(api, deployment, bucket, tmp_path)


def computed_with(record: Mapping[str, Any]) -> set[str]:
    """Return all identities whose KV any of an answer's tokens saw."""
    return {identity for seen in record["kv"] for identity in seen}


def test_without_a_salt_preserve_serves_stale_kv_and_with_one_it_does_not(run: Run) -> None:
    first = run.load("v0", seed=1)
    choice, record = run.ask()
    assert (computed_with(record), record["cached_tokens"]) == ({"v0"}, 0)
    assert run.off("v0", choice) < 1e-5
    salted, record = run.ask(nvext={"cache_salt": first})
    assert record["cached_tokens"] == 0, "another salt, another cache"
    assert run.ask(nvext={"cache_salt": first})[1]["cached_tokens"] == len(PROMPT) - 1

    second = run.load("v1", seed=2, promptCachePolicy="PROMPT_CACHE_POLICY_PRESERVE")
    choice, record = run.ask()
    assert set(record["tokens"]) == {"v1"}
    assert record["prompt_kv"] == ["v0"] * (len(PROMPT) - 1) + ["v1"]
    assert record["kv"][0] == ["v0", "v1"]
    # The model looks back at three tokens: what it has made itself soon stands alone.
    assert [seen for seen in record["kv"] if "v0" in seen] == [["v0", "v1"]] * 2
    assert run.off("v1", choice) > 1e-2, "stale KV makes other log-probs than the new weights' own"
    assert run.off("v0", choice) > 1e-2

    salted, record = run.ask(nvext={"cache_salt": second})
    assert computed_with(record) == {"v1"}
    assert run.off("v1", salted) < 1e-5
    top_level, record = run.ask(cache_salt=second)
    assert (computed_with(record), record["cached_tokens"]) == ({"v1"}, len(PROMPT) - 1)
    assert run.off("v1", top_level) < 1e-5
    # A salt that does not change with the weights is no salt.
    assert "v0" in computed_with(run.ask(nvext={"cache_salt": first})[1])


def test_reset_all_empties_the_cache_and_left_out_means_preserve(run: Run) -> None:
    run.load("v0", seed=1)
    run.ask()
    run.load("v1", seed=2)
    assert "v0" in computed_with(run.ask()[1])
    run.load("v2", seed=3, promptCachePolicy="PROMPT_CACHE_POLICY_RESET_ALL")
    choice, record = run.ask()
    assert (computed_with(record), record["cached_tokens"]) == ({"v2"}, 0)
    assert run.off("v2", choice) < 1e-5


def test_the_cache_knows_answers_too_and_finds_the_longest_beginning(run: Run) -> None:
    run.load("v0", seed=1)
    choice, _ = run.ask()
    conversation = [*PROMPT, *choice["token_ids"], 1, 2, 3]
    _, record = run.ask(conversation)
    # The last token of the answer was never read.
    assert record["cached_tokens"] == len(PROMPT) + TOKENS - 1
    assert run.ask([*PROMPT[:-1], 11])[1]["cached_tokens"] == len(PROMPT) - 1


def test_a_request_under_way_goes_on_with_the_new_weights_and_its_old_kv(run: Run) -> None:
    run.load("v0", seed=1, stop_bias=-100.0)
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    # It ends when the new weights, which like nothing but the stop token, come in the middle of it.
    asking = threading.Thread(
        target=lambda: found.append(run.ask(max_tokens=900_000, stop_token_ids=[STOP], logprobs=None))
    )
    asking.start()
    run.load("v1", seed=2, stop_bias=100.0)
    asking.join()
    ((choice, record),) = found
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", STOP)
    assert record["tokens"] == ["v0"] * (len(record["tokens"]) - 1) + ["v1"]
    assert len(record["tokens"]) > 1
    # The last token before the swap was read after it, and those before that one were not read again.
    assert record["kv"][-1] == ["v0", "v1"]
    assert record["prompt_kv"] == ["v0"] * len(PROMPT)


def test_closing_the_connection_ends_the_request(tmp_path: Path) -> None:
    with Emulator(replicas=1, slots=1) as emulator:
        api = Api(emulator.base_url, emulator.admin_token)
        deployment = api.deployment(api.gateway()["spec"]["id"], emulator.bucket)
        Run(api, deployment, bucket_of(emulator), tmp_path).load("v0", seed=1)
        for path, prompt in (
            ("completions", {"prompt": [1, 2]}),
            ("chat/completions", {"messages": [{"role": "user", "content": "X"}]}),
        ):
            # These would take minutes in the only slot there is.
            body = {"model": deployment["spec"]["model"]["name"], "max_tokens": 900_000, "ignore_eos": True, **prompt}
            url = f"{api.base_url}/v1/{path}"
            with api.session.post(url, json={**body, "stream": True}, timeout=30, stream=True) as answer:
                assert answer.status_code == 200, answer.text
                next(answer.iter_lines())
            assert api.session.post(url, json={**body, "max_tokens": 1}, timeout=30).status_code == 200
            with pytest.raises(requests.Timeout):
                api.session.post(url, json=body, timeout=0.2)
            assert api.session.post(url, json={**body, "max_tokens": 1}, timeout=30).status_code == 200
        api.close()
