"""``cwtrain.integrations.*``: aliases of distributions that may not be there, and names that are not there yet."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from cwtrain.errors import IntegrationError
from cwtrain.integrations._missing import missing

ALIASES = {
    "slime": ("cwtrain_slime", "cwtrain-slime"),
    "miles": ("cwtrain_miles", "cwtrain-miles"),
    "nemo_rl": ("cwtrain_nemo_rl", "cwtrain-nemo-rl"),
    "rollout": ("cwtrain_rollout", "cwtrain-rollout"),
}
NOT_YET = [
    ("nemo_rl", "CoreWeaveGeneration"),
    ("nemo_rl", "HotLoadWeightSynchronizer"),
    ("nemo_rl", "CoreWeaveDTensorPolicyWorker"),
]


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_has_what_its_distribution_has(alias):
    pytest.importorskip(ALIASES[alias][0])
    module = importlib.import_module(f"cwtrain.integrations.{alias}")
    real = importlib.import_module(ALIASES[alias][0])
    assert module.__doc__ == real.__doc__
    assert module.__all__ == real.__all__
    for name in real.__all__:
        assert getattr(module, name) is getattr(real, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_the_rollout_alias_brings_the_sampler_and_lists_its_settings():
    pytest.importorskip("cwtrain_rollout")
    from cwtrain.integrations.rollout import RolloutConfig, Sampler

    assert RolloutConfig.__module__.startswith("cwtrain_rollout")
    assert Sampler.__module__.startswith("cwtrain_rollout")
    assert "CWTRAIN_ROLLOUT_" in (importlib.import_module("cwtrain.integrations.rollout").__doc__ or "")


@pytest.mark.parametrize("alias", ALIASES)
def test_a_missing_distribution_is_named_with_the_command_that_installs_it(alias):
    module, distribution = ALIASES[alias]
    code = (
        "import sys\n"
        f"sys.modules[{module!r}] = None\n"  # what an import finds that is known not to be there
        "try:\n"
        f"    import cwtrain.integrations.{alias}\n"
        "except ModuleNotFoundError as exc:\n"
        "    print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == f"{module!r} is not installed; run: pip install {distribution}", done.stderr


def test_something_missing_inside_an_adapter_keeps_its_own_error():
    inner = ModuleNotFoundError("No module named 'torch'", name="torch")
    with pytest.raises(ModuleNotFoundError, match="'torch'"):
        raise missing(inner, module="cwtrain_slime", distribution="cwtrain-slime")


@pytest.mark.parametrize(("alias", "name"), NOT_YET)
def test_a_documented_name_that_is_not_there_yet_says_so(alias, name):
    pytest.importorskip(ALIASES[alias][0])
    module = importlib.import_module(f"cwtrain.integrations.{alias}")
    assert name not in module.__all__
    with pytest.raises(IntegrationError, match=f"does not bring '{name}' yet") as caught:
        getattr(module, name)
    assert "publish" in (caught.value.hint or "")
    with pytest.raises(IntegrationError, match="yet"):
        exec(f"from cwtrain.integrations.{alias} import {name}")


@pytest.mark.parametrize("alias", ["slime", "miles", "nemo_rl"])
def test_an_adapter_registers_itself_honestly(alias):
    pytest.importorskip(ALIASES[alias][0])
    from cwtrain.plugins import get_plugins

    found = {item.name: item for item in get_plugins().integrations()}
    assert found[alias].distribution == ALIASES[alias][1]
    assert found[alias].documented.startswith(f"cwtrain.integrations.{alias}.")
    assert ("not in this version yet" in found[alias].status) == any(name == alias for name, _ in NOT_YET)
