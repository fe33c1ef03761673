"""The command line against an API on loopback: what it asks for, what it prints, what it leaves running."""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from helpers.run_cli import program, run, start
from helpers.tiny_api import PREFIX, TinyApi

UUID = "2f3c0000-0000-4000-8000-000000000001"


@pytest.fixture
def api():
    with TinyApi() as server:
        server.gateway("g")
        yield server


def spec_of(api, name):
    return next(one["spec"] for one in api.deployments.values() if one["spec"]["name"] == name)


# -- deployments ------------------------------------------------------------------------------------------------------


def test_create_tells_the_id_first_and_prints_endpoints(api):
    done = run("deployment", "create", "--file", "-", env=api.env, stdin='{"name": "x", "gatewayIds": ["g"]}')
    assert done.code == 0, done.err
    made = spec_of(api, "x")["id"]
    assert done.data["id"] == made
    assert done.data["endpoints"] == ["infer.example.com"]
    assert done.data["rollout_base_url"] == "https://infer.example.com/v1"
    assert f"creating deployment {made}" in done.err
    assert api.paths("POST") == ["/deployments"]


def test_a_blank_id_is_none_and_the_one_that_is_sent_is_told(api):
    done = run("deployment", "create", "--file", "-", env=api.env, stdin='{"id": "", "name": "x", "gatewayIds": ["g"]}')
    assert f"creating deployment {done.data['id']}\n" in done.err


def test_create_and_wait_prints_the_id_alone_with_output_id(api):
    done = run(
        "deployment", "create", "--file", "-", "--wait", "-o", "id", env=api.env, stdin='{"id": "mine", "name": "x"}'
    )
    assert (done.code, done.out) == (0, "mine\n"), done.err
    assert "READY" in done.err


@pytest.mark.parametrize("statuses", [["FAILED"], ["CREATING"]], ids=["failed", "late"])
def test_a_create_whose_wait_fails_still_prints_id_and_endpoints_and_says_how_to_delete(api, statuses):
    api.statuses["next"] = statuses
    done = run(
        *("deployment", "create", "--file", "-", "--wait", "--timeout", "0.3"),
        env=api.env,
        stdin='{"id": "mine", "name": "x", "gatewayIds": ["g"]}',
    )
    assert done.code == 1
    assert done.data["id"] == "mine"
    assert done.data["rollout_base_url"] == "https://infer.example.com/v1"
    lines = done.err.splitlines()
    assert lines[0] == "creating deployment mine"
    assert any(line.startswith("error: ") and "mine" in line for line in lines)
    assert "cwtrain deployment delete mine" in done.err
    assert api.paths("DELETE") == []


def test_a_create_that_is_refused_prints_nothing(api):
    api.fail("POST", "/deployments", 400, {"code": 3, "message": "bad engine"})
    done = run("deployment", "create", "--file", "-", env=api.env, stdin='{"name": "x"}')
    assert (done.code, done.out) == (1, "")
    assert "bad engine" in done.err


def test_get_takes_an_id_or_a_name(api):
    api.deployment(UUID)
    assert run("deployment", "get", UUID, env=api.env).data["id"] == UUID
    assert run("deployment", "get", "toy", env=api.env).data["id"] == UUID
    api.deployment("other")
    several = run("deployment", "get", "toy", env=api.env)
    assert (several.code, several.out) == (1, "")
    assert UUID in several.err
    assert "other" in several.err
    assert run("deployment", "get", "other", env=api.env).data["id"] == "other"
    none = run("deployment", "get", "nobody", env=api.env)
    assert (none.code, none.out) == (1, "")


def test_list_shows_endpoints_and_the_documented_keys(api):
    api.deployment("a")
    api.deployment("b", gatewayIds=[])
    shown = run("deployment", "list", env=api.env).data
    assert [one["endpoints"] for one in shown] == [["infer.example.com"], []]
    keys = [
        "id",
        "name",
        "status",
        "model_name",
        "engine",
        "hot_load",
        "gateway_ids",
        "conditions",
        "endpoints",
        "rollout_base_url",
    ]
    assert set(keys) <= set(shown[0])
    assert {"bucket", "path_prefix", "transition_mode"} == set(shown[0]["hot_load"])
    assert run("deployment", "list", "-o", "id", env=api.env).out == "a\nb\n"


