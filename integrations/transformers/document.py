"""Read a document once under a policy, then answer questions about it."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicy.checks import check_count, check_kind
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.generation import effective_config
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.state.report import held_in_words
from kvpolicy.integrations.transformers.state.storage import Storage
from kvpolicy.integrations.transformers.surface import CACHE, CACHE_NAMES
from kvpolicy.policies import ReplayKV
from kvpolicy.policy import CachePolicy

# Needs no question, and reads the document once.
DEFAULT_POLICY = ReplayKV()

# Arguments of `generate` that are made of document and question, so that callers cannot set them.
OWN_ARGUMENTS = {"input_ids", "inputs", "inputs_embeds", "attention_mask", *CACHE_NAMES}


class ReadDocument:
    r"""A document that a model has read once under a policy, for any number of questions.

    The policy chooses which tokens to keep before it knows any question. Each question is appended
    whole to a copy of the cache, so that no answer sees another question.

    Args:
        model: A decoder-only model of Transformers.
        tokenizer: Its tokenizer.
        document: The text.
        policy: Which of its tokens to keep; by default the 20% that `ReplayKV` keeps. It needs a
            rotary embedding; for other models (GPT-2) give `KVzip`. Or a cache that has read this
            document, such as ``document.cache`` of another time, saved and loaded: then nothing is
            read.
        chat: True puts document and question into one user message of the tokenizer's chat
            template; False puts the question directly after the document.
        storage: How keys and values are held; see `PolicyCache`.

    Attributes:
        cache: The cache of the tokens kept of the document.

    Raises:
        TypeError: An argument has the wrong type.
        UnsupportedModelError: The model lacks what the policy needs; the message says what.
        ValueError: The document is empty, the chat template is missing, the template's text up to
            the end of the document depends on the question, or the cache has read something else.

    Example:
        >>> from kvpolicy.evaluation import load  # the model SmolLM2-135M-Instruct
        >>> from kvpolicy.policies import ReplayKV
        >>> found = load()
        >>> text = "Ann lives in Oslo. Bob lives in Rome. Eve lives in Lima.\n\n"
        >>> document = ReadDocument(found.model, found.tokenizer, text, ReplayKV(0.5))
        >>> document.answer(["Bob lives in"], max_new_tokens=2)
        [' Rome.']
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        document: str,
        policy: CachePolicy | PolicyCache = DEFAULT_POLICY,
        *,
        chat: bool = False,
        storage: Storage | None = None,
    ) -> None:
        check_kind("document", document, str)
        if not document.strip():
            raise ValueError("document must be a text that is not blank, got an empty one")
        check_kind("chat", chat, bool)
        if not isinstance(policy, PolicyCache):
            self.cache = PolicyCache(policy, storage)
        elif storage is None:
            self.cache = policy
        else:
            raise ValueError(f"storage must be left out with a cache, got {storage!r}")
        ModelParts(model)  # raises an error if this is not a model
        if not callable(tokenizer):
            raise TypeError(f"tokenizer must be one of Transformers, got {tokenizer!r}")
        if chat and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "chat must be False with a tokenizer that has no chat_template, got True; set "
                "tokenizer.chat_template, or build the texts yourself"
            )
        self._model, self._tokenizer = model, tokenizer
        self._document, self._chat = document, chat
        self._text = self._templated("?")[: -len(self._after("?"))] if chat else document
        ids = prompt_ids(tokenizer, self._text, special=not chat)
        if not ids:
            raise ValueError(
                f"document must have tokens, got {document!r}, for which the tokenizer makes none"
            )
        self._ids = torch.tensor([ids], device=model.device)
        if self.cache is policy:
            self._check_read()
        else:
            read(model, self.cache, self._ids, torch.ones_like(self._ids))

    def __repr__(self) -> str:
        held = held_in_words(self.cache.layers, self.cache.get_seq_length())
        names = type(self).__name__, type(self._model).__name__
        return f"{names[0]}({names[1]}, {self.cache.policy}): {held}"

    def answer(
        self, questions: Sequence[str], *, batch_size: int | None = None, **generation: Any
    ) -> list[str]:
        """Answer questions about the document, independently of each other.

        Args:
            questions: Texts; each one follows the document unchanged.
            batch_size: How many questions are answered at a time, each with its own copy of the
                kept tokens; None for all of them.
            generation: Arguments of `generate`, such as ``max_new_tokens``, except inputs and
                cache.

        Returns:
            The answers, in the order of the questions, without special tokens.

        Raises:
            TypeError: ``questions`` is not a sequence of texts, or ``batch_size`` is not an int.
            ValueError: A question is empty, ``batch_size`` is below 1, or ``generation`` names an
                input or the cache.
        """
        if isinstance(questions, (str, bytes)) or not isinstance(questions, Sequence):
            raise TypeError(
                f"questions must be a sequence of texts, got {questions!r}; pass a list"
            )
        for question in questions:
            if not isinstance(question, str):
                raise TypeError(f"questions must be texts, got {question!r} among them")
        if batch_size is not None:
            check_count("batch_size", batch_size, minimum=1)
        check_options(generation, "document and question")
        rows = [self._question_ids(question) for question in questions]
        size, answers = batch_size or max(len(rows), 1), list[str]()
        for start in range(0, len(rows), size):
            answers += self._answer(rows[start : start + size], generation)
        return answers

    def _check_read(self) -> None:
        """Raise ValueError unless the cache has read this document, in this form, and no more."""
        seen = self.cache._reader.tokens
        if seen is None or seen.valid.shape != self._ids.shape:
            batch, count = (0, 0) if seen is None else seen.valid.shape
            got = f"of {batch} rows and {count:,} tokens"
        elif (unlike := seen.first_unlike(self._ids)) is not None:
            got = f"that has read another token at {unlike[1]:,}"
        else:
            return
        raise ValueError(
            "policy must be a policy, or a cache that has read this document and no more, 1 row of "
            f"{self._ids.shape[1]:,} tokens, got a cache {got}; is chat={self._chat} as when the "
            "document was read?"
        )

    def _answer(self, rows: Sequence[list[int]], generation: dict[str, Any]) -> list[str]:
        pad = pad_of(self._tokenizer)
        asked, valid = left_padded(rows, pad or 0, self._ids.device)
        document = self._ids.expand(len(rows), -1)
        ids = torch.cat([document, asked], dim=1)
        mask = torch.cat([torch.ones_like(document), valid], dim=1)
        fork = copy.copy(self.cache)
        fork.batch_repeat_interleave(len(rows) * beams_of(self._model, generation))
        with fork.appending():
            output = self._model.generate(
                ids, attention_mask=mask, **{CACHE: fork, "pad_token_id": pad, **generation}
            )
        sequences = output if isinstance(output, Tensor) else output.sequences
        decoded: list[str] = self._tokenizer.batch_decode(
            sequences[:, ids.shape[1] :], skip_special_tokens=True
        )
        return decoded

    def _question_ids(self, question: str) -> list[int]:
        text = self._after(question) if self._chat else question
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError(f"questions must not be empty, got {question!r}")
        return ids

    def _templated(self, question: str) -> str:
        message = {"role": "user", "content": self._document + question}
        text: str = self._tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        return text

    def _after(self, question: str) -> str:
        """Return the text that the chat template puts after the document, with a question."""
        text, document = self._templated(question), self._document.strip()
        before, found, after = text.partition(document)
        if not found or not (before + found).startswith(getattr(self, "_text", before + found)):
            raise ValueError(
                "the chat template must begin with the same document for every question, got one "
                "that changes it; build the texts yourself, and pass chat=False"
            )
        return after


