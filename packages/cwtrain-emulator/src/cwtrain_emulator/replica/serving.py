"""What a replica serves at one moment: the weights of one identity, and all that goes with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cwtrain_emulator.engine.base import Engine, Tokenizer
from cwtrain_emulator.engine.model_io import MODEL_TYPE
from cwtrain_emulator.engine.numpy_engine import NumpyEngine
from cwtrain_emulator.engine.safetensors import FormatError
from cwtrain_emulator.engine.tokenizer import ByteTokenizer
from cwtrain_emulator.replica.materialise import Generation, SnapshotError

__all__ = ["Served", "activate", "load"]

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Served:
    """One identity in memory. `engine` is None when the checkpoint's kind of model cannot be run here: `why_not`."""

    identity: str
    generation: Generation
    engine: Engine | None
    tokenizer: Tokenizer | None
    model_type: str
    why_not: str = ""
    eos_ids: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=dict)
    default_max_tokens: int | None = None


def activate(served: Served) -> None:
    """Let a loaded identity's engine take over; called once, between two tokens."""
    if served.engine is not None:
        served.engine.activate()


def load(generation: Generation, *, engine: str = "numpy", previous: Served | None = None) -> Served:
    """Return what a generation serves; raise SnapshotError when its config or its tensors cannot be read.

    `engine` is ``numpy``, or ``transformers`` for models of all other kinds; `previous` is what is served now, whose
    memory may be used again.
    """
    directory = generation.checkpoint
    config = _read_object(directory / "config.json", required=True)
    generation_config = _read_object(directory / "generation_config.json", required=False)
    model_type = str(config.get("model_type", "unknown"))
    runner: Engine | None = None
    tokenizer: Tokenizer | None = None
    why_not = ""
    try:
        if model_type == MODEL_TYPE:
            own = NumpyEngine.load(directory)
            runner, tokenizer = own, ByteTokenizer.load(directory, vocab_size=own.vocab_size)
        elif engine == "transformers":
            # Heavy, and an extra: imported in a replica that serves with it, and nowhere else.
            from cwtrain_emulator.engine.transformers_engine import TransformersEngine, load_tokenizer

            before = previous.engine if previous is not None else None
            runner = TransformersEngine.load(directory, previous=before)
            tokenizer = load_tokenizer(directory)
        else:
            why_not = (
                f"the served checkpoint is a {model_type!r} model, which the numpy engine does not run; "
                "start the emulator with --engine transformers"
            )
    except (FormatError, ImportError, KeyError, TypeError, ValueError) as exc:
        raise SnapshotError(f"{generation.identity}: the engine cannot load the checkpoint: {exc}") from exc
    eos_ids = _eos_ids(generation_config.get("eos_token_id", config.get("eos_token_id")))
    if tokenizer is not None and tokenizer.eos_id is not None:
        eos_ids |= {tokenizer.eos_id}
    most = generation_config.get("max_new_tokens")
    return Served(
        identity=generation.identity,
        generation=generation,
        engine=runner,
        tokenizer=tokenizer,
        model_type=model_type,
        why_not=why_not,
        eos_ids=eos_ids,
        defaults=_sampling_defaults(generation_config),
        default_max_tokens=most if isinstance(most, int) and not isinstance(most, bool) and most > 0 else None,
    )


def _sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _SAMPLING_DEFAULTS:
        value = generation_config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def _eos_ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int) and not isinstance(item, bool))


def _read_object(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        if required:
            raise SnapshotError(f"{path.name} is missing") from None
        return {}
    except (OSError, ValueError, RecursionError) as exc:
        raise SnapshotError(f"{path.name} is not JSON ({exc})") from None
    if not isinstance(values, dict):
        raise SnapshotError(f"{path.name} is not a JSON object")
    return values
