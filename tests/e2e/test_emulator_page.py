"""The emulator's page in a real Chromium: what it shows, that it is live, and that anyone can read it."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import requests

from cwtrain_emulator import Emulator
from cwtrain_emulator.engine.model_io import make_model
from helpers import tiny_delta
from helpers.emulator_api import Api
from helpers.requirements import require
from helpers.tiny_delta import Files

ROUTE = "/emulator/v1/page"
PATIENCE_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    require("chromium")
    from playwright.sync_api import expect, sync_playwright

    from screenshot_page import launch

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        started = launch(playwright)
        yield started
        started.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a small model, vocabulary 64."""
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, vocab_size=64, hidden_size=8, context=3, seed=1, max_length=128)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Looker:
    """A page that is open in a browser, and what must not happen there."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.url = url

    def open(self) -> Looker:
        self.page.goto(self.url)
        self.page.wait_for_selector("#main:not([hidden])")
        return self

    def replica(self, deployment: str, name: str) -> list[str]:
        """Return the cells of a replica's row: name, state, identity, zone, process."""
        row = self.page.get_by_role("table", name=f"Replicas of {deployment}").get_by_role("row", name=name)
        found: list[str] = row.locator("th, td").all_inner_texts()
        return found

    def wait(self, condition: str, **values: Any) -> None:
        """Wait until a JavaScript expression over `v`, and `text(selector)`, holds for what is shown at one moment."""
        text = 'const text = (selector) => document.querySelector(selector)?.innerText ?? "";'
        self.page.wait_for_function(f"(v) => {{ {text} return {condition}; }}", arg=values)

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def looker(browser: Any, emulator: Emulator) -> Iterator[Looker]:
    made = Looker(browser, emulator.page_url)
    yield made
    made.close()


def upload(emulator: Emulator, deployment: Mapping[str, Any], identity: str, files: Files) -> None:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=emulator.s3_endpoint,
        aws_access_key_id=emulator.access_key_id,
        aws_secret_access_key=emulator.secret_access_key,
        region_name=emulator.region,
        config=Config(s3={"addressing_style": "path"}),
    )
    for name, raw in files.items():
        key = f"{deployment['spec']['hotLoad']['pathPrefix']}/{identity}/{name}"
        client.put_object(Bucket=emulator.bucket, Key=key, Body=raw)
    client.close()


def deltas(model: Files) -> tuple[Files, Files]:
    """Return a delta v1 on v0, and v2 on v1 with a wrong checksum."""
    old = tiny_delta.read_tensors(model)
    new = tiny_delta.nudged(old, seed=3, names=["lm_head.weight", "lm_head.bias"])
    newer = tiny_delta.nudged(new, seed=4, names=["lm_head.bias"])
    good = tiny_delta.delta_snapshot(old, new, version="v1", base_version="v0")
    wrong = tiny_delta.delta_snapshot(new, newer, version="v2", base_version="v1", sums={"lm_head.bias": "00000001"})
    return good, wrong


