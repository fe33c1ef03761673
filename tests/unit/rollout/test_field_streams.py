"""What a server sends over HTTP, however it is framed, broken or large, is an answer, or an error in our words.

The kind: untrusted bytes. Lines have no limit of a library's, events may have names, comments and any line end, memory
is bounded before it is spent, and no exception of the HTTP library leaves the sampler.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import aiohttp.client_exceptions
import aiohttp.http_exceptions
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cwtrain.plugins import Plugins
from cwtrain_rollout import Group, RolloutConfig, RolloutError, RolloutExhaustedError, Sampler, SamplingParams
from cwtrain_rollout._http import HttpTransport
from cwtrain_rollout.chat import ChatSampler
from cwtrain_rollout.transport import NoAnswer
from helpers.completions_server import CompletionsServer, Raw, answer, choice

PARAMS = SamplingParams(max_tokens=4)
EVENT = json.dumps(answer(choice(0, (7, 8))))
DONE = "data: [DONE]\n\n"


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


class Pieces:
    """A server that sends these bytes to every request, piece by piece, and closes the connection."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self.requests = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Pieces:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                length = 0
                while (line := file.readline()).strip():
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                file.read(length)
                self.requests += 1
                for piece in self._pieces:
                    connection.sendall(piece)
            except OSError:
                pass


def head(kind: str = "text/event-stream", status: str = "200 OK", **more: str) -> bytes:
    fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in more.items())
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{fields}Connection: close\r\n\r\n".encode()


async def events_of(url: str, **options: Any) -> list[bytes]:
    transport = HttpTransport(RolloutConfig(base_url=url, model="m"), **options)
    try:
        async with transport.stream(b"{}", {}) as streamed:
            assert streamed.events is not None
            return [event async for event in streamed.events]
    finally:
        await transport.aclose()


def streamed_sample(url: str, **settings: Any) -> Any:
    config = RolloutConfig(base_url=url, model="m", deadline=2, max_attempts=2, **settings)
    one = Sampler(config, rng=random.Random(1), sleep=no_pause, plugins=Plugins())

    async def scenario() -> Any:
        async with one, one.rollout([Group(prompt=[1])], PARAMS, partial=True) as rollout:
            (group,) = [group async for group in rollout]
            return group.samples[0]

    return asyncio.run(scenario())


# Frames --------------------------------------------------------------------------------------------------------------

FRAMES = {
    "plain": (f"data: {EVENT}\n\n", [EVENT]),
    "no space": (f"data:{EVENT}\n\n", [EVENT]),
    "a byte order mark": (f"\ufeffdata: {EVENT}\n\n", [EVENT]),
    "comments": (f": keep-alive\n\n:\n\ndata: {EVENT}\n: and on\n\n", [EVENT]),
    "an id and a time to retry": (f"id: 7\nretry: 10\ndata: {EVENT}\n\n", [EVENT]),
    "the name of a message": (f"event: message\ndata: {EVENT}\n\n", [EVENT]),
    "a name of its own": (f"event: completion\ndata: {EVENT}\n\n", [EVENT]),
    "a name after the data": (f"data: {EVENT}\nevent: completion\n\n", [EVENT]),
    "notes of other names": (f"event: ping\ndata: x\n\nevent: token_ids\ndata: [1, 2]\n\ndata: {EVENT}\n\n", [EVENT]),
    "a note in a comment": (f'event: llm_metrics\n: {{"tokens": 2}}\n\ndata: {EVENT}\n\n', [EVENT]),
    "a name that does not stay": (f"event: ping\n\ndata: {EVENT}\n\n", [EVENT]),
    "empty data": (f"data:\n\ndata: \n\ndata\n\ndata: {EVENT}\n\n", [EVENT]),
    "several lines of data": ('data: {"choices":\ndata: []}\n\n', ['{"choices":\n[]}']),
    "blank lines": (f"\n\n\ndata: {EVENT}\n\n\n\n", [EVENT]),
    "two events": (f"data: {EVENT}\n\ndata: {EVENT}\n\n", [EVENT, EVENT]),
    "two events without a blank line": (f"data: {EVENT}\ndata: {EVENT}\n\n", [EVENT, EVENT]),
}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("name", FRAMES)
def test_every_frame_of_an_event_is_read(name: str, end: str) -> None:
    text, expected = FRAMES[name]
    with Pieces(head(), (text + DONE).replace("\n", end).encode()) as server:
        found = asyncio.run(events_of(server.url))
    assert [event.decode() for event in found] == expected


