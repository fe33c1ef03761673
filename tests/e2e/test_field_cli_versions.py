"""The command line puts a delta only on the version that its own index names. The kind: evidence that is not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cwtrain.hotload.delta import write_delta
from helpers.run_cli import Done, run

Fixture = Any


def test_a_delta_on_a_version_that_was_never_published_is_refused(
    emulator: Fixture, deployment: Fixture, bucket: Fixture, tmp_path: Path
) -> None:
    from cwtrain_emulator.engine.model_io import load_model, make_model, save_model

    make_model(tmp_path / "v0", vocab_size=16, hidden_size=4, context=4, seed=0)
    for number, part in ((1, 0), (3, 1), (4, 2)):
        model = load_model(tmp_path / f"v{max(number - 1, 0) if number != 3 else 1}")
        name = sorted(model.tensors)[part]
        model.tensors[name] = np.asarray(model.tensors[name] + 0.5, dtype=model.tensors[name].dtype)
        save_model(tmp_path / f"v{number}", model)
    for base, number in ((0, 1), (3, 4)):
        folder = tmp_path / f"d{number}"
        write_delta(tmp_path / f"v{base}", tmp_path / f"v{number}", folder, version=number, base_version=base)

    def publish(directory: str, identity: str, *options: str) -> Done:
        here = ("--deployment", deployment["spec"]["id"], "--checkpoint", str(tmp_path / directory))
        return run("hotload", "publish", *here, "--identity", identity, *options, env=emulator.env)

    def objects() -> list[str]:
        prefix = deployment["spec"]["hotLoad"]["pathPrefix"]
        found = bucket.client.list_objects_v2(Bucket=bucket.name, Prefix=prefix)
        return [item["Key"] for item in found["Contents"]]

    assert publish("v0", "x-v000000").code == 0
    assert publish("d1", "x-v000001", "--previous-identity", "x-v000000").code == 0
    before = objects()
    on_first = ("--previous-identity", "x-v000001")
    for options in ((), ("--dry-run",), ("--base-version", "1")):
        refused = publish("d4", "x-v000004", *on_first, *options)
        assert refused.code == 1
        assert "is a delta on version 000003, and x-v000001 holds version" in refused.err
        assert "--base-version 000003" in refused.err
    assert objects() == before
    assert publish("v3", "x-v000003").code == 0
    done = publish("d4", "x-v000004", "--previous-identity", "x-v000003")
    assert done.data["status"]["state"] == "COMPLETED", done.err
