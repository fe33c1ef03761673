"""Check that the documentation says what is so.

    python tools/check_docs.py

- links between files, and to headings, resolve;
- the glossary's "do not say" phrases do not appear in prose;
- `cwtrain ...` in shell examples and in inline code is a command with options that exist;
- shell examples can work as written: what a page installs brings the commands that it runs, its variables are set, the
  model that it asks is one that it made, scripts are there, and nothing is waited for in a loop;
- dotted names (`cwtrain.hotload.delta`), classes of errors, variables (`CWTRAIN_...`) and source paths exist;
- Python examples compile;
- the reference pages name every command, option, error and setting; the architecture page every module of core.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import needed

with needed.imports():
    import click

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```\s*$", re.DOTALL | re.MULTILINE
)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
DOTTED = re.compile(r"^cwtrain(_\w+)?(\.\w+)+(\(.*\))?$")
VARIABLE = re.compile(r"\b(?:CWTRAIN|COREWEAVE|CW|AWS)_[A-Z0-9_]+[A-Z0-9]\b")
ERROR = re.compile(r"^[A-Z]\w+Error$")
SOURCE = re.compile(r"^[\w./-]+/[\w-]+\.(py|toml|md|sh)$")
# Words after which a command is quoted in part, or a placeholder stands.
OPEN_ENDED = {"...", "…"}


class Block(NamedTuple):
    """A fenced example."""

    language: str
    text: str
    line: int


class Page:
    """One Markdown file, split into prose and examples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        self.blocks: list[Block] = []
        for match in FENCE.finditer(self.text):
            indent = match["indent"]
            lines = [line.removeprefix(indent) for line in match["text"].splitlines()]
            self.blocks.append(Block(match["language"], "\n".join(lines) + "\n", self.line(match.start()) + 1))
        # Blank lines keep the line numbers of what follows.
        self.prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), self.text)

    def line(self, position: int) -> int:
        """Return the line number of a character."""
        return self.text.count("\n", 0, position) + 1

    def inline(self) -> Iterator[tuple[int, str]]:
        """Yield (line, text) of every piece of inline code."""
        for match in INLINE.finditer(self.prose):
            yield self.prose.count("\n", 0, match.start()) + 1, match[1].strip()

    def anchors(self) -> set[str]:
        """Return the anchors of the headings, as code hosts make them."""
        titles = (re.sub(r"[`*]", "", match[1]).lower() for match in HEADING.finditer(self.prose))
        return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def pages() -> list[Page]:
    """Return every Markdown page that is published."""
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
    return [Page(path) for path in sorted(found)]


def links(page: Page) -> Iterator[str]:
    """Yield what is wrong with a page's links."""
    for match in LINK.finditer(page.prose):
        target = match[1]
        where = f"{page.name}:{page.prose.count(chr(10), 0, match.start()) + 1}"
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        if not path.exists():
            yield f"{where}: link to {target}, which is not there"
        elif anchor and path.suffix == ".md" and anchor not in Page(path).anchors():
            yield f"{where}: link to {target}: no such heading"


def forbidden() -> list[tuple[str, str]]:
    """Return (phrase, word to use) from the glossary's last column."""
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| ([^|]*) ?\|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.M
    )
    return [(phrase, word.strip()) for word, phrases in rows for phrase in INLINE.findall(phrases)]


