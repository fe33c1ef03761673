"""One group on its way: which requests it needs, what becomes of each, until every sample is there or it fails."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import attrs
import msgspec

from cwtrain_rollout._engine import Asked, Engine, Refusal, speaks_of_length
from cwtrain_rollout._streamed import Partial, read_stream
from cwtrain_rollout.errors import RolloutAnswerError, RolloutExhaustedError
from cwtrain_rollout.parsing import BadAnswer, GoodChoice, ReadAnswer, UnfitAnswer, Wanted, read_answer
from cwtrain_rollout.protocol import Group, SampleStatus, SamplingParams
from cwtrain_rollout.requests import Ask, fields, must_split, plan, prompt_of, seed_of, session_of
from cwtrain_rollout.spans import History, Load
from cwtrain_rollout.transport import NoAnswer, Reply

__all__ = ["Got", "GroupRun", "all_or_nothing"]

_FIRST_PAUSE = 0.25
_FIRST_PAUSE_AFTER_BAD = 0.5
_LONGEST_PAUSE = 10.0

T = TypeVar("T")


class _Cut(str):
    """What is wrong with an answer that ended in the middle."""

    __slots__ = ()


class _Broken(str):
    """What is wrong with a 5xx: a bad answer, and many in a row are an outage like any other."""

    __slots__ = ()


@attrs.define(kw_only=True, eq=False)
class Got:
    """A usable choice, and what was known when its request was sent and when it ended."""

    choice: GoodChoice
    request_id: str
    history: History | None
    ended: float
    identity: Load | None = None
    """The weights that the answer itself names."""


@attrs.define(kw_only=True, eq=False)
class GroupRun:
    """The state of one group. ``got`` fills up; ``partials`` is what streamed requests have so far."""

    engine: Engine
    group: Group
    place: int
    sampling: SamplingParams
    salt: str | None = None
    evaluation: bool = False
    streamed: bool = False
    got: dict[int, Got] = attrs.field(factory=dict)
    partials: dict[int, Partial] = attrs.field(factory=dict)
    attempts: dict[int, int] = attrs.field(factory=dict)
    first_failure: float | None = None
    text: bool = False
    rooms: dict[int, int] = attrs.field(factory=dict)
    """Tokens of an answer at most, for samples whose prompt the server counts as longer than we do."""
    measuring: set[int] = attrs.field(factory=set)
    """Samples that are asked for one token, so that the answer says how long their prompt is for the server."""
    _used: int = 0
    _session: str | None = None

    async def fill(self, indices: Iterable[int] | None = None) -> None:
        """Ask until every sample (or each of ``indices``) is there. Raises ``RolloutError``."""
        wanted = range(self.group.n) if indices is None else tuple(indices)
        engine = self.engine
        while missing := [index for index in wanted if index not in self.got]:
            split = must_split(self.group, engine.config, streamed=self.streamed) or (engine.split and len(missing) > 1)
            self._session = self._session or session_of(self.group, split=split)
            asks = plan(self.group, self.sampling, indices=missing, split=split, context=engine.context)
            if self.rooms:
                asks = [self._within_rooms(ask) for ask in asks]
            if len(asks) == 1:
                await self._ask(asks[0], split=split)
            else:
                await all_or_nothing([self._ask(ask, split=split) for ask in asks])

    def _within_rooms(self, ask: Ask) -> Ask:
        room = min((self.rooms[index] for index in ask.indices if index in self.rooms), default=ask.max_tokens)
        return attrs.evolve(ask, max_tokens=min(ask.max_tokens, room))

    # One request -------------------------------------------------------------------------------------------------

    async def _ask(self, ask: Ask, *, split: bool) -> None:
        """Make one request for some samples and keep what its answer has of them."""
        if ask.max_tokens < 1:
            self._no_room(ask)
            return
        engine = self.engine
        request_id = str(uuid.uuid4())
        random_seed = engine.seed() if engine.config.seeds and len(ask.indices) == 1 else None
        seed = seed_of(self.group, ask, split=split, used=self._used, random_seed=random_seed)
        tries = 0
        while True:
            await engine.admission.acquire(len(ask.indices), evaluation=self.evaluation)
            try:
                problem = await self._answered(ask, seed, request_id, tries)
            finally:
                engine.admission.release(len(ask.indices))
            if problem is None:
                return
            # A sleeping retry gives its room back.
            await self._after_bad_answer(ask, problem, request_id, tries)
            if any(index in self.got for index in ask.indices):
                return
            tries += 1

    async def _answered(self, ask: Ask, seed: int | None, request_id: str, tries: int) -> str | None:
        """Send until something else than a refusal comes. Return what was wrong with the answer, or None.

        A refused request keeps its room over its pause, so that an outage is not met with ever more requests. For the
        window it stays one of the time when it was first sent: a server that refuses it again says nothing new.
        """
        engine, admission = self.engine, self.engine.admission
        epoch = admission.epoch()
        while True:
            probe = await admission.pass_gate()
            told = False
            try:
                self._check_time(request_id)
                engine.totals.requests += 1
                history = engine.history()
                outcome = await self._send(ask, seed, request_id, history)
                told = True
                if isinstance(outcome, Refusal | _Broken):
                    reason = outcome.reason if isinstance(outcome, Refusal) else outcome
                    floor = outcome.floor if isinstance(outcome, Refusal) else 0.0
                    outage = admission.refused(
                        epoch,
                        floor=floor if floor <= engine.config.deadline else 0.0,
                        overload=isinstance(outcome, Refusal) and outcome.overload,
                        probe=probe,
                    )
                    if outage:
                        engine.unavailable(reason)
                    if isinstance(outcome, _Broken):
                        return outcome
                elif isinstance(outcome, ReadAnswer):
                    admission.answered(epoch, len(ask.indices), outcome.queue_seconds)
                    if self.measuring and self._measured(ask, outcome):
                        return None
                    return self._keep(ask, outcome, history, request_id)
                else:
                    if isinstance(outcome, _Cut):
                        # It says nothing of who is there now: in an outage, what was under way ends like this.
                        admission.gave_up(probe=probe)
                    else:
                        admission.disappointed()
                    return outcome
            finally:
                if not told:
                    admission.gave_up(probe=probe)
            await self._pause(outcome.reason, outcome.floor, request_id, tries)
            tries += 1

    async def _send(
        self, ask: Ask, seed: int | None, request_id: str, history: History | None
    ) -> ReadAnswer | Refusal | str | None:
        """Return an answer, a refusal, what is wrong with the answer, or None where it must be planned anew."""
        engine, config = self.engine, self.engine.config
        text = self.text or engine.text or not config.token_id_prompts
        n, logprobs = len(ask.indices), engine.logprobs
        completion_ids = engine.completion_ids and n == 1
        body = fields(
            config,
            self.sampling,
            prompt=prompt_of(self.group, ask, text=text),
            n=n,
            max_tokens=ask.max_tokens,
            seed=seed,
            salt=self.salt if self.salt is not None else engine.salt(history),
            logprobs=logprobs,
            stream=self.streamed,
            timed=config.fixed_concurrency is None,
            completion_ids=completion_ids,
            extra=self.group.extra,
        )
        wanted = Wanted(
            n=n,
            prompt_tokens=None if text or self.group.extra else len(ask.prompt),
            least_prompt_tokens=0 if text else len(ask.prompt),
            logprobs=config.logprobs,
            token_ids=config.token_ids,
            aborted=self.streamed,
            routed_experts=config.routed_experts,
            tokenise=engine.tokenise,
            quote=engine.quoted,
        )

        def asked() -> Asked:
            left = self.group.text is not None and not text
            return Asked(prompt=len(ask.prompt), room=ask.max_tokens, logprobs=logprobs, text_left=left)

        payload, headers = msgspec.json.encode(body), self._headers(request_id)
        try:
            if self.streamed:
                partial = self.partials[ask.indices[0]] = Partial(history=history, request_id=request_id)
                found = await read_stream(engine.transport, payload, headers, partial, wanted)
                reply, read = found if isinstance(found, tuple) else (found, None)
            else:
                reply, read = await engine.transport.post(payload, headers), None
            if read is None:
                content_type = reply.content_type
                wanted.quote = lambda body: engine.quoted(body, content_type)
                if not reply.good:
                    return await self._not_good(reply, request_id, ask, asked())
                read = read_answer(reply.body, wanted)
                if reply.queue_seconds is not None and read.queue_seconds is None:
                    read = attrs.evolve(read, queue_seconds=reply.queue_seconds)
        except NoAnswer as exc:
            engine.totals.transport_errors += 1
            return _Cut(exc) if exc.cut else Refusal(reason=str(exc))
        except BadAnswer as exc:
            if exc.error is not None:
                words = exc.error.decode("utf-8", "replace")
                if speaks_of_length(200, words) and await self._learned(
                    words, ask, asked(), request_id, only_length=True
                ):
                    return None
            return config.quoted(str(exc), limit=1000)
        except UnfitAnswer as exc:
            if exc.without_ids and not completion_ids:
                engine.ask_for_completion_ids()
                return None
            message = f"{config.base_url}/completions: {config.quoted(str(exc), limit=1000)}"
            raise RolloutAnswerError(message, request_id=request_id, hint=exc.hint) from exc
        if self.text:
            engine.text = True
        if config.routed_experts and not engine.routed:
            engine.routed = any(choice.routed_experts for choice in read.choices.values())
        if read.unfit_routes is not None and not engine.routed:
            raise RolloutAnswerError(
                f"{config.base_url}/completions gives no routed experts that can be used: an answer was read, and "
                f"{config.quoted(read.unfit_routes, limit=1000)}",
                request_id=request_id,
                hint="CWTRAIN_ROLLOUT_ROUTED_EXPERTS=1 needs them with a shape and for every token that was run: serve "
                "with enable-return-routed-experts, with Dynamo (nvext.routed_experts) or vLLM "
                "(choices[].routed_experts); what SGLang gives has no shape",
            )
        return read

    async def _not_good(self, reply: Reply, request_id: str, ask: Ask, asked: Asked) -> Refusal | str | None:
        """Return a refusal, what is wrong, or None where it must be planned anew; raises for final refusals."""
        engine = self.engine
        if refusal := engine.refusal(reply):
            engine.totals.refusals += 1
            return refusal
        words = reply.body.decode("utf-8", "replace")
        broken = reply.status >= 500 and reply.status != 501
        if speaks_of_length(reply.status, words) and await self._learned(
            words, ask, asked, request_id, only_length=broken
        ):
            return None
        if broken:
            return _Broken(f"HTTP {reply.status}: {engine.quoted(reply.body, reply.content_type)}")
        raise engine.refused(reply, request_id)

    async def _learned(self, words: str, ask: Ask, asked: Asked, request_id: str, *, only_length: bool) -> bool:
        """Learn from a refusal; whether there is something to do otherwise (about lengths only, if ``only_length``)."""
        lesson = await self.engine.learn(words, asked, self._headers(request_id))
        if lesson in ("logprobs", "text"):
            if only_length:
                return False
            self.text = self.text or lesson == "text"
        elif lesson == "full" or (lesson == "longer" and self.rooms.keys() >= set(ask.indices)):
            self.rooms.update(dict.fromkeys(ask.indices, 0))
        elif lesson == "longer":
            self.measuring.update(ask.indices)
            self.rooms.update(dict.fromkeys(ask.indices, 1))
        return lesson is not None

    def _measured(self, ask: Ask, read: ReadAnswer) -> bool:
        """Note how much room an answer of one token leaves, and whether the sample is to be asked for with that."""
        if not self.measuring.issuperset(ask.indices):
            return False
        self.measuring.difference_update(ask.indices)
        context = self.engine.context
        if context is None or read.prompt_tokens is None:
            return False
        room = max(0, context - read.prompt_tokens)
        self.rooms.update(dict.fromkeys(ask.indices, room))
        return room > 1

    def _headers(self, request_id: str) -> dict[str, str]:
        headers = {"X-Request-Id": request_id}
        if key := self.engine.config.current_api_key():
            headers["Authorization"] = f"Bearer {key}"
        if self._session:
            headers["X-Session-Id"] = self._session
        return headers

    # What came ---------------------------------------------------------------------------------------------------

    def _keep(self, ask: Ask, read: ReadAnswer, history: History | None, request_id: str) -> str | None:
        """Keep the good choices; return what was wrong with the others."""
        engine, totals = self.engine, self.engine.totals
        self._used += bool(read.choices)
        totals.answers += bool(read.choices)
        totals.prompt_tokens += len(ask.prompt)
        named = None
        if read.identity is not None:
            named = (history.find(read.identity) if history else None) or Load(id=read.identity, identity=read.identity)
        ended = engine.clock()
        for place, choice in read.choices.items():
            index = ask.indices[place]
            self.got[index] = Got(choice=choice, request_id=request_id, history=history, ended=ended, identity=named)
            self._count(choice)
        if read.given_up:
            totals.failed_samples += len(read.given_up)
            reason = engine.config.quoted(read.given_up[0], limit=100)
            engine.warn_once("The endpoint ended a sample with finish_reason %r: it is asked again", reason)
        if read.extra:
            engine.warn_once(
                "The endpoint gave %d choices more than the %d asked for: dropped", read.extra, len(ask.indices)
            )
        if read.given == 1 and len(ask.indices) > 1:
            engine.one_choice_instead_of_many()
        # What a server says in place of a number or a reason may be anything.
        return engine.config.quoted("; ".join(read.problems[:5]), limit=500) if read.problems else None

    def _count(self, choice: GoodChoice) -> None:
        totals = self.engine.totals
        totals.samples += 1
        totals.completion_tokens += len(choice.token_ids)
        if choice.floors:
            totals.floor_logprobs += choice.floors
            self.engine.warn_once("The endpoint reports %d log-probs of -9999 or less: kept as they are", choice.floors)
        if choice.token_ids and not choice.logprobs:
            totals.missing_logprobs += 1

    def _no_room(self, ask: Ask) -> None:
        """Give samples whose prompt fills the context (or whose answer so far is long enough) without a request."""
        engine = self.engine
        for index in ask.indices:
            engine.totals.samples += 1
            engine.totals.truncated_prompts += 1
            choice = GoodChoice(
                index=index, token_ids=(), logprobs=(), status=SampleStatus.TRUNCATED, finish_reason="length"
            )
            now = engine.clock()
            self.got[index] = Got(choice=choice, request_id="", history=engine.history(), ended=now)

    # Retries -----------------------------------------------------------------------------------------------------

    async def _after_bad_answer(self, ask: Ask, reason: str, request_id: str, tries: int) -> None:
        self.engine.totals.bad_answers += 1
        most = self.engine.config.max_attempts
        for index in ask.indices:
            if index not in self.got:
                self.attempts[index] = self.attempts.get(index, 0) + 1
        worst = max(self.attempts.values(), default=0)
        if worst >= most:
            raise self._exhausted(f"{worst} of {most} attempts gave a bad answer", reason, request_id)
        # Longer pauses than after a refusal: eight attempts outlast an outage of twenty seconds.
        pause = _pause_of(_FIRST_PAUSE_AFTER_BAD, tries) * (0.75 + 0.25 * self.engine.rng.random())
        await self._pause(reason, pause, request_id, tries)

    async def _pause(self, reason: str, floor: float, request_id: str, tries: int) -> None:
        """Pause, at least ``floor`` seconds; raises when the group's time for retries is over."""
        engine = self.engine
        now = engine.clock()
        self.first_failure = now if self.first_failure is None else self.first_failure
        left = engine.config.deadline - (now - self.first_failure)
        pause = max(floor, _pause_of(_FIRST_PAUSE, tries) * (0.5 + 0.5 * engine.rng.random()))
        if pause > left:
            why = f"the next try is {pause:g} s away and {max(0.0, left):.1f} s are left for retries"
            raise self._exhausted(why, reason, request_id)
        engine.retried(reason, tries + 1, pause)
        await engine.sleep(pause)

    def _check_time(self, request_id: str) -> None:
        """Raise when a retry would start after the group's time: it may have waited for the endpoint to come back."""
        if self.first_failure is not None:
            spent = self.engine.clock() - self.first_failure
            if spent > self.engine.config.deadline:
                raise self._exhausted(f"{spent:.1f} s after its first failure", "the endpoint refused", request_id)

    def _exhausted(self, why: str, reason: str, request_id: str) -> RolloutExhaustedError:
        bad = max(self.attempts.values(), default=0)
        known = self.engine.history()
        seen = f"; hot-load last seen: {known.newest.identity} ({known.newest.state})" if known and known.newest else ""
        return RolloutExhaustedError(
            f"{self.engine.config.base_url}/completions gave no usable samples: {why}; last: {reason}{seen}",
            bad_answers=bad,
            last=reason,
            request_id=request_id,
            hint="Look for the request id in the server's log, or allow more with CWTRAIN_ROLLOUT_MAX_ATTEMPTS and "
            "CWTRAIN_ROLLOUT_DEADLINE",
        )


def _pause_of(first: float, tries: int) -> float:
    return min(_LONGEST_PAUSE, first * 2.0 ** min(tries, 10))


async def all_or_nothing(work: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results in order; the first failure cancels the rest, waits for them to end, and is raised."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel_all(tasks)
        raise


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until each has ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
