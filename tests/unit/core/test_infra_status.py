"""From refusals of every shape to one class per code."""

from __future__ import annotations

import datetime as dt
import html
import json
import pickle
import urllib.parse

import pytest

from cwtrain import errors
from cwtrain.infra._status import QUOTE_CHARS, Scrubber, error_from_answer, quote, retry_floor

TOKEN = 'tok"en-a1b2c3'
NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


def refused(status, body, headers=None, where="GET /deployments/d-1", **more):
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return error_from_answer(
        status=status,
        headers=headers or {},
        body=data,
        where=where,
        scrub=Scrubber([TOKEN]),
        now=lambda: NOW,
        **more,
    )


CODES = [
    (1, "canceled", errors.CanceledError),
    (2, "unknown", errors.UnknownError),
    (3, "invalid_argument", errors.InvalidArgumentError),
    (4, "deadline_exceeded", errors.DeadlineExceededError),
    (5, "not_found", errors.NotFoundError),
    (6, "already_exists", errors.AlreadyExistsError),
    (7, "permission_denied", errors.PermissionDeniedError),
    (8, "resource_exhausted", errors.ResourceExhaustedError),
    (9, "failed_precondition", errors.FailedPreconditionError),
    (10, "aborted", errors.AbortedError),
    (11, "out_of_range", errors.OutOfRangeError),
    (12, "unimplemented", errors.UnimplementedError),
    (13, "internal", errors.InternalServerError),
    (14, "unavailable", errors.UnavailableError),
    (15, "data_loss", errors.DataLossError),
    (16, "unauthenticated", errors.UnauthenticatedError),
]


@pytest.mark.parametrize(("number", "name", "cls"), CODES, ids=[name for _, name, _ in CODES])
def test_the_sixteen_codes_in_every_spelling(number, name, cls):
    camel = "".join(word.title() for word in name.split("_"))
    for body in (
        {"code": number, "message": "why"},
        {"code": str(number), "message": "why"},
        {"code": name, "message": "why"},
        {"code": name.upper(), "message": "why"},
        {"code": camel, "message": "why"},
        {"error": {"code": 418, "message": "why", "status": name.upper()}},
        {"error": {"code": number, "message": "why"}},
        {"error": name, "message": "why"},
        [{"error": {"code": name, "message": "why"}}],
    ):
        error = refused(418, body)
        assert type(error) is cls, body
        assert (error.code, error.status) == (name, 418)
        assert str(error) == f"why ({name.upper()}, HTTP 418, GET /deployments/d-1)"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid_argument"),
        (401, "unauthenticated"),
        (403, "permission_denied"),
        (404, "not_found"),
        (408, "deadline_exceeded"),
        (409, "already_exists"),
        (412, "failed_precondition"),
        (418, "invalid_argument"),
        (429, "resource_exhausted"),
        (499, "canceled"),
        (500, "internal"),
        (501, "unimplemented"),
        (502, "unavailable"),
        (503, "unavailable"),
        (504, "deadline_exceeded"),
        (599, "internal"),
        (600, "internal"),
    ],
)
def test_without_a_code_the_http_status_decides(status, code):
    for body in ("", "why", "<html><body>why</body></html>", {"message": "why"}, {"error": "why"}, {"error": {}}, "[]"):
        assert refused(status, body).code == code, body
    assert refused(status, {"code": 0, "message": "ok?"}).code == code
    assert refused(status, {"code": "no_such_code", "message": "?"}).code == code


def test_409_is_aborted_where_the_body_says_so():
    assert refused(409, "the operation was aborted").code == "aborted"
    assert refused(409, {"message": "another operation is in progress"}).code == "aborted"
    assert refused(409, {"code": 6, "message": "aborted by hand"}).code == "already_exists"


def test_text_pages_and_nothing():
    assert str(refused(502, "upstream\n\n gone \x1b[31m")).startswith("upstream gone [31m (UNAVAILABLE, HTTP 502, GET")
    page = "<!DOCTYPE html><html><head><title>502</title><style>b{}</style></head><body><h1>Bad &amp; gone</h1></body>"
    assert str(refused(502, page)).startswith("an HTML page: 502 Bad & gone (")
    assert str(refused(502, "<b>x</b>", {"content-type": "text/html; charset=utf-8"})).startswith("an HTML page: x (")
    assert str(refused(503, "")).startswith("no explanation (Service Unavailable) (UNAVAILABLE, HTTP 503")
    assert str(refused(503, b"\xff\xfe\x00")).startswith("\ufffd\ufffd (")
    assert str(refused(400, {"unexpected": ["shape"]})).startswith('{"unexpected": ["shape"]} (')
    assert str(refused(400, {"detail": [{"loc": ["name"], "msg": "too short"}]})).startswith("[{")
    assert str(refused(500, "[" * 100_000)).startswith("[[[")


