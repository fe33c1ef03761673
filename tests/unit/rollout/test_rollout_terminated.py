"""A signal that ends the program while rollouts are under way ends it quietly: no exception is left for nobody."""

import subprocess
import sys

PROGRAM = """
import asyncio, os, signal, threading
from cwtrain_rollout.sampler import _all_or_nothing

def end(*_):
    raise SystemExit(143)

async def busy():
    while True:
        await asyncio.sleep(0)

async def main():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return await _all_or_nothing([busy() for _ in range(8)])

signal.signal(signal.SIGTERM, end)
asyncio.run(main())
"""


def test_sigterm_inside_a_batch_leaves_no_traceback():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 143
    assert done.stderr == ""
