"""What is true of every new deployment is told as what it is: nothing was loaded into it yet, and the run will do that.

The kind: a state that is right for the moment, told as an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cwtrain_emulator.engine.model_io import make_model
from cwtrain_slime._check import check_run
from cwtrain_slime._dialect import SLIME
from cwtrain_slime._findings import Level
from helpers.trainer_lines import flags


def test_a_deployment_that_serves_no_weights_yet_is_a_warning(
    emulator: Any, deployment: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "base", vocab_size=64, hidden_size=8, context=2, seed=0)
    environ = {
        **emulator.env,
        "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": deployment["spec"]["id"],
        "CWTRAIN_HOTLOAD_RUN_ID": "waits",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def found(**changes: str) -> dict[str, Level]:
        words = flags("slime", tmp_path, tmp_path / "base", None)
        report = check_run(SLIME, words, environ={**environ, **changes}, with_base=False, patience=0.2)
        return {one.name: one.level for one in report.findings}

    fresh = found()
    assert fresh["no-weights"] is Level.WARNING
    assert Level.ERROR not in fresh.values()
    # An endpoint where nobody is stays an error, also of a new deployment.
    nobody = found(CWTRAIN_ROLLOUT_BASE_URL="http://127.0.0.1:1/v1")
    assert nobody["endpoint"] is Level.ERROR
    assert "no-weights" not in nobody
