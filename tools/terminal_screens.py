"""Print what people see on terminals of 80, 120 and 200 columns: commands run against an emulator of their own.

    uv run python tools/terminal_screens.py

A screen that a wider terminal does not change is shown once. Frames of lines that are redrawn follow each other, equal
ones once.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import needed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

with needed.imports():
    from cwtrain import inspect_snapshot, upload_snapshot
    from cwtrain.infra import InferenceClient, lifecycle, s3_client
    from cwtrain_emulator import Emulator
    from cwtrain_emulator.engine.model_io import make_model
    from helpers.terminal import on_terminal

WIDTHS = (80, 120, 200)


def main() -> int:
    """Print the screens."""
    with tempfile.TemporaryDirectory() as folder:
        for screen in screens(Path(folder)):
            print(screen, flush=True)
    return 0


def screens(root: Path) -> Iterator[str]:
    """Yield the screens, as blocks of lines."""
    make_model(root / "base", vocab_size=512, hidden_size=512, context=4, seed=0)
    make_model(root / "next", vocab_size=512, hidden_size=512, context=4, seed=1)
    with Emulator(root / "emulator", replicas=2) as emulator:
        environ = dict(emulator.env)
        store = s3_client(
            emulator.s3_endpoint,
            region_name=emulator.region,
            aws_access_key_id=emulator.access_key_id,
            aws_secret_access_key=emulator.secret_access_key,
        )
        upload_snapshot(
            inspect_snapshot(root / "base"), bucket=emulator.bucket, path_prefix="models", identity="base", s3=store
        )
        with InferenceClient(emulator.admin_token, base_url=emulator.base_url) as client:
            environ["CWTRAIN_HOTLOAD_DEPLOYMENT_ID"] = _deployment(client, emulator.bucket)

        def show(*words: str, widths: tuple[int, ...] = WIDTHS, **more: object) -> Iterator[str]:
            seen: list[str] = []
            for width in widths:
                lines = on_terminal(*words, columns=width, env=environ, **more).lines  # type: ignore[arg-type]
                lines = [line for line, before in zip(lines, ["", *lines], strict=False) if line != before]
                shown = "\n".join(lines).replace(str(root), "/ckpt")
                if shown not in seen:
                    seen.append(shown)
                    name = " ".join(words).replace(str(root), "/ckpt")
                    yield f"{'=' * 20} {width} columns: cwtrain {name}\n{shown}\n"

        publish = ["hotload", "publish", "--checkpoint", str(root / "base"), "-o", "id", "--identity"]
        emulator.control.add_fault("store", "throttle", bytes_per_second=1_500_000)
        emulator.control.add_fault("replica", "slow", seconds=4)
        yield from show(*publish, "step_000100", widths=(80,))
        emulator.control.clear_faults()
        yield from show(*publish, "step_000100", widths=(80,))
        yield from show(
            "snapshot", "diff", str(root / "base"), str(root / "next"), str(root / "delta"), "-o", "table", widths=(80,)
        )
        delta = ["hotload", "publish", "--checkpoint", str(root / "delta"), "--previous-identity", "step_000100"]
        yield from show(*delta, "--identity", "step_000101", "-o", "table", widths=(80,))
        for words in (
            "doctor",
            "hotload status step_000101",
            "hotload chain",
            "hotload list",
            "hotload gc --keep 1",
            "hotload resume-info --run grpo-7b",
            "deployment list",
            "deployment get first",
            "plugins list",
            "emulator status",
            f"snapshot show {root / 'delta'}",
        ):
            wide = words.startswith(("doctor", "hotload list", "hotload status", "plugins"))
            yield from show("-o", "table", *words.split(), widths=WIDTHS if wide else WIDTHS[:1])
        yield from show("hotload", "publish", "--help", widths=(80,))
        # A store that holds its answer: what is said while it does, every two seconds here in place of every 25.
        code = "import sys; from cwtrain.cli import main; sys.exit(main(sys.argv[1:], heartbeat=2.0))"
        emulator.control.add_fault("store", "latency", seconds=14, method="PUT", times=1)
        yield from show(*publish, "stalled", widths=(80,), program=("-c", code))


def _deployment(client: InferenceClient, bucket: str) -> str:
    zone = client.get_gateway_parameters()["zones"][0]
    routing = {"apiType": "API_TYPE_OPENAI"}
    gateway = client.create_gateway(
        {"name": "first-gateway", "zones": [zone], "coreWeaveAuth": {}, "bodyBasedRouting": routing}
    )
    lifecycle.wait_for_gateway(client, gateway.id, poll_interval=0.1)
    kind = client.get_deployment_parameters([gateway.id])["resourceParameters"]["instanceTypes"][0]
    made = client.create_deployment(
        {
            "name": "first",
            "gatewayIds": [gateway.id],
            "runtime": {"engine": "dynamo-vllm"},
            "resources": {"instanceType": kind, "gpuCount": 1},
            "model": {"name": "first-model", "bucket": bucket, "path": "models/base"},
            "autoscaling": {"min": 2, "max": 2},
            "hotLoad": {"bucket": bucket, "pathPrefix": "run", "transitionMode": "TRANSITION_MODE_ASYNC"},
        }
    )
    return lifecycle.wait_for_deployment(client, made.id, poll_interval=0.1).id


if __name__ == "__main__":
    sys.exit(main())
