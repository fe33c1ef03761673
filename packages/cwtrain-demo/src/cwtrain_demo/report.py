"""The demo's report as one HTML file: no script, no outside request, light and dark, readable on a phone."""

from __future__ import annotations

import html
from collections.abc import Sequence

from cwtrain_demo.result import DemoResult, Step

__all__ = ["human_bytes", "report_html"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 480, 220, 68, 14, 32

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #5b6570; --line: #d5dae0; --card: #f6f8fa; --page: #ffffff;
  --reward: #0a5bd3; --full: #b35900; --delta: #2f855a; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --soft: #9aa4af; --line: #363d46; --card: #1d2228;
  --page: #14181c; --reward: #6ea8ff; --full: #f0a050; --delta: #66c796; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 46rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .soft { color: var(--soft); } .bad { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .75rem; }
.card b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
svg { width: 100%; max-width: 36rem; height: auto; display: block; }
svg text { fill: var(--soft); font: 13px system-ui, sans-serif; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child, .left { text-align: left; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
"""


def human_bytes(count: float) -> str:
    """Return a byte count for people: 512 B, 43.1 KB, 2.0 MB."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def report_html(result: DemoResult) -> str:
    """Return the page for ``result``."""
    verdict = (
        "<p>The reward rose, and the bytes on every replica are the trainer's.</p>"
        if result.ok
        else "".join(f"<p class=bad>{html.escape(problem)}</p>" for problem in result.problems())
    )
    deltas = [version for version in result.versions if version.kind == "DELTA"]
    fulls = [version for version in result.versions if version.kind == "FULL"]
    cards = [
        ("reward, first fifth", f"{result.reward_start:.3f}"),
        ("reward, last fifth", f"{result.reward_end:.3f}"),
        ("weights match", "yes" if result.weights_match else "no"),
        ("log-probs match", "yes" if result.logprobs_match else "no"),
        ("versions", f"{len(fulls)} full, {len(deltas)} delta"),
        ("seconds in all", f"{result.seconds.get('total', 0.0):.1f}"),
    ]
    replicas = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td><code>{html.escape(identity)}</code></td></tr>"
        for name, identity in result.replicas.items()
    )
    examples = "".join(
        f"<tr><td>{step.step}</td><td class=left><code>{html.escape(step.example)}</code></td></tr>"
        for step in _some(result.steps, 6)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>cwtrain demo, seed {result.seed}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>cwtrain demo</h1>
<p class=soft>{len(result.steps)} steps, seed {result.seed}, {len(result.replicas)} replicas: a model learns to go on
with the alphabet, and every step's weights are hot-loaded into the replicas that answer the next one.</p>
{verdict}
<div class=cards>{_cards(cards)}</div>
<h2>Reward</h2>
{_reward_chart([step.reward for step in result.steps])}
<h2>First rollout of a step</h2>
<div class=wide><table><tr><th>step</th><th class=left>prompt and answer</th></tr>{examples}</table></div>
<h2>Bytes of each version</h2>
{_bytes_chart([(version.kind, version.bytes) for version in result.versions])}
<h2>Versions</h2>
<div class=wide><table>
<tr><th>identity</th><th>kind</th><th>bytes</th><th>ratio</th><th>changed</th>
<th>upload</th><th>hot-load</th></tr>
{_version_rows(result)}
</table></div>
<h2>Replicas at the end</h2>
<div class=wide><table><tr><th>replica</th><th>identity</th></tr>{replicas}</table></div>
<h2>Where the time went</h2>
<div class=wide><table><tr><th>phase</th><th>seconds</th></tr>{
        "".join(f"<tr><td>{name}</td><td>{value:.2f}</td></tr>" for name, value in result.seconds.items())
    }</table></div>
</body>
</html>
"""


def _cards(cards: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<div class=card><span class=soft>{name}</span><b>{value}</b></div>" for name, value in cards)


def _version_rows(result: DemoResult) -> str:
    return "\n".join(
        f"<tr><td><code>{html.escape(version.identity)}</code></td><td>{version.kind.lower()}</td>"
        f"<td>{human_bytes(version.bytes)}</td><td>{version.ratio:.2f}</td><td>{version.density:.0%}</td>"
        f"<td>{version.upload_seconds:.2f} s</td><td>{version.hot_load_seconds:.2f} s</td></tr>"
        for version in result.versions
    )


def _reward_chart(rewards: Sequence[float]) -> str:
    """Return the reward over the steps as a line."""
    across = _WIDTH - _LEFT - 10
    up = _HEIGHT - _TOP - _BOTTOM

    def x(step: int) -> float:
        return _LEFT + across * step / max(1, len(rewards) - 1)

    def y(reward: float) -> float:
        return _TOP + up * (1 - reward)

    lines = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="var(--line)"/>'
        f'<text x="{_LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:.2f}</text>'
        for mark in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    points = " ".join(f"{x(step):.1f},{y(reward):.1f}" for step, reward in enumerate(rewards))
    dots = "".join(
        f'<circle cx="{x(step):.1f}" cy="{y(reward):.1f}" r="3" fill="var(--reward)"><title>step {step}: '
        f"{reward:.3f}</title></circle>"
        for step, reward in enumerate(rewards)
    )
    last = len(rewards) - 1
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Reward of each step, from '
        f'{rewards[0]:.2f} to {rewards[-1]:.2f}">{lines}'
        f'<polyline points="{points}" fill="none" stroke="var(--reward)" stroke-width="2"/>{dots}'
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">step 0</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 8}" text-anchor="end">step {last}</text></svg>'
    )


def _bytes_chart(sizes: Sequence[tuple[str, int]]) -> str:
    """Return each version's bytes as a bar."""
    across = _WIDTH - _LEFT - 10
    up = _HEIGHT - _TOP - _BOTTOM
    largest = max(size for _, size in sizes)
    slot = across / len(sizes)
    bars = "".join(
        f'<rect x="{_LEFT + slot * place + slot * 0.1:.1f}" y="{_TOP + up * (1 - size / largest):.1f}" '
        f'width="{slot * 0.8:.1f}" height="{up * size / largest:.1f}" fill="var(--{kind.lower()})">'
        f"<title>version {place}, {kind.lower()}: {human_bytes(size)}</title></rect>"
        for place, (kind, size) in enumerate(sizes)
    )
    legend = "".join(
        f'<rect x="{_LEFT + 70 * place}" y="{_HEIGHT - 18}" width="10" height="10" fill="var(--{kind})"/>'
        f'<text x="{_LEFT + 70 * place + 15}" y="{_HEIGHT - 9}">{kind}</text>'
        for place, kind in enumerate(("full", "delta"))
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Bytes of each version">'
        f'<text x="{_LEFT - 8}" y="{_TOP + 4}" text-anchor="end">{human_bytes(largest)}</text>'
        f'<text x="{_LEFT - 8}" y="{_TOP + up}" text-anchor="end">0</text>{bars}{legend}</svg>'
    )


def _some(items: Sequence[Step], most: int) -> list[Step]:
    """Return at most ``most`` items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
