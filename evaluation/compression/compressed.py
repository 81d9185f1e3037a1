"""A shortened prompt, with its kept and left-out segments."""

from __future__ import annotations

from typing import Any

import attrs

from kvpolicy.evaluation.compression.chunks import Chunk
from kvpolicy.evaluation.compression.report import headline, segment_table
from kvpolicy.evaluation.compression.segments import Segment


@attrs.frozen
class CompressedPrompt:
    """A shortened prompt, with the segments kept and left out and their scores.

    Args:
        prompt: The prompt as the model has read it, its template included.
        text: The shorter prompt; of a text without a template that it was read in, of a chat in it.
        ids: The shorter prompt in the tokens of the model that chose, its template's included.
        messages: The shorter prompt as a chat.
        segments: Kept and left out in turn, all of the prompt together.
        chunks: What was chosen among.
        tokens_before: Tokens of the whole prompt, template included.
        tokens_fixed: Of these, tokens that are never cut.
        source: What the saliency was computed by.
    """

    prompt: str = attrs.field(repr=False)
    text: str
    ids: tuple[int, ...] = attrs.field(repr=False)
    messages: tuple[dict[str, Any], ...] = attrs.field(repr=False)
    segments: tuple[Segment, ...] = attrs.field(repr=False)
    chunks: tuple[Chunk, ...] = attrs.field(repr=False)
    tokens_before: int
    tokens_fixed: int
    source: str

    @property
    def tokens_after(self) -> int:
        """The number of tokens of the shortened prompt, gap markers included."""
        return len(self.ids)

    @property
    def kept(self) -> tuple[Segment, ...]:
        """The segments of the prompt that are kept."""
        return tuple(each for each in self.segments if each.kept)

    @property
    def left_out(self) -> tuple[Segment, ...]:
        """The segments of the prompt that are left out."""
        return tuple(each for each in self.segments if not each.kept)

    def report(self) -> str:
        """Return a text table of the segments kept and left out, in 80 columns."""
        head = headline(self.chunks, self.tokens_before, self.tokens_after, self.tokens_fixed)
        table = segment_table(self.segments, self.chunks)
        return f"{head}\nscored by {self.source}\n\n{table}"

    def request(self, model: str, *, as_ids: bool = False, **fields: Any) -> dict[str, Any]:
        """Return the request body that sends the shortened prompt to an OpenAI-compatible server.

        Args:
            model: The name under which the server serves its model.
            as_ids: For ``/v1/completions`` with token ids, which a server such as vLLM's takes, in
                place of ``/v1/chat/completions``. The served model must have the tokenizer of the
                model that chose.
            fields: Further fields, such as ``max_tokens=256``.

        Example:
            >>> from kvpolicy.evaluation import compress_prompt
            >>> from kvpolicy.evaluation.tasks.ruler_words import load_model, load_tokenizer
            >>> found = compress_prompt(load_model(), load_tokenizer(), "name river :", rate=0.5)
            >>> found.request("served", max_tokens=8)["messages"]
            [{'role': 'user', 'content': 'name river :'}]
        """
        if as_ids:
            return {**fields, "model": model, "prompt": list(self.ids)}
        return {**fields, "model": model, "messages": [dict(each) for each in self.messages]}

    def as_data(self) -> dict[str, Any]:
        """Return the shortened prompt and its segments as a dict, without the original."""
        return {
            "source": self.source,
            "tokens_before": self.tokens_before,
            "tokens_after": self.tokens_after,
            "tokens_fixed": self.tokens_fixed,
            "text": self.text,
            "ids": list(self.ids),
            "messages": [dict(each) for each in self.messages],
            "segments": [
                {
                    "tokens": [each.start, each.end],
                    "characters": None if each.characters is None else list(each.characters),
                    "kept": each.kept,
                    "text": each.text,
                }
                for each in self.segments
            ],
            "chunks": [
                {
                    "tokens": [each.start, each.end],
                    "score": each.score,
                    "always": each.always,
                    "kept": each.kept,
                }
                for each in self.chunks
            ],
        }