def test_an_open_page_follows_all_that_happens(browser: Any, model: Files) -> None:
    from playwright.sync_api import expect

    # The second replica swaps 3 s after the first, so that the page must be seen between the two.
    with Emulator(extra_args=["--swap-delay=3"]) as emulator:
        api = Api(emulator.base_url, emulator.admin_token)
        looker = Looker(browser, emulator.page_url).open()
        page = looker.page
        page.evaluate("window.sameDocument = true")
        expect(page.get_by_role("status")).to_contain_text("Live")
        expect(page.get_by_text("No deployment yet.")).to_be_visible()
        expect(page.get_by_text("No hot-load yet.")).to_be_visible()
        expect(page.get_by_text("No request yet.")).to_be_visible()
        expect(page.get_by_text("cwtrain deployment create")).to_be_visible()

        deployment = api.deployment(api.gateway()["spec"]["id"], emulator.bucket, name="policy")
        deployment_id, served = deployment["spec"]["id"], deployment["spec"]["model"]["name"]
        card = page.get_by_role("article", name="policy")
        expect(card).to_contain_text("Ready")
        expect(card).to_contain_text(f"cwtrain hotload publish --deployment {deployment_id}")

        upload(emulator, deployment, "v0", model)
        api.completed(deployment_id, "v0")
        loads = page.get_by_role("table", name="Hot-loads, newest first")
        expect(loads.get_by_role("row", name="v0 full")).to_contain_text("Completed")
        looker.wait('text(".serves").includes("all 2 replicas")')
        assert [looker.replica("policy", name)[1:3] for name in ("policy-00", "policy-01")] == [["Ready", "v0"]] * 2

        # A hot-load while it is under way: one replica has swapped, the other has not.
        good, wrong = deltas(model)
        upload(emulator, deployment, "v1", good)
        hot_load = api.hot_load(deployment_id, "v1", "v0")
        looker.wait(
            'text("[data-replica=policy-00]").includes("v1") && text("[data-replica=policy-01]").includes("v0")'
            " && text(`[data-hot-load='${v.id}']`).includes('In progress')",
            id=hot_load,
        )
        api.ended(hot_load)
        looker.wait('text(".serves").includes("v1") && text(".serves").includes("1 delta on v0 · all 2 replicas")')
        assert [looker.replica("policy", name)[1:3] for name in ("policy-00", "policy-01")] == [["Ready", "v1"]] * 2
        expect(loads.get_by_role("row", name="v1 delta on v0")).to_contain_text("Completed")
        expect(loads.get_by_role("row", name="v1 delta on v0")).to_contain_text(re.compile(r"\d (ms|s)\b"))
        expect(page.get_by_role("log")).to_contain_text("Hot-load v1 on policy completed")

        # One that fails says why, and the old weights stay.
        upload(emulator, deployment, "v2", wrong)
        failed = api.ended(api.hot_load(deployment_id, "v2", "v1"))
        expect(loads.get_by_role("row", name="v2 delta on v1")).to_contain_text("Failed")
        expect(page.locator(f"[data-hot-load='{failed['spec']['id']}']")).to_contain_text("Adler-32")
        looker.wait('text(".serves").includes("v1") && text("[data-replica=policy-00]").includes("Error")')
        assert looker.replica("policy", "policy-00")[1:3] == ["Error", "v1"]
        expect(page.get_by_role("article", name="policy")).to_contain_text("tensor 'lm_head.bias' has Adler-32")

        # Requests are counted, refusals are kept with their reasons.
        for number in range(5):
            answer = api.complete({"model": served, "prompt": [1, number], "max_tokens": 2})
            assert answer.status_code == 200
        for _ in range(2):
            assert api.complete({"model": "unknown", "prompt": [1]}).status_code == 404
        looker.wait('text("#f-total") === "7" && text("#f-refused") === "2" && Number(text("#f-peak")) >= 1')
        assert page.locator("#chart rect.answered").count() >= 1
        assert page.locator("#chart rect.refused").count() >= 1
        assert page.locator("#chart .bar").count() == 3
        problems = page.get_by_role("table", name="Refused requests")
        expect(problems.get_by_role("row", name="404 POST /v1/completions")).to_contain_text("2×")
        expect(problems).to_contain_text("The model `unknown` does not exist.")

        # A replica that dies is said so, and comes back as another process.
        before = looker.replica("policy", "policy-01")
        os.kill(int(before[4]), signal.SIGKILL)
        expect(problems).to_contain_text("replica policy-01 ended with code -9")
        looker.wait(
            'text("[data-replica=policy-01]").includes("Ready") && text("[data-replica=policy-01]").includes("v1")'
            ' && !text("[data-replica=policy-01]").includes(v.pid)',
            pid=before[4],
        )

        assert page.evaluate("window.sameDocument") is True
        assert looker.complaints == []
        assert {url.removeprefix(emulator.base_url)[:10] for url in looker.requested} <= {"/", "/emulator/"}
        api.close()
    expect(page.get_by_role("status")).to_contain_text("No answer")
    looker.close()


