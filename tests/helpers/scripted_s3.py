"""A small S3 server that misbehaves on demand, for what no real server shows. Everything else runs on real ones.

It knows conditional PUT and Complete, multipart, metadata and listings of one page; it checks no signature.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import attrs
import boto3
import botocore.loaders
import botocore.session

LOST = "lost"
"""A script's answer for: carry the request out, and hang up without an answer."""


@attrs.frozen
class Answer:
    status: int
    code: str = ""
    extra: str = ""
    """More XML inside the error."""


@attrs.frozen(kw_only=True)
class Request:
    operation: str
    key: str
    headers: Mapping[str, str]
    connection: int


Script = Callable[[Request, int], "Answer | str | None"]
"""Gets a request and how many of its operation came before it; None means: behave."""


@attrs.define(eq=False)
class ScriptedS3:
    """The server's state. ``decode`` says whether aws-chunked bodies are taken apart, as they should be."""

    script: Script = lambda request, before: None
    decode: bool = True
    refuse_chunked: bool = False
    objects: dict[str, tuple[bytes, dict[str, str]]] = attrs.field(factory=dict)
    uploads: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = attrs.field(factory=dict)
    requests: list[Request] = attrs.field(factory=list)
    url: str = ""
    lock: threading.RLock = attrs.field(factory=threading.RLock)

    def count(self, operation: str) -> int:
        return sum(request.operation == operation for request in self.requests)


@contextlib.contextmanager
def scripted_s3(server: ScriptedS3, tls: ssl.SSLContext | None = None) -> Iterator[ScriptedS3]:
    class Handler(_Handler):
        state = server

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    if tls is not None:
        httpd.socket = tls.wrap_socket(httpd.socket, server_side=True, do_handshake_on_connect=False)
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: ScriptedS3
    protocol_version = "HTTP/1.1"
    timeout = 20

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
            self._answer()
            return
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        _, _, key = unquote(url.path[1:]).partition("/")
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._body(headers)
        operation = _operation(self.command, key, query)
        state = self.state
        with state.lock:
            before = state.count(operation)
            request = Request(operation=operation, key=key, headers=headers, connection=self.client_address[1])
            state.requests.append(request)
        answer = state.script(request, before)
        if isinstance(answer, Answer):
            return self._error(answer)
        if state.refuse_chunked and headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            return self._error(Answer(411, "MissingContentLength"))
        said = headers.get("x-amz-content-sha256", "")
        if len(said) == 64 and said != hashlib.sha256(body).hexdigest():
            return self._error(Answer(400, "XAmzContentSHA256Mismatch"))
        status, more, payload = self._do(operation, key, query, headers, body)
        if answer == LOST:
            self.close_connection = True
            self.connection.close()
            return None
        return self._send(status, more, payload)

    def _body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            raw = bytearray()
            while size := int(self.rfile.readline(), 16):
                raw += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            data = bytes(raw)
        else:
            data = self.rfile.read(int(headers.get("content-length", 0)))
        if self.state.decode and headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            return _unframed(data)
        return data

    def _do(
        self, operation: str, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        state = self.state
        metadata = {name: value for name, value in headers.items() if name.startswith("x-amz-meta-")}
        upload_id = query.get("uploadId", "")
        with state.lock:
            if operation in ("PutObject", "CompleteMultipartUpload"):
                upload = state.uploads.get(upload_id)
                if operation != "PutObject" and upload is None:
                    return _xml(404, "NoSuchUpload")
                if headers.get("if-none-match") == "*" and key in state.objects:
                    return _xml(412, "PreconditionFailed")
                if upload is not None:
                    body, metadata = b"".join(upload[2][n] for n in sorted(upload[2])), upload[1]
                    del state.uploads[upload_id]
                state.objects[key] = (body, metadata)
                etag = f'"{hashlib.md5(body).hexdigest()}"'
                if operation == "PutObject":
                    return 200, {"ETag": etag}, b""
                return 200, {}, f"<R><ETag>{escape(etag)}</ETag></R>".encode()
            if operation == "CreateMultipartUpload":
                upload_id = f"upload-{state.count(operation)}"
                state.uploads[upload_id] = (key, metadata, {})
                return 200, {}, f"<R><UploadId>{upload_id}</UploadId></R>".encode()
            if operation in ("UploadPart", "AbortMultipartUpload"):
                if upload_id not in state.uploads:
                    return _xml(404, "NoSuchUpload")
                if operation == "AbortMultipartUpload":
                    del state.uploads[upload_id]
                    return 204, {}, b""
                state.uploads[upload_id][2][int(query["partNumber"])] = body
                return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""
            if operation == "ListMultipartUploads":
                return 200, {}, b"<R></R>"
            if operation == "ListObjectsV2":
                found = "".join(
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size></Contents>"
                    for key, (data, _) in sorted(state.objects.items())
                    if key.startswith(query.get("prefix", ""))
                )
                return 200, {}, f"<R>{found}</R>".encode()
            if key not in state.objects:
                return _xml(404, "NoSuchKey")
            data, metadata = state.objects[key]
            if operation == "HeadObject":
                return 200, {**metadata, "Content-Length": str(len(data))}, b""
            return 200, metadata, data

    def _error(self, answer: Answer) -> None:
        self._send(*_xml(answer.status, answer.code, answer.extra))

    def _send(self, status: int, headers: Mapping[str, str], payload: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers and status != 204:
            self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)


def _operation(method: str, key: str, query: Mapping[str, str]) -> str:
    if method == "GET" and not key:
        return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
    if method == "POST":
        return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
    many = {"PUT": "UploadPart", "DELETE": "AbortMultipartUpload"}
    if "uploadId" in query and method in many:
        return many[method]
    return {"GET": "GetObject", "HEAD": "HeadObject" if key else "HeadBucket", "PUT": "PutObject"}.get(method, method)


def _xml(status: int, code: str, extra: str = "") -> tuple[int, dict[str, str], bytes]:
    message = "" if "<Message>" in extra else "<Message>scripted</Message>"
    return status, {}, f"<Error><Code>{code}</Code>{message}{extra}</Error>".encode()


def _unframed(data: bytes) -> bytes:
    """Take an aws-chunked body apart: ``size[;extension] CRLF bytes CRLF ... 0 CRLF trailers``."""
    out, rest = bytearray(), data
    while True:
        line, _, rest = rest.partition(b"\r\n")
        size = int(re.match(rb"[0-9a-f]+", line)[0], 16)  # type: ignore[index]
        if not size:
            return bytes(out)
        out += rest[:size]
        rest = rest[size + 2 :]


def aws_session(**keys: str) -> boto3.Session:
    """Return a session of its own, for ``s3_client``: only boto3's models, whose reading costs most, are shared."""
    core = botocore.session.Session()
    core.register_component("data_loader", _models())
    return boto3.Session(botocore_session=core, **keys)


@functools.cache
def _models() -> Any:
    return botocore.loaders.create_loader()
