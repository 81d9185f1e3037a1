"""Define the options of `kvpolicy estimate --memory`."""

from __future__ import annotations

from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.sizes import parse_size
from kvpolicy.evaluation.defaults import ATTENTION_NAMES
from kvpolicy.evaluation.options import Option, PolicyOptions

DEFAULT_ANSWER = 1024
DEFAULT_CHUNK = 4096


@attrs.frozen
class MemoryAsked:
    """What a memory estimate assumes: GPU memory, the weights' bytes, answer and chunk length.

    Args:
        memory: Bytes there are.
        weights: Bytes of the model's weights; None for those of its configuration.
        answer: Tokens of an answer.
        chunk: Tokens of a forward, where a prompt is read in chunks.
        attention: See `ModelMemory`; None for the family's own.
    """

    memory: int
    weights: int | None
    answer: int
    chunk: int
    attention: str | None


@attrs.frozen(kw_only=True)
class MemoryOptions:
    """The command-line options of a memory estimate; none may be given without ``--memory``."""

    memory: Annotated[
        str | None,
        Option(
            "Memory of the GPU, such as 80GB, 24GiB or 40e9: show how many sessions fit into it.",
            metavar="SIZE",
        ),
    ] = None
    weights: Annotated[
        str | None,
        Option(
            "Size of the weights; default: as quantised in the configuration, else in --dtype.",
            metavar="SIZE",
        ),
    ] = None
    answer: Annotated[
        int | None,
        Option(
            f"Number of tokens in an answer; default with --memory: {DEFAULT_ANSWER}.",
            ("--answer-tokens",),
            min=1,
        ),
    ] = None
    chunk: Annotated[
        int | None,
        Option(
            "Number of tokens in a chunk, if the prompt is read in chunks; default: "
            f"{DEFAULT_CHUNK}.",
            ("--prefill-chunk-size",),
            min=1,
        ),
    ] = None
    attention: Annotated[
        str | None,
        Option(
            "Attention implementation: sdpa, flash or eager; default: sdpa if the family has it.",
            metavar="NAME",
        ),
    ] = None

    def asked(self, policies: PolicyOptions) -> MemoryAsked | None:
        """Return what the memory estimate assumes; None without ``--memory``.

        Raises:
            ValueError: A size or a name is none; or an option makes no sense without ``--memory``.
        """
        if self.memory is None:
            given = {
                "--weights": self.weights,
                "--answer-tokens": self.answer,
                "--prefill-chunk-size": self.chunk,
                "--attention": self.attention,
                "--decoding-tokens": policies.decoding_tokens,
            }
            for option, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"--memory must be given with {option}, got {option} {value} alone"
                    )
            return None
        if self.attention is not None and self.attention not in ATTENTION_NAMES:
            raise ValueError(
                f"--attention must be one of {', '.join(ATTENTION_NAMES)}, got {self.attention}"
            )
        return MemoryAsked(
            parse_size(self.memory, "--memory"),
            None if self.weights is None else parse_size(self.weights, "--weights"),
            self.answer or DEFAULT_ANSWER,
            self.chunk or DEFAULT_CHUNK,
            self.attention,
        )
