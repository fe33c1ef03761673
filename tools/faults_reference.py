# ruff: noqa: E501
"""The reference page of the emulator's faults, made from the tables that the emulator itself reads."""

from __future__ import annotations

from collections.abc import Mapping

import needed

with needed.imports():
    from cwtrain_emulator.faults import COMMON_OPTIONS, KINDS, MATCH_OPTIONS, TARGETS, Option

HEAD = """# Faults of the emulator

{made}

A fault is a rule: what it strikes, which of it, and when. Three ways to set one, with the same words:

```python
def test_it(faults):  # the pytest fixture; gone after the test
    faults.add("api", "status", status=503, retry_after=1, method="POST", path="hotLoads$", after=2, times=3)
```

```bash
cwtrain emulator faults add api status --status 503 --retry-after 1 --method POST --path 'hotLoads$' --after 2 --times 3
cwtrain emulator faults list
cwtrain emulator faults clear
```

```text
POST   /emulator/v1/faults        {{"target": "api", "kind": "status", "status": 503, "after": 2, "times": 3}}
GET    /emulator/v1/faults        every rule, with `seen` and `struck`
DELETE /emulator/v1/faults        all of them; /emulator/v1/faults/ID: one
```

The commands find a running emulator by `--state-dir`, or by `--url` (`COREWEAVE_API_URL`) and `COREWEAVE_API_TOKEN`; the
routes want the admin's token. Rules are in memory: a restart, `cwtrain emulator reset` and the end of a test clear them.

**Nothing is random.** A rule counts the requests of its target that match it. It lets `after` of them pass and strikes the
next `times`. (With `probability` it draws, from its `seed`.) Rules are asked in the order in which they were added. One that
answers the request itself ends it: later rules do not see it. The others go together.

The emulator's own routes under `/emulator/v1`, and its page, are never struck.
"""

TARGET_NOTES = {
    "api": "The control plane, `/v1alpha1/inference/...`. Refusals are those of a gRPC JSON gateway.",
    "endpoint": "`/v1/...`, on the API's port and on each gateway's. Refusals are OpenAI's.",
    "store": "The bucket. Clients and the service itself reach it through a small proxy of the emulator, which hands every "
    "request on byte by byte; so a fault can be told apart by who is asking. Not for a store given with `--s3-endpoint`.",
    "replica": "A replica's process, while it loads weights or serves a request. Its loads are those of hot-loads and those "
    "after its start; `identity` tells them apart.",
    "directory": "Directories of the machine that the emulator runs on, given as absolute paths: not the emulator's own, but "
    "those that a trainer writes and a publisher reads. What a rule counts are files.",
}

TAIL = """## Notes

- `cut` with `bytes` 0 is the lost answer: the call was carried out, and the client cannot know. `drop` is the lost request.
- `lost_object` counts reads of objects whose key matches, and listings. Nothing is deleted: cleared, they are back.
- `late_object` is about objects that were written after the emulator's start, in a store that shows a write late; an
  object that is written again is late again. A condition (`If-None-Match`) sees them at once.
- `late` of a directory is a stand-in for a network file system, by copies. Cleared, the view shows everything and follows
  no more.
- `expired_credentials` refuses a key; `POST /emulator/v1/credentials` (`emulator.control.credentials()`) gives another one
  for the same bucket, so that a client that renews its credentials can be tested.
- `damage` makes a load fail at its checksum. A full snapshot without recorded checksums has none to fail: there a file is cut.
- A replica that died loads what it was told to load once more; after three deaths over one hot-load it is in ERROR.
- A replica that is stuck in a load goes on serving its old weights. Stuck in a request, it holds that request's slots.
- What a rule cannot make: answers that are wrong and look right. The emulator does not lie about tokens or log-probs.
"""


def faults_page(made: str) -> str:
    """Return docs/reference/faults.md."""
    parts = [HEAD.format(made=made)]
    parts.append(f"## Every rule\n\n{_table(COMMON_OPTIONS)}")
    for target in TARGETS:
        parts.append(f"## {target}\n\n{TARGET_NOTES[target]}\n\n{_table(MATCH_OPTIONS[target])}")
        rows = []
        for name, kind in KINDS.items():
            if target in kind.targets:
                rows.append(f"| `{name}` | {kind.help} | {_options(kind.options, target)} |")
        parts.append("\n".join(["| kind | does | options |", "| --- | --- | --- |", *rows, ""]))
    parts.append(TAIL)
    return "\n".join(parts)


def _table(options: Mapping[str, Option]) -> str:
    if not options:
        return "It has no options of its own beside those of every rule.\n"
    rows = [f"| `{name}` | {_meaning(option)} | {_default(option)} |" for name, option in options.items()]
    return "\n".join(["| option | meaning | default |", "| --- | --- | --- |", *rows, ""])


def _options(options: Mapping[str, Option], target: str) -> str:
    shown = []
    for name, option in options.items():
        if name == "code" and target != "store":
            continue
        default = _default(option)
        shown.append(f"`{name}`: {_meaning(option)}" + (f" ({default})" if default else ""))
    return "; ".join(shown)


def _meaning(option: Option) -> str:
    choices = ", ".join(f"`{choice}`" for choice in option.choices if choice)
    return option.help + (f": {choices}" if choices else "")


def _default(option: Option) -> str:
    if option.required:
        return "required"
    return "" if option.default in (None, "") else f"`{option.default}`"
