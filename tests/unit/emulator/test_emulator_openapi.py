from __future__ import annotations

from typing import Any, cast

from starlette.routing import Mount, Route

from cwtrain_emulator.api.app import PREFIX, make_app
from cwtrain_emulator.openapi import openapi
from helpers.openapi_values import Document


def test_the_description_has_exactly_the_routes_of_the_application() -> None:
    app = make_app(cast("Any", None), [])
    (mount,) = [route for route in app.routes if isinstance(route, Mount)]
    assert mount.path == PREFIX == openapi()["servers"][0]["url"]
    served = set()
    for route in mount.routes:
        assert isinstance(route, Route)
        served |= {(method, route.path) for method in route.methods or () if method != "HEAD"}
    described = {(method, path) for method, path, _ in Document(openapi()).operations()}
    assert described == served


def test_every_reference_leads_somewhere_and_every_id_is_unique() -> None:
    document = openapi()
    schemas = document["components"]["schemas"]
    names = [operation["operationId"] for _, _, operation in Document(document).operations()]
    assert len(set(names)) == len(names)

    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            here = [value["$ref"]] if "$ref" in value else []
            return here + [found for inner in value.values() for found in references(inner)]
        return [found for inner in value for found in references(inner)] if isinstance(value, list) else []

    assert {reference.rpartition("/")[2] for reference in references(document)} == set(schemas)
