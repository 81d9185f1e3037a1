"""Define the settings of an attention analysis."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.options import CHAT, NeedleOptions, Option


@attrs.frozen(kw_only=True)
class AnalysisSettings(NeedleOptions):
    """Settings of an attention analysis: the model, the prompts and what is measured."""

    seed: Annotated[int, Option("Random seed of the needle prompts.")] = 0
    prompt_files: Annotated[
        tuple[Path, ...],
        Option(
            "File with a prompt as UTF-8 text, or - for stdin; repeatable. Default: needle "
            "prompts.",
            ("--prompt-file",),
            metavar="FILE",
        ),
    ] = ()
    chat: Annotated[bool | None, CHAT] = None
    k: Annotated[
        int,
        Option(
            "Number of most attended tokens that are compared between layers.",
            ("--top-k", "-k"),
            min=1,
        ),
    ] = 64
    recall_ks: Annotated[
        tuple[int, ...],
        Option(
            "Number of most attended tokens whose share of attention is measured; repeatable; "
            "default: k/4 to 4k.",
            ("--recall-k",),
            min=1,
        ),
    ] = ()
    window_size: Annotated[
        int, Option("Number of last tokens whose attention is measured.", min=1)
    ] = 8
    tsp_rate: Annotated[
        float,
        Option(
            "Fraction of the prompt's tokens that later layers read after a drop, in (0, 1].",
            metavar="RATE",
        ),
    ] = 0.2
    layers: Annotated[
        tuple[int, ...],
        Option(
            "Layer after which tokens are dropped, counted from 0; repeatable; default: all.",
            ("--layer",),
            min=0,
        ),
    ] = ()

    def ks(self, context_len: int) -> tuple[int, ...]:
        """The numbers k of top tokens whose share of attention is measured, ascending."""
        spread = {self.k // 4, self.k // 2, self.k, 2 * self.k, 4 * self.k}
        return tuple(sorted(set(self.recall_ks) or {k for k in spread if 1 <= k <= context_len}))
