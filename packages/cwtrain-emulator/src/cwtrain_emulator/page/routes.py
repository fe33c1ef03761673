"""The page's routes: its files, and what they poll.

Who may look: while the emulator is bound to loopback, anyone on this machine, since the page shows no secret, the Host
check (`Edge`) keeps out names that only resolve to loopback, and a browser gives the answer to no other site's script.
Bound to anything else, a token of either role is needed; the page takes it from its address (``#token=``) or asks.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cwtrain_emulator.api.app import bearer_token, endpoint
from cwtrain_emulator.api.errors import permission_denied, unauthenticated
from cwtrain_emulator.api.service import Service
from cwtrain_emulator.page.activity import Activity
from cwtrain_emulator.page.view import PageView
from cwtrain_emulator.s3.client import is_loopback

__all__ = ["page_routes", "page_url"]

_FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "chart.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}

# Nothing but this server's own files; no inline script or style, no frame around the page, no form that goes anywhere,
# and no text that becomes markup.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def page_routes(service: Service, activity: Activity) -> list[BaseRoute]:
    """Return the page at ``/``, its files, and ``/emulator/v1/page``, which it polls."""

    view = PageView(service, activity)

    def shown(service: Service, request: Request) -> dict[str, Any]:
        _admit(service, request)
        return view.now()

    answer = endpoint(service, shown, role=None)

    async def polled(request: Request) -> Response:
        response = await answer(request)
        response.headers.update({**_HEADERS, "Cache-Control": "no-store"})
        return response

    files = [Route(f"/emulator/page/{name}", _file(name, kind)) for name, kind in _FILES.items()]
    return [Route("/", _file("index.html", "text/html")), *files, Route("/emulator/v1/page", polled)]


def page_url(service: Service) -> str:
    """Return where the page is, with what it needs to read."""
    token = "" if is_loopback(service.settings.host) else f"#token={service.keys.viewer_token}"
    return f"{service.base_url}/{token}"


def _admit(service: Service, request: Request) -> None:
    """Raise ApiError unless the request may see the page's data."""
    token = bearer_token(request)
    if token:
        if service.role_of(token) is None:
            raise unauthenticated()
        return
    if not is_loopback(service.settings.host):
        raise unauthenticated()
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise permission_denied("the page's data is for the page")


def _file(name: str, kind: str) -> Any:
    content = resources.files("cwtrain_emulator.page").joinpath("static", name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "Cache-Control": "no-cache", "ETag": tag}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return answer