def test_who_may_look_and_what_they_see(emulator: Emulator, deployment: dict[str, Any]) -> None:
    def get(path: str, **headers: str) -> requests.Response:
        return requests.get(emulator.base_url + path, headers=headers, timeout=30, proxies={"http": ""})

    page = get("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    for answer in (page, get("/emulator/page/page.js"), get(ROUTE)):
        assert answer.status_code == 200
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert get("/", **{"If-None-Match": page.headers["ETag"]}).status_code == 304
    assert get("/emulator/page/../view.py").status_code == 404

    shown = get(ROUTE)
    assert deployment["spec"]["id"] in shown.text
    keys = json.loads((emulator.state_dir / "keys.json").read_text())
    secrets = [keys["admin_token"], keys["viewer_token"], keys["page_key"]]
    secrets += [*keys["s3_admin"], *keys["s3_service"], *keys["s3_trainer"]]
    assert not [secret for secret in secrets if secret in shown.text or secret in page.text]

    # Loopback by name alone is not enough, a page elsewhere gets nothing, and a wrong token is not "no token".
    assert get(ROUTE, Host="evil.example").status_code == 403
    assert get("/", Host="evil.example").status_code == 403
    for site in ("cross-site", "same-site"):
        assert get(ROUTE, **{"Sec-Fetch-Site": site}).status_code == 403
    assert get(ROUTE, **{"Sec-Fetch-Site": "same-origin"}).status_code == 200
    assert get(ROUTE, Authorization="Bearer wrong").status_code == 401
    assert get(ROUTE, Authorization=f"Bearer {emulator.viewer_token}").status_code == 200
    assert requests.post(emulator.base_url + ROUTE, timeout=30, proxies={"http": ""}).status_code == 501


@pytest.fixture(scope="module")
def story(emulator: Emulator, model: Files) -> Iterator[str]:
    """The name of a deployment with everything that the page shows."""
    api = Api(emulator.base_url, emulator.admin_token)
    deployment = api.deployment(api.gateway()["spec"]["id"], emulator.bucket)
    deployment_id = deployment["spec"]["id"]
    good, wrong = deltas(model)
    for identity, files in (("v0", model), ("v1", good), ("v2", wrong)):
        upload(emulator, deployment, identity, files)
    api.completed(deployment_id, "v0")
    api.completed(deployment_id, "v1", "v0")
    api.ended(api.hot_load(deployment_id, "v2", "v1"))
    api.complete({"model": deployment["spec"]["model"]["name"], "prompt": [1], "max_tokens": 1})
    api.complete({"model": f"a-model-that-nobody-has-made-{'x' * 60}", "prompt": [1]})
    yield deployment["spec"]["name"]
    api.ok("DELETE", f"/deployments/{deployment_id}")
    api.close()


_TOO_WIDE = """() => {
    const root = document.documentElement;
    const wide = [...document.querySelectorAll("main *, header *")].filter((node) => {
        const box = node.getBoundingClientRect();
        return box.width > 1 && (box.right > root.clientWidth + 0.5 || box.left < -0.5);
    });
    return [root.scrollWidth - root.clientWidth, ...wide.map((node) => node.outerHTML.slice(0, 120))];
}"""


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_is_wider_than_the_screen(browser: Any, emulator: Emulator, story: str, width: int) -> None:
    looker = Looker(browser, emulator.page_url, viewport={"width": width, "height": 844}).open()
    looker.page.wait_for_selector(f"[data-replica='{story}-00']")
    assert looker.page.evaluate(_TOO_WIDE) == [0]
    assert looker.page.locator("h2").all_inner_texts()[0].startswith("Deployments")
    looker.close()


# Contrast of every piece of text with what is behind it, as WCAG counts it; below 4.5 is below AA.
_CONTRAST = """() => {
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => {
        const [r, g, b] = parts(colour).slice(0, 3).map((value) => {
            const part = value / 255;
            return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if ((parts(colour)[3] ?? 1) === 1) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const poor = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("noscript")) continue;
        const style = getComputedStyle(node);
        const two = [light(node.closest("svg") ? style.fill : style.color), light(behind(node))].sort((a, b) => b - a);
        const ratio = (two[0] + 0.05) / (two[1] + 0.05);
        if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${walker.currentNode.data.slice(0, 40)}`);
    }
    return [light(getComputedStyle(document.body).backgroundColor), poor];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read(browser: Any, emulator: Emulator, story: str, scheme: str) -> None:
    looker = Looker(browser, emulator.page_url, color_scheme=scheme, viewport={"width": 1200, "height": 900}).open()
    looker.page.wait_for_selector(f"[data-replica='{story}-00']")
    background, poor = looker.page.evaluate(_CONTRAST)
    assert background < 0.02 if scheme == "dark" else background > 0.85
    assert poor == []
    assert looker.complaints == []
    looker.close()


def test_what_a_screen_reader_and_a_keyboard_get(looker: Looker, story: str) -> None:
    page = looker.open().page
    page.wait_for_selector(f"[data-replica='{story}-00']")
    levels = [int(tag[1]) for tag in page.locator("h1, h2, h3").evaluate_all("all => all.map((one) => one.tagName)")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.locator("table").count() == page.locator("table > caption").count()
    assert page.locator("thead th:not([scope=col]), tbody th:not([scope=row])").count() == 0
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("[aria-live=polite]").count() == 1
    drawing = page.get_by_role("img", name=re.compile("^Requests and hot-loads of the last"))
    assert drawing.count() == 1
    # Every state is a word beside its sign; a deployment whose replicas are in error is not called ready.
    card = page.locator("[data-deployment]", has=page.locator(f"[data-replica='{story}-00']"))
    assert {word.strip() for word in card.locator(".state").all_inner_texts()} == {"Error"}
    words = {word.strip() for word in page.locator(".state").all_inner_texts()}
    assert {"Completed", "Failed", "Error"} <= words


# From here on the page is shown made-up answers, for what a real emulator does not say on demand.


def made_up(emulator: Emulator, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(emulator.base_url + ROUTE, timeout=30, proxies={"http": ""}).json()
    return {**found, **changes}


def hot_loads(number: int, now: float, **changes: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": f"id-{index}", "deployment_id": "d", "deployment": "policy", "identity": f"v{index}",
            "type": "DELTA", "previous": f"v{index - 1}", "full": "v0", "deltas": index, "state": "COMPLETED",
            "created_at": now - 10 * (number - index), "finished_at": now - 10 * (number - index) + 1, "reason": "",
            "replicas": [{"name": "r", "state": "READY", "started_at": None, "finished_at": None}],
            **changes,
        }
        for index in reversed(range(number))
    ]  # fmt: skip


def test_text_is_never_markup(looker: Looker, emulator: Emulator) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    replica = {"name": evil, "zone": evil, "state": evil, "identity": evil, "error": evil, "pid": 1}
    deployment = {
        "id": evil, "name": evil, "model": evil, "status": "ERROR", "reason": evil, "hot_loads": True,
        "identity": evil, "full_identity": evil, "deltas": 1, "endpoints": [evil], "replicas": [replica],
    }  # fmt: skip
    problem = {
        "source": "request",
        "what": evil,
        "status": 500,
        "message": evil,
        "request_id": evil,
        "at": 1,
        "count": 1,
    }
    loads = hot_loads(1, time.time(), identity=evil, previous=evil, deployment=evil, reason=evil, state="FAILED")
    answer = made_up(emulator, deployments=[deployment], hot_loads=loads, problems=[problem])
    looker.page.route(f"**{ROUTE}", lambda route: route.fulfill(json=answer))
    page = looker.open().page
    page.wait_for_selector("[data-replica]")
    assert page.title() == "cwtrain emulator"
    assert page.locator("main img, main script").count() == 0
    assert page.get_by_text(evil).count() >= 6
    assert looker.complaints == []


def test_many_hot_loads_are_shown_when_asked_for_by_keyboard(looker: Looker, emulator: Emulator) -> None:
    answer = made_up(emulator, hot_loads=hot_loads(60, time.time()))
    looker.page.route(f"**{ROUTE}", lambda route: route.fulfill(json=answer))
    page = looker.open().page
    rows = page.locator("[data-hot-load]")
    page.wait_for_selector("[data-hot-load]")
    assert rows.count() == 10
    button = page.get_by_role("button", name="Show 50 earlier ones")
    button.focus()
    page.keyboard.press("Enter")
    looker.wait('document.querySelectorAll("[data-hot-load]").length === 60')
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    assert page.locator("[data-hot-load] th").first.inner_text().startswith("v59")


def test_beyond_loopback_the_page_asks_for_a_token(looker: Looker, emulator: Emulator) -> None:
    from playwright.sync_api import expect

    answer = made_up(emulator)
    given = []

    def guarded(route: Any) -> None:
        token = route.request.headers.get("authorization", "")
        given.append(token)
        if token == "Bearer right":
            route.fulfill(json=answer)
        else:
            route.fulfill(status=401, json={"code": 16, "message": "no"})

    page = looker.page
    page.route(f"**{ROUTE}", guarded)
    page.goto(looker.url)
    field = page.get_by_label("needs a token")
    expect(field).to_be_visible()
    field.fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("does not know this token")
    field.fill("right")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("heading", name="Deployments")).to_be_visible()
    expect(field).to_be_hidden()

    # The address that `serve` prints has the token; it does not stay there.
    page.goto("about:blank")
    page.goto(f"{looker.url}#token=right")
    expect(page.get_by_role("heading", name="Deployments")).to_be_visible()
    assert page.url == looker.url
    assert given[:2] == ["", "Bearer wrong"]
