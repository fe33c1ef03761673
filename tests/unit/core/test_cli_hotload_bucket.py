"""``hotload gc`` stops where a deployment cannot be read: what it serves might be what would be removed."""

from __future__ import annotations

import pytest

from helpers.run_cli import run
from helpers.tiny_api import TinyApi


@pytest.mark.parametrize("path", ["/deployments", "/hotLoads"])
def test_gc_stops_where_a_deployment_cannot_be_read(path: str) -> None:
    with TinyApi() as api:
        api.deployment("a")
        api.deployment("b")
        api.fail("GET", path, 403, {"code": 7, "message": "not yours"})
        # No bucket is asked: nothing answers at its endpoint.
        env = {
            **api.env,
            "CW_S3_ENDPOINT": "http://127.0.0.1:9",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "US-EAST-04A",
        }
        done = run("hotload", "gc", "--deployment", "a", "--keep", "1", "--yes", env=env)
    assert (done.code, done.out) == (1, "")
    assert "not yours" in done.err


def test_gc_asks_how_many_to_keep() -> None:
    done = run("hotload", "gc", "--deployment", "a")
    assert done.code == 2
    assert "--keep" in done.err


def test_resume_info_names_the_option_of_a_run_id_that_is_none() -> None:
    done = run("hotload", "resume-info", "--run", "---")
    assert done.code == 2
    assert "'--run'" in done.err
    assert "must have a letter or a digit" in done.err
