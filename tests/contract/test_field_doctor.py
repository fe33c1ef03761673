"""`cwtrain doctor` names every missing piece of what a publish needs, however many others are missing beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.run_cli import run
from helpers.tiny_api import TinyApi

SECRET = "s3cret-key-0123456789"
STORE = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "US-EAST-04A",
    "CW_S3_ENDPOINT": "http://127.0.0.1:9",
}
PIECES = {
    "token": ({"COREWEAVE_API_TOKEN": ""}, "COREWEAVE_API_TOKEN"),
    "keys": ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "region": ({"AWS_REGION": ""}, "AWS_REGION"),
    "endpoint": ({"CW_S3_ENDPOINT": "no-url"}, "CW_S3_ENDPOINT"),
    "file": ({"CWTRAIN_ROLLOUT_API_KEY_FILE": "/no/such/key"}, "CWTRAIN_ROLLOUT_API_KEY_FILE"),
    "web identity": ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/no/such/token"}, "AWS_WEB_IDENTITY_TOKEN_FILE"),
    "bundle": ({"SSL_CERT_FILE": "/no/such/bundle"}, "SSL_CERT_FILE"),
    "served": ({"CWTRAIN_ROLLOUT_SERVED_IDENTITY_FILE": "/no/such/file"}, "CWTRAIN_ROLLOUT_SERVED_IDENTITY_FILE"),
}
ALL = [name for name in PIECES if name != "web identity"]  # that one stands for keys


@pytest.fixture(scope="module")
def api() -> Iterator[TinyApi]:
    with TinyApi() as made:
        yield made


def told(problems: list[str], name: str) -> bool:
    """Whether one problem is about this piece; the bucket and region hints name other variables as examples."""
    return any(PIECES[name][1] in problem for problem in problems)


def test_nothing_missing_is_no_problem(api: TinyApi) -> None:
    done = run("doctor", "--strict", env={**api.env, **STORE})
    assert (done.code, done.data["problems"]) == (0, []), done.err
    assert done.data["storage"]["credentials"] == "env"
    assert SECRET not in done.out + done.err


@pytest.mark.parametrize("names", [*((name,) for name in PIECES), *itertools.pairwise(PIECES), tuple(ALL)])
def test_each_missing_piece_is_told_whatever_else_is_missing(api: TinyApi, names: tuple[str, ...]) -> None:
    env = {**api.env, **STORE}
    for name in names:
        env |= PIECES[name][0]
    done = run("doctor", "--strict", env=env)
    problems = done.data["problems"]
    assert done.code == 1
    assert [name for name in names if not told(problems, name)] == [], problems
    assert [problem for problem in problems if f"problem: {problem}" not in done.err] == []
    assert len(problems) == len(set(problems))
    assert SECRET not in done.out + done.err
    if len(names) == 1:
        assert run("doctor", env=env).code == 0, "without --strict the report is what was asked for"


def test_a_deployment_that_is_set_by_its_name_is_found_and_its_id_is_told(emulator, deployment) -> None:
    """Commands take a name from the variable; a trainer that is started with it would not."""
    name, its_id = deployment["spec"]["name"], deployment["spec"]["id"]
    by_id = run("doctor", "--strict", env={**emulator.env, "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": its_id})
    assert (by_id.code, by_id.data["problems"]) == (0, []), by_id.err
    by_name = run("doctor", env={**emulator.env, "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": f" {name} "})
    assert by_name.data["bucket"] == by_id.data["bucket"]
    (problem,) = by_name.data["problems"]
    assert f"'{name}' is a name" in problem
    assert its_id in problem
    nobodys = run("doctor", env={**emulator.env, "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": "nobody's"})
    (problem,) = nobodys.data["problems"]
    assert "no deployment has the name or id" in problem


def test_half_a_pair_of_keys_names_the_other_half(api: TinyApi) -> None:
    for absent in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        (problem,) = run("doctor", env={**api.env, **STORE, absent: ""}).data["problems"]
        assert absent in problem


def test_a_missing_piece_is_told_while_nothing_answers() -> None:
    env = {**STORE, "COREWEAVE_API_URL": "http://127.0.0.1:9", "AWS_REGION": ""}
    problems = run("doctor", env=env).data["problems"]
    assert told(problems, "token")
    assert told(problems, "region")
    assert any("127.0.0.1:9" in problem for problem in problems)


def test_files_that_are_there_and_cannot_be_read_and_settings_that_contradict_each_other(
    api: TinyApi, tmp_path: Path
) -> None:
    env = {**api.env, **STORE, "CWTRAIN_ROLLOUT_API_KEY_FILE": str(tmp_path)}
    (problem,) = run("doctor", env=env).data["problems"]
    assert f"CWTRAIN_ROLLOUT_API_KEY_FILE={str(tmp_path)!r}" in problem
    (tmp_path / "key").write_text("key-of-the-endpoint\n", encoding="utf-8")
    env |= {"CWTRAIN_ROLLOUT_API_KEY_FILE": str(tmp_path / "key"), "CWTRAIN_ROLLOUT_API_KEY": "another"}
    env |= {"CWTRAIN_ROLLOUT_BASE_URL": "http://127.0.0.1:9/v1", "CWTRAIN_ROLLOUT_MODEL": "toy"}
    (problem,) = run("doctor", env=env).data["problems"]
    assert "a key has one source" in problem
