"""The kind: a store with demands or habits of its own. The emulator's faults, as boto3 meets them."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError


def client(emulator: Any, checksums: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=emulator.s3_endpoint,
        region_name=emulator.region,
        aws_access_key_id=emulator.access_key_id,
        aws_secret_access_key=emulator.secret_access_key,
        config=Config(
            s3={"addressing_style": "path"}, request_checksum_calculation=checksums, retries={"total_max_attempts": 1}
        ),
    )


def test_a_bucket_that_demands_checksums(emulator: Any, faults: Any) -> None:
    """As object lock does: Content-MD5 or x-amz-checksum-*, for objects and for parts."""
    fault = faults.add("store", "checksum_required")
    plain, checked = client(emulator, "when_required"), client(emulator, "when_supported")
    where = {"Bucket": emulator.bucket, "Key": "demands/a"}
    upload = plain.create_multipart_upload(**where)["UploadId"]
    for call in (
        lambda: plain.put_object(Body=b"x", **where),
        lambda: plain.upload_part(Body=b"x", PartNumber=1, UploadId=upload, **where),
    ):
        with pytest.raises(ClientError, match="Content-MD5 OR x-amz-checksum- HTTP header is required") as caught:
            call()
        assert caught.value.response["Error"]["Code"] == "InvalidRequest"
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    checked.upload_part(Body=b"x", PartNumber=1, UploadId=upload, **where)
    checked.abort_multipart_upload(UploadId=upload, **where)
    assert faults.struck(fault) == 2
    checked.put_object(Body=b"x", **where)
    assert plain.get_object(**where)["Body"].read() == b"x"


def test_an_operation_that_another_one_aborts(emulator: Any, faults: Any) -> None:
    faults.add("store", "operation_aborted", times=1)
    s3 = client(emulator, "when_required")
    with pytest.raises(ClientError, match="conflicting conditional operation") as caught:
        s3.put_object(Bucket=emulator.bucket, Key="demands/b", Body=b"x")
    assert caught.value.response["Error"]["Code"] == "OperationAborted"
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 409
    s3.put_object(Bucket=emulator.bucket, Key="demands/b", Body=b"x")


def test_objects_that_show_late(emulator: Any, faults: Any) -> None:
    s3 = client(emulator, "when_required")
    s3.put_object(Bucket=emulator.bucket, Key="late/before", Body=b"x")

    def keys() -> list[str]:
        found = s3.list_objects_v2(Bucket=emulator.bucket, Prefix="late/").get("Contents", [])
        return [one["Key"] for one in found]

    faults.add("store", "late_object", key="^late/new", seconds=3600)
    s3.put_object(Bucket=emulator.bucket, Key="late/new", Body=b"x")
    parted = {"Bucket": emulator.bucket, "Key": "late/new-parts"}
    upload = s3.create_multipart_upload(**parted)["UploadId"]
    part = s3.upload_part(PartNumber=1, UploadId=upload, Body=b"x", **parted)
    done = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    s3.complete_multipart_upload(UploadId=upload, MultipartUpload=done, **parted)
    assert keys() == ["late/before"]
    for key in ("late/new", "late/new-parts"):
        with pytest.raises(ClientError, match="404"):
            s3.head_object(Bucket=emulator.bucket, Key=key)
        with pytest.raises(s3.exceptions.NoSuchKey):
            s3.get_object(Bucket=emulator.bucket, Key=key)
    faults.clear()
    assert keys() == ["late/before", "late/new", "late/new-parts"]
