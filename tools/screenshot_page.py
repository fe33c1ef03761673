"""Take the documentation's pictures of the emulator's page, during a real run of the demo.

    python tools/screenshot_page.py                  # writes docs/images/emulator-page.png and -dark.png
    python tools/screenshot_page.py --out DIR --after 20

Needs Debian's Chromium (`apt-get install chromium fonts-dejavu-core`) and the `dev` group's playwright.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import needed

with needed.imports():
    from playwright.sync_api import Browser, Playwright, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
# A browser that looks at one page on this machine and talks to nobody else.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LIMIT_BYTES = 200_000
PATIENCE_MS = 300_000
_WATCH = re.compile(r"watch it at (http://\S+)")


def main() -> None:
    """Run the demo, look at its page twice, and stop it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images", help="folder of the pictures")
    parser.add_argument("--after", type=int, default=24, help="the version that must be served first")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    steps = arguments.after * 2 + 20
    command = [sys.executable, "-m", "cwtrain", "demo", f"--steps={steps}", "--replicas=3", "--seed=0"]
    with tempfile.TemporaryFile("w+") as sink:
        demo = subprocess.Popen(command, stdout=sink, stderr=subprocess.PIPE, text=True)
        try:
            url = page_of(demo)
            with sync_playwright() as playwright:
                browser = launch(playwright, "--font-render-hinting=none")
                take(browser, url, arguments.out / "emulator-page.png", arguments.after, width=1200)
                take(browser, url, arguments.out / "emulator-page-dark.png", arguments.after, width=390, dark=True)
                browser.close()
        finally:
            demo.terminate()
            if demo.stderr is not None:
                demo.stderr.close()
            demo.wait()


def launch(playwright: Playwright, *more_flags: str) -> Browser:
    """Start the machine's Chromium, headless, with an empty profile of its own."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        sys.exit("Chromium is missing: apt-get install -y --no-install-recommends chromium fonts-dejavu-core")
    return playwright.chromium.launch(executable_path=path, headless=True, args=[*FLAGS, *more_flags])


def page_of(demo: subprocess.Popen[str]) -> str:
    """Return the address that the demo prints."""
    assert demo.stderr is not None
    said = []
    for line in demo.stderr:
        said.append(line)
        found = _WATCH.search(line)
        if found:
            return found[1]
    sys.exit(f"the demo said no address:\n{''.join(said)}")


def take(browser: Browser, url: str, path: Path, after: int, *, width: int, dark: bool = False) -> None:
    """Write a picture of the page as it is once a version is served by every replica."""
    context = browser.new_context(
        viewport={"width": width, "height": 844},
        device_scale_factor=1,
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_function(
        """after => {
            const shown = document.querySelector(".serves-identity")?.textContent ?? "";
            return Number(shown.replace("demo-v", "")) >= after;
        }""",
        arg=after,
        timeout=PATIENCE_MS,
    )
    page.screenshot(path=path, full_page=True)
    context.close()
    size = path.stat().st_size
    print(f"{path}: {size:,} bytes")
    if size > LIMIT_BYTES:
        sys.exit(f"{path} is larger than {LIMIT_BYTES:,} bytes")


if __name__ == "__main__":
    main()
