"""What people read on a terminal is made for people: tables, units, progress.

The kind: output that was laid out for programs, or for a wide screen, and is then cut, folded inside an id, or printed
as JSON in a cell.
"""

from __future__ import annotations

import json
import random
import re

import pytest

from cwtrain.cli._output import ProgressLine
from cwtrain.hotload import ProgressEvent
from cwtrain.storage import UploadProgress
from helpers.run_cli import run
from helpers.snapshot_files import write_delta, write_full
from helpers.terminal import on_terminal, shown
from helpers.tiny_api import TinyApi
from helpers.virtual_clock import VirtualClock

DEPLOYMENT = "1595cfa2-c5db-4a37-af3f-7753929bbd55"
HOT_LOAD = "fc59f0a1-0369-5ee5-b78a-de24a32dd89d"
IDENTITY = "grpo-qwen-7b-v000123"


@pytest.fixture
def api():
    with TinyApi() as server:
        server.gateway("3a7151a5-22bf-4127-b0c4-80425e8cc104", name="the-gateway-of-the-policy")
        server.deployment(DEPLOYMENT, name="policy-of-the-seven-billion-model")
        server.hot_load(HOT_LOAD, statuses=["COMPLETED"], deployment_id=DEPLOYMENT, identity=IDENTITY)
        for one in server.hot_loads:
            one["status"] |= {"createdAt": "2026-11-30T23:48:56.543111Z"}
        yield server


def check_for_people(seen, columns=80):
    """No line is folded by the terminal, no cell is JSON, no header is a key."""
    assert seen.code == 0, seen.raw
    assert [line for line in seen.lines if len(line) > columns and not line.startswith("problem: ")] == []
    assert '{"' not in seen.text
    assert '["' not in seen.text
    heads = [line for line, below in zip(seen.lines, seen.lines[1:], strict=False) if set(below.strip()) == {"─"}]
    assert not [head for head in heads if re.search(r"[._]", head)]


@pytest.mark.parametrize(
    ("words", "whole", "columns"),
    [
        ("deployment list", [DEPLOYMENT], 80),
        (f"deployment get {DEPLOYMENT}", [DEPLOYMENT], 80),
        ("gateway list", ["3a7151a5-22bf-4127-b0c4-80425e8cc104"], 80),
        ("hotload list", [HOT_LOAD, IDENTITY, "COMPLETED"], 80),
        ("hotload list", [HOT_LOAD, IDENTITY, "COMPLETED", "FULL"], 120),
        (f"hotload status {HOT_LOAD}", [HOT_LOAD, DEPLOYMENT, IDENTITY], 80),
        (f"hotload status {HOT_LOAD}", [HOT_LOAD, DEPLOYMENT, IDENTITY], 200),
        ("plugins list", ["cwtrain-emulator"], 80),
        ("doctor", ["CWTRAIN_HOTLOAD_DEPLOYMENT_ID"], 80),
    ],
)
def test_a_table_fits_the_terminal_and_ids_stay_whole(api, words, whole, columns):
    if words == "plugins list":
        pytest.importorskip("cwtrain_emulator")
    seen = shown("-o", "table", *words.split(), columns=columns, env=api.env)
    check_for_people(seen, columns)
    for word in whole:
        assert any(word in line for line in seen.lines), word


def test_sizes_and_times_have_units(tmp_path):
    write_full(tmp_path / "full", {"a.w": ("BF16", [4 << 20], bytes(8 << 20))})
    seen = shown("-o", "table", "snapshot", "show", str(tmp_path / "full"))
    check_for_people(seen)
    assert "8.0 MiB" in seen.text
    assert "8388608" not in seen.text
    assert json.loads(run("snapshot", "show", str(tmp_path / "full")).out)["raw_bytes"] == 8 << 20


