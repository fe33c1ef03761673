"""The bucket: a client with the right rules, an object store behind a Protocol, and an immutable upload.

    from cwtrain.storage import Location, S3Store, s3_client, upload_objects

    store = S3Store(s3_client(), "weights")
    report = upload_objects(files, store=store, location=Location("weights", "run-7"), identity="step_000100")

The names are loaded at first use, so that importing this package imports no S3 library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwtrain.storage.check import AccessReport, PermissionCheck, check_access
    from cwtrain.storage.location import Location
    from cwtrain.storage.memory import Fault, MemoryStore
    from cwtrain.storage.plan import plan_upload
    from cwtrain.storage.report import ObjectDigest, UploadPlan, UploadProgress, UploadReport
    from cwtrain.storage.s3 import S3Settings, s3_client, s3_settings
    from cwtrain.storage.s3_store import S3Store
    from cwtrain.storage.store import ObjectInfo, ObjectStore, OpenUpload
    from cwtrain.storage.upload import upload_objects

__all__ = [
    "AccessReport",
    "Fault",
    "Location",
    "MemoryStore",
    "ObjectDigest",
    "ObjectInfo",
    "ObjectStore",
    "OpenUpload",
    "PermissionCheck",
    "S3Settings",
    "S3Store",
    "UploadPlan",
    "UploadProgress",
    "UploadReport",
    "check_access",
    "plan_upload",
    "s3_client",
    "s3_settings",
    "upload_objects",
]

_HOMES = {
    "AccessReport": "check",
    "Fault": "memory",
    "Location": "location",
    "MemoryStore": "memory",
    "ObjectDigest": "report",
    "ObjectInfo": "store",
    "ObjectStore": "store",
    "OpenUpload": "store",
    "PermissionCheck": "check",
    "S3Settings": "s3",
    "S3Store": "s3_store",
    "UploadPlan": "report",
    "UploadProgress": "report",
    "UploadReport": "report",
    "check_access": "check",
    "plan_upload": "plan",
    "s3_client": "s3",
    "s3_settings": "s3",
    "upload_objects": "upload",
}


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        from importlib import import_module

        return getattr(import_module(f"cwtrain.storage.{home}"), name)
    raise AttributeError(f"module 'cwtrain.storage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