def words(page: Page, phrases: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the glossary's forbidden phrases that a page uses."""
    if page.path == ROOT / "docs/glossary.md":
        return
    prose = INLINE.sub("", page.prose)
    for phrase, word in phrases:
        for match in re.finditer(rf"(?<![\w-]){re.escape(phrase)}s?\b", prose, re.IGNORECASE):
            yield f"{page.name}:{prose.count(chr(10), 0, match.start()) + 1}: say {word!r}, not {match[0]!r}"


def commands(text: str) -> Iterator[list[str]]:
    """Yield the argument lists of `cwtrain` calls in a piece of shell."""
    text = re.sub(r"\\\n\s*", " ", text)
    for line in text.splitlines():
        for part in re.split(r"\|\||&&|[|;&]|\$\(|\)|`", line.partition(" #")[0]):
            try:
                arguments = shlex.split(re.sub(r"(?<=\s)\d?>+\s*\S*|<\s*\S+", "", part.strip().rstrip('"')))
            except ValueError:
                continue
            while arguments and (arguments[0] in ("uv", "run", "eval", "exec", "time", "!") or "=" in arguments[0]):
                arguments = arguments[1:]
            if arguments[:1] == ["cwtrain"]:
                yield arguments[1:]


def command_problem(root: click.Command, arguments: list[str]) -> str | None:
    """Return what is wrong with a call of `cwtrain`, or None."""
    command, context, path = root, click.Context(root, info_name="cwtrain"), "cwtrain"
    before: click.Option | None = None
    for word in arguments:
        if word in OPEN_ENDED or word.startswith(("<", "[")):
            return None
        options = {name: item for item in command.params if isinstance(item, click.Option) for name in _names(item)}
        value_of, before = before, None
        if value_of is not None and not value_of.is_flag:
            continue
        if word.startswith("-") and word != "-":
            name, _, attached = word.partition("=")
            if name not in options and name not in ("--help", "-h", "--version"):
                return f"`{path}` has no option {name}"
            before = None if attached else options.get(name)
        elif isinstance(command, click.Group):
            inner = command.get_command(context, word)
            if inner is None:
                return f"`{path}` has no command {word!r}"
            command, context, path = inner, click.Context(inner, info_name=word, parent=context), f"{path} {word}"
    return None


def _names(option: click.Option) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def examples(page: Page, root: click.Command) -> Iterator[str]:
    """Yield what is wrong with a page's examples and inline commands."""
    for block in page.blocks:
        if block.language == "python":
            try:
                compile(block.text, page.name, "exec")
            except SyntaxError as error:
                yield f"{page.name}:{block.line + (error.lineno or 1) - 1}: {error.msg}"
        elif block.language in ("bash", "sh", "shell", "console"):
            for arguments in commands(block.text):
                if problem := command_problem(root, arguments):
                    yield f"{page.name}:{block.line}: {problem}"
    for line, text in page.inline():
        if text.startswith("cwtrain "):
            for arguments in commands(text):
                if problem := command_problem(root, arguments):
                    yield f"{page.name}:{line}: {problem}"


SHELLS = ("bash", "sh", "shell", "console")
# Commands that a distribution or an extra of the same name brings; cwtrain-core brings the rest.
BROUGHT = ("demo", "emulator", "miles", "rollout", "slime")
INSTALL = re.compile(r"pip install ([^\n#|&;]*)")
DISTRIBUTION = re.compile(r"cwtrain-([\w-]+)(?:\[([\w,-]+)\])?")
SET = re.compile(r"(?:^|[\s;(])([A-Za-z_]\w*)=|\bfor (\w+) in\b|\bread (?:-\w+ )*(\w+)", re.MULTILINE)
USED = re.compile(r"(?<!\\)\$\{?([A-Za-z_]\w*)(?![\w]*[:-])")
READER = frozenset({"ARGS", "HOME", "PATH", "PWD", "TMPDIR", "USER"})
"""Variables that a reader has; ARGS are the flags that a trainer is launched with."""


def runnable(page: Page, *, given: frozenset[str]) -> Iterator[str]:
    """Yield why a page's shell examples, run one after the other, cannot work; ``given`` are the reader's variables."""
    text, known = "", set(given)
    served = set(re.findall(r'"model":\s*\{\s*"name":\s*"([^"$]+)"', page.text))
    for block in page.blocks:
        if block.language not in SHELLS:
            continue
        where = f"{page.name}:{block.line}"
        text += block.text
        known |= {name for match in SET.findall(block.text) for name in match if name}
        if "emulator.env" in block.text:
            known |= {"COREWEAVE_API_URL", "COREWEAVE_API_TOKEN"}
        # Nothing is expanded between single quotes, nor in a document whose end is quoted.
        expanded = re.sub(r"<<-?\s*'(\w+)'.*?^\1$", "", block.text, flags=re.DOTALL | re.MULTILINE)
        for name in sorted(set(USED.findall(re.sub(r"'[^'\n]*'", "", expanded))) - known):
            yield f"{where}: nothing before sets ${name}"
        for model in re.findall(r'"model":\s*"([^"$]+)"', block.text):
            if model not in served:
                yield f"{where}: asks the model {model!r}, which the page has not made"
        for script in re.findall(r"\bpython ((?:tools|recipes|benchmarks)/[\w./-]+\.py)", block.text):
            if not (ROOT / script).exists():
                yield f"{where}: there is no {script}"
        if re.search(r"^\s*(until|while)\b", block.text, re.MULTILINE):
            yield f"{where}: waits in a loop: use a command that returns when it is ready"
    yield from not_installed(page, text)


def not_installed(page: Page, text: str) -> Iterator[str]:
    """Yield the commands in ``text`` that nothing brings of what it installs; a page that installs nothing has all."""
    installed = DISTRIBUTION.findall(" ".join(INSTALL.findall(text)))
    if not installed:
        return
    brought = {word for name, extras in installed for word in [name, *extras.split(",")]}
    for arguments in commands(text):
        command = next((word for word in arguments if not word.startswith("-")), "")
        if not brought & {"core", "demo", "miles", "rollout", "slime", "nemo-rl"}:
            yield f"{page.name}: runs `cwtrain {command}`, and nothing that it installs brings `cwtrain`"
            return
        by = {command, "all", *(["demo"] if command in ("emulator", "rollout") else [])}
        if command in BROUGHT and not brought & by:
            yield f"{page.name}: runs `cwtrain {command}`, and nothing that it installs brings that command"


def names(page: Page, sources: str) -> Iterator[str]:
    """Yield names that a page mentions and that do not exist."""
    errors = importlib.import_module("cwtrain.errors")
    for line, text in page.inline():
        where = f"{page.name}:{line}"
        if DOTTED.match(text) and not exists(text.partition("(")[0]):
            yield f"{where}: there is no {text}"
        elif (
            ERROR.match(text)
            and not hasattr(errors, text)
            and not re.search(rf"^class {text}\b|{text} =", sources, re.M)
        ):
            if not hasattr(importlib.import_module("builtins"), text):
                yield f"{where}: there is no error {text}"
        elif SOURCE.match(text) and not text.startswith("/") and not path_exists(text):
            yield f"{where}: there is no file {text}"
    if page.path.name == "CHANGELOG.md":
        return
    for match in VARIABLE.finditer(page.text):
        if match[0] not in sources:
            yield f"{page.name}:{page.line(match.start())}: no code reads {match[0]}"


def exists(dotted: str) -> bool:
    """Say whether a dotted name can be imported, or names a distribution's entry point group."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            try:
                found = getattr(found, part)
            except Exception as error:  # noqa: BLE001 - a name of a later version answers with an error of ours
                return "yet" in str(error) or "this version" in str(error)
        return True
    return False


def path_exists(text: str) -> bool:
    """Say whether a path is one of the repository, or the end of one below a package's source."""
    return (
        (ROOT / text).exists() or any(ROOT.glob(f"packages/*/src/*/{text}")) or any(ROOT.glob(f"packages/*/src/{text}"))
    )


def reference(root: click.Command) -> Iterator[str]:
    """Yield what the reference pages leave out."""
    yield from lacking("docs/reference/errors.md", importlib.import_module("cwtrain.errors").__all__)
    yield from lacking("docs/reference/cli.md", sorted(set(command_words(root, "cwtrain", None))))
    config = importlib.import_module("cwtrain.config")
    variables = {name for item in config.CONFIGS for setting in config.describe(item) for name in setting.variables}
    yield from lacking("docs/reference/environment.md", sorted(variables))

    core = ROOT / "packages/cwtrain-core/src/cwtrain"
    modules = [str(path.relative_to(core)) for path in core.glob("*/*.py") if not path.name.startswith("_")]
    yield from lacking("docs/explanation/architecture.md", sorted(modules))


def lacking(name: str, wanted: list[str]) -> Iterator[str]:
    """Yield the words that a reference page does not contain."""
    path = ROOT / name
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for word in wanted:
        if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text):
            yield f"{name}: does not mention {word}"