def test_update_sends_the_whole_spec(api):
    api.deployment("d", disabled=False)
    assert run("deployment", "update", "d", "--disable", env=api.env).data["disabled"] is True
    assert api.log[-2][3]["disabled"] is True or api.deployments["d"]["spec"]["disabled"] is True
    assert api.deployments["d"]["spec"]["hotLoad"] == {"bucket": "weights", "pathPrefix": "run"}
    assert run("deployment", "update", "d", "--enable", env=api.env).data["disabled"] is False
    renamed = run("deployment", "update", "d", "--file", "-", env=api.env, stdin='{"name": "new"}')
    assert renamed.data["name"] == "new"
    assert api.deployments["d"]["spec"]["hotLoad"] == {"bucket": "weights", "pathPrefix": "run"}
    other = run("deployment", "update", "d", "--file", "-", env=api.env, stdin='{"id": "e", "name": "new"}')
    assert (other.code, other.out) == (2, "")


def test_delete_says_what_became_of_it(api):
    api.deployment("d")
    assert run("deployment", "delete", "d", env=api.env).data == {"id": "d", "result": "deleting"}
    missing = run("deployment", "delete", "d", env=api.env)
    assert (missing.code, missing.out) == (1, "")
    ignored = run("deployment", "delete", "d", "--ignore-not-found", env=api.env)
    assert (ignored.code, ignored.data) == (0, {"id": "d", "result": "not_found"})
    assert run("deployment", "delete", "d", "--wait", env=api.env).code == 1
    assert run("deployment", "delete", "d", "--wait", "--ignore-not-found", env=api.env).data["result"] == "not_found"
    api.deployment("d")
    assert run("deployment", "delete", "d", "--wait", env=api.env).data == {"id": "d", "result": "deleted"}


def test_a_delete_that_does_not_take_effect_is_an_error_with_the_last_state(api):
    api.deployment("d")
    api.gone_after_delete = False
    api.fail("DELETE", f"/deployments/{'d'}", 503, {"code": 14, "message": "later"})
    done = run("deployment", "delete", "d", "--wait", "--timeout", "0.3", env=api.env)
    assert (done.code, done.out) == (1, "")
    assert "DELETING" in done.err or "later" in done.err
    assert "cwtrain deployment delete d" in done.err


def test_parameters_pass_the_gateways_on(api):
    other = "2f3c0000-0000-4000-8000-000000000001"
    done = run("deployment", "parameters", "--gateway", "gw", "--gateway", other, env=api.env)
    assert done.data == {"zones": ["US-EAST-04A"]}
    assert api.paths()[-1] == f"/deployments/parameters?gatewayIds=g&gatewayIds={other}"


def test_gateways(api):
    assert [one["id"] for one in run("gateway", "list", env=api.env).data] == ["g"]
    assert run("gateway", "get", "gw", env=api.env).data["endpoints"] == ["infer.example.com"]
    assert run("gateway", "parameters", env=api.env).data == {"zones": ["US-EAST-04A"]}
    made = run("gateway", "create", "--file", "-", "--wait", env=api.env, stdin='{"name": "new"}')
    assert made.data["status"] == "READY", made.err
    assert run("gateway", "delete", made.data["id"], "--wait", env=api.env).data["result"] == "deleted"


def test_a_gateway_whose_wait_fails_says_how_to_delete_it(api):
    api.statuses["next"] = ["FAILED"]
    done = run("gateway", "create", "--file", "-", "--wait", env=api.env, stdin='{"id": "mine", "name": "new"}')
    assert (done.code, done.out) == (1, "")
    assert "cwtrain gateway delete mine" in done.err


# -- hot-loads --------------------------------------------------------------------------------------------------------


def test_list_counts_items_over_pages(api):
    for number in range(7):
        api.hot_load(f"h{number}", statuses=["COMPLETED"])
    assert run("hotload", "list", "--limit", "5", "-o", "id", env=api.env).out.split() == ["h6", "h5", "h4", "h3", "h2"]
    assert len(api.paths()) == 1
    api.largest_page = 2
    assert len(run("hotload", "list", "--limit", "5", env=api.env).data) == 5
    assert len(api.paths()) == 1 + 3
    assert len(run("hotload", "list", env=api.env).data) == 7
    api.deployment("d")
    shown = run("hotload", "list", "--deployment", "d", "--limit", "1", env=api.env).data
    assert set(shown[0]) == {"spec", "status"}
    gone = "2f3c0000-0000-4000-8000-000000000001"
    assert run("hotload", "list", "--deployment", gone, env=api.env).data == []


def test_status_shows_the_hot_load_and_its_replicas(api):
    api.hot_load("h", statuses=["IN_PROGRESS"])
    done = run("hotload", "status", "h", env=api.env)
    assert set(done.data) == {"hot_load", "replicas"}
    assert done.data["replicas"][0]["current_snapshot_identity"] == "v1"


