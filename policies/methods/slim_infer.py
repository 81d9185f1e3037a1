"""SlimInfer's prefill (arXiv 2508.06447)."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.staged import StagedPropagation
from kvpolicy.policies.propagation.token_selective import TokenSelectivePropagation
from kvpolicy.policies.scorers.block_product import BlockProductScorer
from kvpolicy.policies.selectors.keep_all import KeepAllSelector

DEPTHS = (11 / 32, 21 / 32, 31 / 32)  # layers 10, 20 and 30 of 32


@documented
@attrs.frozen
class SlimInfer(Method):
    """Drops blocks of tokens three times in one prefill, by products with the last queries.

    After a third, two thirds and nearly all of the layers, the first block of tokens, the last
    tokens and the blocks go on of which some run of keys answers most strongly to the last queries
    (see `BlockProductScorer`). Layers keep all keys and values that reach them.

    Args:
        stage_tokens: Numbers of tokens that go on, one for each drop, each at least 1.
        stage_rates: Fractions of the context that go on, in place of the numbers; None for these.
        window_size: Last tokens, whose queries are averaged and which always go on, at least 1.
        block_size: Tokens of a block, a multiple of ``unit_size``.
        unit_size: Tokens whose keys are averaged, at least 1.
        protect: First tokens of the context that always go on, at least 0; None for a block.

    Example:
        >>> SlimInfer().propagation.acting_layers(num_layers=32) == {10, 20, 30}
        True

    Source: SlimInfer (arXiv 2508.06447), as described by others. Its prefill only, and without the
    return of dropped blocks, which it keeps in the CPU's memory. Numbers are those for Llama 3.1
    8B; for Qwen2.5 7B it takes 12,288, 6,144 and 4,096 after layers 9, 18 and 26 of 28. The budget
    is a number of tokens here, so that one block may be cut, which keeps its first tokens.
    """

    paper: ClassVar[str] = "arXiv 2508.06447"

    stage_tokens: tuple[int, ...] = attrs.field(default=(8192, 4096, 2048), converter=tuple)
    stage_rates: tuple[float, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(tuple)
    )
    window_size: int = 4
    block_size: int = 64
    unit_size: int = 8
    protect: int | None = attrs.field(default=None, kw_only=True)

    def _parts(self) -> Parts:
        scorer = BlockProductScorer(self.window_size, self.block_size, self.unit_size)
        name = "stage_tokens" if self.stage_rates is None else "stage_rates"
        amounts = self.stage_tokens if self.stage_rates is None else self.stage_rates
        if len(amounts) != len(DEPTHS):
            raise ValueError(f"{name} must be {len(DEPTHS)} numbers, got {amounts}")
        stages = [
            TokenSelectivePropagation(
                tsp_rate=None if self.stage_rates is None else self.stage_rates[index],
                window_size=self.window_size,
                tsp_tokens=self.stage_tokens[index] if self.stage_rates is None else None,
                protect=self.block_size if self.protect is None else self.protect,
                tsp_depth=depth,
            )
            for index, depth in enumerate(DEPTHS)
        ]
        return scorer, KeepAllSelector(), StagedPropagation(stages)
