"""``cwtrain rollout``: look at samples, and measure an endpoint. Only click is imported before a command runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cwtrain.cli._context import Command, Context, pass_context
from cwtrain.cli._options import SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from cwtrain_rollout.protocol import SamplingParams

__all__ = ["rollout"]

_T = TypeVar("_T")


@click.group("rollout")
def rollout() -> None:
    """Sample from an endpoint, and measure it."""


def _endpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where to sample."""
    for option in reversed(
        (
            click.option(
                "--backend",
                default=None,
                metavar="NAME",
                help="How to reach the model: dedicated, openai, serverless, or a plugin's.  [default: dedicated where "
                "a deployment is named, also by CWTRAIN_HOTLOAD_DEPLOYMENT_ID, else openai]",
            ),
            click.option(
                "--deployment", metavar="NAME_OR_ID", help="A deployment: its gateway, model, key and versions."
            ),
            click.option(
                "--endpoint",
                metavar="URL",
                help="Base URL of an OpenAI-compatible endpoint.  [env var: CWTRAIN_ROLLOUT_BASE_URL]",
            ),
            click.option("--model", metavar="NAME", help="Name of the served model.  [env var: CWTRAIN_ROLLOUT_MODEL]"),
            click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens at most."),
            click.option(
                "--temperature", type=click.FloatRange(0), default=1.0, show_default=True, help="0: greedy decoding."
            ),
            click.option(
                "--top-p",
                type=click.FloatRange(0, 1, min_open=True),
                default=1.0,
                show_default=True,
                help="Share of the probability that is sampled from.",
            ),
            click.option("--top-k", type=int, default=-1, show_default=True, help="Tokens sampled from; -1: all."),
        )
    ):
        function = option(function)
    return function


