"""What makes a checkpoint a model that an engine loads as it was trained: names, quantisation, ends, tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

__all__ = [
    "MERGE",
    "end_tokens_trouble",
    "has_tokenizer",
    "name_differences",
    "quantisation_difference",
    "quantisation_of",
    "quantisation_trouble",
    "wrapped_names",
]

MERGE = "merge it into its base (peft: model.merge_and_unload().save_pretrained(DIR)) and publish the result"

_PEFT_PREFIX = "base_model.model."
_PEFT_PARTS = frozenset(
    {
        "base_layer", "original_module", "modules_to_save", "trainable_tokens_delta", "trainable_tokens_original",
        "ia3_l", "prompt_encoder", "prompt_embeddings", "ranknum",
    }
)  # fmt: skip
_PEFT_STARTS = ("lora_", "hada_", "lokr_", "vera_lambda", "oft_", "boft_", "adalora_", "randlora_", "bone_", "vblora_")
_WRAPPERS = {
    "_fsdp_wrapped_module": "FSDP", "_checkpoint_wrapped_module": "activation checkpointing", "_orig_mod":
    "torch.compile", "_forward_module": "Lightning or DeepSpeed", "_fpw_module": "FSDP", "_flat_param": "FSDP",
}  # fmt: skip
_PARALLEL = "module."
"""How DistributedDataParallel and DeepSpeed call what they wrap. One tensor alone of a model may be called so, too."""
_SCALES = (
    ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_packed", ".qweight", ".qzeros", ".SCB", ".absmax",
)  # fmt: skip
_QUANTISED = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4"})
_TOKENIZERS = ("tokenizer.json", "tekken.json", "vocab.txt")
_VOCABULARIES = (".model", ".tiktoken", ".vocab", ".spm")
_OF_BYTES = ("byt5", "canine", "perceiver")
_EXAMPLES = 3


def wrapped_names(names: Iterable[str]) -> str | None:
    """Return why an engine knows no tensors of such names: they are those of a wrapper around the model; else None."""
    peft: list[str] = []
    other: dict[str, list[str]] = {}
    names = list(names)
    if len(names) > 1 and all(name.startswith(_PARALLEL) for name in names):
        other["DistributedDataParallel or DeepSpeed"] = names
    # Thousands of names are made of a few words, which are looked at first.
    words = set(".".join(names).split("."))
    known = any(one in _PEFT_PARTS or one in _WRAPPERS or one.startswith(_PEFT_STARTS) for one in words)
    for name in names if known or any(name.startswith(_PEFT_PREFIX) for name in names) else ():
        parts = name.split(".")
        if name.startswith(_PEFT_PREFIX) or any(one in _PEFT_PARTS or one.startswith(_PEFT_STARTS) for one in parts):
            peft.append(name)
        else:
            for part in parts:
                if part in _WRAPPERS:
                    other.setdefault(_WRAPPERS[part], []).append(name)
    if peft:
        return (
            f"{_some(peft)} are those of a model that PEFT (LoRA) wraps, not of the model itself, and no engine has "
            f"them; {MERGE}"
        )
    for wrapper, found in other.items():
        return f"{_some(found)} are those of a wrapper ({wrapper}); save the module inside it"
    return None


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a ``config.json`` says of quantised weights, None where it says nothing."""
    for place in (config, config.get("text_config"), config.get("llm_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(place, Mapping) and isinstance(place.get(key), Mapping) and place[key]:
                return dict(place[key])
    return None


def quantisation_trouble(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> str | None:
    """Return how ``config.json`` and the tensors, name to dtype, disagree on quantisation; None where they agree."""
    said = quantisation_of(config)
    scales = [name for name, dtype in dtypes.items() if _is_scale_of_quantised(name, dtype)]
    if said is None and scales:
        return (
            f"config.json: has no quantization_config, but {_some(scales)} are of quantised weights: an engine would "
            "take those for plain numbers; copy config.json from the model that they were quantised as"
        )
    if said is None or not dtypes:
        return None
    if not any(_may_be_quantised(name, dtype) for name, dtype in dtypes.items()):
        return (
            f"config.json: quantization_config says {_method(said)}, but no tensor is quantised and there are no "
            "scales: an engine would look for them; leave quantization_config out, or quantise the weights"
        )
    bare = [name for name, dtype in dtypes.items() if dtype in _QUANTISED and not _has_scale(name, dtypes)]
    if bare:
        return (
            f"config.json: quantization_config says {_method(said)}, but {_some(bare)} have no scales: an engine would "
            "look for them; save the scales with the weights"
        )
    return None


def _is_scale_of_quantised(name: str, dtype: str) -> bool:
    return name.endswith(_SCALES) or (name.endswith("_scales") and dtype in ("U8", "F8_E8M0"))  # the latter: MXFP4's


def _has_scale(name: str, names: Collection[str]) -> bool:
    """Return whether an 8- or 4-bit tensor is a scale, or has one beside it."""
    stem = name.removesuffix(".weight").removesuffix("_blocks")
    beside = (f"{name}{end}" for end in ("_scale", "_scale_inv", "_scales"))
    below = (f"{stem}{end}" for end in (".scale", ".scales", "_scale", "_scale_inv", "_scales"))
    return "scale" in name.rpartition(".")[2] or any(one in names for one in (*beside, *below))


def _may_be_quantised(name: str, dtype: str) -> bool:
    """Return whether a tensor may be a quantised weight or its scale: weights are packed into integers of any kind."""
    last = name.rpartition(".")[2]
    return dtype not in ("F16", "BF16", "F32", "F64") or "scale" in last or "absmax" in last


def quantisation_difference(here: Mapping[str, Any], there: Mapping[str, Any], what: str) -> str | None:
    """Return how this ``config.json`` and that of ``what`` disagree on quantisation, None where they agree."""
    mine, theirs = quantisation_of(here), quantisation_of(there)
    if mine == theirs:
        return None
    texts = ["has no quantization_config" if one is None else f"says {_method(one)}" for one in (mine, theirs)]
    if texts[0] == texts[1]:
        keys = sorted(
            key for key in {*(mine or {}), *(theirs or {})} if (mine or {}).get(key) != (theirs or {}).get(key)
        )
        texts[0] += f" with another {', '.join(map(str, keys[:_EXAMPLES]))}"
    return (
        f"config.json: {texts[0]}, and that of {what} {texts[1]}: a deployment keeps the quantisation that it "
        "started with; export the weights as that has them"
    )


def _method(quantisation: Mapping[str, Any]) -> str:
    method = quantisation.get("quant_method") or quantisation.get("quant_algo") or "no method"
    bits = quantisation.get("bits")
    return f"{method}, {bits} bits" if bits else f"{method}"


def name_differences(here: Collection[str], there: Collection[str], what: str) -> str | None:
    """Return how the tensors' names differ from those of ``what``, None where they are the same.

    A ``lm_head.weight`` that only one of both has is no difference: with tied embeddings it is the same tensor.
    """
    gone = sorted(name for name in set(there) - set(here) if not name.endswith("lm_head.weight"))
    come = sorted(name for name in set(here) - set(there) if not name.endswith("lm_head.weight"))
    parts = [f"{_some(come)} are not in {what}"] if come else []
    parts += [f"{_some(gone)} of {what} are missing"] if gone else []
    if not parts:
        return None
    return f"the names of the tensors: {' and '.join(parts)}; an engine loads tensors by their names"


def end_tokens_trouble(config: Mapping[str, Any], generation: Mapping[str, Any]) -> str | None:
    """Return how both files disagree on the tokens that end an answer, None where they do not."""
    found = []
    for values in (config, generation):
        tokens = values.get("eos_token_id")
        text = values.get("text_config")
        if tokens is None and isinstance(text, Mapping):
            tokens = text.get("eos_token_id")
        found.append(tokens)
    sets = [set(map(repr, one)) if isinstance(one, list) else {repr(one)} for one in found]
    if None in found or sets[0] == sets[1]:
        return None
    return (
        f"config.json: eos_token_id is {found[0]}, and {found[1]} in generation_config.json: an engine ends answers at "
        "those of generation_config.json, a trainer may read the others; let both say the same"
    )


def has_tokenizer(names: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Return whether files of these names bring a tokenizer; ``config`` is what ``tokenizer_config.json`` says."""
    folded = {name.casefold() for name in names}
    kind = str(config.get("tokenizer_class", "")).casefold()
    return (
        kind.startswith(_OF_BYTES)  # its tokens are bytes or characters: there is no vocabulary
        or "bytetokenizer" in kind
        or any(name in _TOKENIZERS or name.endswith(_VOCABULARIES) for name in folded)
        or any(name.startswith("tokenizer.model.") for name in folded)  # Mistral's, with a version behind it
        or {"vocab.json", "merges.txt"} <= folded
        or any(name.startswith("tokenization_") for name in folded)
    )


def _some(names: Collection[str]) -> str:
    shown = ", ".join(map(repr, list(names)[:_EXAMPLES]))
    return (
        f"{len(names)} tensors ({shown}{', ...' if len(names) > _EXAMPLES else ''})"
        if len(names) > 1
        else f"tensors such as {shown}"
    )