@pytest.mark.parametrize("columns", [80, 120])
def test_any_data_is_laid_out_with_whole_words(columns):
    from cwtrain.cli._table import table

    rng = random.Random(7)

    def word():
        return "".join(rng.choice("abcdefgh0123456789-") for _ in range(rng.choice([3, 8, 20, 36])))

    def value(depth=0):
        kind = rng.randrange(8 if depth < 3 else 6)
        if kind < 3:
            return word()
        if kind == 3:
            return " ".join(word() for _ in range(rng.randrange(12)))
        if kind == 4:
            return rng.choice([None, True, 1.5, 10**9, []])
        if kind == 5:
            return [word() for _ in range(rng.randrange(4))]
        if kind == 6:
            return {f"k{n}_{word()[:5]}": value(depth + 1) for n in range(rng.randrange(1, 6))}
        keys = [f"k{n}" for n in range(rng.randrange(1, 6))]
        return [{key: value(depth + 1) for key in keys} for _ in range(rng.randrange(1, 4))]

    def words_of(data):
        match data:
            case str():
                yield from data.split()
            case dict():
                for item in data.values():
                    yield from words_of(item)
            case list():
                for item in data:
                    yield from words_of(item)

    for _ in range(60):
        data = {"first": value(), "second": value(), "rows": [{"a": value(2), "b": value(2)} for _ in range(3)]}
        text = table(data, width=columns)
        told = set(re.split(r"[\s,]+", text))
        assert set(words_of(data)) <= told
        assert "{" not in text
        assert "[" not in text


def test_keys_that_are_data_stay_as_they_are(tmp_path):
    """Names of files and tensors are keys here and there, and no words to be made nicer."""
    from cwtrain.cli._table import table

    names = ["generation_config.json", "model.embed_tokens.weight", "logprobs-mode", "a/b_c", "2_x", "VLLM_USE_V1"]
    lines = table({"file_bytes": dict.fromkeys(names, 2048), "rows": [dict.fromkeys(names, "x")]}, width=80)
    for name in names:
        assert name in lines
    write_full(tmp_path / "full", {"a.w": ("BF16", [4], bytes(8))})
    (tmp_path / "full" / "generation_config.json").write_text("{}", encoding="utf-8")
    told = run("-o", "table", "hotload", "inspect", str(tmp_path / "full")).out
    assert "generation_config.json" in told
    assert "generation config" not in told


def test_rows_stay_lines_away_from_a_terminal(api):
    lines = run("-o", "table", "hotload", "list", env=api.env).out.splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["id", "identity", "state", "created", "type"]
    assert all(word in lines[2] for word in (HOT_LOAD, IDENTITY, "COMPLETED", "FULL", "2026-11-30 23:48:56 UTC"))


def test_a_redrawn_line_has_replicas_and_seconds_and_the_id_can_be_copied_whole():
    with TinyApi() as api:
        api.deployment(DEPLOYMENT)
        states = ["PENDING", "PENDING", "IN_PROGRESS", "IN_PROGRESS", "COMPLETED"]
        api.hot_load(HOT_LOAD, statuses=states, deployment_id=DEPLOYMENT, identity=IDENTITY * 4)
        seen = on_terminal("hotload", "wait", HOT_LOAD, "-o", "id", env=api.env)
        assert seen.code == 0, seen.raw
        drawn = [line for line in seen.lines if "IN_PROGRESS" in line]
        assert drawn
        assert all(re.search(r"1/1 replicas, \S+ s", line) and len(line) <= 80 for line in drawn)
        assert any(line.startswith(f"hot-load {HOT_LOAD} of ") for line in seen.lines)


def upload(sent, total, seconds, rate):
    return ProgressEvent(
        upload=UploadProgress(
            sent_bytes=sent, total_bytes=total, seconds=seconds, objects_done=1, objects=2, bytes_per_second=rate
        )
    )


def test_the_time_that_is_left_is_told_only_where_it_is_known(capfd):
    clock = VirtualClock()

    def told(event):
        with ProgressLine(clock=clock.now) as line:
            line.event(event)
        return capfd.readouterr().err

    total = 20 << 30
    assert "left" not in told(upload(0, total, 0.3, 0.0))  # no rate
    assert "left" not in told(upload(4096, total, 0.3, 4096 / 0.3))  # one small object says nothing of the others
    assert "left" not in told(upload(4096, total, 40.0, 0.0))  # it stands still
    assert "more than a day left" in told(upload(4096, total, 40.0, 20.0))
    assert "3 min 20 s left" in told(upload(0, 200 << 20, 40.0, float(1 << 20)))
    with ProgressLine(clock=clock.now) as line:
        line.bytes_done("comparing", 4096, total)
        assert "left" not in capfd.readouterr().err


def test_a_delta_is_shown_with_a_bar_that_fits(tmp_path):
    old = {f"model.layers.{n}.self_attn.q_proj.weight": ("BF16", [32], bytes(64)) for n in range(3)}
    new = {name: ("BF16", [32], bytes(range(64))) for name in old}
    write_delta(tmp_path / "delta", old, new)
    seen = shown("-o", "table", "snapshot", "show", str(tmp_path / "delta"))
    check_for_people(seen)
    assert "█" in seen.text
