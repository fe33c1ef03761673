"""What `cwtrain slime check` and `cwtrain miles check` find without a network: flags, settings, checkpoint, disks."""

from __future__ import annotations

import json
import pickle
import shlex
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cwtrain.errors import ConfigError, IntegrationError
from cwtrain_slime._args import RunArgs, parse_command_line
from cwtrain_slime._check import check_run
from cwtrain_slime._check_base import _room
from cwtrain_slime._dialect import FLAGS, MILES, SLIME, Dialect, Kind, dialect_of
from cwtrain_slime._findings import LEVELS, Finding, finding
from helpers.tiny_checkpoint import write_full
from helpers.trainer_lines import flags

HOOK = "--custom-update-weight-post-write-path"
SETTINGS = {"CWTRAIN_HOTLOAD_DEPLOYMENT_ID": "d", "CWTRAIN_HOTLOAD_RUN_ID": "run"}


def names(dialect: Dialect, words: list[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Return what is found, without what only a token could find out."""
    report = check_run(dialect, words, environ={**SETTINGS, **(environ or {})})
    return [found.name for found in report.findings if found.name != "token"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return Path(write_full(tmp_path / "base"))


@pytest.mark.parametrize("dialect", [SLIME, MILES], ids=lambda one: one.name)
def test_nothing_is_found_in_a_good_line(dialect: Dialect, tmp_path: Path, base: Path) -> None:
    assert names(dialect, flags(dialect.name, tmp_path, base)) == []


FOUND: list[tuple[str, Dialect, dict[str, str | None], dict[str, str]]] = [
    ("flag-value", SLIME, {"--rollout-top-p": "high"}, {}),
    ("flag-value", MILES, {"--rollout-num-gpus": None}, {}),
    ("foreign-flag", SLIME, {"--update-weight-transfer-mode": "disk-delta"}, {}),
    ("foreign-flag", MILES, {"--update-weight-mode": "delta"}, {}),
    ("custom-config", SLIME, {"--custom-config-path": "/no/such/file.yaml"}, {}),
    ("ignored", SLIME, {"--update-weight-disk-keep-files": None}, {}),
    ("ignored", MILES, {}, {"CWTRAIN_HOTLOAD_RUNID": "run"}),
    ("not-disk", SLIME, {"--update-weight-transport": "nccl"}, {}),
    ("not-disk", MILES, {"--update-weight-transfer-mode": "-"}, {}),
    (
        "full-mode",
        SLIME,
        {
            "--update-weight-mode": "full",
            "--update-weight-delta-encoding": "-",
            "--update-weight-delta-checksum": "-",
        },
        {},
    ),
    ("no-hook", SLIME, {HOOK: "-", "--rollout-num-gpus": "-", "--rollout-function-path": "-"}, {}),
    ("no-hook", MILES, {HOOK: "my.hook"}, {}),
    ("no-disk-dir", SLIME, {"--update-weight-disk-dir": "-"}, {}),
    ("disk-dir-erases", MILES, {"--update-weight-local-checkpoint-dir": "{root}/updates/local"}, {}),
    ("disk-dir-erases", SLIME, {}, {"CWTRAIN_HOTLOAD_STATE_DIR": "{root}/updates/state"}),
    ("no-local-dir", SLIME, {"--update-weight-local-checkpoint-dir": "-"}, {}),
    ("encoding", SLIME, {"--update-weight-delta-encoding": "overwrite"}, {"CWTRAIN_HOTLOAD_FULL_EVERY": "0"}),
    ("checksum", MILES, {"--update-weight-delta-checksum": "-"}, {"CWTRAIN_HOTLOAD_FULL_EVERY": "0"}),
    ("converted", SLIME, {"--update-weight-delta-checksum": "-"}, {}),
    ("no-engines", SLIME, {HOOK: "cwtrain.integrations.slime.hook"}, {}),
    ("no-engines", MILES, {"--sglang-config": "-"}, {}),
    ("router", MILES, {"--sglang-router-port": "-"}, {}),
    ("own-engines", SLIME, {"--rollout-num-gpus": "8"}, {}),
    ("colocate", SLIME, {"--colocate": None}, {}),
    ("lora", MILES, {"--lora-rank": "16"}, {}),
    ("backend", MILES, {"--train-backend": "fsdp"}, {}),
    ("publishing-off", SLIME, {"--debug-train-only": None}, {}),
    ("publishing-off", MILES, {"--debug-skip-weight-update": None}, {}),
    ("check-equal", MILES, {"--check-weight-update-equal": None}, {}),
    ("release-train", SLIME, {"--release-train": None}, {"CWTRAIN_HOTLOAD_WAIT": "0"}),
    ("temperature", MILES, {"--rollout-temperature": "0"}, {}),
    ("top-p", SLIME, {"--rollout-top-p": "0.9"}, {}),
    ("routing-replay", MILES, {"--use-rollout-routing-replay": None}, {}),
    ("rollout-function", SLIME, {"--rollout-function-path": "slime.rollout.sglang_rollout.generate_rollout"}, {}),
    ("settings", SLIME, {}, {"CWTRAIN_HOTLOAD_TIMEOUT": "nan"}),
    ("settings", SLIME, {}, {"CWTRAIN_HOTLOAD_MIRROR": "0"}),
    ("settings", SLIME, {}, {"CWTRAIN_S3_SIGN_PAYLOAD": "perhaps"}),
    ("run-id", SLIME, {}, {"CWTRAIN_HOTLOAD_RUN_ID": ""}),
    ("no-fall-back", SLIME, {}, {"CWTRAIN_HOTLOAD_FULL_EVERY": "0"}),
    ("base-missing", SLIME, {"--hf-checkpoint": "-"}, {}),
    ("base-missing", MILES, {"--hf-checkpoint": "Qwen/Qwen3-4B"}, {}),
    ("base-invalid", SLIME, {"--hf-checkpoint": "{root}"}, {}),
]


@pytest.mark.parametrize(
    ("name", "dialect", "changes", "environ"), FOUND, ids=[f"{name}-{one.name}" for name, one, *_ in FOUND]
)
def test_each_finding_alone(
    name: str, dialect: Dialect, changes: dict[str, str | None], environ: dict[str, str], tmp_path: Path, base: Path
) -> None:
    changes = {flag: value and value.replace("{root}", str(tmp_path)) for flag, value in changes.items()}
    environ = {key: value.replace("{root}", str(tmp_path)) for key, value in environ.items()}
    found = names(dialect, flags(dialect.name, tmp_path, base, changes), environ)
    also = {"no-fall-back", "rollout-function"} if name not in ("no-fall-back", "rollout-function") else set()
    assert set(found) - also == {name}


def test_every_finding_says_what_to_do(tmp_path: Path, base: Path) -> None:
    for name, dialect, changes, environ in FOUND:
        report = check_run(dialect, flags(dialect.name, tmp_path, base, changes), environ={**SETTINGS, **environ})
        (first, *_) = [found for found in report.findings if found.name == name] or [None]
        if first is not None:
            assert first.message
            assert first.fix


def test_no_token_and_a_token_that_cannot_be_one(tmp_path: Path, base: Path) -> None:
    words = flags("slime", tmp_path, base)
    for environ in ({}, {"COREWEAVE_API_TOKEN": "two words"}):
        report = check_run(SLIME, words, environ={**SETTINGS, **environ})
        assert [found.name for found in report.findings] == ["token"]
        assert "two words" not in str(report.to_json())
        assert not report.ok


def test_a_quantised_base(tmp_path: Path, base: Path) -> None:
    (base / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert names(SLIME, flags("slime", tmp_path, base)) == ["base-quantised"]


def test_experts_fused_in_the_index_but_not_in_the_shards(tmp_path: Path, base: Path) -> None:
    """B15: a base whose index names other tensors than its shards hold is named before the run."""
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.mlp.experts.gate_up_proj"] = index["weight_map"].pop("layer.weight")
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    report = check_run(SLIME, flags("slime", tmp_path, base), environ=SETTINGS)
    text = " ".join(found.message for found in report.findings if found.name == "base-invalid")
    assert "gate_up_proj" in text
    assert "layer.weight" in text


@pytest.mark.parametrize(("tracker", "found"), [(None, ["resume"]), ("0", []), ("40", ["resume"])])
def test_a_resume(tracker: str | None, found: list[str], tmp_path: Path, base: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "iter_0000040").mkdir()
    if tracker is not None:
        (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text(tracker)
    assert names(MILES, flags("miles", tmp_path, base, {"--load": str(tmp_path / "saved")})) == found


@pytest.mark.parametrize("load", ["x" * 300, "saved/latest_checkpointed_iteration.txt/further", "loop"])
def test_a_resume_from_what_cannot_be_looked_at_is_a_finding(load: str, tmp_path: Path, base: Path) -> None:
    """The check ended with what the operating system had said, and all other findings were lost."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("40")
    (tmp_path / "loop").symlink_to("loop")
    found = names(SLIME, flags("slime", tmp_path, base, {"--load": str(tmp_path / load)}))
    assert found == ([] if "further" in load else ["resume"])


def test_room_on_the_disks(tmp_path: Path) -> None:
    """Versions and the mirror on one disk are added up; the size is the base's."""

    def room(size: int) -> list[str]:
        return [found.name for found in _room(SLIME, tmp_path / "updates", tmp_path / "state", None, size)]

    assert room(1) == []
    assert room(10**18) == ["disk-full"]


def test_a_disk_that_is_tight(tmp_path: Path) -> None:
    import shutil

    free = shutil.disk_usage(tmp_path).free
    found = list(_room(SLIME, tmp_path / "updates", tmp_path / "state", None, free // 4))
    assert [one.name for one in found] == ["disk-tight"]
    assert "CWTRAIN_HOTLOAD_CLEANUP" in found[0].fix


def test_a_custom_configuration_overrides_flags(tmp_path: Path, base: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "more.yaml"
    path.write_text("update_weight_transport: nccl\nrollout_top_p: 0.5\nother: 1\n")
    found = names(SLIME, flags("slime", tmp_path, base, {"--custom-config-path": str(path)}))
    assert sorted(found) == ["not-disk", "top-p"]


def test_a_custom_configuration_with_values_that_are_none(tmp_path: Path, base: Path) -> None:
    """The trainer takes the file as it is: what is no number there is no number in the run, so it is an error."""
    pytest.importorskip("yaml")
    path = tmp_path / "more.yaml"
    path.write_text("update_weight_disk_dir: 5\nrollout_temperature: hot\nhf_checkpoint: [a]\ncolocate: 'no'\n")
    line = flags("slime", tmp_path, base, {"--custom-config-path": str(path)})
    assert names(SLIME, line) == ["flag-value"] * 4
    path.write_text("sglang_router_port: 30000\nload: null\nrollout_num_gpus: 0\n")
    assert names(MILES, flags("miles", tmp_path, base, {"--custom-config-path": str(path)})) == []


def test_a_quoted_launch_line_is_read_as_its_words(tmp_path: Path, base: Path) -> None:
    line = [shlex.join(flags("slime", tmp_path, base))]
    assert names(SLIME, line) == []
    assert names(SLIME, [f"{line[0]} --save 'open"]) == ["flag-value"]


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_temperature_that_is_none(value: str, tmp_path: Path, base: Path) -> None:
    assert names(SLIME, flags("slime", tmp_path, base, {"--rollout-temperature": value})) == ["temperature"]


@pytest.mark.parametrize(("value", "found"), [("yes", []), ("On", []), ("0", ["routing-replay"])])
def test_every_word_for_yes_asks_for_the_experts(value: str, found: list[str], tmp_path: Path, base: Path) -> None:
    line = flags("miles", tmp_path, base, {"--use-rollout-routing-replay": None})
    assert names(MILES, line, {"CWTRAIN_ROLLOUT_ROUTED_EXPERTS": value}) == found


def test_flags_of_deltas_have_no_effect_in_full_mode(tmp_path: Path, base: Path) -> None:
    found = names(SLIME, flags("slime", tmp_path, base, {"--update-weight-mode": "full"}))
    assert found == ["ignored", "ignored", "full-mode"]


def test_a_misspelt_variable_is_named_with_the_nearest(tmp_path: Path, base: Path) -> None:
    environ = {**SETTINGS, "CWTRAIN_HOTLOAD_FULL_EVRY": "5"}
    (found, _) = check_run(SLIME, flags("slime", tmp_path, base), environ=environ).findings
    assert found.fix == "set CWTRAIN_HOTLOAD_FULL_EVERY instead"


def test_findings_have_known_names() -> None:
    with pytest.raises(KeyError):
        finding("unheard-of", "a", "b")
    one = finding("top-p", "a", "b")
    assert one.to_json() == {"name": "top-p", "level": "error", "message": "a", "fix": "b"}
    assert pickle.loads(pickle.dumps(one)) == one
    assert isinstance(one, Finding)


def test_the_how_to_pages_explain_every_finding() -> None:
    root = Path(__file__).resolve().parents[3]
    for page in ("slime", "miles"):
        text = (root / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")
        only = {"slime": {"lora", "router", "backend"}, "miles": {"full-mode", "release-train", "top-p"}}[page]
        missing = [name for name in LEVELS if f"`{name}`" not in text and name not in only]
        assert missing == [], page


def test_every_finding_is_tested() -> None:
    """Those of the service are in tests/contract."""
    contract = Path(__file__).resolve().parents[2] / "contract"
    files = [Path(__file__), contract / "test_slime_check.py", contract / "test_field_new_deployment.py"]
    text = "".join(file.read_text() for file in files)
    assert [name for name in LEVELS if f'"{name}"' not in text] == []


# Reading -------------------------------------------------------------------------------------------------------------


def test_a_launch_line_as_people_write_it() -> None:
    words = ["ray", "job", "submit", "--", "python3", "train.py", "--rollout-top-k", "-1", "--rollout-top-p=0.5"]
    words += [
        "--rollout-external-engine-addrs",
        "a:1",
        "b:2",
        "--colocate",
        "--num-layers",
        "4",
        "--hf-checkpoint",
        "x",
    ]
    found = parse_command_line(SLIME, words)
    assert found["top_k"] == -1
    assert found["top_p"] == 0.5
    assert found["engine_addresses"] == ["a:1", "b:2"]
    assert found["colocate"] is True
    assert found["hf_checkpoint"] == "x"
    assert found["given"] == ("top_k", "top_p", "engine_addresses", "colocate", "hf_checkpoint")
    assert found["mode"] == "full"
    assert parse_command_line(MILES, [])["mode"] == "broadcast"


def test_every_value_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command_line(SLIME, ["--rollout-top-p", "--rollout-top-k", "many"])
    assert len(caught.value.problems) == 2


def test_the_table_of_dialects() -> None:
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    for flag in FLAGS:
        assert flag.slime or flag.miles
        if flag.kind is Kind.SWITCH:
            assert flag.default("slime") is False
    with pytest.raises(KeyError):
        MILES.flag("transport")


def test_whose_namespace_it_is() -> None:
    common: dict[str, Any] = {"update_weight_disk_dir": "/d", "hf_checkpoint": "/b", "rank": 3, "world_size": 4}
    slime = RunArgs.of(Namespace(update_weight_mode="full", **common))
    assert (slime.dialect, slime.full_mode, slime.rank, slime.world_size) == (SLIME, True, 3, 4)
    miles = RunArgs.of(Namespace(update_weight_transfer_mode="disk-delta", **common))
    assert (miles.dialect, miles.full_mode) == (MILES, False)
    assert dialect_of(Namespace()) is SLIME


def test_a_run_without_a_disk_directory_is_refused() -> None:
    with pytest.raises(IntegrationError, match="--update-weight-disk-dir"):
        RunArgs.of(Namespace(update_weight_disk_dir=None))
