"""What the sampler raises.

    IntegrationError (cwtrain.errors)
    └── RolloutError                 an endpoint did not give what a training sample needs
        ├── RolloutRequestError      it refused a request for good: status, answer, request_id
        ├── RolloutAnswerError       it answers, but never what was asked for: a setting is wrong
        ├── RolloutExhaustedError    every attempt, or all the time for retries, was used up
        └── StaleWeightsError        the version that was asked for is not served, or never alone

The message says what happened and where; ``hint`` says the next step. No message holds the API key.
"""

from __future__ import annotations

from cwtrain.errors import IntegrationError

__all__ = [
    "RolloutAnswerError",
    "RolloutError",
    "RolloutExhaustedError",
    "RolloutRequestError",
    "StaleWeightsError",
]


class RolloutError(IntegrationError):
    """An endpoint did not give what a training sample needs."""


class RolloutRequestError(RolloutError):
    """The endpoint refused a request for good (400, 401, 403, 404, 422, 501, ...).

    ``status`` is the HTTP status, ``answer`` the start of what it said, ``request_id`` the ``X-Request-Id`` sent.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        answer: str | None = None,
        request_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.answer = answer
        self.request_id = request_id


class RolloutAnswerError(RolloutError):
    """The endpoint answers, but its answers can never be training samples as it is set up now."""

    def __init__(self, message: str, *, request_id: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.request_id = request_id


class RolloutExhaustedError(RolloutError):
    """A group used up its attempts or its time; ``bad_answers`` counts the attempts, ``last`` is the last reason."""

    def __init__(
        self,
        message: str,
        *,
        bad_answers: int = 0,
        last: str | None = None,
        request_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.bad_answers = bad_answers
        self.last = last
        self.request_id = request_id


class StaleWeightsError(RolloutError):
    """The weights that were asked for are not served; ``wanted`` names them, ``served`` what was served last."""

    def __init__(
        self, message: str, *, wanted: str | None = None, served: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.wanted = wanted
        self.served = served