def test_cancel_says_that_the_service_cannot(api):
    api.hot_load("h", statuses=["IN_PROGRESS"])
    done = run("hotload", "cancel", "h", "--errors", "json", env=api.env)
    assert (done.code, done.out) == (1, "")
    assert json.loads(done.err.splitlines()[-1])["error"]["code"] == "unimplemented"


def test_wait_prints_the_end_and_streams_changes_as_lines(api):
    api.deployment("d")
    api.hot_load("h", statuses=["PENDING", "COMPLETED"])
    done = run("hotload", "wait", "h", env=api.env)
    assert done.code == 0, done.err
    assert done.data["status"]["state"] == "COMPLETED"
    api.hot_load("i", statuses=["PENDING", "COMPLETED"])
    lines = run("hotload", "wait", "i", "-o", "jsonl", env=api.env).out.splitlines()
    assert json.loads(lines[-1])["status"]["state"] == "COMPLETED"
    assert {json.loads(line)["spec"]["id"] for line in lines} == {"i"}


def test_a_wait_that_fails_prints_the_reason_and_nothing_on_standard_output(api):
    api.deployment("d")
    api.hot_load("h", statuses=["FAILED"])
    api.replicas["h"][0] |= {"state": "ERROR", "errorReason": "CUDA out of memory"}
    done = run("hotload", "wait", "h", env=api.env)
    assert (done.code, done.out) == (1, "")
    assert "CUDA out of memory" in done.err


def test_a_wait_that_times_out_says_how_to_go_on(api):
    api.deployment("d")
    api.hot_load("h", statuses=["IN_PROGRESS"])
    done = run("hotload", "wait", "h", "--timeout", "0.2", env=api.env)
    assert (done.code, done.out) == (1, "")
    assert "cwtrain hotload wait h" in done.err


def test_a_check_of_a_deployment_without_hot_load_says_so(api):
    api.deployment("d", hotLoad=None)
    done = run("hotload", "check", "--deployment", "d", env=api.env)
    assert (done.code, done.out) == (1, "")
    assert "hotLoad" in done.err


# -- settings ---------------------------------------------------------------------------------------------------------


def test_options_win_over_the_environment(api):
    done = run(
        *("--base-url", api.url, "--token", "from-the-option", "gateway", "list"),
        env={"COREWEAVE_API_URL": "http://127.0.0.1:9", "COREWEAVE_API_TOKEN": "from-the-environment"},
    )
    assert done.code == 0, done.err
    assert api.log[0][2]["authorization"] == "Bearer from-the-option"


def test_a_refused_token_names_its_source(api):
    api.fail("GET", "/gateways", 401, {"code": 16, "message": "bad token"})
    api.fail("GET", "/gateways", 401, {"code": 16, "message": "bad token"})
    assert "COREWEAVE_API_TOKEN" in run("gateway", "list", env=api.env).err
    told = run("--token", "t0ken-t0ken", "gateway", "list", env=api.env).err.splitlines()
    assert "--token" in next(line for line in told if line.startswith("error: "))


def test_headers_of_the_environment_are_sent(api):
    run("gateway", "list", env={**api.env, "CWTRAIN_API_HEADERS": '{"X-Test": "1"}'})
    assert api.log[0][2]["x-test"] == "1"


def test_doctor_reports_settings_endpoint_and_clock(api):
    done = run(
        "doctor",
        env={
            **api.env,
            "CWTRAIN_HOTLOAD_TIMEOUT": "nan",
            "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": "nobody",
            "CWTRAIN_API_HEADERS": '{"X-Key": "s3cret-header"}',
            "CWTRAIN_DELTA_ENCODER": "fastest",
        },
    )
    assert done.code == 0, done.err
    report = done.data
    assert "CWTRAIN_DELTA_ENCODER='fastest'" in report["encoder"]["error"]
    assert report["encoder"]["error"] in report["problems"]
    assert report["endpoint"]["url"] == api.url
    assert report["endpoint"]["reachable"] is True
    assert report["endpoint"]["token"] == "COREWEAVE_API_TOKEN"
    assert report["clock"]["ok"] is True
    assert report["versions"]["cwtrain-core"]
    assert report["bucket"]["result"] == "failed"
    settings = {row["variables"][0]: row for row in report["settings"]}
    assert settings["COREWEAVE_API_TOKEN"] == {
        "variables": ["COREWEAVE_API_TOKEN", "CW_API_TOKEN"],
        "value": "********",
        "source": "COREWEAVE_API_TOKEN",
    }
    assert settings["CWTRAIN_HOTLOAD_WAIT"]["source"] == "default"
    assert "nan" in settings["CWTRAIN_HOTLOAD_TIMEOUT"]["problem"]
    assert any("CWTRAIN_HOTLOAD_TIMEOUT" in problem for problem in report["problems"])
    assert any("nobody" in problem for problem in report["problems"])
    for secret in (api.env["COREWEAVE_API_TOKEN"], "s3cret-header"):
        assert secret not in done.out + done.err


