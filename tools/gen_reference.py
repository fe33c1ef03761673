# ruff: noqa: E501
"""Write the reference pages that are made from the code: commands, environment variables, hooks, faults.

- ``python tools/gen_reference.py`` writes ``docs/reference/cli.md``, ``environment.md``, ``hooks.md`` and ``faults.md``;
- with ``--check`` it says which of them is not what the code says, and writes nothing.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import needed

with needed.imports():
    import attrs
    import click

    from faults_reference import faults_page

ROOT = Path(__file__).resolve().parent.parent
MADE = "<!-- Made by tools/gen_reference.py from the code: change it there, and run that. -->"

CLI_HEAD = """# Commands

{made}

```text
cwtrain [GLOBAL OPTIONS] COMMAND [OPTIONS] [ARGUMENTS]
```

**Standard output is data**, JSON unless `--output` says otherwise, and nothing else (completion scripts and help
aside): keys in `snake_case`, states as bare names (`COMPLETED`), times in RFC 3339. Progress, logs, warnings and errors
go to standard error. On an error standard output stays empty, with two exceptions: `deployment create --wait` prints the
deployment also when the wait fails, because it goes on holding GPUs, and `rollout bench` prints what it has measured
when it is interrupted.

| `--output` | standard output gets |
| --- | --- |
| `json` | one JSON value, indented |
| `jsonl` | one JSON object in each line: the items of a list; for `hotload wait` a line for each change |
| `table` | a table, for eyes |
| `id` | one id in each line, for shells |

| exit code | means |
| --- | --- |
| 0 | done |
| 1 | the operation failed; a hot-load that ended as FAILED is one |
| 2 | wrong usage or configuration |
| 130 | interrupted (Ctrl-C); standard error says what goes on at the service |
| 143 | terminated (SIGTERM); as above |

An error is two lines: what happened, and what to do next. With `--errors json` it is one JSON object instead:
`{{"error": {{"type", "code", "message", "hint", "request_id"}}}}`.

Settings come from options, then from [environment variables](environment.md), then from defaults. What an error class
means is in [errors](errors.md).
"""

ENVIRONMENT_HEAD = """# Environment variables

{made}

An argument or option wins over a variable, a variable over the default. Blank means unset. Where a setting has several
variables, the first that is set wins. All problems are reported at once, each with the variable's name and meaning.
`cwtrain doctor` shows every setting and where it came from, with secrets masked, and names variables that look like
settings and are none.
"""

HOOKS_HEAD = """# Hooks

{made}

What a plugin may implement. [How to write one](../how-to/write-a-plugin.md) shows a whole plugin.

The kind of a hook says how it is called, and what becomes of an exception in it:

| kind | is | an exception |
| --- | --- | --- |
| register | asked once, the answers of all plugins are put together | marks the plugin broken, with one warning; the others stay |
| choose | asked in turn until one has an opinion; `None` is none | reaches the caller, with a note that names the plugin |
| guard | asked one after the other before something is done | is a veto: it reaches the caller, and nothing was written |
| observe | told of something that happened | is logged once for each plugin and hook, counted, and goes no further |

The plugin that was registered last is called first; `hookimpl(tryfirst=True)` and `hookimpl(trylast=True)` move one. An
implementation may leave out arguments that it does not need. A hook that this version does not have is an error, unless
it is marked `hookimpl(optionalhook=True)`. An argument or a hook may be added in a minor version; one is removed or
renamed only in a major version, after it was deprecated in a minor one.

Nothing is loaded at `import cwtrain`. Plugins are found in the entry-point group `cwtrain` when they are first asked;
`CWTRAIN_DISABLED_PLUGINS`, `CWTRAIN_STRICT_PLUGINS` and `CWTRAIN_TRACE_PLUGINS` are in
[environment variables](environment.md). `cwtrain plugins list` shows what there is and what is broken.

