"""A folder as the Hub has them, of a model with random weights: what a page's example loads."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_names() -> list[str]:
    """The characters by which tokenizers of GPT-2's kind name the 256 bytes, in their order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(256 + index) for index in range(len(others)))]


def tiny_qwen(folder: Path) -> Path:
    """Save a Qwen 2 of four layers with its tokenizer, of a token a byte, and its chat template."""
    vocabulary = {name: index for index, name in enumerate([*byte_names(), *SPECIAL])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], chat_template=CHAT)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    ends = vocabulary["<|im_end|>"]
    config = Qwen2Config(vocab_size=len(tokenizer), eos_token_id=ends, **sizes, **heads)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
