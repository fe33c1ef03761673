"""Rank 0's publish as a conversation: where it needs the other ranks, its thread asks and their main threads answer.

A publish runs in a thread of rank 0, and collectives belong to the main threads. So the thread hands a question to its
main thread, which carries it to all ranks in the next collective, and waits for the answers of all.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from cwtrain.errors import IntegrationError

__all__ = ["Done", "Talk"]


@attrs.frozen
class Done:
    """The publish has ended well; ``value`` is what came of it."""

    value: Any


class Talk:
    """One publish that may ask questions. Anything but ``Done`` that ``next`` returns is a question for all ranks."""

    def __init__(self, call: Callable[[Talk], Any]) -> None:
        self._call = call
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[Sequence[Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="cwtrain-publish-talk", daemon=True).start()

    def _run(self) -> None:
        try:
            self._said.put(Done(self._call(self)))
        except BaseException as exc:  # noqa: BLE001 - raised by next(), in the thread that listens
            self._said.put(exc)

    def ask(self, question: Any) -> Sequence[Any]:
        """Return the answers of all ranks, by rank. Called by the publish; raises when the ranks gave it up."""
        self._said.put(question)
        answers = self._heard.get()
        if answers is None:
            raise IntegrationError(
                "another rank failed while its shards were being sent", hint="look at the error of that rank"
            )
        return answers

    def next(self) -> Any:
        """Return the next question, or ``Done``; raise what the publish raised."""
        said = self._said.get()
        if isinstance(said, BaseException):
            raise said
        return said

    def answer(self, answers: Sequence[Any]) -> None:
        """Give the publish what it asked for."""
        self._heard.put(answers)

    def give_up(self) -> None:
        """Let a publish that asks, now or later, end with an error."""
        self._heard.put(None)
