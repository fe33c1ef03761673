"""What the launch flags alone tell: that the trainer will not publish, will refuse to start, or will ignore a flag."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cwtrain.config import HotLoadConfig
from cwtrain.config._env import boolean
from cwtrain.errors import ConfigError
from cwtrain_slime._args import overridden, parse_command_line
from cwtrain_slime._dialect import FLAGS, Dialect
from cwtrain_slime._findings import Finding, finding

__all__ = ["check_flags", "directories", "read_flags"]

_WITHOUT_ENGINES = "cwtrain.integrations.slime.hook_without_engines"
_HOOKS = frozenset(
    {
        "cwtrain.integrations.slime.hook",
        "cwtrain.integrations.miles.hook",
        "cwtrain_slime.hook",
        "cwtrain_miles.hook",
        _WITHOUT_ENGINES,
        "cwtrain_slime.hook_without_engines",
    }
)


def read_flags(dialect: Dialect, words: Sequence[str]) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Return the settings of a launch line with its custom configuration applied, and what was wrong with reading them.

    The settings are None where a value cannot be read.
    """
    try:
        flags = parse_command_line(dialect, words)
    except ConfigError as exc:
        return None, _unreadable(exc)
    path = flags["custom_config"]
    if not path:
        return flags, []
    spelled = dialect.flag("custom_config")
    try:
        # A trainer's machine has PyYAML; cwtrain does not need it otherwise.
        with open(path, encoding="utf-8") as file:
            more = importlib.import_module("yaml").safe_load(file) or {}
        if not isinstance(more, Mapping):
            raise ValueError("it is no mapping")
        return overridden(dialect, flags, more), []
    except ConfigError as exc:
        return None, _unreadable(exc)
    except ModuleNotFoundError:
        why, fix = "PyYAML is not installed here", "pip install pyyaml, and check again"
    except Exception as exc:  # noqa: BLE001 - a parser's errors are as many as parsers
        why, fix = str(exc) or type(exc).__name__, "give a YAML file that the trainer can read"
    return flags, [
        finding("custom-config", f"{spelled} {path} cannot be read ({why}); its keys override flags, so this check may "
                "miss what they set", fix)
    ]  # fmt: skip


def _unreadable(exc: ConfigError) -> list[Finding]:
    return [finding("flag-value", problem, "give the flag a value as for the trainer") for problem in exc.problems]


def check_flags(
    dialect: Dialect, flags: Mapping[str, Any], settings: HotLoadConfig | None, environ: Mapping[str, str]
) -> list[Finding]:
    """Return what is wrong with the flags, given the settings of the environment (None where those are wrong)."""
    findings = [
        *_foreign(dialect, flags),
        *_ignored(dialect, flags),
        *_way_out(dialect, flags),
        *_format(dialect, flags, settings),
    ]
    findings += [*_engines(dialect, flags), *_refused(dialect, flags, settings), *_rollouts(dialect, flags, environ)]
    return findings


def _foreign(dialect: Dialect, flags: Mapping[str, Any]) -> Iterator[Finding]:
    other = "miles" if dialect.name == "slime" else "slime"
    for spelled in flags["foreign"]:
        name = next(flag.name for flag in FLAGS if flag.spelled(other) == spelled)
        ours = next(flag for flag in FLAGS if flag.name == name).spelled(dialect.name)
        fix = f"{dialect.name} calls it {ours}" if ours else f"leave it out, or run `cwtrain {other} check`"
        yield finding("foreign-flag", f"{spelled} is a flag of {other}; {dialect.name} does not know it", fix)


def _ignored(dialect: Dialect, flags: Mapping[str, Any]) -> Iterator[Finding]:
    """Flags that were given and have no effect in the mode that was chosen."""
    if dialect.name != "slime":
        return
    full = flags["mode"] == "full"
    for name in ("encoding", "checksum") if full else ("keep_files",):
        if name in flags["given"]:
            yield finding(
                "ignored",
                f"{dialect.flag(name)} has no effect with {dialect.flag('mode')} {flags['mode']}",
                f"leave {dialect.flag(name)} out",
            )


