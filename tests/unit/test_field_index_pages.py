"""What a package index shows of each distribution leads somewhere: there is no repository around it there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from check_docs import LINK, Page

PACKAGES = sorted((Path(__file__).resolve().parents[2] / "packages").glob("*/pyproject.toml"))


def leads_somewhere(url: str) -> bool:
    """Say whether a link works wherever its page is shown."""
    parts = urlsplit(url)
    return parts.scheme == "https" and bool(parts.hostname) and "." in parts.hostname


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.name)
def test_each_distribution_names_a_url_and_links_to_nothing_beside_itself(path: Path) -> None:
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    assert project["urls"]
    assert all(map(leads_somewhere, project["urls"].values()))
    page = Page(path.parent / project["readme"])
    links = [match[1] for match in LINK.finditer(page.prose)]
    assert [link for link in links if not (leads_somewhere(link) or link.removeprefix("#") in page.anchors())] == []
