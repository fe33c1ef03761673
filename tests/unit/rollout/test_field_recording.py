"""Recordings. Kind: a side-output that cannot be written ended the work, and good answers were lost."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cwtrain.errors import ConfigError
from cwtrain.plugins import Plugins
from cwtrain_rollout import Group, RolloutConfig, Sampler, SampleStatus, SamplingParams
from cwtrain_rollout.record import Recorder, Replay
from helpers.completions_server import CompletionsServer
from helpers.told_endpoint import ToldEndpoint, no_pause, sampler, streamed_choice

PARAMS = SamplingParams(max_tokens=4)
GROUPS = [Group(prompt=[number], n=2) for number in range(6)]


def told(request: dict[str, Any]) -> Any:
    if request["stream"]:
        return streamed_choice(request["prompt"] * 2, "stop")
    values = {"token_logprobs": [-0.5]}
    one = {"token_ids": request["prompt"], "finish_reason": "stop", "logprobs": values}
    return {"choices": [{"index": index, **one} for index in range(request["n"])]}


def check(one: Sampler) -> None:
    found = one.sample_groups(GROUPS, PARAMS)
    assert [[sample.token_ids for sample in group.samples] for group in found] == [[(n,)] * 2 for n in range(6)]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes: what a full disk does, without root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_device_stops_the_recording_and_not_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    with CompletionsServer(rest=told) as server:
        one = Sampler(RolloutConfig(base_url=server.url, model="m", record="/dev/full"), plugins=Plugins())
        check(one)
        check(one)
    (text,) = warnings_of(caplog)
    assert "'/dev/full'" in text
    assert "No space left on device" in text
    assert "CWTRAIN_ROLLOUT_RECORD" in text


@pytest.mark.parametrize("partial", [False, True])
def test_a_disk_that_fills_up_keeps_what_was_written_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, partial: bool
) -> None:
    file = tmp_path / "record"

    async def rollout(one: Sampler, groups: list[Group]) -> list[Any]:
        async with one.rollout(groups, PARAMS, partial=partial) as found:
            return sorted([group async for group in found], key=lambda group: group.place)

    recorder = Recorder(ToldEndpoint(told), file)
    first = asyncio.run(rollout(sampler(recorder), GROUPS[:3]))
    size = file.stat().st_size
    with largest_file(size + 100):
        rest = asyncio.run(rollout(sampler(recorder), GROUPS[3:]))
        again = asyncio.run(rollout(sampler(recorder), GROUPS[3:]))
    assert all(group.whole for group in [*first, *rest, *again])
    assert len(warnings_of(caplog)) == 1
    assert file.stat().st_size == size
    replayed = asyncio.run(rollout(sampler(Replay(file)), GROUPS[:3]))
    ids = [[sample.token_ids for sample in group.samples] for group in first]
    assert [[sample.token_ids for sample in group.samples] for group in replayed] == ids


def test_a_directory_that_is_gone_stops_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    one = sampler(Recorder(ToldEndpoint(told), folder / "record"))
    (folder / "record").unlink()
    folder.rmdir()
    check(one)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("cut", [1, 2, 30, 150])
def test_an_unfinished_last_line_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int) -> None:
    file = tmp_path / "record"
    check(sampler(Recorder(ToldEndpoint(told), file)))
    raw = file.read_bytes()
    file.write_bytes(raw[:-cut])
    whole = len(raw[:-cut].split(b"\n")) - (1 if cut > 1 else 0)
    assert sum(len(lines) for lines in Replay(file)._lines.values()) == whole
    assert len(warnings_of(caplog)) == (cut > 1)


def test_a_recording_goes_on_behind_an_unfinished_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process that was killed leaves half a line; the next one begins its own behind it."""
    file = tmp_path / "record"
    sampler(Recorder(ToldEndpoint(told), file)).sample_groups(GROUPS[:1], PARAMS)
    file.write_bytes(file.read_bytes()[:-40])
    check(sampler(Recorder(ToldEndpoint(told), file)))
    check(sampler(Replay(file)))
    assert len(warnings_of(caplog)) == 1


def test_what_is_no_recording_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("these are notes\nof mine\n")
    with pytest.raises(ConfigError, match="cannot be replayed"):
        Replay(file)
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="cannot be replayed"):
        Replay(file)
    file.write_text("no line end")
    Recorder(ToldEndpoint(told), file)
    assert file.read_text() == "no line end"


def test_a_stream_without_events_is_replayed_as_one(tmp_path: Path) -> None:
    file = tmp_path / "record"
    script: list[Any] = [[], streamed_choice((7,), "stop")]

    async def one(transport: Any) -> Any:
        made = sampler(transport)
        async with made.rollout([Group(prompt=[1])], PARAMS, partial=True) as rollout:
            return (await anext(rollout)).samples[0], made.totals.bad_answers

    first = asyncio.run(one(Recorder(ToldEndpoint(lambda request: script.pop(0)), file)))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["events"] is not None for line in lines] == [True, True]
    assert lines[0]["events"] == []
    again = asyncio.run(one(Replay(file)))
    assert first[0].status is again[0].status is SampleStatus.COMPLETED
    assert (first[0].token_ids, first[1]) == (again[0].token_ids, again[1]) == ((7,), 1)


def test_a_file_that_may_only_be_written_is_recorded_into(tmp_path: Path) -> None:
    file = tmp_path / "record"
    file.touch(mode=0o200)
    os.chmod(file, 0o200)
    check(
        Sampler(
            RolloutConfig(base_url="http://e", model="m"), transport=Recorder(ToldEndpoint(told), file), sleep=no_pause
        )
    )
    os.chmod(file, 0o600)
    assert len(file.read_text().splitlines()) == len(GROUPS)