@pytest.mark.parametrize("encoder", ["numpy", "public"])
def test_doctor_says_what_deltas_are_made_with(api, encoder):
    done = run("doctor", env={**api.env, "CWTRAIN_DELTA_ENCODER": encoder})
    frames, zeros = {"numpy": ("sequences", "numpy"), "public": ("public", "zstd")}[encoder]
    assert {"frames": frames, "zeros": zeros}.items() <= done.data["encoder"].items()
    assert done.data["encoder"]["adler32"]


def test_doctor_warns_about_a_clock_that_is_off():
    with TinyApi(date=email.utils.formatdate(time.time() - 500, usegmt=True)) as api:
        report = run("doctor", env=api.env).data
    assert report["clock"]["ok"] is False
    assert report["clock"]["skew_seconds"] == pytest.approx(500, abs=30)
    assert any("clock" in problem for problem in report["problems"])


def test_doctor_works_with_nothing_set_and_nothing_reachable():
    done = run("doctor", env={"COREWEAVE_API_URL": "http://127.0.0.1:9", "CWTRAIN_API_INSECURE": "maybe"})
    told = [problem for problem in done.data["problems"] if "CWTRAIN_API_INSECURE" in problem]
    assert len(told) == 1, "one problem, told once"
    report = run("doctor", env={"COREWEAVE_API_URL": "http://127.0.0.1:9"}).data
    assert report["endpoint"]["reachable"] is False
    assert report["bucket"] is None
    assert report["clock"] == {"skew_seconds": None, "ok": None}
    assert any("127.0.0.1:9" in problem for problem in report["problems"])


# -- processes --------------------------------------------------------------------------------------------------------


def until(condition, what):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_during_a_wait_says_what_goes_on(api, number, code, word):
    api.deployment("d")
    api.hot_load("h", statuses=["IN_PROGRESS"])
    process = start("hotload", "wait", "h", env=api.env)
    until(lambda: f"{PREFIX}/hotLoads/h/replicas" in [path for _, path, _, _ in api.log], "it never waited")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert word in err
    assert "hot-load h goes on; follow it with: cwtrain hotload wait h" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_create_and_wait_prints_the_deployment_and_how_to_delete_it(api, tmp_path, number, code):
    file = tmp_path / "spec.json"
    file.write_text('{"id": "mine", "name": "x"}')
    api.statuses["next"] = ["CREATING"]
    process = start("deployment", "create", "--file", str(file), "--wait", env=api.env)
    until(lambda: f"{PREFIX}/deployments/mine" in [path for _, path, _, _ in api.log], "it never waited")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert json.loads(out)["id"] == "mine"
    assert "cwtrain deployment delete mine" in err
    assert api.paths("DELETE") == []


def test_a_reader_that_goes_away_is_no_traceback(api):
    for number in range(3000):
        api.hot_load(f"h{number}", statuses=["COMPLETED"])
    process = start("hotload", "list", "--limit", "3000", env=api.env)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert err == ""
    process.stderr.close()


def test_on_a_terminal_progress_is_drawn_and_standard_output_stays_clean(api):
    pty = pytest.importorskip("pty")
    api.deployment("d")
    api.hot_load("h", statuses=["IN_PROGRESS", "COMPLETED"])
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cwtrain", "hotload", "wait", "h"],
        env={**os.environ, **api.env, "TERM": "xterm", "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=writer,
    )
    os.close(writer)
    drawn: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # which is how the end of a terminal looks
            while part := os.read(reader, 65536):
                drawn.append(part)

    reading = threading.Thread(target=read)
    reading.start()
    out, _ = process.communicate(timeout=60)
    reading.join(60)
    os.close(reader)
    assert process.returncode == 0
    assert json.loads(out)["status"]["state"] == "COMPLETED"
    assert b"hot-load h of v1" in b"".join(drawn)
    assert b"1/1 replicas, 0 s, COMPLETED, v1" in b"".join(drawn)
    assert b"\x1b[" in b"".join(drawn)


def test_python_m_cwtrain_is_the_same_program(api):
    done = program("gateway", "list", "-o", "id", env=api.env)
    assert (done.code, done.out, done.err) == (0, "g\n", "")
