"""Shorten a prompt with a small model, for another model to answer."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpolicy.checks import check_count, check_kind, check_rate
from kvpolicy.evaluation.compression.chat import (
    Message,
    Rendered,
    Span,
    read_messages,
    render,
)
from kvpolicy.evaluation.compression.chunks import ALIGNMENTS, choose, divide, kept_tokens
from kvpolicy.evaluation.compression.compressed import CompressedPrompt
from kvpolicy.evaluation.compression.scoring import LookAheadScorer, PromptScorer
from kvpolicy.evaluation.compression.segments import segments_of, shortened, shorter_ids
from kvpolicy.evaluation.compression.tokens import tokens_of
from kvpolicy.evaluation.defaults import COMPRESSION_RATE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compress_prompt(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str | Sequence[Any],
    *,
    rate: float | None = None,
    tokens: int | None = None,
    scorer: PromptScorer | None = None,
    chunk_size: int = 32,
    align: str = "word",
    protect: Sequence[Span] = (),
    keep: Sequence[str] = (),
    chat: bool | None = None,
    cut_special: bool = False,
    gap: str = "",
) -> CompressedPrompt:
    """Shorten a prompt by leaving out the chunks that a small model does not attend to.

    The model reads the prompt, and every token gets a saliency. Chunks of neighbouring tokens are
    ranked by their mean saliency, and the best are kept, in their order, with the first and the
    last. What is left is a shorter text, exactly pieces of the prompt, that any server takes.

    Never cut are a chat template's own words, special tokens, and what ``protect``, ``keep`` and a
    message's ``"keep"`` name; system messages are kept whole unless they say otherwise.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode: the one that chooses.
        tokenizer: Its tokenizer.
        prompt: A text, or a chat: messages ``{"role": ..., "content": ...}``. ``"keep"`` beside
            these is True where a content is never cut, False where all of it may be, or the
            text or texts in it that are not, such as the question.
        rate: Fraction of the chunks that are kept, rounded up, in (0, 1]. 0.2 by default.
        tokens: Tokens that are kept at most, in place of the rate: what is never cut counts, gaps
            do not.
        scorer: How tokens are scored; `LookAheadScorer` by default.
        chunk_size: Tokens of a chunk, at least 1.
        align: Where chunks begin and end: between ``"word"``s, ``"line"``s or any ``"token"``s. A
            chunk has up to twice its size to get there.
        protect: First character and the one behind the last, of parts of a text that are never
            cut. A token is kept with any of its characters.
        keep: Texts that are never cut, wherever they are in a content.
        chat: Whether a text is read as a user's turn in the tokenizer's template; None for yes if
            it has one. A chat always is.
        cut_special: Whether special tokens within contents may be cut.
        gap: The text in place of what was left out.

    Returns:
        The shorter prompt, what it is made of and what was left out.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, the prompt is empty, or what is never cut does
            not fit; the model is refused by `PolicyCache`, or cannot be scored so.

    Example:
        >>> from kvpolicy.evaluation.tasks.ruler_words import load_model, load_tokenizer, prompts
        >>> prompt = prompts("multi-key", length=256, count=1)[0]
        >>> found = compress_prompt(load_model(), load_tokenizer(), prompt.input, rate=0.25)
        >>> found.tokens_before, found.tokens_after, found.text.endswith(prompt.question)
        (256, 64, True)

    Source: the choice by chunks is SpecPrefill's (arXiv 2502.02789), without its positions, which
    no server takes: what is left is read at positions without gaps, as in GemFilter (arXiv
    2409.17422). There chunks have exactly their size.
    """
    rate = check_extent(rate, tokens, chunk_size, align)
    check_kind("gap", gap, str)
    scorer = LookAheadScorer() if scorer is None else scorer
    check_kind("scorer", scorer, PromptScorer)

    messages, rendered = rendered_of(tokenizer, prompt, chat)
    kept = [*_message_spans(messages, rendered), *_found(keep, rendered)]
    if isinstance(prompt, str):
        kept += _protected(protect, prompt, rendered)
    elif len(protect):
        raise ValueError(
            f'protect must not be given with a chat, got {list(protect)}; use keep, or "keep" '
            "beside a message's content"
        )
    read = tokens_of(tokenizer, rendered, kept, cut_special=cut_special)
    if not read.ids:
        raise ValueError("prompt must have at least one token, got none")
    saliency = scorer.score(model, read.ids)
    chunks = choose(read, divide(read, chunk_size, align), saliency, rate=rate, budget=tokens)
    segments = segments_of(tokenizer, read, kept_tokens(read, chunks), glue=not gap)
    contents = [shortened(segments, span, gap) for span in rendered.contents]
    if isinstance(prompt, str):  # without the chat template
        text = contents[0]
    else:
        text = shortened(segments, (0, len(rendered.text)), gap)
    return CompressedPrompt(
        prompt=rendered.text,
        text=text,
        ids=shorter_ids(tokenizer, read, segments, gap),
        messages=tuple(
            {**each.fields, "content": content} if each.content.strip() else each.fields
            for each, content in zip(messages, contents, strict=True)
        ),
        segments=segments,
        chunks=tuple(chunks),
        tokens_before=len(read),
        tokens_fixed=sum(read.fixed),
        source=saliency.source,
    )


def check_extent(
    rate: float | None, tokens: int | None, chunk_size: int, align: str
) -> float | None:
    """Check the number or fraction of tokens to keep; this needs no model.

    Returns:
        The rate; None where a number of tokens is given.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both a rate and a number are given.
    """
    if rate is not None and tokens is not None:
        raise ValueError("at most one of rate and tokens may be given, got both")
    if tokens is None:
        rate = check_rate("rate", COMPRESSION_RATE if rate is None else rate)
    else:
        check_count("tokens", tokens, minimum=1)
    check_count("chunk_size", chunk_size, minimum=1)
    if align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {', '.join(ALIGNMENTS)}, got {align!r}")
    return rate


def rendered_of(
    tokenizer: Any, prompt: str | Sequence[Any], chat: bool | None
) -> tuple[tuple[Message, ...], Rendered]:
    """Return a prompt's messages, and the text that the small model reads."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(prompt, str):
        if not isinstance(prompt, Sequence):
            raise TypeError(f"prompt must be a text or a list of messages, got {prompt!r:.80}")
        if chat is False:
            raise ValueError("chat must not be False where the prompt is a chat; give its text")
        messages = read_messages(prompt)
        return messages, render(tokenizer, messages)
    if not prompt.strip():
        raise ValueError("prompt must have text, got none")
    if chat and not template:
        raise ValueError("chat needs a tokenizer with a chat template, got one without")
    message = Message({"role": "user", "content": prompt})
    if template and chat is not False:
        return (message,), render(tokenizer, [message])
    return (message,), Rendered(prompt, ((0, len(prompt)),))


