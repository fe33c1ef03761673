"""Run a program that must not outlive its parent: ``python _guard.py PARENT_PID PROGRAM ARG...``.

On Linux the kernel is asked to kill the program when the parent dies, and this process becomes the program. Elsewhere
this process stays, watches standard input (a pipe that the parent holds open), and kills the program at its end.
Imports little: it is on the way of every start.
"""

import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux only; nothing elsewhere)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def main(argv: list[str]) -> int:
    """Become, or watch over, the program in `argv`."""
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        die_with_parent(parent)
        os.execv(command[0], command)  # noqa: S606
    import subprocess
    import threading

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        child.kill()

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
