"""Which files beside the weights belong to a snapshot. Everything that is not allowed here is left out."""

from __future__ import annotations

from fnmatch import fnmatchcase

from cwtrain.models.snapshot import INDEX_NAME

_ALLOWED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "tokenizer*", "merges*", "vocab*")
_REFUSED = (
    ".*",
    "*.bin", "*.pt", "*.pth", "*.tmp", "*.safetensors",
    "readme*",
    "optimizer*", "optim_*", "scheduler*", "rng_state*", "random_states*",
    "trainer_state*", "training_args*", "training_state*", "latest_checkpointed_iteration*",
    "*.index.json",  # indexes of other formats; ours is not a side file
)  # fmt: skip


def is_side_file(name: str) -> bool:
    """Return whether a file of this name is uploaded beside the weights (config, tokenizer, templates, custom code)."""
    folded = name.casefold()
    if name == INDEX_NAME or any(fnmatchcase(folded, pattern) for pattern in _REFUSED):
        return False
    return any(fnmatchcase(folded, pattern) for pattern in _ALLOWED)
