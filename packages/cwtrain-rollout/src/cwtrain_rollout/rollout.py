"""One rollout: all groups of a call in flight, results as they finish, failures, and what is left at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import attrs

from cwtrain._process import OneProcess
from cwtrain.errors import ConfigError
from cwtrain.events import RolloutBatchCompleted
from cwtrain.waits import waiting
from cwtrain_rollout._engine import Engine
from cwtrain_rollout._group import Got, GroupRun, all_or_nothing, cancel_all
from cwtrain_rollout.errors import RolloutAnswerError, RolloutError, StaleWeightsError
from cwtrain_rollout.protocol import Group, Sample, SampledGroup, SampleStatus, SamplingParams, whole
from cwtrain_rollout.requests import check_salt
from cwtrain_rollout.served import ServedWeights
from cwtrain_rollout.spans import History, Load, WeightSpan

__all__ = ["Options", "Rollout"]

log = logging.getLogger("cwtrain.rollout")

_SHARED_READS = 0.5
"""Seconds for which calls that begin or end while others go on share a read of what is served."""
_EXACT_ATTEMPTS = 8
"""How often a sample that several versions may have made is sampled again."""


def _version(wanted: Any) -> Any:
    """Return a version as it was given, numpy's numbers as Python's."""
    if wanted is None or isinstance(wanted, str):
        return wanted
    return whole(wanted.tolist() if hasattr(wanted, "tolist") else wanted)


@attrs.frozen(kw_only=True)
class Options:
    """How a rollout is made; ``Sampler.sample`` says what each means."""

    cache_salt: str | None = None
    min_version: int | str | None = attrs.field(default=None, converter=_version)
    exact_version: bool | int | str = attrs.field(default=False, converter=_version)
    evaluation: bool = False
    partial: bool = False
    on_failure: str = "raise"

    def __attrs_post_init__(self) -> None:
        problems = []
        for name, wanted in (("min_version", self.min_version), ("exact_version", self.exact_version)):
            if isinstance(wanted, bool) or wanted is None:
                fits = (wanted is None) == (name == "min_version")
            else:
                fits = wanted != "" if isinstance(wanted, str) else type(wanted) is int and wanted >= 0
            if not fits:
                problems.append(f"{name} is {wanted!r}: a trainer's number, an identity or a hot-load's id is needed")
        if problems:
            raise ConfigError("; ".join(problems), problems=problems)


def _checked(groups: Iterable[Group], sampling: SamplingParams) -> list[Group]:
    """Return the groups as a list; raises ``ConfigError`` for anything else than groups and how to sample them."""
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(f"{sampling!r} does not say how to sample", hint="give SamplingParams(max_tokens=...)")
    found = None if isinstance(groups, Group) or not isinstance(groups, Iterable) else list(groups)
    if found is None or not all(isinstance(group, Group) for group in found):
        raise ConfigError("only a list of groups can be sampled", hint="give [Group(prompt=[...], n=...), ...]")
    return found


class Rollout(OneProcess):
    """Groups in flight. An async context manager, and an async iterator of groups as they finish.

        async with sampler.rollout(groups, sampling, partial=True) as rollout:
            async for group in rollout:
                if enough(group):
                    break
            unfinished = await rollout.abort()

    Leaving the context ends everything that still runs, and waits for it.
    """

    _instead = "sample there: the sampler pickles, and works in a forked process"

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[Group],
        sampling: SamplingParams,
        options: Options,
        *,
        on_drop: Callable[[Group, RolloutError], None] | None = None,
    ) -> None:
        check_salt(options.cache_salt)
        groups = _checked(groups, sampling)
        self._engine, self._options, self._on_drop = engine, options, on_drop
        self._runs = [
            GroupRun(
                engine=engine,
                group=group,
                place=place,
                sampling=sampling,
                salt=options.cache_salt,
                evaluation=options.evaluation,
                streamed=options.partial,
            )
            for place, group in enumerate(groups)
        ]
        self._again: list[GroupRun] = []
        self._results: asyncio.Queue[SampledGroup | BaseException | None] = asyncio.Queue()
        self._delivered: set[int] = set()
        self._asking = 0
        self._nothing_asked = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._entered = False
        self._noted = contextlib.ExitStack()
        self._began = engine.clock()
        self._before = attrs.evolve(engine.totals)
        self._versions: dict[str, None] = {}

    # The context and the iterator --------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._check_process()
        self._noted.enter_context(waiting(self._in_words, seconds=self._left, clock=self._engine.clock))
        try:
            await self._start()
        except BaseException:
            self._noted.close()
            raise
        return self

    def _in_words(self) -> str:
        config, trouble = self._engine.config, self._engine.trouble
        text = f"sampling from {config.base_url}: {len(self._delivered)} of {len(self._runs)} groups are there"
        return f"{text}, the last trouble was: {trouble}" if trouble else text

    def _left(self) -> float | None:
        """Return the seconds until a failing group is given up; None where none fails."""
        left = [
            self._engine.config.deadline - (self._engine.clock() - run.first_failure)
            for run in self._runs
            if run.first_failure is not None and len(run.got) < run.group.n
        ]
        return max(0.0, min(left)) if left else None

    async def _start(self) -> None:
        if self._runs:
            engine, options = self._engine, self._options
            if engine.served is not None:
                wanted = options.exact_version if not isinstance(options.exact_version, bool) else options.min_version
                await engine.served.ready(
                    wanted,
                    settled=options.exact_version is not False,
                    recent=0.0 if engine.admission.idle() else _SHARED_READS,
                )
            elif options.min_version is not None or options.exact_version is not False:
                raise ConfigError(
                    "min_version and exact_version need to know what is served",
                    hint="set CWTRAIN_ROLLOUT_DEPLOYMENT_ID (or CWTRAIN_ROLLOUT_SERVED_IDENTITY_FILE)",
                )
            await self._require_processed()
        self._entered = True
        self._driver = asyncio.create_task(self._drive())

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._in_fork:  # what is in flight is the other process's, and so is its end
            self._noted.close()
            return
        try:
            await self._end()
        finally:
            self._noted.close()
        # Whoever still iterates, or begins to, finds the end.
        self._results.put_nowait(None)
        totals, before = self._engine.totals, self._before
        seconds = self._engine.clock() - self._began
        totals.seconds += seconds
        if self._engine.plugins is not None and self._runs:
            self._engine.plugins.notify(
                RolloutBatchCompleted(
                    backend=self._engine.name,
                    requests=totals.requests - before.requests,
                    retries=totals.retries - before.retries,
                    completion_tokens=totals.completion_tokens - before.completion_tokens,
                    seconds=seconds,
                    weight_versions=tuple(self._versions),
                )
            )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SampledGroup:
        self._check_process()
        if not self._entered:
            raise ConfigError(
                "A rollout was iterated over that was not entered: nothing is in flight",
                hint="use `async with sampler.rollout(...) as rollout:` around the loop",
            )
        item = await self._results.get()
        if isinstance(item, SampledGroup):
            return item
        # It stays the last one, however often it is asked for.
        self._results.put_nowait(item)
        if item is None:
            raise StopAsyncIteration
        raise item

    async def abort(self) -> list[SampledGroup]:
        """End everything and return the groups that were not iterated over yet, in order.

        Samples that were under way are ABORTED, with the tokens that had come where requests are streamed (with
        ``partial=True``): closing the connection is what ends the work at the server.
        """
        self._check_process()
        await self._end()
        left: dict[int, SampledGroup] = {}
        while not self._results.empty():
            item = self._results.get_nowait()
            if isinstance(item, SampledGroup):
                left[item.place] = item
        self._results.put_nowait(None)
        served = self._engine.served
        after = await served.fresh(self._engine.clock()) if served is not None else None
        for run in self._runs:
            if run.place not in self._delivered:
                left[run.place] = self._group(run, after)
        return [left[place] for place in sorted(left)]

    async def _end(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            await cancel_all([driver])

    # Work --------------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        self._asking = len(self._runs)
        try:
            await all_or_nothing([self._one(run) for run in self._runs])
            if self._again:
                self._asking += len(self._again)
                self._nothing_asked.clear()
                await all_or_nothing([self._one(run, last=True) for run in self._again])
        except asyncio.CancelledError:
            if self._driver is not None:
                # Not ended by us: somebody cancelled the loop's tasks, and whoever iterates must not wait for ever.
                self._results.put_nowait(
                    RolloutError("The rollout's tasks were cancelled from outside", hint="leave the rollout to end it")
                )
            raise
        except BaseException as exc:  # noqa: BLE001 - whoever iterates raises it
            self._results.put_nowait(exc)
        else:
            self._results.put_nowait(None)

    async def _one(self, run: GroupRun, *, last: bool = False) -> None:
        """See one group through, up to its result."""
        try:
            try:
                await run.fill()
            finally:
                self._asked()
            after = await self._settled(run)
        except RolloutError as exc:
            if not self._survives(run, exc, last=last):
                raise
            return
        self._delivered.add(run.place)
        self._results.put_nowait(self._group(run, after))

    def _survives(self, run: GroupRun, exc: RolloutError, *, last: bool) -> bool:
        """Do what is to be done about a failed group; False where its error is to be raised."""
        policy, totals = self._options.on_failure, self._engine.totals
        if policy == "drop":
            totals.dropped_groups += 1
            self._delivered.add(run.place)
            log.warning("Group %d is dropped: %s", run.place, exc)
            if self._on_drop is not None:
                self._on_drop(run.group, exc)
            return True
        if policy == "requeue" and not last:
            totals.requeued_groups += 1
            log.warning("Group %d is asked for once more, after the others: %s", run.place, exc)
            fresh = attrs.evolve(run, got={}, partials={}, attempts={}, first_failure=None)
            self._again.append(fresh)
            self._runs[run.place] = fresh
            return True
        return False

    # Weights -----------------------------------------------------------------------------------------------------

    def _asked(self) -> None:
        self._asking -= 1
        if not self._asking:
            self._nothing_asked.set()

    async def _settled(self, run: GroupRun) -> History | None:
        """Return a history that was read after the group's last answer; with ``exact_version`` sample until it fits."""
        served, exact = self._engine.served, self._options.exact_version
        if served is None:
            return None
        for attempt in range(1, _EXACT_ATTEMPTS + 1):
            after = await self._read_after(served, max(got.ended for got in run.got.values()))
            spanned = [] if exact is False else [i for i, got in run.got.items() if not self._fits(got, after)]
            if not spanned:
                return after
            log.debug("Group %d: %d samples are sampled again for exact weights", run.place, len(spanned))
            if attempt < _EXACT_ATTEMPTS:
                wanted = None if isinstance(exact, bool) else exact
                await served.ready(wanted, settled=True)
                for index in spanned:
                    del run.got[index]
                self._asking += 1
                self._nothing_asked.clear()
                try:
                    await run.fill(spanned)
                finally:
                    self._asked()
        newest = after.newest
        raise StaleWeightsError(
            f"Group {run.place}: after {_EXACT_ATTEMPTS} rounds some samples are still not of one weight version"
            + ("" if isinstance(exact, bool) else f" {exact!r}"),
            wanted=None if isinstance(exact, bool) else str(exact),
            served=newest.identity if newest else None,
            hint="sample for exact weights while no hot-load runs; after a FAILED one nobody knows what replicas serve",
        )

    async def _read_after(self, served: ServedWeights, since: float) -> History:
        """Return a history read at ``since`` or later: at the next poll, or soon where nothing is left to ask.

        Where other calls of the sampler go on, the reads of calls that end are spaced: they share them.
        """
        engine = self._engine
        while not served.read_since(since):
            if self._nothing_asked.is_set():
                waiting = 0.0 if engine.admission.idle() else served.due(min(served.poll, _SHARED_READS))
                if waiting:
                    await engine.sleep(min(waiting, 0.05))
                    continue
            elif due := served.due():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._nothing_asked.wait(), due)
                continue
            break
        return await served.fresh(since)

    def _fits(self, got: Got, after: History) -> bool:
        exact, span = self._options.exact_version, self._span(got, after)
        return span is not None and (span.exact if isinstance(exact, bool) else span.is_only(exact))

    def _span(self, got: Got, after: History | None) -> WeightSpan | None:
        named = got.identity
        if after is None or got.history is None:
            return self._between(named, named, after) if named is not None else None
        if named is None:
            return self._between(got.history.served, after.newest, after)
        # It says whose tokens these are, not whose KV they were computed on: that may be of everything that was served
        # under the request's salt. So it is the newest end; where it was loaded again since, the last time counts.
        newest = after.find(named.identity)
        if newest is None and got.history.served is None:
            return self._between(named, named, after)
        return self._between(got.history.served, newest or named, after)

    def _between(self, oldest: Load | None, newest: Load | None, after: History | None) -> WeightSpan:
        served = self._engine.served
        if served is None:
            return WeightSpan(oldest, newest)
        return WeightSpan(oldest, newest, number=served.number, epoch=after.epoch if after is not None else None)

    # Results -----------------------------------------------------------------------------------------------------

    def _group(self, run: GroupRun, after: History | None) -> SampledGroup:
        """Return the group's samples: those that are there, and for the others what there is of them."""
        made = []
        for index in range(run.group.n):
            got = run.got.get(index)
            made.append(self._partial(run, index, after) if got is None else self._sample(index, got, after))
        group = SampledGroup(group=run.group, samples=tuple(made), place=run.place)
        if run.group.seed is not None and run.group.n > 1 and group.whole:
            self._engine.watch_seeds(group, run.sampling)
        return group

    def _sample(self, index: int, got: Got, after: History | None) -> Sample:
        choice, span = got.choice, self._span(got, after)
        if span is not None:
            self._versions.update(dict.fromkeys(span.identities))
            if span.exact:
                self._engine.version_seen(span.oldest)
            else:
                self._engine.totals.spanned_samples += 1
        return Sample(
            index=index,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            status=choice.status,
            finish_reason=choice.finish_reason,
            text=choice.text,
            request_id=got.request_id,
            weights=span,
            routed_experts=choice.routed_experts,
            retokenised=choice.retokenised,
        )

    def _partial(self, run: GroupRun, index: int, after: History | None) -> Sample:
        partial = run.partials.get(index)
        ids, logprobs = partial.aligned if partial is not None else ((), ())
        history = partial.history if partial is not None else None
        known = history is not None and after is not None and bool(ids)
        return Sample(
            index=index,
            token_ids=ids,
            logprobs=logprobs,
            status=SampleStatus.ABORTED,
            finish_reason="abort",
            text="".join(partial.texts) if partial is not None and ids else "",
            request_id=partial.request_id if partial is not None else "",
            weights=self._between(history.served, after.newest, after) if known and history and after else None,
        )

    async def _require_processed(self) -> None:
        """Find out once which log-probs the server reports; refuse raw ones of another distribution."""
        engine = self._engine
        # The shortest prompt: one that fills the context would leave the question open for the others.
        first = min(self._runs, key=lambda run: (len(run.group.prompt), len(run.group.text or "")))
        if not (engine.config.logprobs and first.sampling.needs_processed):
            return
        if engine.mode is None:
            probe = GroupRun(
                engine=engine,
                group=attrs.evolve(first.group, n=1, seed=None, seeds=None, prefixes=None, extra=None),
                place=0,
                sampling=SamplingParams(max_tokens=1, top_k=1),
                salt=self._options.cache_salt,
                evaluation=self._options.evaluation,
            )
            await probe.fill()
            logprobs = probe.got[0].choice.logprobs
            if not logprobs:
                return  # even the shortest prompt fills the context: nothing will be sampled
            # Among one token only, the processed log-prob is 0; the raw one is that of all tokens.
            engine.mode = "processed" if abs(logprobs[0]) < 1e-6 else "raw"
            log.info("The endpoint reports %s log-probs", engine.mode)
        if engine.mode == "raw":
            raise RolloutAnswerError(
                f"{engine.config.base_url} reports raw log-probs, and the sampling parameters are not neutral: "
                "the log-probs would be of another distribution than the one that is sampled from",
                hint="Set engineConfig 'logprobs-mode: processed_logprobs' on the deployment, or sample with "
                "temperature 1, top_p 1, top_k -1, min_p 0 and no penalties",
            )