def _message_spans(messages: Sequence[Message], rendered: Rendered) -> list[Span]:
    """Return the spans, in the rendered prompt, of texts that the messages mark as to be kept."""
    spans = []
    for message, (start, end) in zip(messages, rendered.contents, strict=True):
        if message.keeps is None:
            spans.append((start, end))
        for text in message.keeps or ():
            # A template may have stripped white space from both ends.
            spans += _occurrences(text.strip(), rendered.text, start, end)
    return spans


def _found(keep: Sequence[str], rendered: Rendered) -> list[Span]:
    """Return the spans where given texts occur in the messages; each text must occur."""
    if isinstance(keep, str):
        raise TypeError(f"keep must be a list of texts, got the text {keep!r:.80}")
    spans: list[Span] = []
    for text in keep:
        check_kind("each of keep", text, str)
        found = [
            span
            for start, end in rendered.contents
            for span in _occurrences(text.strip(), rendered.text, start, end)
        ]
        if not found:
            raise ValueError(f"each of keep must be in the prompt, got {text!r:.80}")
        spans += found
    return spans


def _occurrences(text: str, within: str, start: int, end: int) -> list[Span]:
    spans = []
    at = within.find(text, start, end) if text else -1
    while at >= 0:
        spans.append((at, at + len(text)))
        at = within.find(text, at + len(text), end)
    return spans


def _protected(protect: Sequence[Span], prompt: str, rendered: Rendered) -> list[Span]:
    """Map spans of the original text to spans of the prompt as rendered by the template."""
    first, last = rendered.contents[0]
    stripped = len(prompt) - len(prompt.lstrip()) if last - first < len(prompt) else 0
    spans = []
    for span in protect:
        try:
            start, end = (operator.index(each) for each in span)
        except (TypeError, ValueError):
            raise TypeError(f"each of protect must be two ints, got {span!r:.80}") from None
        if not 0 <= start < end <= len(prompt):
            raise ValueError(
                f"each of protect must be (first, end) with 0 <= first < end <= {len(prompt)}, "
                f"the prompt's characters, got {tuple(span)}"
            )
        spans.append((first + max(start - stripped, 0), min(first + max(end - stripped, 0), last)))
    return spans