def _ids(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    found = []
    for value in values:
        try:
            ids = tuple(int(word) for word in value.replace(",", " ").split())
        except ValueError:
            ids = ()
        if not ids or min(ids) < 0:
            raise click.BadParameter(f"{value!r} is no list of token ids such as 1,2,3")
        found.append(ids)
    return tuple(found)


_PROMPT_IDS = click.option(
    "--prompt-ids", multiple=True, callback=_ids, metavar="IDS", help="A prompt as token ids: 1,2,3. May be repeated."
)


@rollout.command("sample", cls=Command, example='cwtrain rollout sample --deployment ID --prompt "2 + 2 =" -n 4')
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt as text. May be repeated.")
@_PROMPT_IDS
@click.option("-n", "count", type=click.IntRange(1, 1024), default=1, show_default=True, help="Samples of each prompt.")
@click.option("--seed", type=click.IntRange(0, 2**62 - 1), help="Seed, so that equal weights give equal samples.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends a sample. May be repeated.")
@click.option(
    "--timeout",
    type=SECONDS,
    help="Seconds for everything.  [default: none; a failing endpoint is given up after CWTRAIN_ROLLOUT_DEADLINE]",
)
@_endpoint
@pass_context
def sample(
    ctx: Context,
    /,
    *,
    texts: tuple[str, ...],
    prompt_ids: tuple[tuple[int, ...], ...],
    count: int,
    seed: int | None,
    stop: tuple[str, ...],
    timeout: float | None,
    **where: Any,
) -> None:
    """Sample answers to prompts and print them with their tokens, log-probs and weight versions."""
    if bool(texts) == bool(prompt_ids):
        raise click.UsageError("give --prompt or --prompt-ids, and not both")
    from cwtrain_rollout.chat import ChatSampler

    limit = {"deadline": timeout} if timeout is not None else {}
    backend, sampling = _backend(where, text=bool(texts), **limit), _sampling(where, stop)
    if isinstance(backend, ChatSampler):
        if seed is not None or sampling.top_k != -1:
            raise click.UsageError("the backend serverless takes no --seed and no --top-k")
        rows = _within(timeout, _chat(backend, texts, count, sampling))
    else:
        rows = _within(timeout, _completions(backend, texts, prompt_ids, count, seed, sampling))
    ctx.out.data(rows, ids=[row["request_id"] for row in rows], columns=("prompt", "text", "status", "versions"))


@rollout.command("bench", cls=Command, example="cwtrain rollout bench --deployment ID --seconds 30 -n 8")
@_PROMPT_IDS
@click.option("-n", "count", type=click.IntRange(1, 1024), default=8, show_default=True, help="Samples of each group.")
@click.option("--seconds", type=SECONDS, default=30.0, show_default=True, help="How long to send groups.")
@click.option(
    "--concurrency", metavar="auto|N", help="Choices in flight.  [env var: CWTRAIN_ROLLOUT_CONCURRENCY; default: auto]"
)
@_endpoint
@pass_context
def bench(
    ctx: Context,
    /,
    *,
    prompt_ids: tuple[tuple[int, ...], ...],
    count: int,
    seconds: float,
    concurrency: str | None,
    **where: Any,
) -> None:
    """Keep an endpoint busy for a while: requests and tokens per second, latencies, and the window over time.

    Ctrl-C ends it early: what was measured so far is printed, with "interrupted": true.
    """
    import asyncio
    import contextlib

    import attrs

    from cwtrain.cli._errors import Terminated
    from cwtrain_rollout.bench import Bench
    from cwtrain_rollout.sampler import Sampler

    ctx.out.refuse_ids()
    backend = _backend(where, text=False, **({"concurrency": concurrency} if concurrency else {}))
    if not isinstance(backend, Sampler):
        raise click.UsageError("bench measures the sampler: use the backend dedicated or openai")
    # The endpoint is measured, not the list of hot-loads.
    backend = Sampler(attrs.evolve(backend.config, deployment_id=None, served_identity_file=None))
    prompts = prompt_ids or ((1, 2, 3),)
    load = Bench(backend, prompts, n=count, seconds=seconds, sampling=_sampling(where, ()), say=ctx.out.say)
    try:
        asyncio.run(load.run())
    except (KeyboardInterrupt, Terminated):
        with contextlib.suppress(OSError):  # a Ctrl-C ends the whole pipeline, the reader of this output too
            if (found := load.result()) is not None:
                ctx.out.data(found)
        raise
    ctx.out.data(load.result())


def _backend(where: dict[str, Any], *, text: bool, **more: Any) -> Any:
    from cwtrain.plugins import get_plugins

    name = where["backend"] or ("dedicated" if where["deployment"] or _by_environment(where) else "openai")
    settings: dict[str, Any] = {"model": where["model"], "base_url": where["endpoint"], **more}
    if name == "dedicated":
        settings["deployment"] = where["deployment"]
    if text and name != "serverless":
        settings["token_id_prompts"] = False
    given = {key: value for key, value in settings.items() if value is not None}
    return get_plugins().rollout_backend(name).create(**given)


def _by_environment(where: dict[str, Any]) -> bool:
    """Return whether the environment names a deployment, and nobody an endpoint."""
    if where["endpoint"] or os.environ.get("CWTRAIN_ROLLOUT_BASE_URL", "").strip():
        return False
    variables = ("CWTRAIN_ROLLOUT_DEPLOYMENT_ID", "CWTRAIN_HOTLOAD_DEPLOYMENT_ID")
    return any(os.environ.get(name, "").strip() for name in variables)


def _sampling(where: dict[str, Any], stop: tuple[str, ...]) -> SamplingParams:
    from cwtrain_rollout.protocol import SamplingParams

    return SamplingParams(
        max_tokens=where["max_tokens"],
        temperature=where["temperature"],
        top_p=where["top_p"],
        top_k=where["top_k"],
        stop=stop,
    )


def _within(timeout: float | None, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what ``work`` returns. Raises ``WaitTimeoutError`` where that takes longer than ``timeout`` seconds."""
    import asyncio

    from cwtrain.errors import WaitTimeoutError
    from cwtrain.waits import current, waiting

    async def limited() -> _T:
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait([task], timeout=timeout)
        if done:
            return task.result()
        seen = current() or "nothing"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise WaitTimeoutError(
            f"the samples were not there within {timeout:g} s; last seen: {seen}",
            last_seen=seen,
            hint="give a longer --timeout, or ask for fewer and shorter samples",
        )

    with waiting("waiting for samples", seconds=timeout):
        return asyncio.run(limited())


async def _completions(
    backend: Any,
    texts: tuple[str, ...],
    prompt_ids: tuple[tuple[int, ...], ...],
    count: int,
    seed: int | None,
    sampling: SamplingParams,
) -> list[dict[str, Any]]:
    from cwtrain_rollout.protocol import Group

    # The ids of a text are the server's business: one stands for them.
    groups = [Group(prompt=(0,), text=text, n=count, seed=seed) for text in texts]
    groups += [Group(prompt=ids, n=count, seed=seed) for ids in prompt_ids]
    rows = []
    for group in await backend.sample(groups, sampling):
        for one in group.samples:
            rows.append(
                {
                    "prompt": group.group.text if group.group.text is not None else list(group.group.prompt),
                    "index": one.index,
                    "text": one.text,
                    "status": one.status.value,
                    "finish_reason": one.finish_reason,
                    "token_ids": list(one.token_ids),
                    "logprobs": list(one.logprobs),
                    "versions": list(one.weights.identities) if one.weights else [],
                    "request_id": one.request_id,
                }
            )
    return rows


async def _chat(backend: Any, texts: tuple[str, ...], count: int, sampling: SamplingParams) -> list[dict[str, Any]]:
    if not texts:
        raise click.UsageError("the backend serverless takes text: give --prompt")
    found = await backend.chat(
        [[{"role": "user", "content": text}] for text in texts],
        n=count,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop=sampling.stop,
    )
    return [
        {
            "prompt": text,
            "index": index,
            "text": answer.text,
            "status": "COMPLETED" if answer.finish_reason == "stop" else "TRUNCATED",
            "finish_reason": answer.finish_reason,
            "request_id": answer.request_id,
        }
        for text, answers in zip(texts, found, strict=True)
        for index, answer in enumerate(answers)
    ]
