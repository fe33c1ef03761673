"""One trainer process of many: samples the same prompts over and over until a file appears, and writes what it got.

    python rollout_client.py '{"base_url": ..., "model": ..., "key": ..., "deployment": ..., "stop": FILE, "out": FILE,
                               "salt": null}'

The API's address and token are those of the environment. One JSON line for each sample, with its span of hot-loads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cwtrain_rollout import Group, RolloutConfig, Sampler, SamplingParams

PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 11], [20, 21, 22, 23]]


def line_of(prompt: list[int], sample: Any) -> dict[str, Any]:
    """Return a sample as plain data."""
    span = sample.weights
    return {
        "prompt": prompt,
        "request": sample.request_id,
        "index": sample.index,
        "tokens": sample.token_ids,
        "logprobs": sample.logprobs,
        "oldest": span.oldest and span.oldest.id,
        "newest": span.newest and span.newest.id,
        "exact": span.exact,
        "versions": [span.oldest_version, span.newest_version],
    }


def main() -> None:
    """Sample until it is told to stop."""
    task = json.loads(sys.argv[1])
    config = RolloutConfig(
        base_url=task["base_url"],
        model=task["model"],
        api_key=task["key"],
        deployment_id=task["deployment"],
        poll=0.05,
        deadline=60,
    )
    sampler = Sampler(config)
    stop = Path(task["stop"])
    with Path(task["out"]).open("w", encoding="utf-8") as out:
        while not stop.exists():
            groups = [Group(prompt=prompt, n=3) for prompt in PROMPTS]
            sampling = SamplingParams(max_tokens=10, ignore_eos=True)
            for group in sampler.sample_groups(groups, sampling, cache_salt=task["salt"]):
                for sample in group.samples:
                    out.write(json.dumps(line_of(list(group.group.prompt), sample)) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