def test_what_is_quoted_is_capped():
    for body in ("x" * 9000, {"message": "y" * 9000}, "<html>" + "z " * 9000):
        error = refused(500, body)
        assert len(str(error)) < QUOTE_CHARS + 100
        assert "... (INTERNAL" in str(error)
    assert quote("a\tb\r\n c") == "a b c"


def test_details_are_shown_and_kept():
    details = [
        {
            "@type": "type.googleapis.com/google.rpc.ResourceInfo",
            "resourceType": "deployment",
            "resourceName": "d-1",
            "description": "taken",
        },
        {
            "@type": "type.googleapis.com/google.rpc.PreconditionFailure",
            "violations": [{"type": "STATE", "subject": "d-1", "description": "hot-load runs"}],
        },
        {
            "@type": "type.googleapis.com/google.rpc.BadRequest",
            "field_violations": [{"field": "resources.gpuCount", "description": "must be 1, 2, 4, 8 or 16"}],
        },
        {
            "@type": "type.googleapis.com/google.rpc.QuotaFailure",
            "violations": [{"subject": "gpus", "description": "8 of 8 used"}],
        },
        {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "QUOTA", "domain": "coreweave.com"},
        {"@type": "type.googleapis.com/google.rpc.RequestInfo", "requestId": "req-7"},
        {"@type": "something.else"},
        "not an object",
    ]
    error = refused(400, {"code": 9, "message": "no", "details": details})
    for text in (
        "deployment: d-1: taken",
        "STATE: d-1: hot-load runs",
        "resources.gpuCount: must be 1, 2, 4, 8 or 16",
        "gpus: 8 of 8 used",
        "reason: QUOTA",
        "request req-7",
    ):
        assert text in str(error)
    assert error.request_id == "req-7"
    assert list(error.details) == details[:-1]
    assert pickle.loads(pickle.dumps(error)).details == error.details


def test_connect_style_details():
    body = {
        "code": "resource_exhausted",
        "message": "slow down",
        "details": [
            {"type": "google.rpc.RetryInfo", "value": "CgIIAg", "debug": {"retryDelay": "2.5s"}},
            {"type": "google.rpc.ErrorInfo", "value": "CgFY"},
        ],
    }
    error = refused(429, body)
    assert isinstance(error, errors.ResourceExhaustedError)
    assert error.retry_after == retry_floor(error) == 2.5
    assert error.details[1] == {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "value": "CgFY"}


@pytest.mark.parametrize(
    ("headers", "details", "floor"),
    [
        ({"retry-after": "2"}, [], 2),
        ({"retry-after": " 1.5 "}, [], 1.5),
        ({"retry-after": "86400"}, [], 86400),
        ({"retry-after": "Fri, 02 Jan 2026 03:04:25 GMT"}, [], 20),
        ({"retry-after": "Fri, 02 Jan 2026 03:04:25 GMT", "date": "Fri, 02 Jan 2026 03:04:20 GMT"}, [], 5),
        ({"retry-after": "Fri, 02 Jan 2020 03:04:25 GMT"}, [], 0),
        ({"retry-after": "soon"}, [], 0),
        ({"retry-after": "-3"}, [], 0),
        ({"retry-after": "inf"}, [], 0),
        ({"retry-after": ""}, [], 0),
        ({}, [{"@type": "x/google.rpc.RetryInfo", "retryDelay": "3s"}], 3),
        ({}, [{"@type": "x/google.rpc.RetryInfo", "retry_delay": {"seconds": 1, "nanos": 500000000}}], 1.5),
        ({}, [{"@type": "x/google.rpc.RetryInfo", "retryDelay": {"seconds": "a"}}], 0),
        ({}, [{"@type": "x/google.rpc.RetryInfo"}], 0),
        ({"retry-after": "2"}, [{"@type": "x/google.rpc.RetryInfo", "retryDelay": "3s"}], 3),
        ({"retry-after": "4"}, [{"@type": "x/google.rpc.RetryInfo", "retryDelay": "3s"}], 4),
    ],
)
def test_what_the_service_asks_for_before_the_next_try(headers, details, floor):
    for status in (429, 503):
        error = refused(status, {"message": "later", "details": details}, headers)
        assert retry_floor(error) == floor
        assert retry_floor(pickle.loads(pickle.dumps(error))) == floor


