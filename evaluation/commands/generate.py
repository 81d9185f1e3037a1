"""Run `kvpolicy generate`: one completion under a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.options import CHAT, PROMPT, TSP_LAYER, ModelOptions, Option, PolicyOptions


@attrs.frozen(kw_only=True)
class GenerateOptions(ModelOptions):
    """The command-line options of `kvpolicy generate`.

    Raises:
        ValueError: Both or none of the prompt and its file are given, or a text is empty.
    """

    prompt_file: Annotated[Path | None, Option(PROMPT, metavar="FILE")] = None
    prompt: Annotated[
        str | None, Option("The prompt itself, instead of --prompt-file.", metavar="TEXT")
    ] = None
    questions: Annotated[
        tuple[str, ...],
        Option(
            "A question about the prompt, which is then a document that is read once, before any "
            "question is known. Repeatable: each question is answered without the others.",
            ("--ask",),
            metavar="TEXT",
        ),
    ] = ()
    policies: PolicyOptions
    tsp_rate: Annotated[
        float | None,
        Option(
            "Fraction of the prompt's tokens that later layers read after a drop, in (0, 1].",
            metavar="RATE",
        ),
    ] = None
    tsp_layer: Annotated[int | None, TSP_LAYER] = None
    max_new_tokens: Annotated[
        int,
        Option(
            "Largest number of tokens to generate.",
            ("--answer-tokens",),
            min=1,
        ),
    ] = 128
    sample: Annotated[bool, Option("Sample the answer; default: greedy decoding.")] = False
    temperature: Annotated[float, Option("Temperature of --sample, above 0.", metavar="T")] = 1.0
    seed: Annotated[int, Option("Of --sample.")] = 0
    chat: Annotated[bool | None, CHAT] = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if (self.prompt_file is None) == (self.prompt is None):
            got = "neither" if self.prompt is None else "both"
            raise ValueError(f"exactly one of --prompt-file and --prompt must be given, got {got}")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("--prompt must be a text, got an empty one")
        if not all(each.strip() for each in self.questions):
            raise ValueError("--ask must be a text, got an empty one")


def generate(options: GenerateOptions) -> None:
    """Stream a completion to stdout, then print to stderr what the cache held.

    Without --policy, FastKV is used, with its own retention rate. With --ask, the answers are
    on stdout, in the order of the questions, and the cache is the document's.
    """
    work("generate", options)