`HotLoader` asks the guard and tells of every step of a publish. `Publisher`, which stands behind every trainer's adapter,
asks for a name and for a choice, has the sync done through its hook (core's own publish is the plugin that is asked
last), and tells of what was written; adapters tell of it on their other ranks. Samplers tell of rollouts.
"""

EVENTS_HEAD = """## Events

Frozen data in `cwtrain.events`. Each has `at` (UTC) and `run_id`. `cwtrain.events.to_json` turns one into plain JSON data
with its name under `kind`. More fields with defaults, and more events, may come: keep a `case _` when you match.
"""

SECTIONS = (
    ("cwtrain.config", "ApiConfig", "The API", ""),
    (
        "cwtrain.config",
        "StorageConfig",
        "The object store",
        "Credentials, profiles and the AWS endpoint settings (`AWS_ENDPOINT_URL_S3`, `AWS_PROFILE`, ...) are read by "
        "boto3 as usual.",
    ),
    (
        "cwtrain.config",
        "HotLoadConfig",
        "Hot-loads of a trainer",
        "`python -m cwtrain.integrations.preflight` checks them. A `CWTRAIN_HOTLOAD_*` variable that is not in the table is warned about, with the nearest name.",
    ),
    ("cwtrain.config", "PluginConfig", "Plugins", ""),
    ("cwtrain_rollout", "RolloutConfig", "Rollouts", "Read by `cwtrain_rollout`."),
)

ENVIRONMENT_TAIL = """## The command line

| variable | meaning |
| --- | --- |
| `NO_COLOR` | tables have no colour |
| `TERM` | `dumb` makes progress plain lines |
"""


# Commands ------------------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Return docs/reference/cli.md."""
    root = importlib.import_module("cwtrain.cli._root").root
    context = click.Context(root, info_name="cwtrain", **root.context_settings)
    parts = [CLI_HEAD.format(made=MADE)]
    parts.append(
        "## Global options\n\nThey stand before the group, or after a command; a plugin's command may take them before the group only.\n"
    )
    parts.append(_options(root, context))
    names = root.list_commands(context)
    core = [name for name in names if name in root._lazy]
    parts += _commands(root, context, core)
    if others := sorted(set(names) - set(core)):
        parts.append("## Commands of plugins\n\nThey are there where the distribution that brings them is installed.\n")
        parts += _commands(root, context, others, level=3)
    return "\n".join(parts)


def _commands(group: click.Group, context: click.Context, names: list[str], level: int = 2) -> Iterator[str]:
    for name in names:
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        inner = click.Context(command, info_name=name, parent=context, **command.context_settings)
        yield f"{'#' * level} {inner.command_path}\n\n{_prose(command.help or '')}\n"
        if isinstance(command, click.Group):
            yield from _commands(command, inner, command.list_commands(inner), level + 1)
            continue
        usage = " ".join([inner.command_path, *command.collect_usage_pieces(inner)])
        yield f"```text\n{usage}\n```\n"
        if options := _options(command, inner):
            yield options
        if example := getattr(command, "example", ""):
            yield f"```bash\n{example}\n```\n"


def _options(command: click.Command, context: click.Context) -> str:
    rows = []
    for item in command.params:
        if not isinstance(item, click.Option) or item.hidden:
            continue
        names = ", ".join(f"`{name}`" for name in (*item.opts, *item.secondary_opts))
        if not item.is_flag:
            names += f" {_cell(item.make_metavar(context))}"
        text, default = item.help or "", _default(item)
        if match := re.search(r"\s*\[(?:(env var: .*?)(?:; )?)?(?:default: (.*))?\]$", text):
            text = text[: match.start()] + (f" Variable: {match[1][9:]}." if match[1] else "")
            default = match[2] or default
        rows.append(f"| {names} | {_cell(text)} | {_cell(default)} |")
    if not rows:
        return ""
    return "\n".join(["| option | meaning | default |", "| --- | --- | --- |", *rows, ""])


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    if option.is_flag or option.multiple:
        return ""
    value = option.to_info_dict()["default"]
    return "" if value is None else str(value)


