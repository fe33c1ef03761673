"""The documentation checker finds what it is for, and the documentation passes it."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

import check_docs


@click.group(name="cwtrain")
@click.option("--base-url")
def tool(base_url: str | None) -> None:
    """Stand in for the command line."""


@tool.group()
def hotload() -> None:
    """Stand in for a group."""


@hotload.command()
@click.option("--deployment")
@click.option("--no-wait", is_flag=True)
def publish(deployment: str, no_wait: bool) -> None:
    """Stand in for a command."""


def page(tmp_path: Path, text: str) -> check_docs.Page:
    """Return a page with this text."""
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    return check_docs.Page(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("cwtrain hotload publish --deployment x --no-wait", None),
        ("cwtrain --base-url hotload hotload publish --deployment publish", None),
        ("cwtrain hotload publish --help", None),
        ("cwtrain hotload <command>", None),
        ("DEPLOYMENT=$(cwtrain hotload publish --no-wait | jq .id)", None),
        ("cwtrain hotload publish \\\n  --deployment x > out.json 2>&1", None),
        ("cwtrain hotload push", "`cwtrain hotload` has no command 'push'"),
        ("cwtrain hotload publish --nowait", "`cwtrain hotload publish` has no option --nowait"),
        ("true && cwtrain hotload publish --deploy x", "`cwtrain hotload publish` has no option --deploy"),
    ],
)
def test_shell_examples_are_read_as_commands(line: str, problem: str | None) -> None:
    found = [check_docs.command_problem(tool, arguments) for arguments in check_docs.commands(line)]
    assert found == [problem]


def test_links_and_headings(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A Heading: `code`\n", encoding="utf-8")
    text = "[a](other.md#a-heading-code) [b](other.md#none) [c](gone.md) [d](https://example.com/x)\n"
    assert list(check_docs.links(page(tmp_path, text))) == [
        "page.md:1: link to other.md#none: no such heading",
        "page.md:1: link to gone.md, which is not there",
    ]


def test_words_are_looked_for_in_prose_only(tmp_path: Path) -> None:
    text = "A hot load.\n\n```bash\nhot load\n```\n\n`hot load`, hot-loads, and Hot Loads.\n"
    assert list(check_docs.words(page(tmp_path, text), [("hot load", "hot-load")])) == [
        "page.md:1: say 'hot-load', not 'hot load'",
        "page.md:7: say 'hot-load', not 'Hot Loads'",
    ]


def test_names_that_do_not_exist_are_found(tmp_path: Path) -> None:
    text = "`cwtrain.errors.APIError`, `cwtrain.errors.Nothing`, `NoSuchThingError`, `ValueError`, `CWTRAIN_NO_SUCH`\n"
    assert list(check_docs.names(page(tmp_path, text), "COREWEAVE_API_TOKEN")) == [
        "page.md:1: there is no cwtrain.errors.Nothing",
        "page.md:1: there is no error NoSuchThingError",
        "page.md:1: no code reads CWTRAIN_NO_SUCH",
    ]


def test_examples_keep_their_lines(tmp_path: Path) -> None:
    text = "one\n\n```python\nx = (\n```\n\n1. item\n\n   ```bash\n   cwtrain hotload push\n   ```\n"
    found = list(check_docs.examples(page(tmp_path, text), tool))
    assert found[0].startswith("page.md:4: ")
    assert found[1:] == ["page.md:10: `cwtrain hotload` has no command 'push'"]


def test_the_documentation_passes() -> None:
    assert check_docs.check() == []
