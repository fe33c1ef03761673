"""Whatever JSON comes, the emulator answers with a refusal or with success, never with another exception."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cwtrain_emulator.api import resources
from cwtrain_emulator.api.app import JsonResponse
from cwtrain_emulator.api.claims import CLAIMS
from cwtrain_emulator.api.controller import Controller
from cwtrain_emulator.api.deployments import DEPLOYMENTS
from cwtrain_emulator.api.errors import ApiError
from cwtrain_emulator.api.gateways import GATEWAYS
from cwtrain_emulator.api.hot_loads import create_hot_load, list_hot_loads
from cwtrain_emulator.api.service import Service
from cwtrain_emulator.engine.safetensors import FormatError, parse_header
from cwtrain_emulator.gateway.completion_request import parse_chat, parse_completion
from cwtrain_emulator.gateway.errors import GatewayError
from cwtrain_emulator.keys import Keys
from cwtrain_emulator.settings import Settings
from cwtrain_emulator.snapshots import parse_index
from cwtrain_emulator.store import Store

# fmt: off
_FIELDS = [
    "id", "name", "zones", "coreWeaveAuth", "weightsAndBiasesAuth", "bodyBasedRouting", "headerBasedRouting",
    "pathBasedRouting", "apiType", "apiKey", "serverUrl", "headerName", "endpointConfiguration", "additionalDns",
    "gatewayIds", "disabled", "runtime", "engine", "version", "engineConfig", "engineEnv", "resources",
    "instanceType", "gpuCount", "model", "bucket", "path", "autoscaling", "min", "max", "priority", "concurrency",
    "capacityClasses", "traffic", "weight", "hotLoad", "pathPrefix", "transitionMode", "instanceId", "instanceCount",
    "capacityType", "deploymentId", "hotLoadId", "identity", "type", "promptCachePolicy",
    "incrementalSnapshotMetadata", "previousSnapshotIdentity", "compressionFormat", "checksumFormat", "prompt", "n",
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "logprobs", "stream", "stream_options", "include_usage", "nvext", "cache_salt", "extra_fields", "echo",
    "logit_bias", "messages", "role", "content", "text", "top_logprobs", "max_completion_tokens",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "tools", "skip_special_tokens",
]
# fmt: on
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(alphabet=st.characters()),
    st.sampled_from(
        [
            "US-EAST-04A",
            "dynamo-vllm",
            "SNAPSHOT_TYPE_FULL",
            "ok-name",
            "00000000-0000-0000-0000-000000000001",
            "\ud800",
        ]
    ),
)
_JSON = st.recursive(
    _VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(_FIELDS) | st.text(), inner, max_size=6)
    ),
    max_leaves=25,
)
_BODY = st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=12)
_SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as directory:
        store = Store(":memory:")
        controller = Controller(store, replicas=1, zones_of=lambda _: [], clock=lambda: 1.0, root=Path(directory))
        unused: Any = None
        yield Service(
            settings=Settings(state_dir=Path(directory)),
            keys=Keys.load_or_create(Path(directory)),
            store=store,
            controller=controller,
            pool=unused,
            bucket_reader=unused,
            clock=lambda: 1.0,
        )
        store.close()


@_SETTINGS
@given(body=_BODY, kind=st.sampled_from([GATEWAYS, DEPLOYMENTS, CLAIMS]))
def test_creates(service: Service, body: dict[str, Any], kind: resources.Kind) -> None:
    try:
        answer = resources.create(service, kind, body)
    except ApiError as exc:
        answer = exc.body
    JsonResponse(answer)


@_SETTINGS
@given(body=_BODY)
def test_hot_loads(service: Service, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(create_hot_load(service, body))
    JsonResponse(caught.value.body)


@_SETTINGS
@given(query=st.dictionaries(st.sampled_from(["maxPageSize", "pageToken", "parentDeploymentId"]), st.text()))
def test_queries(service: Service, query: dict[str, str]) -> None:
    with contextlib.suppress(ApiError):
        list_hot_loads(service, query)


@_SETTINGS
@given(body=_BODY)
def test_completions(body: dict[str, Any]) -> None:
    for parse in (parse_completion, parse_chat):
        try:
            asked = parse(body)
        except GatewayError as exc:
            JsonResponse(exc.body)
        else:
            JsonResponse(asked.for_replica)


@_SETTINGS
@given(raw=st.binary() | _JSON.map(lambda value: repr(value).encode("utf-8", "replace")))
def test_files_from_the_bucket(raw: bytes) -> None:
    with contextlib.suppress(FormatError):
        parse_index(raw)
    with contextlib.suppress(FormatError):
        parse_header(raw, name="x")
