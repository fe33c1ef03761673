"""Real other processes, started in each way that multiprocessing knows, and what is tried in them.

`report` says of each call how it ended: its value, or the error's class and words. A child that does not end is killed,
and the test fails.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

METHODS = ("fork", "spawn", "forkserver")
LIMIT_SECONDS = 30
"""What no child needs; one that waits for a thread that is not there, or for a lock, would need for ever."""


def start(method: str, target: Callable[..., None], *args: Any) -> Any:
    """Start a process. Python (3.12 on) warns of any fork beside threads: that is what is tried here."""
    process = multiprocessing.get_context(method).Process(target=target, args=args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def report(method: str, call: Callable[..., Any], things: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `call(name, thing)` gave for each of `things`, one after the other in one child."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = start(method, _tell, theirs, call, dict(things))
    theirs.close()
    found: dict[str, Any] = {}
    try:
        while ours.poll(LIMIT_SECONDS):
            name, outcome = ours.recv()
            found[name] = outcome
    except EOFError:
        pass
    process.join(LIMIT_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"{method}: the child hangs after {sorted(found)} of {sorted(things)}")
    return found


def forked(call: Callable[[], Any]) -> Any:
    """Return what `call` gives in a fork, which needs nothing that pickles but the answer."""
    return report("fork", _call, {"it": call})["it"]


def _call(name: str, thing: Callable[[], Any]) -> Any:
    return thing()


def _tell(connection: Any, call: Callable[..., Any], things: Mapping[str, Any]) -> None:
    for name, thing in things.items():
        try:
            outcome = call(name, thing)
        except BaseException as error:
            kind = next(one.__name__ for one in type(error).__mro__ if one.__module__ != "helpers")
            outcome = (kind, "".join(traceback.format_exception_only(error)).strip())
        connection.send((name, outcome))


class Elsewhere:
    """A thread that holds what it is given (a context manager) until the block ends."""

    def __init__(self, held: Any) -> None:
        self._held, self._has, self._end = held, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._held:
            self._has.set()
            self._end.wait()

    def __enter__(self) -> None:
        self._thread.start()
        assert self._has.wait(LIMIT_SECONDS)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def use(name: str, thing: Any) -> Any:
    """Do with `thing` what a user does with it, and return something plain."""
    from cwtrain_rollout import Group, SamplingParams

    match name.split()[0]:
        case "sampler":
            groups = thing.sample_groups([Group(prompt=(5, 6), n=2)], SamplingParams(max_tokens=3, ignore_eos=True))
            return [len(sample.token_ids) for group in groups for sample in group.samples]
        case "client":
            return [gateway.status.value for gateway in thing.list_gateways()][:1]
        case "loader":
            return thing.read_manifest(thing.current_identity())["identity"]
        case "publisher":
            return thing.publish_directory(thing.disk_dir).state.value
        case "bucket":
            return len(thing.client.list_objects_v2(Bucket=thing.name, MaxKeys=1)["Contents"])
        case "faults":
            return thing.all()
        case "emulator":
            status = thing.control.status()
            thing.stop()
            return [os.path.isdir(thing.state_dir), thing.control.status().keys() == status.keys()]
    raise AssertionError(name)
