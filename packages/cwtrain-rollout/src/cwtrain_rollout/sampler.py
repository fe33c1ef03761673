"""The sampler: groups of prompts in, exact samples out.

What it promises: the token ids that were sampled and one log-prob for each, of the distribution that was sampled from;
the weights that made them; results in the order of the groups; choices matched by their index; missing or unusable ones
asked for again, only those; bounded retries; and after an exception nothing runs on in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from cwtrain._process import renew_after_fork
from cwtrain.errors import ConfigError
from cwtrain_rollout._engine import Engine
from cwtrain_rollout.admission import Admission
from cwtrain_rollout.config import RolloutConfig
from cwtrain_rollout.errors import RolloutError
from cwtrain_rollout.protocol import Group, SampledGroup, SamplerTotals, SamplingParams
from cwtrain_rollout.rollout import Options, Rollout
from cwtrain_rollout.served import DeploymentSource, FileSource, ServedWeights
from cwtrain_rollout.transport import Transport
from cwtrain_rollout.window import AdaptiveWindow, FixedWindow, Window

if TYPE_CHECKING:
    from cwtrain.infra import InferenceClient
    from cwtrain.plugins import Plugins

__all__ = ["Sampler"]

log = logging.getLogger("cwtrain.rollout")


class Sampler:
    """Samples groups of prompts from an OpenAI-compatible ``/completions`` endpoint.

    One object serves several event loops and threads, and the processes that fork from this one. It pickles without
    the key: the process that unpickles it reads that from its own environment. ``totals`` counts what it did here.

        sampler = Sampler(RolloutConfig.from_env())
        groups = sampler.sample_groups([Group(prompt=[1, 2, 3], n=8)], SamplingParams(max_tokens=64))

    ``client`` reads the hot-loads of the configuration's deployment (one is made from the environment without it);
    ``served`` takes the place of both. ``plugins`` hears of batches, retries and outages (the process's own without
    it). ``tokenise`` makes ids from text where TOKEN_IDS=0. ``on_drop`` gets the groups that ON_FAILURE=drop leaves
    out, with the error. ``transport`` is another way to the endpoint, such as a recording. ``rng`` draws seeds and
    jitter, ``sleep`` pauses, ``clock`` is in seconds: for tests.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        name: str = "openai",
        client: InferenceClient | None = None,
        served: ServedWeights | None = None,
        plugins: Plugins | None = None,
        tokenise: Callable[[str], list[int]] | None = None,
        on_drop: Callable[[Group, RolloutError], None] | None = None,
        transport: Transport | None = None,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not config.token_ids and tokenise is None:
            raise ConfigError(
                "CWTRAIN_ROLLOUT_TOKEN_IDS=0 tokenises answers again, and no tokeniser is given",
                hint="give Sampler(tokenise=...), or unset CWTRAIN_ROLLOUT_TOKEN_IDS",
            )
        self.config = config
        self.totals = SamplerTotals()
        self._name, self._tokenise, self._on_drop, self._plugins = name, tokenise, on_drop, plugins
        self._client, self._served, self._transport = client, served, transport
        if served is None and (source := _source(config, client)) is not None:
            served = ServedWeights(source, poll=config.poll, patience=config.deadline, clock=clock, sleep=sleep)
        self._engine = Engine(
            config=config,
            name=name,
            transport=transport if transport is not None else _transport(config),
            admission=Admission(_window(config), clock, sleep),
            served=served,
            totals=self.totals,
            rng=rng if rng is not None else random.Random(secrets.randbits(64)),  # noqa: S311 - seeds, no secrets
            clock=clock,
            sleep=sleep,
            plugins=plugins,
            tokenise=tokenise,
            mode=None if config.logprobs_mode == "auto" else config.logprobs_mode,
            context=config.context_length,
        )
        if rng is None:
            renew_after_fork(self, Sampler._draw_anew)

    def __repr__(self) -> str:
        return f"Sampler({self.config!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: it opens its own connections and reads what is served by itself."""
        engine = self._engine
        served = self._served
        return {
            "config": self.config,
            "name": self._name,
            "client": self._client,
            "tokenise": self._tokenise,
            "on_drop": self._on_drop,
            "transport": self._transport,
            "source": None if served is None else (served.source, served.number),
            "learned": {
                name: getattr(engine, name)
                for name in ("mode", "context", "logprobs", "text", "split", "completion_ids")
            },
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        learned, source = state.pop("learned"), state.pop("source")
        if source is not None:
            config = state["config"]
            state["served"] = ServedWeights(source[0], poll=config.poll, patience=config.deadline, number=source[1])
        self.__init__(**state)  # type: ignore[misc]
        for name, value in learned.items():
            setattr(self._engine, name, value)

    def _draw_anew(self) -> None:
        """Draw other seeds than the process that this one was forked from, and than its other children."""
        self._engine.rng = random.Random(secrets.randbits(64))  # noqa: S311 - seeds, no secrets

    # Sampling ----------------------------------------------------------------------------------------------------

    async def sample(
        self,
        groups: Sequence[Group],
        sampling: SamplingParams,
        *,
        cache_salt: str | None = None,
        min_version: int | str | None = None,
        exact_version: bool | int | str = False,
        evaluation: bool = False,
        on_failure: str | None = None,
    ) -> list[SampledGroup]:
        """Return one ``SampledGroup`` for each group, in their order.

        - ``cache_salt`` keeps answers apart from KV that older weights computed. Where a deployment is known, the id of
          its newest COMPLETED hot-load is taken by itself.
        - ``min_version`` (the trainer's number, an identity, or a hot-load's id) is waited for.
        - ``exact_version``: a sample that several versions may have made is sampled again; True takes any one version.
        - ``evaluation`` takes its turn behind training.
        - ``on_failure``: ``raise`` cancels the other groups, waits for them to end, and raises; ``requeue`` asks for a
          failed group once more when the others are there; ``drop`` leaves it out.

        Raises ``RolloutRequestError``, ``RolloutAnswerError``, ``RolloutExhaustedError`` or ``StaleWeightsError``.
        """
        async with self.rollout(
            groups,
            sampling,
            cache_salt=cache_salt,
            min_version=min_version,
            exact_version=exact_version,
            evaluation=evaluation,
            on_failure=on_failure,
        ) as rollout:
            found = [group async for group in rollout]
        return sorted(found, key=lambda group: group.place)

    def sample_groups(
        self, groups: Sequence[Group], sampling: SamplingParams, *, cache_salt: str | None = None, **options: Any
    ) -> list[SampledGroup]:
        """Return what ``sample`` does, for callers without an event loop; takes the same arguments.

        Raises ``RolloutError``, and ``ConfigError`` when it is called inside a running event loop.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.sample(groups, sampling, cache_salt=cache_salt, **options))
        raise ConfigError(
            "Sampler.sample_groups was called inside a running event loop", hint="Use `await sampler.sample(...)` there"
        )

    async def sample_stream(
        self, groups: Sequence[Group], sampling: SamplingParams, **options: Any
    ) -> AsyncIterator[SampledGroup]:
        """Yield groups as they finish, for trainers that filter and over-sample; takes ``sample``'s arguments.

        ``SampledGroup.place`` is the group's place. Closing the iterator ends what still runs; ``rollout`` does that at
        a place you see, and can keep what there is.
        """
        async with self.rollout(groups, sampling, **options) as rollout:
            async for group in rollout:
                yield group

    def rollout(
        self,
        groups: Sequence[Group],
        sampling: SamplingParams,
        *,
        partial: bool = False,
        cache_salt: str | None = None,
        min_version: int | str | None = None,
        exact_version: bool | int | str = False,
        evaluation: bool = False,
        on_failure: str | None = None,
    ) -> Rollout:
        """Return a rollout to enter with ``async with``: an iterator of groups as they finish, which can be aborted.

        With ``partial`` every sample is a streamed request of its own, so that ``abort`` keeps the tokens that had
        come. The other arguments are those of ``sample``.
        """
        if on_failure not in (None, "raise", "requeue", "drop"):
            raise ConfigError(f"on_failure must be raise, requeue or drop, not {on_failure!r}")
        if self._engine.plugins is None:
            from cwtrain.plugins import get_plugins

            self._engine.plugins = self._plugins or get_plugins()
        options = Options(
            cache_salt=cache_salt,
            min_version=min_version,
            exact_version=exact_version,
            evaluation=evaluation,
            partial=partial,
            on_failure=on_failure or self.config.on_failure,
        )
        return Rollout(self._engine, groups, sampling, options, on_drop=self._on_drop)

    async def warm_up(self, *, prompt: Sequence[int] = (1,), requests: int | None = None) -> None:
        """Send some small requests, one for each replica by default, so that training does not pay for a cold start.

        What they come to does not matter; nothing is raised.
        """
        group = Group(prompt=prompt)
        count = self.config.replicas if requests is None else requests
        with contextlib.suppress(RolloutError):
            await self.sample([group] * count, SamplingParams(max_tokens=1), evaluation=True, on_failure="drop")

    # State -------------------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """How many choices may be in flight now."""
        return self._engine.admission.window.size

    @property
    def in_flight(self) -> int:
        """How many choices are in flight now."""
        return self._engine.admission.in_flight

    @property
    def logprobs_mode(self) -> str | None:
        """Which log-probs the endpoint reports: ``processed``, ``raw``, or None while nobody needed to know."""
        return self._engine.mode

    @property
    def served(self) -> ServedWeights | None:
        """The reader of what is served; None where no deployment is known."""
        return self._engine.served

    async def aclose(self) -> None:
        """Close the running event loop's connections and the reader of what is served. Loops that end do it, too."""
        await self._engine.transport.aclose()
        if self._engine.served is not None:
            self._engine.served.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _window(config: RolloutConfig) -> Window:
    if config.fixed_concurrency is not None:
        return FixedWindow(config.fixed_concurrency)
    return AdaptiveWindow(replicas=config.replicas, maximum=config.concurrency_max)


def _transport(config: RolloutConfig) -> Transport:
    from cwtrain_rollout._http import HttpTransport

    transport: Transport = HttpTransport(config)
    if config.record:
        from cwtrain_rollout.record import Recorder

        transport = Recorder(transport, config.record, hide=config.without_key)
    return transport


def _source(config: RolloutConfig, client: InferenceClient | None) -> DeploymentSource | FileSource | None:
    from pathlib import Path

    if config.deployment_id:
        return DeploymentSource(config.deployment_id, client)
    return FileSource(Path(config.served_identity_file)) if config.served_identity_file else None