@pytest.mark.parametrize("before", ["\n", "\n\n"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n"])
def test_the_last_event_needs_no_blank_line(before: str, end: str) -> None:
    with Pieces(head(), f"data: {EVENT}{before}data: [DONE]{end}".encode()) as server:
        assert [event.decode() for event in asyncio.run(events_of(server.url))] == [EVENT]


def test_a_stream_without_its_last_event_was_cut() -> None:
    for rest in ("", f"data: {EVENT}\n\n", f"data: {EVENT}"):
        with Pieces(head(), rest.encode()) as server, pytest.raises(NoAnswer, match="without its last event") as caught:
            asyncio.run(events_of(server.url))
        assert caught.value.cut


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_where_the_network_cuts_makes_no_difference(data: st.DataObject) -> None:
    """Every cut of a stream of any frames gives its events, the cut in the middle of a line end too."""
    from cwtrain_rollout._http import _Events

    names = data.draw(st.lists(st.sampled_from(sorted(FRAMES.keys() - {"a byte order mark"})), max_size=4))
    end = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    text = ("".join(FRAMES[name][0] for name in names) + DONE).replace("\n", end).encode()
    expected = [event for name in names for event in FRAMES[name][1]]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    split, found = _Events(1 << 20), []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        assert not split.done or start >= len(text) - 4
        if not split.done:
            found += split.feed(text[start:stop])
    assert [event.decode() for event in found] == expected
    assert split.done


@pytest.mark.parametrize(
    "frame",
    [
        'event: error\ndata: {"error": {"message": "engine died"}}\n\n',
        'event: error\ndata: {"message": "engine died"}\n\n',
        "event: error\ndata: engine died\n\n",
        "event: error\n: engine died\n\n",
        'data: {"error": {"message": "engine died"}}\n\n',
        'data: {"object": "error", "message": "engine died"}\n\n',
    ],
)
def test_an_error_in_a_stream_is_a_bad_answer_in_its_own_words(frame: str) -> None:
    with Pieces(head(), (frame + DONE).encode()) as server:
        with pytest.raises(RolloutExhaustedError, match="engine died") as caught:
            streamed_sample(server.url)
        assert (caught.value.bad_answers, server.requests) == (2, 2)


# Sizes ---------------------------------------------------------------------------------------------------------------


def test_a_line_may_be_as_long_as_an_answer_s_routes() -> None:
    """Above every limit that a library has on a line: 3 MiB in an event of tokens, 20 MiB in one without."""
    long = json.dumps({**json.loads(EVENT), "padding": "." * (3 << 20)})
    longer = json.dumps({"choices": [], "padding": "." * (20 << 20)})
    body = f"data: {longer}\n\ndata: {long}\n\n{DONE}"
    with CompletionsServer(Raw(200, body, headers={"Content-Type": "text/event-stream"})) as server:
        sample = streamed_sample(server.url)
        assert len(server.requests) == 1
    assert (sample.token_ids, sample.logprobs) == ((7, 8), (-0.5, -0.5))


def _endless(line: bytes) -> tuple[bytes, ...]:
    return (head(), *[line] * 64)


@pytest.mark.parametrize(
    "pieces",
    [
        _endless(b"." * 4096),
        _endless(b"data: " + b"." * 4096 + b"\n"),
        _endless(b": " + b"." * 4096),
        (head("application/json"), *[b"." * 4096] * 64),
        (head("application/json", Content_Length=str(1 << 40)), b"."),
    ],
    ids=["a line", "lines of data", "a comment", "an answer", "an answer that says so"],
)
def test_what_is_endless_is_given_up_before_the_memory_is_spent(pieces: tuple[bytes, ...]) -> None:
    async def read(url: str) -> None:
        transport = HttpTransport(RolloutConfig(base_url=url, model="m"), most_bytes=1 << 16)
        try:
            async with transport.stream(b"{}", {}) as streamed:
                assert streamed.events is not None
                async for _ in streamed.events:
                    pass
        finally:
            await transport.aclose()

    with Pieces(*pieces) as server:
        with pytest.raises(NoAnswer, match="larger than 65536 bytes") as caught:
            asyncio.run(read(server.url))
        assert caught.value.cut


def test_small_events_may_be_any_number() -> None:
    """The bound is of one event, not of a stream; comments and notes do not add up."""
    event = f": {'.' * 500}\nevent: note\ndata: {'.' * 500}\n\ndata: {EVENT}\n\n".encode()
    with Pieces(head(), *[event] * 200, DONE.encode()) as server:
        assert len(asyncio.run(events_of(server.url, most_bytes=1 << 14))) == 200


def test_of_a_refusal_only_the_start_is_read() -> None:
    async def read(url: str) -> tuple[int, int]:
        transport = HttpTransport(RolloutConfig(base_url=url, model="m"))
        reply = await transport.post(b"{}", {})
        await transport.aclose()
        return reply.status, len(reply.body)

    body = [b"." * (1 << 20)] * 8
    for more in ({}, {"Content_Length": str(8 << 20)}):
        with Pieces(head("text/plain", "400 Bad Request", **more), *body) as server:
            assert asyncio.run(read(server.url)) == (400, 1 << 20)


# What goes wrong -----------------------------------------------------------------------------------------------------

THEIRS = sorted(
    {
        kind
        for module in (aiohttp.client_exceptions, aiohttp.http_exceptions)
        for kind in vars(module).values()
        if inspect.isclass(kind)
        and issubclass(kind, Exception)
        and kind.__module__.startswith("aiohttp")
        and not kind.__name__.startswith("WS")
    },
    key=lambda kind: kind.__name__,
)


def made(kind: type[Exception]) -> Exception:
    """Return an exception of this kind, whatever its making takes."""
    methods = {"__init__": lambda self: None, "__str__": lambda self: "a text"}
    found: Exception = type(kind.__name__, (kind,), methods)()
    return found


@pytest.mark.parametrize(
    "kind", [*THEIRS, ConnectionResetError, BrokenPipeError, EOFError], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_every_exception_of_the_library_is_told_in_our_words(kind: type[Exception], answered: bool) -> None:
    """Before an answer has begun it costs time only, after that it was cut."""
    from cwtrain_rollout._http import _Disconnected, _Progress

    transport = HttpTransport(RolloutConfig(base_url="http://h", model="m"))
    with pytest.raises((NoAnswer, _Disconnected)) as caught, transport._in_our_words(_Progress(answered)):
        raise made(kind)
    if answered:
        assert isinstance(caught.value, NoAnswer)
        assert caught.value.cut
    assert str(caught.value)


BROKEN = {
    "no HTTP": [b"\x16\x03\x01\x02\x00 what is this\r\n\r\n"],
    "a status that is none": [b"HTTP/1.1 abc\r\n\r\n"],
    "a head without an end": [b"HTTP/1.1 200 OK\r\nContent-Type: te"],
    "a head that is too long": [b"HTTP/1.1 200 OK\r\nX-Long: " + b"." * (1 << 17) + b"\r\n\r\n"],
    "a field that is none": [b"HTTP/1.1 200 OK\r\n: x\r\n\r\n"],
    "two lengths": [head("application/json", Content_Length="5, 6"), b"12345"],
    "a length that is none": [head("application/json", Content_Length="five"), b"12345"],
    "less than was said": [head("application/json", Content_Length="500"), b"12345"],
    "chunks that are none": [head("application/json", Transfer_Encoding="chunked"), b"zz\r\n12345\r\n"],
    "a chunk's line that is too long": [head("application/json", Transfer_Encoding="chunked"), b"1" * (1 << 17)],
    "a chunk that is cut": [head("application/json", Transfer_Encoding="chunked"), b"ff\r\n12345"],
    "a compression that is none": [head("application/json", Content_Encoding="gzip"), b"12345"],
    "a compression that is cut": [head("application/json", Content_Encoding="gzip"), b"\x1f\x8b\x08\x00"],
    "nothing": [],
}


@contextmanager
def broken(name: str, kind: str) -> Iterator[Pieces]:
    pieces = [piece.replace(b"application/json", kind.encode()) for piece in BROKEN[name]]
    with Pieces(*pieces) as server:
        yield server


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("way", ["whole", "streamed", "chat"])
def test_what_is_no_http_is_an_error_of_the_sampler_s(name: str, way: str) -> None:
    with broken(name, "text/event-stream" if way == "streamed" else "application/json") as server:
        config = RolloutConfig(base_url=server.url, model="m", deadline=0.01, max_attempts=2)
        with pytest.raises(RolloutError) as caught:
            ask(way, config)
    assert type(caught.value).__module__ == "cwtrain_rollout.errors"


def ask(way: str, config: RolloutConfig) -> None:
    if way == "streamed":
        streamed_sample(config.base_url)
    elif way == "whole":
        Sampler(config, sleep=no_pause, plugins=Plugins()).sample_groups([Group(prompt=[1])], PARAMS)
    else:
        asyncio.run(_chat(config))


async def _chat(config: RolloutConfig) -> None:
    one = ChatSampler(config, sleep=no_pause)
    try:
        await one.chat([[{"role": "user", "content": "a"}]])
    finally:
        await one.aclose()


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError, aiohttp.ClientError, NoAnswer])
def test_what_the_caller_raises_over_the_events_stays_the_caller_s(kind: type[Exception]) -> None:
    async def read(url: str) -> None:
        transport = HttpTransport(RolloutConfig(base_url=url, model="m"))
        try:
            async with transport.stream(b"{}", {}) as streamed:
                assert streamed.events is not None
                async for _ in streamed.events:
                    raise kind("mine")
        finally:
            await transport.aclose()

    with Pieces(head(), f"data: {EVENT}\n\n".encode()) as server, pytest.raises(kind, match=r"^mine$"):
        asyncio.run(read(server.url))
