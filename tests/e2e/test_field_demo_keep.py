"""The demo's page can be looked at when the training is over.

The kind: something that is shown, and gone before it can be looked at.
"""

from __future__ import annotations

import re
import select
import shutil
import signal
import urllib.request
from pathlib import Path

from helpers.run_cli import start_with_heartbeat


def test_what_is_kept_is_served_until_it_is_interrupted() -> None:
    process = start_with_heartbeat(0.05, "demo", "--keep", "--steps", "2", "--replicas", "1")
    assert process.stderr is not None
    root = ""
    try:
        for line in process.stderr:
            if found := re.search(r"its page is (http://\S+?)/?; Ctrl-C", line):
                for _ in range(100):  # many heartbeats long
                    with urllib.request.urlopen(found[1].partition("#")[0], timeout=30) as answer:
                        assert answer.status == 200
                assert select.select([process.stderr], [], [], 0)[0] == [], "what serves does not wait"
                process.send_signal(signal.SIGINT)
            if found := re.search(r"everything that was written is in (\S+)", line):
                root = found[1]
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert '"weights_match": true' in out
    assert process.returncode == 0
    assert (Path(root) / "trained").exists()
    shutil.rmtree(root)
