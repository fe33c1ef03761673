"""The first sampler: exact, small, one request for each group.

What it promises: the token ids that were sampled and one log-prob for each, of the distribution that was sampled from;
results in the order of the groups; choices matched by their index; missing or unusable ones asked for again, only
those; bounded retries; and after an exception nothing runs on in the background. The number of choices in flight is
fixed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import attrs

from cwtrain.errors import ConfigError
from cwtrain_rollout._http import NoAnswer, Reply, Session, open_session
from cwtrain_rollout.config import RolloutConfig
from cwtrain_rollout.errors import RolloutAnswerError, RolloutError, RolloutExhaustedError, RolloutRequestError
from cwtrain_rollout.parsing import BadAnswer, GoodChoice, ReadAnswer, UnfitAnswer, excerpt, read_answer
from cwtrain_rollout.protocol import (
    Group,
    Sample,
    SampledGroup,
    SamplerTotals,
    SamplingParams,
    check_salt,
    request_body,
)

__all__ = ["Sampler"]

log = logging.getLogger("cwtrain.rollout")

_REFUSALS = frozenset({408, 425, 429, 503})
"""The server did no work: they cost time, never an attempt."""
_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 10.0
_SEEDS = 2**62


class Sampler:
    """Samples groups of prompts from an OpenAI-compatible ``/completions`` endpoint.

    It holds no connection between two calls, so one object serves several event loops and threads, and pickles.
    ``totals`` counts what it did.

        sampler = Sampler(RolloutConfig.from_env())
        groups = sampler.sample_groups([Group(prompt=[1, 2, 3], n=8)], SamplingParams(max_tokens=64))

    ``rng`` draws the seeds of single samples and the jitter of pauses, ``sleep`` is what pauses: both for tests.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.config = config
        self.totals = SamplerTotals()
        self._rng = rng if rng is not None else random.Random(secrets.randbits(64))  # noqa: S311 - seeds, no secrets
        self._sleep = sleep
        self._mode: str | None = None if config.logprobs_mode == "auto" else config.logprobs_mode
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"Sampler({self.config!r})"

    def sample_groups(
        self, groups: Sequence[Group], sampling: SamplingParams, *, cache_salt: str | None = None
    ) -> list[SampledGroup]:
        """Return one ``SampledGroup`` for each group, in their order, for callers without an event loop.

        Raises ``RolloutError``, and ``ConfigError`` when it is called inside a running event loop.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.sample(groups, sampling, cache_salt=cache_salt))
        raise ConfigError(
            "Sampler.sample_groups was called inside a running event loop", hint="Use `await sampler.sample(...)` there"
        )

    async def sample(
        self, groups: Sequence[Group], sampling: SamplingParams, *, cache_salt: str | None = None
    ) -> list[SampledGroup]:
        """Return one ``SampledGroup`` for each group, in their order.

        ``cache_salt`` keeps answers apart from KV that older weights computed: give the id of the newest completed
        hot-load. It is sent as ``nvext.cache_salt``. The first failure cancels the other groups and is raised:
        ``RolloutRequestError``, ``RolloutAnswerError`` or ``RolloutExhaustedError``.
        """
        check_salt(cache_salt)
        started = time.monotonic()
        window = _Window(self.config.concurrency)
        try:
            async with open_session(self.config) as session:
                call = _Call(sampler=self, session=session, window=window, sampling=sampling, cache_salt=cache_salt)
                if groups and sampling.needs_processed and self.config.logprobs:
                    await self._require_processed(call, groups[0])
                return await _all_or_nothing([call.group(group) for group in groups])
        finally:
            self.totals.seconds += time.monotonic() - started

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)

    async def _require_processed(self, call: _Call, group: Group) -> None:
        """Find out once which log-probs the server reports, and refuse raw ones: they are of another distribution."""
        if self._mode is None:
            probe = SamplingParams(max_tokens=1, top_k=1)
            answer = await attrs.evolve(call, sampling=probe).group(attrs.evolve(group, n=1))
            # Among one token only, the processed log-prob is 0; the raw one is that of all tokens.
            self._mode = "processed" if abs(answer.samples[0].logprobs[0]) < 1e-6 else "raw"
            log.info("The endpoint reports %s log-probs", self._mode)
        if self._mode == "raw":
            raise RolloutAnswerError(
                f"{self.config.base_url} reports raw log-probs, and the sampling parameters are not neutral: "
                "the log-probs would be of another distribution than the one that is sampled from",
                hint="Set engineConfig 'logprobs-mode: processed_logprobs' on the deployment, or sample with "
                "temperature 1, top_p 1, top_k -1 and min_p 0",
            )


class _Window:
    """How many choices may be in flight. First come, first served; a group larger than the window goes alone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def room(self, wanted: int) -> AsyncIterator[None]:
        """Wait for room for ``wanted`` choices and hold it."""
        weight = min(wanted, self._size)
        await self._acquire(weight)
        try:
            yield
        finally:
            self._release(weight)

    async def _acquire(self, weight: int) -> None:
        if not self._waiting and self._used + weight <= self._size:
            self._used += weight
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((weight, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come in the same moment
                self._release(weight)
            raise

    def _release(self, weight: int) -> None:
        self._used -= weight
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.done():
                if self._used + wanted > self._size:
                    return
                self._used += wanted
                turn.set_result(None)
            self._waiting.popleft()


@attrs.frozen(kw_only=True)
class _Call:
    """One call of ``Sampler.sample``."""

    sampler: Sampler
    session: Session
    window: _Window
    sampling: SamplingParams
    cache_salt: str | None

    async def group(self, group: Group) -> SampledGroup:
        """Return all samples of a group, asking again for those that are missing or unusable."""
        config, totals = self.sampler.config, self.sampler.totals
        samples: dict[int, Sample] = {}
        used = 0
        retrying = _Retrying(sampler=self.sampler)
        while missing := [index for index in range(group.n) if index not in samples]:
            request_id = str(uuid.uuid4())
            body = request_body(
                config.model,
                group,
                self.sampling,
                n=len(missing),
                seed=self._seed(group, used),
                cache_salt=self.cache_salt,
            )
            reply = await self._answer(body, len(missing), request_id, retrying)
            try:
                read = self._read(reply, group, len(missing), request_id)
            except BadAnswer as exc:
                problems: tuple[str, ...] = (str(exc),)
            else:
                problems = read.problems
                used += bool(read.choices)
                totals.prompt_tokens += len(group.prompt)
                for place, choice in read.choices.items():
                    samples[missing[place]] = self._sample(missing[place], choice, request_id)
            if problems:
                await retrying.after_bad_answer("; ".join(problems[:5]), request_id)
        if group.seed is not None and group.n > 1 and len({sample.token_ids for sample in samples.values()}) == 1:
            self.sampler._warn_once(
                "All %d samples of a seeded group are equal: the endpoint may give every choice the same seed", group.n
            )
        return SampledGroup(group=group, samples=tuple(samples[index] for index in range(group.n)))

    def _seed(self, group: Group, used: int) -> int | None:
        """Return the seed of a request, ``used`` answers of the group having been used already."""
        if group.seed is not None:
            # Choice i of a seeded request draws from seed + i: what is asked for again must not be the same samples.
            return (group.seed + used * group.n) % _SEEDS
        if group.n == 1 and self.sampler.config.seeds:
            return self.sampler._rng.randrange(_SEEDS)
        return None

    async def _answer(self, body: dict[str, Any], weight: int, request_id: str, retrying: _Retrying) -> Reply:
        """Return a 2xx answer; waits out refusals and broken connections, raises for final refusals."""
        totals = self.sampler.totals
        while True:
            async with self.window.room(weight):
                totals.requests += 1
                try:
                    reply = await self.session.post(body, request_id=request_id)
                except NoAnswer as exc:
                    totals.transport_errors += 1
                    refused, reason, floor = not exc.cut, str(exc), 0.0
                else:
                    if 200 <= reply.status < 300:
                        return reply
                    refused = reply.status in _REFUSALS
                    reason, floor = f"HTTP {reply.status}: {self._quoted(reply)}", reply.retry_after or 0.0
                    totals.refusals += refused
                    if not refused and (reply.status < 500 or reply.status == 501):
                        raise self._refused(reply, request_id)
                if refused:
                    # The slot is kept over the pause, so that an outage is not met with ever more requests.
                    await retrying.after_refusal(reason, floor, request_id)
            if not refused:
                await retrying.after_bad_answer(reason, request_id)

    def _read(self, reply: Reply, group: Group, n: int, request_id: str) -> ReadAnswer:
        config = self.sampler.config
        try:
            read = read_answer(
                reply.body,
                n=n,
                prompt_tokens=len(group.prompt),
                logprobs_required=config.logprobs,
                quote=lambda body: config.without_key(excerpt(body)),
            )
        except UnfitAnswer as exc:
            message = f"{config.base_url}/completions: {exc}"
            raise RolloutAnswerError(message, request_id=request_id, hint=exc.hint) from exc
        if read.extra:
            self.sampler._warn_once("The endpoint gave %d choices more than the %d asked for: dropped", read.extra, n)
        if floors := sum(choice.floors for choice in read.choices.values()):
            self.sampler._warn_once("The endpoint reports %d log-probs of -9999 or less: kept as they are", floors)
        return read

    def _sample(self, index: int, choice: GoodChoice, request_id: str) -> Sample:
        totals = self.sampler.totals
        totals.samples += 1
        totals.completion_tokens += len(choice.token_ids)
        totals.floor_logprobs += choice.floors
        return Sample(
            index=index,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            status=choice.status,
            finish_reason=choice.finish_reason,
            text=choice.text,
            request_id=request_id,
        )

    def _quoted(self, reply: Reply) -> str:
        return self.sampler.config.without_key(excerpt(reply.body)) or "(an empty answer)"

    def _refused(self, reply: Reply, request_id: str) -> RolloutRequestError:
        config = self.sampler.config
        answer = self._quoted(reply)
        return RolloutRequestError(
            f"{config.base_url}/completions refused a request for {config.model!r}: HTTP {reply.status}: {answer}",
            status=reply.status,
            answer=answer,
            request_id=request_id,
            hint=_HINTS.get(reply.status),
        )


_HINTS = {
    400: "The server's words say which field it does not take; a prompt must be shorter than the model's context",
    401: "Set CWTRAIN_ROLLOUT_API_KEY, or CWTRAIN_ROLLOUT_API_KEY_FILE, to a valid key",
    403: "The key's roles do not allow inference on this endpoint",
    404: "Check CWTRAIN_ROLLOUT_BASE_URL (it ends in /v1) and CWTRAIN_ROLLOUT_MODEL (the deployment's model name)",
    501: "The endpoint has no /completions for this model",
}


@attrs.define(kw_only=True)
class _Retrying:
    """The pauses and the bounds of one group's retries."""

    sampler: Sampler
    tries: int = 0
    bad_answers: int = 0
    first_failure: float | None = None

    async def after_refusal(self, reason: str, floor: float, request_id: str) -> None:
        """Pause, at least ``floor`` seconds, after something that costs time only; raises when the time is over."""
        now = time.monotonic()
        self.first_failure = now if self.first_failure is None else self.first_failure
        left = self.sampler.config.deadline - (now - self.first_failure)
        backoff = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self.tries, 10))
        pause = max(floor, backoff * (0.5 + 0.5 * self.sampler._rng.random()))
        if pause > left:
            why = f"the next try is {pause:g} s away and {max(0.0, left):.1f} s are left for retries"
            raise self._exhausted(why, reason, request_id)
        self.tries += 1
        self.sampler.totals.retries += 1
        log.debug("Request %s is tried again in %.2f s: %s", request_id, pause, reason)
        await self.sampler._sleep(pause)

    async def after_bad_answer(self, reason: str, request_id: str) -> None:
        """Pause after something that costs an attempt; raises when the attempts or the time are used up."""
        self.bad_answers += 1
        self.sampler.totals.bad_answers += 1
        most = self.sampler.config.max_attempts
        if self.bad_answers >= most:
            raise self._exhausted(f"{self.bad_answers} of {most} attempts gave a bad answer", reason, request_id)
        await self.after_refusal(reason, 0.0, request_id)

    def _exhausted(self, why: str, reason: str, request_id: str) -> RolloutError:
        return RolloutExhaustedError(
            f"{self.sampler.config.base_url}/completions gave no usable samples: {why}; last: {reason}",
            bad_answers=self.bad_answers,
            last=reason,
            request_id=request_id,
            hint="Look for the request id in the server's log, or allow more with CWTRAIN_ROLLOUT_MAX_ATTEMPTS and "
            "CWTRAIN_ROLLOUT_DEADLINE",
        )


async def _all_or_nothing(work: Sequence[Awaitable[SampledGroup]]) -> list[SampledGroup]:
    """Return all results in order; the first failure cancels the rest, waits for them to end, and is raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException as failure:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(failure, SystemExit | KeyboardInterrupt):
            # A task that is left by one of these has sent it out of the event loop already, which is being closed.
            # Raised once more, it would be reported as an exception that nobody fetched.
            raise asyncio.CancelledError from None
        raise