def command_words(command: click.Command, path: str, parent: click.Context | None) -> Iterator[str]:
    """Yield every command's path and every option's name."""
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    if path != "cwtrain":
        yield path
    for item in command.params:
        if isinstance(item, click.Option) and not item.hidden:
            yield from _names(item)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from command_words(inner, f"{path} {name}", context)


def source_text() -> str:
    """Return all code in one string: what it never mentions, no page may promise."""
    files = [
        *ROOT.glob("packages/*/src/**/*.py"),
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("tools/*.py"),
        ROOT / ".ci/run",
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files if path.exists())


def cli() -> click.Command:
    """Return the whole command tree, plugins' commands included."""
    found = importlib.import_module("cwtrain.cli._root").root
    assert isinstance(found, click.Command)
    return found


def check() -> list[str]:
    """Return every problem, in the order of the pages."""
    root, phrases, sources = cli(), forbidden(), source_text()
    problems: list[str] = []
    for page in pages():
        problems += [*links(page), *words(page, phrases), *examples(page, root), *names(page, sources)]
        problems += runnable(page, given=frozenset(VARIABLE.findall(sources)) | READER)
    return problems + list(reference(root))


def main() -> None:
    """Print the problems."""
    needed.need("cwtrain", "cwtrain_emulator", "cwtrain_rollout", "cwtrain_slime")
    os.chdir(ROOT)
    problems = check()
    print(*problems, sep="\n" if problems else "")
    if problems:
        sys.exit(f"{len(problems)} problem(s) in the documentation")
    print(f"{len(pages())} pages: all good")


if __name__ == "__main__":
    main()
