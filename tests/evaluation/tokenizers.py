"""Tiny tokenizers with merges, with and without a chat template and special tokens."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHAT = (
    "<s>{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
TEXT = (
    "Of all the numbers of the line, 1234567 is the value in the list. They love the question: "
    'what is "this" and what are those?\n\n    return self.value\n' * 3
)


@cache
def _trained() -> str:
    """Bytes and 60 merges, learned from a short text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    found: str = tokenizer.to_str()
    return found


def tiny_tokenizer(*, chat: str | None = None, special: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and a few merges, without a padding token."""
    tokenizer = Tokenizer.from_str(_trained())
    ends = {}
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        ends = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat, **ends)


TOKENIZERS = {
    "chat": tiny_tokenizer(chat=CHAT, special=True),
    "special": tiny_tokenizer(special=True),
    "bare": tiny_tokenizer(),
}
