"""SlimInfer's prefill (arXiv 2508.06447)."""

import attrs

from kvpolicy.budgets import Budget, DefaultRate
from kvpolicy.checks import check_count
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.staged import StagedPropagation
from kvpolicy.policies.propagation.token_selective import TokenSelectivePropagation
from kvpolicy.policies.scorers.block_product import BlockProductScorer
from kvpolicy.policies.selectors.keep_all import KeepAllSelector

# Layers 10, 20 and 30 of 32, and by how much more goes on there than after the last.
STAGES = ((11 / 32, 4), (21 / 32, 2), (31 / 32, 1))


@documented
@attrs.frozen
class SlimInfer(Method):
    """Drops blocks of tokens three times in one prefill, by products with the last queries.

    Tokens are dropped after about a third, two thirds and nearly all of the layers. The first block
    of tokens and the last tokens always go on, and the blocks with a run of keys that has the
    largest products with the last queries (see `BlockProductScorer`). The number of tokens is four
    times, twice and finally once the number asked for. Layers keep all keys and values that reach
    them.

    Args:
        tsp_rate: Fraction of the context that goes on after the last of the three, in (0, 1].
        window_size: Last tokens, whose queries are averaged and which always go on, at least 1.
        chunk_size: Tokens of a chunk, whose keys are averaged, at least 1.
        block_chunks: Chunks of a block, at least 1.
        tsp_tokens: Number of tokens that go on after the last of the three, at least 1, in place of
            the rate; 2,048 in the paper, with Llama 3.1 8B.
        protect: First tokens of the context that always go on, at least 0; None for a block.

    Example:
        >>> rates = SlimInfer(tsp_rate=0.1).propagation.layer_rates(num_layers=32)
        >>> [rates[layer] for layer in (10, 11, 21, 31)]
        [1.0, 0.4, 0.2, 0.1]

    Source: SlimInfer (arXiv 2508.06447), as described by others. Only its prefill: the paper keeps
    dropped blocks in the CPU's memory, from where they can return. The layers, 10, 20 and 30 of 32,
    and the ratio of the three numbers are those for Llama 3.1 8B; for Qwen2.5 7B the paper has
    12,288, 6,144 and 4,096 tokens after layers 9, 18 and 26 of 28. The budget is a number of tokens
    here, so that one block may be cut to its first tokens.
    """

    paper = "arXiv 2508.06447"

    tsp_rate: float | None = attrs.field(default=DefaultRate(0.1), kw_only=True)
    window_size: int = attrs.field(default=4, kw_only=True)
    chunk_size: int = attrs.field(default=8, kw_only=True)
    block_chunks: int = attrs.field(default=8, kw_only=True)
    tsp_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int | None = attrs.field(default=None, kw_only=True)

    def _parts(self) -> Parts:
        check_count("chunk_size", self.chunk_size, minimum=1)
        check_count("block_chunks", self.block_chunks, minimum=1)
        last = Budget(self.tsp_rate, self.tsp_tokens, name="tsp")
        block = self.chunk_size * self.block_chunks
        scorer = BlockProductScorer(
            window_size=self.window_size, chunk_size=self.chunk_size, block_chunks=self.block_chunks
        )
        stages = [
            TokenSelectivePropagation(
                tsp_rate=None if last.rate is None else min(times * last.rate, 1.0),
                window_size=self.window_size,
                tsp_tokens=None if last.tokens is None else times * last.tokens,
                protect=block if self.protect is None else self.protect,
                tsp_depth=depth,
            )
            for depth, times in STAGES
        ]
        return scorer, KeepAllSelector(), StagedPropagation(stages)
