"""Make a tiny Qwen3 with random weights, a byte-level tokenizer and a chat template, without any download.

    python tools/make_tiny_model.py OUT [--seed N] [--tied]

Needs torch, transformers and tokenizers. For tests of the transformers engine and for trying it out: it speaks
nonsense, but everything around it is what a real model has: shards with an index, generation_config.json, tokenizer.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import needed

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
SENTENCES = ("a small model counts 1 2 3 4 5 6 7 8 9 10", "system user assistant say think answer the question please")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(directory: str | os.PathLike[str], *, seed: int = 0, tied: bool = False) -> Path:
    """Write the model into `directory` and return that. The same arguments give the same bytes.

    About 420,000 parameters in bfloat16, in several shards. `tied`: input and output embeddings are one tensor.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    out = Path(directory)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    pieces.train_from_iterator(SENTENCES * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, eos_token="<|im_end|>", pad_token="<|pad|>", model_max_length=1024
    )
    tokenizer.chat_template = TEMPLATE
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Larger than usual, so that the random model has opinions and greedy decoding has no near ties.
        initializer_range=0.1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out, max_shard_size="200KB")
    tokenizer.save_pretrained(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", metavar="OUT", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tied", action="store_true")
    chosen = parser.parse_args()
    needed.need("torch", "tokenizers", "transformers")
    made = make_tiny_model(chosen.directory, seed=chosen.seed, tied=chosen.tied)
    print(made, sum(path.stat().st_size for path in made.iterdir()), "bytes")


if __name__ == "__main__":
    main()
