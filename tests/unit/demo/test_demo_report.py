from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from cwtrain_demo.report import human_bytes, report_html
from cwtrain_demo.result import DemoResult, Step, Version


def result(rewards: list[float], **changes: object) -> DemoResult:
    versions = [
        Version(
            version=number,
            identity=f"demo-v{number:06d}",
            kind="FULL" if number % 3 == 0 else "DELTA",
            hot_load_id=f"id-{number}",
            bytes=100_000 // (number + 1),
            ratio=1.5,
            changed_tensors=5,
            tensors=8,
            density=0.4,
            write_seconds=0.01,
            encode_seconds=0.01,
            upload_seconds=0.02,
            hot_load_seconds=0.1,
            seconds=0.2,
        )
        for number in range(len(rewards) + 1)
    ]
    steps = [
        Step(step=i, version=i, reward=reward, samples=4, tokens=9, logprob_mismatches=0, example="ab<c&", seconds=0.1)
        for i, reward in enumerate(rewards)
    ]
    made = DemoResult(
        seed=3,
        engine="numpy",
        steps=steps,
        versions=versions,
        seconds={"start": 1.0, "total": 2.0},
        replicas={"r<0>": versions[-1].identity},
        weights_match=True,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


class Checker(HTMLParser):
    """Finds tags that stay open and everything that would make a request."""

    VOID = frozenset({"meta", "rect", "line", "circle", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.wrong += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "action", "xlink:href")]
        if tag in ("script", "link", "img", "iframe"):
            self.wrong.append(tag)
        if tag not in self.VOID or self.get_starttag_text()[-2:] != "/>":
            self.open += [tag] if tag not in ("meta",) else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing")


def test_the_page_is_well_formed_and_asks_for_nothing() -> None:
    page = report_html(result([0.05, 0.2, 0.6, 0.9, 0.95, 0.97, 0.99]))
    checker = Checker()
    checker.feed(page)
    assert checker.wrong == []
    assert checker.open == []
    assert not re.search(r"https?:|url\(|@import", page)
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert "ab&lt;c&amp;" in page
    assert "r&lt;0&gt;" in page
    assert "demo-v000007" in page
    assert page.count("<svg") == 2


def test_the_page_says_what_went_wrong() -> None:
    page = report_html(result([0.9, 0.5], weights_match=False, weights_differ={"replica-1": ["lm_head.bias"]}))
    assert "the reward did not rise" in page
    assert "replica-1: lm_head.bias" in page


def test_the_reward_is_compared_between_the_first_and_the_last_fifth() -> None:
    made = result([0.0, 0.2, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.1, 0.3])
    assert (made.reward_start, made.reward_end) == pytest.approx((0.1, 0.2))
    assert made.reward_rose
    assert made.ok
    assert made.problems() == []
    flat = result([0.4] * 5)
    assert not flat.reward_rose
    assert not flat.ok
    assert not result([0.1, 0.9], weights_match=False).ok


def test_the_result_is_plain_json() -> None:
    data = json.loads(json.dumps(result([0.1, 0.9]).as_json()))
    assert data["reward_rose"] is True
    assert data["replicas"] == {"r<0>": "demo-v000002"}
    assert [version["kind"] for version in data["versions"]] == ["FULL", "DELTA", "DELTA"]
    assert data["seconds"] == {"start": 1.0, "total": 2.0}


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (43_100, "43.1 KB"), (2_000_000, "2.0 MB"), (3_100_000_000, "3.1 GB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text
