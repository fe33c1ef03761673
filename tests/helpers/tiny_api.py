"""A Dedicated Inference API of a few lines on loopback, for tests of the command line: resources in memory, no weights.

    with TinyApi() as api:
        api.deployment("d", statuses=["CREATING", "READY"])
        subprocess.run([...], env=api.env)

Each GET of a resource with ``statuses`` moves it one status further; the last one stays. Every request is in ``log`` as
(method, path with query, headers, body). ``fail(method, path, status, body)`` answers the next such request instead.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PREFIX = "/v1alpha1/inference"


class TinyApi:
    def __init__(self, *, date: str | None = None) -> None:
        self.gateways: dict[str, dict[str, Any]] = {}
        self.deployments: dict[str, dict[str, Any]] = {}
        self.hot_loads: list[dict[str, Any]] = []  # newest first
        self.replicas: dict[str, list[dict[str, Any]]] = {}
        self.statuses: dict[str, list[str]] = {}
        self.log: list[tuple[str, str, dict[str, str], Any]] = []
        self.gone_after_delete = True
        self.largest_page = 1000
        self.date = date
        self._failures: list[tuple[str, str, int, Any]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.env = {"COREWEAVE_API_URL": self.url, "COREWEAVE_API_TOKEN": "tiny-token-0123456789"}

    def __enter__(self) -> TinyApi:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def gateway(
        self, gateway_id: str, *, name: str = "gw", endpoints: tuple[str, ...] = ("infer.example.com",)
    ) -> None:
        self.gateways[gateway_id] = {
            "spec": {"id": gateway_id, "name": name, "zones": ["US-EAST-04A"]},
            "status": {"status": "STATUS_READY", "endpoints": list(endpoints)},
        }

    def deployment(self, deployment_id: str, *, statuses: list[str] | None = None, **spec: Any) -> None:
        self.deployments[deployment_id] = {
            "spec": {
                "id": deployment_id,
                "name": "toy",
                "gatewayIds": list(self.gateways),
                "runtime": {"engine": "dynamo-vllm"},
                "model": {"name": "toy-model"},
                "hotLoad": {"bucket": "weights", "pathPrefix": "run"},
                **spec,
            },
            "status": {"status": "STATUS_READY"},
        }
        if statuses:
            self.statuses[deployment_id] = list(statuses)

    def hot_load(
        self, hot_load_id: str, *, statuses: list[str], deployment_id: str = "d", identity: str = "v1"
    ) -> None:
        self.hot_loads.insert(
            0,
            {
                "spec": {
                    "id": hot_load_id,
                    "deploymentId": deployment_id,
                    "identity": identity,
                    "type": "SNAPSHOT_TYPE_FULL",
                },
                "status": {"state": f"HOT_LOAD_STATE_{statuses[0]}"},
            },
        )
        self.statuses[hot_load_id] = list(statuses)
        self.replicas[hot_load_id] = [
            {"name": "r0", "zone": "z", "state": "READY", "currentSnapshotIdentity": identity}
        ]

    def fail(self, method: str, path: str, status: int, body: Any) -> None:
        self._failures.append((method, path, status, body))

    def paths(self, method: str = "GET") -> list[str]:
        return [path.removeprefix(PREFIX) for verb, path, _, _ in self.log if verb == method]

    # -- answers ------------------------------------------------------------------------------------------------------

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        path = urlsplit(target).path.removeprefix(PREFIX)
        query = {key: values[-1] for key, values in parse_qs(urlsplit(target).query).items()}
        for failure in self._failures:
            if failure[:2] == (method, path):
                self._failures.remove(failure)
                return failure[2], failure[3]
        kind, _, rest = path.strip("/").partition("/")
        match kind:
            case "gateways" | "deployments":
                return self._resource(kind, method, rest, body)
            case "hotLoads":
                return self._hot_load(method, rest, query)
        return 404, {"code": 5, "message": f"no such path {path}"}

    def _resource(self, kind: str, method: str, rest: str, body: Any) -> tuple[int, Any]:
        store, key = (self.gateways, "gateway") if kind == "gateways" else (self.deployments, "deployment")
        if rest == "parameters":
            return 200, {"zones": ["US-EAST-04A"]}
        if not rest:
            if method == "GET":
                return 200, {"items": list(store.values())}
            store[body["id"]] = {"spec": dict(body), "status": {"status": "STATUS_CREATING"}}
            self.statuses.setdefault(body["id"], self.statuses.pop("next", ["READY"]))
            return 200, {key: store[body["id"]]}
        if rest not in store:
            return 404, {"code": 5, "message": f"{key} {rest} not found"}
        if method == "PATCH":
            store[rest]["spec"] = body
        elif method == "DELETE":
            last = store[rest]
            last["status"]["status"] = "STATUS_DELETING"
            self.statuses.pop(rest, None)
            if self.gone_after_delete:
                del store[rest]
            return 200, {key: last}
        else:
            store[rest]["status"]["status"] = f"STATUS_{self._next(rest, store[rest]['status']['status'][7:])}"
        return 200, {key: store[rest]}

    def _hot_load(self, method: str, rest: str, query: dict[str, str]) -> tuple[int, Any]:
        if not rest:
            wanted = query.get("parentDeploymentId")
            found = [one for one in self.hot_loads if wanted in (None, one["spec"]["deploymentId"])]
            size, start = min(int(query.get("maxPageSize") or 50), self.largest_page), int(query.get("pageToken") or 0)
            page = {"hotLoads": found[start : start + size]}
            return 200, {**page, "nextPageToken": str(start + size)} if start + size < len(found) else page
        hot_load_id, _, part = rest.partition("/")
        if hot_load_id.endswith(":cancel"):
            return 501, {"code": 12, "message": "cancel is not implemented"}
        found_one = next((one for one in self.hot_loads if one["spec"]["id"] == hot_load_id), None)
        if found_one is None:
            return 404, {"code": 5, "message": f"hot-load {hot_load_id} not found"}
        if part == "replicas":
            return 200, {"replicas": self.replicas[hot_load_id]}
        found_one["status"]["state"] = f"HOT_LOAD_STATE_{self._next(hot_load_id, found_one['status']['state'][15:])}"
        return 200, {"hotLoad": found_one}

    def _next(self, resource_id: str, now: str) -> str:
        left = self.statuses.get(resource_id) or [now]
        return left.pop(0) if len(left) > 1 else left[0]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                with api._lock:
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    api.log.append((self.command, self.path, headers, body))
                    status, answer = api.answer(self.command, self.path, body)
                data = json.dumps(answer).encode()
                self.send_response_only(status)
                self.send_header("Date", api.date or self.date_time_string())
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = _serve

            def log_message(self, *args: Any) -> None:
                pass

        return Handler
