"""A client that goes away is no mistake of the emulator's: no traceback, no 500, wherever it hangs up."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import uvicorn

from cwtrain_emulator.emulator import Emulator
from cwtrain_emulator.engine.model_io import make_model
from cwtrain_emulator.http_faults import HangUpProtocol
from helpers.emulator_api import Api
from helpers.run_cli import run, start


class Running(NamedTuple):
    """An emulator that makes tokens slowly, and a deployment on it."""

    emulator: Emulator
    deployment: dict[str, Any]
    gateway_url: str
    log: Path

    @property
    def page(self) -> dict[str, Any]:
        api = Api(self.emulator.base_url, self.emulator.admin_token)
        try:
            found: dict[str, Any] = api.own("/page")
            return found
        finally:
            api.close()

    def ended(self) -> int:
        """How many requests of the endpoint and of the API have ended."""
        return sum(self.page["requests"]["total"])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("emulator")
    with Emulator(state_dir=folder / "state", replicas=1, tokens_per_second=20) as emulator:
        api = Api(emulator.base_url, emulator.admin_token)
        deployment = api.deployment(api.gateway()["spec"]["id"], emulator.bucket)
        api.close()
        make_model(folder / "model", vocab_size=16, hidden_size=4, context=4, seed=0)
        here = deployment["spec"]["id"]
        done = run(
            *("hotload", "publish", "--deployment", here, "--checkpoint", str(folder / "model"), "--identity", "v0"),
            env=emulator.env,
        )
        assert done.code == 0, done.err
        url = run("deployment", "get", here, env=emulator.env).data["rollout_base_url"].removesuffix("/v1")
        yield Running(emulator, deployment, url, folder / "state" / "serve.log")


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hang_up(
    origin: str, lines: list[str], body: bytes, *, length: int | None = None, read: int = 0, reset: bool
) -> None:
    """Send a request, of which ``length`` bytes of body are announced, and go away after ``read`` bytes of answer."""
    place = urlsplit(origin)
    with socket.create_connection((place.hostname or "", place.port or 80), timeout=30) as connection:
        size = len(body) if length is None else length
        head = [*lines, f"Host: {place.netloc}", "Content-Type: application/json", f"Content-Length: {size}"]
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        if read:
            assert connection.recv(read)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_whoever_hangs_up_is_no_error_of_ours(running: Running) -> None:
    emulator, before = running.emulator, running.ended()
    auth = f"Authorization: Bearer {emulator.admin_token}"
    count = 0
    asked = {"model": running.deployment["spec"]["model"]["name"], "max_tokens": 20}
    for origin, path, stream, reset in itertools.product(
        (emulator.base_url, running.gateway_url), ("completions", "chat/completions"), (False, True), (False, True)
    ):
        prompt = {"prompt": [1, 2, 3]} if path == "completions" else {"messages": []}
        raw = json.dumps({**asked, "stream": stream, **prompt}).encode()
        lines = [f"POST /v1/{path} HTTP/1.1", auth]
        hang_up(origin, lines, raw, length=len(raw) + 50, reset=reset)  # in the middle of the request
        count += 1
        if path == "completions":  # in the middle of the answer, or before it
            hang_up(origin, lines, raw, read=10 if stream else 0, reset=reset)
            count += 1
    for path in ("deployments", "hotLoads", "gateways"):
        hang_up(emulator.base_url, [f"POST /v1alpha1/inference/{path} HTTP/1.1", auth], b"{", length=500, reset=True)
        count += 1
    for path in ("/emulator/v1/faults", f"/emulator/v1/deployments/{running.deployment['spec']['id']}/replicas"):
        hang_up(emulator.base_url, [f"POST {path} HTTP/1.1", auth], b"{", length=500, reset=True)
    for path in ("/", "/emulator/v1/page", "/emulator/v1/state"):
        hang_up(emulator.base_url, [f"GET {path} HTTP/1.1", auth], b"", reset=True)
    for method, size in (("PUT", 5000), ("GET", 0)):
        hang_up(
            emulator.s3_endpoint, [f"{method} /{emulator.bucket}/x HTTP/1.1"], b"abc"[:size], length=size, reset=True
        )
    until(lambda: running.ended() - before >= count)
    assert running.page["problems"] == []
    assert "Traceback" not in running.log.read_text()


def test_an_answer_that_is_written_on_for_a_caller_that_has_gone_is_no_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What an application writes before the server hears of the reset: asyncio would warn of each of these writes."""
    written = []

    async def serve() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            theirs.close()  # what it has not read makes it a reset
            for _ in range(50):  # none of these lets the server hear of it
                await send({"type": "http.response.body", "body": b"event", "more_body": True})
                written.append(1)
            await send({"type": "http.response.body", "body": b""})
            done.set()

        done = asyncio.Event()
        config = uvicorn.Config(app, http=HangUpProtocol, lifespan="off", log_config=None, proxy_headers=False)
        config.load()
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: HangUpProtocol(config, state, {}), ours)
        theirs.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await done.wait()
        await asyncio.gather(*state.tasks, return_exceptions=True)

    with caplog.at_level("WARNING"):
        asyncio.run(serve())
    assert len(written) == 50
    assert caplog.messages == []


def test_a_bench_that_is_interrupted_leaves_no_trace(running: Running) -> None:
    here = running.deployment["spec"]["id"]
    before = running.ended()
    words = ("rollout", "bench", "--deployment", here, "--seconds", "600", "--max-tokens", "20")
    process = start(*words, env=running.emulator.env)
    until(lambda: running.ended() - before > 20 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["interrupted"]) == (130, True), err
    assert [problem for problem in running.page["problems"] if problem["status"] != 429] == []
    assert "Traceback" not in running.log.read_text()


def test_what_a_fault_cuts_is_still_shown(running: Running) -> None:
    emulator = running.emulator
    fault = emulator.control.add_fault("endpoint", "drop", times=1)
    api = Api(emulator.base_url, emulator.admin_token)
    with pytest.raises(OSError):
        api.complete({"model": running.deployment["spec"]["model"]["name"], "prompt": [1], "max_tokens": 1})
    api.close()
    emulator.control.clear_faults(fault["id"])
    until(lambda: any("connection ended" in problem["message"] for problem in running.page["problems"]))