@pytest.mark.parametrize(
    "body",
    [
        f"bad token {TOKEN}",
        {"message": f"bad token {TOKEN}"},
        {"code": 16, "message": "x" * (QUOTE_CHARS - 15) + TOKEN},
        {"message": "no", "details": [{"@type": "a/google.rpc.ErrorInfo", "reason": TOKEN, TOKEN: [TOKEN]}]},
        f"<html>you sent Authorization: Bearer {TOKEN}</html>",
        {"detail": {"headers": {"authorization": f"Bearer {TOKEN}"}}},
        f"<html>you sent Bearer {html.escape(TOKEN)} and {html.escape(TOKEN).replace('&quot;', '&#34;')}</html>",
        f"/login?token={urllib.parse.quote(TOKEN)}",
    ],
)
def test_a_token_that_the_server_echoes_is_never_shown(body):
    error = refused(401, body, {"x-request-id": f"r-{TOKEN}"}, token_source="CW_API_TOKEN")
    everything = f"{error}{error.hint}{error.details}{error.request_id}{error.args}"
    assert TOKEN not in everything
    assert TOKEN[:8] not in everything
    assert json.dumps(TOKEN)[1:-1] not in everything
    assert "a1b2c3" not in everything


def test_a_401_says_where_the_token_came_from():
    error = refused(401, {"message": "no"}, token_source="CW_API_TOKEN")
    assert str(error).endswith("; the token came from CW_API_TOKEN")
    assert "quotes" in (refused(401, "", token_source="x", token_quoted=True).hint or "")
    assert "token came" not in str(refused(403, {"message": "no"}, token_source="CW_API_TOKEN"))


def test_request_ids_and_hints():
    assert refused(500, "", {"x-request-id": "abc"}).request_id == "abc"
    assert "request abc" in str(refused(500, "x", {"x-request-id": "abc"}))
    assert refused(500, "").request_id is None
    assert "Inference Admin" in refused(403, "").hint
    assert "cwtrain deployment list" in refused(404, "").hint
    assert "support" in refused(400, "hot-load is not enabled for this organization").hint
    assert "full snapshot" in refused(400, "resolved snapshot chain is too long").hint
    assert "wait" in refused(501, "", where="POST /hotLoads/h-1:cancel").hint
    assert all(refused(status, "").hint for status in (400, 401, 403, 404, 409, 412, 429, 499, 500, 501, 503, 504))
    assert all(refused(400, {"code": code, "message": "no"}).hint for code in range(1, 17))


@pytest.mark.parametrize(
    ("where", "message", "next_step"),
    [
        ("GET /deployments/parameters", "gateway nope not found", "cwtrain gateway list"),
        ("GET /hotLoads", "parentDeploymentId: must be a UUID", "cwtrain deployment list"),
        ("POST /deployments", "gatewayIds[0]: there is no such gateway", "cwtrain gateway list"),
        ("POST /deployments", "resources.gpuCount: must be 1, 2, 4, 8 or 16", "cwtrain deployment parameters"),
        ("DELETE /gateways/g-1", "gateway g-1 is in use by 1 deployment(s)", "cwtrain deployment list"),
        ("POST /hotLoads", "previousSnapshotIdentity 'x' is not a completed hot-load", "cwtrain hotload list"),
    ],
)
def test_a_refusal_points_at_what_it_is_about(where, message, next_step):
    code = 5 if "not found" in message else 3 if "must be" in message else 9
    assert next_step in refused(400, {"code": code, "message": message}, where=where).hint


def test_a_redirect_is_not_followed_and_says_where_to():
    error = refused(302, "", {"location": f"https://login.example.com/?token={TOKEN}"})
    assert isinstance(error, errors.UnexpectedAnswerError)
    assert "https://login.example.com/" in str(error)
    assert TOKEN not in str(error)
    assert "COREWEAVE_API_URL" in error.hint
