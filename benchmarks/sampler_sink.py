"""A server of completions that costs a client nothing but its own work: python sampler_sink.py TOKENS

It answers every POST with `n` choices (the request's) of TOKENS tokens each, made once for each `n`, and prints its
port as the first line. GET /seen tells how many requests came, and how many were open at once at most; with
`"together": K` in a request's body no answer is given before K requests are open. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHOICES = re.compile(rb'"n": ?(\d+)')
TOGETHER = re.compile(rb'"user": ?"together-(\d+)"')


def answer(n: int, tokens: int) -> bytes:
    """Return the body of an answer, as vLLM writes it."""
    rng = random.Random(n)
    choices = []
    for index in range(n):
        ids = [rng.randrange(150_000) for _ in range(tokens)]
        logprobs = [-rng.random() * 3 for _ in range(tokens)]
        names = [f"token_id:{token}" for token in ids]
        choices.append(
            {
                "index": index,
                "text": " word" * tokens,
                "logprobs": {
                    "text_offset": list(range(0, 5 * tokens, 5)),
                    "token_logprobs": logprobs,
                    "tokens": names,
                    "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
                },
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": ids,
                "prompt_logprobs": None,
            }
        )
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices}
    return json.dumps(body).encode()


class Sink:
    """What all connections share."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.bodies: dict[int, bytes] = {}
        self.requests = self.open = self.peak = 0
        self.waiting: list[Connection] = []

    def body(self, n: int) -> bytes:
        """Return the answer with `n` choices."""
        if n not in self.bodies:
            self.bodies[n] = answer(n, self.tokens)
        return self.bodies[n]


class Connection(asyncio.Protocol):
    """HTTP/1.1 as far as these clients speak it."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.buffer = b""
        self.n = 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            found = LENGTH.search(head)
            size = int(found[1]) if found else 0
            if len(self.buffer) < end + 4 + size:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + size], self.buffer[end + 4 + size :]
            self.request(head, body)

    def request(self, head: bytes, body: bytes) -> None:
        """Answer one request, or keep it until enough are there."""
        sink = self.sink
        if head.startswith(b"GET"):
            self.send(json.dumps({"requests": sink.requests, "peak": sink.peak}).encode())
            return
        sink.requests += 1
        sink.open += 1
        sink.peak = max(sink.peak, sink.open)
        found = CHOICES.search(body)
        self.n = int(found[1]) if found else 1
        together = TOGETHER.search(body)
        sink.waiting.append(self)
        if together is None or sink.open >= int(together[1]):
            for connection in sink.waiting:
                sink.open -= 1
                connection.send(sink.body(connection.n))
            sink.waiting.clear()

    def send(self, body: bytes) -> None:
        """Send a whole answer."""
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        self.transport.writelines([head, body])


async def main() -> None:
    """Serve until standard input ends."""
    sink = Sink(int(sys.argv[1]))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(sink), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
