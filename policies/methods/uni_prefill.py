"""UniPrefill (arXiv 2605.06221)."""

import attrs

from kvpolicy.checks import check_count
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.block_mass import BlockMassPropagation
from kvpolicy.policies.propagation.shared import as_layers
from kvpolicy.policies.scorers.window import WindowAttentionScorer
from kvpolicy.policies.selectors.keep_all import KeepAllSelector


@documented
@attrs.frozen
class UniPrefill(Method):
    """Drops blocks of tokens with little attention, after several layers of one prefill.

    After each of ``tsp_layers`` only the first tokens, the last tokens, and the blocks that
    together receive the share ``mass`` of the last ``window_size`` tokens' attention go on (see
    `BlockMassPropagation`). Their number depends on the prompt. Layers keep all keys and values
    that reach them.

    Args:
        tsp_layers: Indices of the layers after which tokens are dropped, from 0; None for six
            from a quarter to seven eighths of the model, 7, 11, 15, 19, 23 and 27 of 32.
        mass: Share of the attention that goes on, in (0, 1].
        chunk_size: Tokens of a block, at least 1.
        num_sinks: First tokens of the context that always go on, at least 0.
        window_size: Last tokens, which observe and always go on, at least 1.

    Example:
        >>> UniPrefill(mass=0.975).propagation.mass
        0.975

    Source: UniPrefill (arXiv 2605.06221), by its public code, whose layers for Llama 3.1 8B are the
    default. It has other settings for other models: for Gemma 3 a mass of 0.975 after layers 29, 35
    and 41, for Qwen3-Next every fourth layer from 7 to 43.
    """

    paper = "arXiv 2605.06221"

    tsp_layers: tuple[int, ...] | None = attrs.field(
        default=None, converter=as_layers, kw_only=True
    )
    mass: float = attrs.field(default=0.99, kw_only=True)
    chunk_size: int = attrs.field(default=64, kw_only=True)
    num_sinks: int = attrs.field(default=128, kw_only=True)
    window_size: int = attrs.field(default=128, kw_only=True)

    def _parts(self) -> Parts:
        check_count("chunk_size", self.chunk_size, minimum=1)
        check_count("num_sinks", self.num_sinks)
        propagation = BlockMassPropagation(
            tsp_layers=self.tsp_layers,
            mass=self.mass,
            chunk_size=self.chunk_size,
            protect=self.num_sinks,
            window_size=self.window_size,
        )
        return WindowAttentionScorer(self.window_size), KeepAllSelector(), propagation
