"""Tiny models that chat in byte pairs, chat templates, and conversations written by hand."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FullContext
from kvpolicy.policy import CachePolicy
from tests.integrations.conversations.tokenizers import CORPUS, byte_tokenizer
from tests.reference import tiny_model
from tests.reference.models import Family

VOCABULARY = 320
SPECIAL = (0, 1, 2)
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# As Llama 3's: a beginning, heads of their own, contents without white space around them.
LLAMA3 = (
    "<|begin|>{% for m in messages %}<|start|>{{ m.role }}\n\n{{ m.content | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)
# As Qwen3's: thoughts only in what follows the last question, and empty ones where none are wanted.
QWEN3 = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>\n{% endif %}"
    "{% endif %}"
)
# Says in its first line how many messages there are.
COUNTING = "{{ messages | length }} messages\n" + CHATML


def chatter(template: str = CHATML) -> Any:
    return byte_tokenizer(template, vocab_size=VOCABULARY)


# As Llama 2's, with spaces around an answer that are no part of it.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)


def spaced_tokenizer(scheme: Literal["always", "first", "never"]) -> Any:
    """A tokenizer whose tokens begin with spaces, and which may put one before a text."""
    tokenizer: Any = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    special = ["<unk>", "<s>", "</s>"]
    trainer = BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "[INST] , ? [/INST]"] * 3, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = LLAMA2
    return made


def chat_model(family: Family, *, seed: int = 1) -> PreTrainedModel:
    """A tiny model with peaked attention, for the tokenizer's vocabulary."""
    model = tiny_model(family, seed=seed)
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(VOCABULARY, mean_resizing=False)
    generator = torch.Generator().manual_seed(seed)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = layer.weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.2)
    return model.eval()


# An answer token by token; None where the model is free.
Script = Sequence[int | None]


def script(tokenizer: Any, text: str) -> list[int | None]:
    """An answer of one token for each character, more than its text has; "_" is free."""
    one = {each: tokenizer(each, add_special_tokens=False)["input_ids"] for each in set(text)}
    assert all(len(ids) == 1 for ids in one.values())
    return [None if each == "_" else one[each][0] for each in text]


class Scripted(LogitsProcessor):  # type: ignore[misc]
    """Lets answers be what a script says, and the model's own word, but no special, where free."""

    def __init__(self, says: Script) -> None:
        self.says = says
        self.first: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.first = input_ids.shape[1] if self.first is None else self.first
        return scripted(scores, self.says, input_ids.shape[1] - self.first)


def scripted(scores: Tensor, says: Script, step: int) -> Tensor:
    """The scores of an answer's step."""
    scores = scores.clone()
    scores[:, list(SPECIAL)] = -torch.inf
    said = says[step] if step < len(says) else None
    if said is not None:
        scores[:] = -torch.inf
        scores[:, said] = 0
    return scores


def saying(says: Script) -> dict[str, Any]:
    """Arguments of `generate` for a scripted answer."""
    return {"logits_processor": LogitsProcessorList([Scripted(says)]), "max_new_tokens": len(says)}


class ByHand:
    """A conversation whose every token is written by the test, read by a loop by hand.

    With full context each token is computed from all before it, without a cache.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, policy: CachePolicy) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.cache = None if policy == FullContext() else PolicyCache(policy)
        self.ids: list[int] = []

    def ask(self, new: str, says: Script) -> list[int]:
        """Reads text behind all there is, and answers as the script says."""
        self.ids += self.encode(new)
        answer = self._without_cache(says) if self.cache is None else self._read(says)
        self.ids += answer
        return answer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @torch.no_grad()
    def _without_cache(self, says: Script) -> list[int]:
        answer: list[int] = []
        for step in range(len(says)):
            whole = torch.tensor([[*self.ids, *answer]])
            logits = self.model(whole, use_cache=False).logits[:, -1]
            answer.append(int(scripted(logits, says, step).argmax()))
        return answer

    @torch.no_grad()
    def _read(self, says: Script) -> list[int]:
        answer: list[int] = []
        cache = self.cache
        assert cache is not None
        with cache.attached(self.model):
            cache.start_turn()
            fed = torch.tensor([self.ids[cache.get_seq_length() :]])
            for step in range(len(says)):
                logits = self.model(fed, cache=cache).logits
                answer.append(int(scripted(logits[:, -1], says, step).argmax()))
                fed = torch.tensor([answer[-1:]])
        return answer