def prompt_ids(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    """Return the token ids of a text that will be continued, without an end token.

    Args:
        tokenizer: The tokenizer.
        text: The text.
        special: True includes the special tokens that the tokenizer puts before a text. Special
            tokens that it puts behind a text are always left out.
    """
    own: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not special:
        return own
    ids: list[int] = tokenizer(text)["input_ids"]
    for before in range(len(ids) - len(own) + 1):
        if ids[before : before + len(own)] == own:
            return ids[: before + len(own)]
    return ids


def check_options(generation: Mapping[str, Any], made_of: str) -> None:
    """Check that arguments for `generate` name neither its inputs nor its cache."""
    for name in sorted(OWN_ARGUMENTS & generation.keys()):
        raise ValueError(
            f"generation must not contain {name}, which is made from {made_of}, got "
            f"{generation[name]!r}"
        )


def pad_of(tokenizer: Any) -> int | None:
    """Return a tokenizer's padding id, or else its end-of-text id; None if it has neither."""
    pad: int | None = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None else pad


def beams_of(model: Any, generation: Mapping[str, Any]) -> int:
    """Return how many rows `generate` makes for each prompt: the number of beams.

    A cache that has been filled must have as many rows for each prompt.

    Raises:
        TypeError: The number of beams is not an int.
        ValueError: The number of beams is below 1, or several answers to one prompt are asked for.
    """
    config = effective_config(model, (), generation)
    if (config.num_return_sequences or 1) != 1:
        raise ValueError(f"num_return_sequences must be 1, got {config.num_return_sequences}")
    beams = config.num_beams
    return 1 if beams is None else check_count("num_beams", beams, minimum=1)


def read(model: Any, cache: PolicyCache, input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Read prompts, or the texts they begin with, into a cache under its policy.

    Args:
        model: A decoder-only model of Transformers.
        cache: The cache. Columns that it has read before are left out.
        input_ids: ``[batch, len]``, padded on the left.
        attention_mask: ``[batch, len]``, 0 on padding; None without padding.
    """
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": 1} if takes else {}
    with torch.no_grad(), cache.attached(model):
        cache.start_turn()
        given = {"attention_mask": attention_mask, CACHE: cache, **keep}
        model(input_ids[:, cache.get_seq_length() :], **given)


def left_padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Make a batch of token ids and its mask from rows, padded on the left.

    Returns:
        Ids and attention mask ``[batch, len]`` int64, padded on the left.

    Example:
        >>> left_padded([[5, 6], [7]], 0, torch.device("cpu"))
        (tensor([[5, 6],
                [0, 7]]), tensor([[1, 1],
                [0, 1]]))
    """
    width = max(len(row) for row in rows)
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
