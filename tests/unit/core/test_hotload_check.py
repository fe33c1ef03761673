"""The check of access before a run, on a bucket in memory."""

from __future__ import annotations

import attrs
import pytest

from cwtrain.errors import HotLoadError, StorageAccessError
from cwtrain.hotload.check import check_hot_load
from cwtrain.models.service import ResourceStatus
from cwtrain.storage import MemoryStore
from helpers.fake_service import FakeService


@pytest.fixture
def service():
    return FakeService()


def test_all_is_well_and_nothing_is_left(service):
    store = MemoryStore("weights")
    checked = check_hot_load(service, "dep", s3=store)
    data = checked.to_json()
    assert [what.split(":")[0] for what in data.pop("not_tried")] == [
        "the PUT of an object in one request, as indexes are written"
    ]
    assert data == {
        "deployment": "dep",
        "bucket": "weights",
        "path_prefix": "run",
        "uri": "s3://weights/run/",
        "result": "ok",
        "warnings": [],
    }
    assert store.objects == {}
    assert store.uploads == {}


def test_every_refused_permission_is_named(service):
    store = MemoryStore("weights", denied=["s3:PutObject", "s3:ListBucket"])
    with pytest.raises(StorageAccessError, match=r"s3:ListBucket.*s3:PutObject"):
        check_hot_load(service, "dep", s3=store)


def test_an_optional_permission_is_a_warning(service):
    store = MemoryStore("weights", denied=["s3:ListBucketMultipartUploads"])
    checked = check_hot_load(service, "dep", s3=store)
    assert checked.result == "ok"
    assert "s3:ListBucketMultipartUploads" in checked.warnings[0]


def test_a_deployment_that_is_not_ready_or_disabled_is_a_warning(service):
    service.deployment = attrs.evolve(service.deployment, status=ResourceStatus.UPDATING, disabled=True)
    warnings = check_hot_load(service, "dep", s3=MemoryStore("weights")).warnings
    assert "UPDATING" in warnings[0]
    assert "disabled" in warnings[1]


def test_a_deployment_without_hot_load_is_refused(service):
    service.deployment = attrs.evolve(service.deployment, hot_load=None)
    with pytest.raises(HotLoadError, match="no hotLoad") as caught:
        check_hot_load(service, "dep", s3=MemoryStore("weights"))
    assert "creation" in (caught.value.hint or "")