def _way_out(dialect: Dialect, flags: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether the trainer writes weights to a disk and calls our hook about them."""
    wanted = " ".join(f"{dialect.flag(name)} {value}" for name, value in dialect.needed.items())
    full = dialect.name == "slime" and (flags["mode"], flags["transport"]) == ("full", "disk")
    if full:
        yield finding(
            "full-mode",
            "every version is a complete checkpoint: each is uploaded and loaded whole",
            f"{wanted} sends what changed, usually a few percent",
        )
    elif any(flags[name] != value for name, value in dialect.needed.items()):
        now = " ".join(f"{dialect.flag(name)} {flags[name]}" for name in dialect.needed)
        yield finding("not-disk", f"with {now} {dialect.name} writes no weights to a disk and calls no hook", wanted)
    if flags["hook"] not in _HOOKS:
        what = (
            f"{flags['hook']} is not cwtrain's hook" if flags["hook"] else "no hook is set: nothing will be published"
        )
        yield finding("no-hook", what, f"{dialect.flag('hook')} {dialect.documented_hook}")
    if not flags["disk_dir"]:
        yield finding(
            "no-disk-dir",
            "the trainer has no directory to write versions to",
            f"{dialect.flag('disk_dir')} DIR, on a file system that all trainer nodes share",
        )
    if not flags["local_checkpoint_dir"] and not full:
        yield finding(
            "no-local-dir",
            f"{dialect.name} refuses deltas without {dialect.flag('local_checkpoint_dir')}, engines or not",
            f"{dialect.flag('local_checkpoint_dir')} DIR; any directory will do where there are no engines",
        )


def _format(dialect: Dialect, flags: Mapping[str, Any], settings: HotLoadConfig | None) -> Iterator[Finding]:
    if dialect.name == "slime" and flags["mode"] == "full":
        return
    mirror = settings is None or settings.keeps_mirror
    for name, wanted in (("encoding", "xor"), ("checksum", "adler32")):
        value, fix = flags[name], f"{dialect.flag(name)} {wanted}"
        if value == wanted:
            continue
        if mirror and value in ("xor", "overwrite", "xxh3-128", "blake3"):
            yield finding(
                "converted",
                f"the service takes {wanted} and not {value}: every delta is decoded and written anew from the mirror",
                fix,
            )
        else:
            yield finding(
                name, f"the service takes {wanted} and not {value}, and there is no mirror to convert with", fix
            )


def _engines(dialect: Dialect, flags: Mapping[str, Any]) -> Iterator[Finding]:
    if flags["colocate"]:
        yield finding(
            "colocate",
            f"{dialect.flag('colocate')} hands weights over in GPU memory: {dialect.name} refuses disk deltas with it",
            f"leave {dialect.flag('colocate')} out",
        )
    none = flags["rollout_num_gpus"] == 0 and not flags["engine_addresses"]
    if dialect.name == "slime":
        patched = str(flags["hook"]).endswith("hook_without_engines")
        if none and not patched:
            yield finding(
                "no-engines",
                "slime skips the whole weight update while it has no engines: no files, no hook, a policy that never "
                "changes",
                f"{dialect.flag('hook')} {_WITHOUT_ENGINES}",
            )
    elif none and not flags["sglang_config"]:
        yield finding(
            "no-engines",
            "miles stops at start: its default server group needs at least one GPU",
            f"{dialect.flag('sglang_config')} FILE with `sglang: [{{name: default, server_groups: []}}]` (recipe)",
        )
    if none and dialect.name == "miles" and not (flags["router_ip"] and flags["router_port"]):
        yield finding(
            "router",
            "miles launches a router for engines that do not exist",
            f"{dialect.flag('router_ip')} 127.0.0.1 {dialect.flag('router_port')} 30000 (nobody has to listen there)",
        )
    if not none and not flags["colocate"] and _ours(flags["rollout_function"]):
        yield finding(
            "own-engines",
            "rollouts come from the deployment, yet the run starts engines of its own, which load every version too",
            f"{dialect.flag('rollout_num_gpus')} 0 gives their GPUs to the trainer",
        )


def _refused(dialect: Dialect, flags: Mapping[str, Any], settings: HotLoadConfig | None) -> Iterator[Finding]:
    for name in ("lora_rank", "lora_adapters"):
        if flags.get(name):
            yield finding(
                "lora",
                f"{dialect.flag(name)} {flags[name]}: an adapter is no checkpoint, and a deployment loads checkpoints",
                f"leave {dialect.flag(name)} out; to serve an adapter, merge it into the base first",
            )
    if flags["train_backend"] != "megatron":
        yield finding(
            "backend",
            f"{dialect.name}'s {flags['train_backend']} trainer has no disk deltas",
            f"{dialect.flag('train_backend')} megatron",
        )
    for name in ("debug_train_only", "debug_rollout_only", "skip_weight_update"):
        if flags.get(name):
            yield finding(
                "publishing-off",
                f"{dialect.flag(name)} makes the trainer leave before it writes weights",
                f"leave {dialect.flag(name)} out",
            )
    if flags["check_equal"]:
        yield finding(
            "check-equal",
            f"{dialect.flag('check_equal')} compares the trainer with its own engines, not with the deployment",
            "CWTRAIN_HOTLOAD_VERIFY=1 asks every replica what it serves",
        )
    if flags.get("release_train") and settings is not None and not settings.wait:
        yield finding(
            "release-train",
            f"{dialect.flag('release_train')} ends the trainer's processes after each version, and with "
            "CWTRAIN_HOTLOAD_WAIT=0 they are to see to its hot-load",
            "CWTRAIN_HOTLOAD_WAIT=1",
        )


def _rollouts(dialect: Dialect, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    if flags["temperature"] is not None and not 0 < flags["temperature"] < float("inf"):
        yield finding(
            "temperature",
            f"{dialect.flag('temperature')} {flags['temperature']} is none to learn from: at 0 there is one answer for "
            "ever, and an endpoint refuses what is below 0 or no number",
            f"{dialect.flag('temperature')} 1",
        )
    if dialect.name == "slime" and flags["top_p"] != 1:
        yield finding(
            "top-p",
            f"{dialect.flag('top_p')} {flags['top_p']}: slime then wants the token sets of every step, which no "
            "OpenAI-compatible endpoint returns",
            f"{dialect.flag('top_p')} 1.0",
        )
    if flags["routing_replay"] and not _asks_for_experts(environ):
        yield finding(
            "routing-replay",
            f"{dialect.flag('routing_replay')} needs the experts that each token went through, and nothing asks the "
            "endpoint for them",
            f"CWTRAIN_ROLLOUT_ROUTED_EXPERTS=1, or leave {dialect.flag('routing_replay')} out",
        )
    if not _ours(flags["rollout_function"]):
        yield finding(
            "rollout-function",
            f"rollouts are {dialect.name}'s own: they come from engines of this run, not from the deployment",
            f"set {dialect.flag('rollout_function')} to a function that samples from the deployment "
            "(cwtrain.integrations.rollout has the sampler)",
        )


def _asks_for_experts(environ: Mapping[str, str]) -> bool:
    try:
        return boolean(environ.get("CWTRAIN_ROLLOUT_ROUTED_EXPERTS", "0").strip() or "0")
    except ConfigError:
        return False


def _ours(path: Any) -> bool:
    return bool(path) and not str(path).startswith(("slime.", "miles."))


def directories(flags: Mapping[str, Any], settings: HotLoadConfig | None) -> tuple[Path | None, Path | None]:
    """Return the trainer's disk directory and ours beside it, None where there is none."""
    if not flags["disk_dir"]:
        return None, None
    disk_dir = Path(flags["disk_dir"])
    if settings is not None and settings.state_dir:
        return disk_dir, Path(settings.state_dir)
    return disk_dir, disk_dir.with_name(f"{disk_dir.name}-hotload")
