"""Which files beside the weights belong to a snapshot. Everything that is not allowed here is left out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase

from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._files import Entry, list_directory, look
from cwtrain.snapshots._json import parse_json
from cwtrain.snapshots._model_rules import MERGE

__all__ = ["ADAPTER", "TEMPLATES", "adapter_trouble", "is_side_file", "list_with_templates"]

ADAPTER = "adapter_config.json"
TEMPLATES = "additional_chat_templates"
"""The one folder that belongs to a snapshot: a tokenizer's chat templates beside its first one, a file for each."""

_ALLOWED = (
    "*.json", "*.txt", "*.jinja", "*.py", "tokenizer*", "merges*", "vocab*",
    "*.model", "*.tiktoken", "*.vocab", "*.spm", "*.codes",
)  # fmt: skip
_REFUSED = (
    ".*",
    "*.bin", "*.pt", "*.pth", "*.tmp", "*.safetensors",
    "readme*",
    "optimizer*", "optim_*", "scheduler*", "rng_state*", "random_states*",
    "trainer_state*", "training_args*", "training_state*", "latest_checkpointed_iteration*",
    "adapter_*",  # what is left of a merged adapter
    "*.index.json",  # indexes of other formats; ours is not a side file
)  # fmt: skip


def is_side_file(name: str) -> bool:
    """Return whether a file of this name is uploaded beside the weights (config, tokenizer, templates, custom code)."""
    folded = name.casefold()
    if "/" in name:
        folder, _, inner = name.partition("/")
        return folder == TEMPLATES and inner.endswith(".jinja") and not inner.startswith(".") and "/" not in inner
    if name == INDEX_NAME or any(fnmatchcase(folded, pattern) for pattern in _REFUSED):
        return False
    return any(fnmatchcase(folded, pattern) for pattern in _ALLOWED)


def list_with_templates(path: str) -> dict[str, Entry]:
    """Return the directory's entries by name, with the files of ``TEMPLATES`` in it as ``TEMPLATES/name``.

    Raises SnapshotLayoutError if it is no readable directory.
    """
    listing = list_directory(path)
    if TEMPLATES in listing and listing[TEMPLATES].directory:
        inner = list_directory(os.path.join(path, TEMPLATES))
        names = [f"{TEMPLATES}/{name}" for name in inner]
        listing |= {name: look(os.path.join(path, name), name) for name in names if is_side_file(name)}
    return listing


def adapter_trouble(path: str, listing: Mapping[str, Entry], *, model: bool) -> str | None:
    """Return why a directory with an ``adapter_config.json`` is no whole model, None where that is merely left over.

    A trainer that merges an adapter may leave its configuration beside the merged ``model``. The adapter's own weights
    beside it, or a configuration that names no adapter, leave open whether it is in there.
    """
    weights = [name for name in listing if name.startswith("adapter_model")]
    try:
        with open(os.path.join(path, ADAPTER), "rb") as file:
            config = parse_json(file.read(1 << 20))
    except (OSError, ValueError):
        config = None
    if model and not weights and isinstance(config, dict) and config.get("peft_type"):
        return None
    if model and weights:
        return (
            f"{ADAPTER}: an adapter ({', '.join(weights)}) lies beside the model, and only the model would be served; "
            f"{MERGE}, or remove the adapter's files where it is merged"
        )
    return f"{ADAPTER}: this is an adapter (LoRA) checkpoint, the service takes whole models; {MERGE}"