def _prose(text: str) -> str:
    """Return a docstring as Markdown."""
    lines = [line.strip() for line in re.sub(r"\x08", "", text).strip().splitlines()]
    return re.sub(r"``([^`]+)``", r"`\1`", re.sub(r"(?<!`)(<\w[\w ]*>)(?!`)", r"`\1`", "\n".join(lines)))


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("\n", " ")


# Settings ------------------------------------------------------------------------------------------------------------


def environment_page() -> str:
    """Return docs/reference/environment.md."""
    from cwtrain.config import describe

    parts = [ENVIRONMENT_HEAD.format(made=MADE)]
    for module, name, title, about in SECTIONS:
        rows = []
        for setting in describe(getattr(importlib.import_module(module), name)):
            variables = ", then ".join(f"`{variable}`" for variable in setting.variables)
            default = "required" if setting.required else f"`{setting.default}`" if setting.default else ""
            secret = " (secret)" if setting.secret else ""
            rows.append(f"| {variables} | {_cell(setting.help)}{secret} | {_cell(default)} |")
        parts.append(f"## {title}\n" + (f"\n{about}\n" if about else ""))
        parts.append("\n".join(["| variable | meaning | default |", "| --- | --- | --- |", *rows, ""]))
    return "\n".join([*parts, ENVIRONMENT_TAIL])


# Hooks ---------------------------------------------------------------------------------------------------------------


def hooks_page() -> str:
    """Return docs/reference/hooks.md."""
    from cwtrain import events
    from cwtrain.plugins import specs

    parts = [HOOKS_HEAD.format(made=MADE)]
    rows = [
        f"| [`{name}`](#{name}) | {kind} | {_first_line(getattr(specs, name))} |" for name, kind in specs.KINDS.items()
    ]
    parts.append("\n".join(["| hook | kind | |", "| --- | --- | --- |", *rows, ""]))
    for name, kind in specs.KINDS.items():
        hook = getattr(specs, name)
        arguments = ", ".join(f"{key}: {value}" for key, value in hook.__annotations__.items() if key != "return")
        signature = f"def {name}({arguments}) -> {hook.__annotations__['return']}: ..."
        parts.append(f"## {name}\n\n```python\n{signature}\n```\n")
        parts.append(f"*{kind}*. {_prose(hook.__doc__)}\n")
    parts.append(EVENTS_HEAD)
    kinds = [getattr(events, name) for name in events.__all__]
    rows = []
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, events.Event)) or kind is events.Event:
            continue
        fields = ", ".join(f"`{field.name}`" for field in attrs.fields(kind) if field.name not in ("at", "run_id"))
        rows.append(f"| `{kind.__name__}` | {_cell(kind.__doc__ or '')} | {fields} |")
    parts.append("\n".join(["| event | means | fields |", "| --- | --- | --- |", *rows, ""]))
    return "\n".join(parts)


def _first_line(function: object) -> str:
    return _cell((function.__doc__ or "").strip().splitlines()[0])


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/cli.md": cli_page,
    "docs/reference/environment.md": environment_page,
    "docs/reference/hooks.md": hooks_page,
    "docs/reference/faults.md": lambda: faults_page(MADE),
}


def stale() -> list[str]:
    """Return the pages that are not what the code says."""
    return [
        name
        for name, make in PAGES.items()
        if not (ROOT / name).exists() or (ROOT / name).read_text(encoding="utf-8") != make()
    ]


def main() -> None:
    """Write the pages, or with ``--check`` look at them."""
    needed.need("cwtrain", "cwtrain_emulator", "cwtrain_rollout", "cwtrain_slime")
    if "--check" in sys.argv[1:]:
        if found := stale():
            sys.exit(f"run python tools/gen_reference.py: {', '.join(found)} is not what the code says")
        return
    for name, make in PAGES.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
