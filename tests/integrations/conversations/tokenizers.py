"""Tokenizers made on the spot: bytes in pairs, white space within tokens, with a chat template."""

from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

# Of the kind of ChatML's; contents are stripped, as Llama's template strips them.
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content | trim }}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = [
    "the user asked the system for the quick brown fox and the lazy dog\n",
    "user system assistant river castle horse bridge mountain garden window 12345\n",
]


def byte_tokenizer(template: str | None = TEMPLATE, *, vocab_size: int = 320) -> Any:
    """A byte-level BPE tokenizer that puts ``<|begin|>`` first and knows ``<|start|>``."""
    tokenizer: Any = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|start|>", "<|end|>"]
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]),
        ]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|start|>"],
    )
    made.chat_template = template
    return made
