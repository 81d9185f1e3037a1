"""What the fuzzing draws: models, with a policy for each, and rows of tokens."""

import copy
from functools import lru_cache
from typing import Any

import attrs
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from tests.families import Family
from tests.integrations.fuzz.drawn_bounds import bounded
from tests.integrations.fuzz.drawn_policies import KINDS
from tests.integrations.support.bounded_row import Bound
from tests.reference import FAMILIES, Method, random_tokens, tiny_model


@lru_cache(maxsize=256)
def built(
    family: str, num_layers: int, heads: tuple[int, int], implementation: str, seed: int
) -> PreTrainedModel:
    query_heads, kv_heads = heads
    if family == "seed_oss":  # a Llama with biases in its attention
        sizes = {
            "num_hidden_layers": num_layers,
            "num_attention_heads": query_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 8,
            "intermediate_size": 24,
        }
        return Family("seed_oss", sizes).build(seed, attn_implementation=implementation)
    return tiny_model(
        family,
        seed=seed,
        num_layers=num_layers,
        query_heads=query_heads,
        kv_heads=kv_heads,
        hidden_size=8 * query_heads,
        intermediate_size=24,
        attn_implementation=implementation,
    )


@lru_cache(maxsize=256)
def windowed(shape: tuple[Any, ...], windows: tuple[int | None, ...]) -> PreTrainedModel:
    """The model of a shape with the same weights, some of whose layers see a sliding window."""
    plain = built(*shape)
    config = copy.deepcopy(plain.config)
    config.sliding_window = next(window for window in windows if window)
    config.layer_types = ["sliding_attention" if window else "full_attention" for window in windows]
    model = type(plain)(config).eval()
    model.load_state_dict(plain.state_dict())
    return model


@attrs.frozen
class Situation:
    """A model, and a policy with its reference; the models are built when they are asked for."""

    shape: tuple[Any, ...]
    windows: tuple[int | None, ...]
    policy: CachePolicy
    method: Method
    bound: Bound | None = None

    @property
    def weights(self) -> PreTrainedModel:
        """The model without windows, for the reference."""
        return built(*self.shape)

    @property
    def model(self) -> PreTrainedModel:
        return windowed(self.shape, self.windows) if any(self.windows) else self.weights


HEADS = st.sampled_from([(4, 2), (2, 2), (6, 2), (3, 1), (6, 3), (1, 1), (4, 4)])


@st.composite
def situations(draw: st.DrawFn, kind: str, *, bounds: bool = False) -> Situation:
    """Models of all shapes, and policies of one of the `KINDS`, which may bound answers."""
    num_layers = draw(st.integers(1, 5))
    shape = (
        draw(st.sampled_from([*FAMILIES, "seed_oss"])),
        num_layers,
        draw(HEADS),
        draw(st.sampled_from(["sdpa", "eager"])),
        draw(st.integers(0, 2)),
    )
    policy, method = draw(KINDS[kind](num_layers))
    bound = None
    if bounds:
        policy, method, bound = draw(bounded(policy, method))
    return Situation(shape, draw(sliding_windows(shape, policy)), policy, method, bound)


@st.composite
def sliding_windows(
    draw: st.DrawFn, shape: tuple[Any, ...], policy: CachePolicy
) -> tuple[int | None, ...]:
    """Windows of layers after which the policy drops nothing, in the families that have them."""
    family, num_layers, *_ = shape
    dropping = policy.propagation.acting_layers(num_layers)
    if family not in ("qwen2", "qwen3") or policy.propagation.restarts or draw(st.booleans()):
        return (None,) * num_layers
    window = draw(st.sampled_from([16, 7, 24]))
    return tuple(
        None if layer in dropping or draw(st.booleans()) else window for layer in range(num_layers)
    )


@attrs.frozen
class Drawn:
    """Columns of new tokens by row, in few numbers, so that a failing example can be read."""

    # Of each row the number of tokens, the seed they are drawn with, how many of them differ before
    # they repeat, and how many come before the padding.
    rows: tuple[tuple[int, int, int, int], ...]
    spare: int = 0  # columns that are padding in every row

    @property
    def columns(self) -> list[list[int | None]]:
        """By row, None on padding; the last of each row is a token."""
        longest = max(length for length, *_ in self.rows) + self.spare
        return [self._row(*row, longest) for row in self.rows]

    @staticmethod
    def _row(length: int, seed: int, period: int, gap: int, longest: int) -> list[int | None]:
        said = random_tokens(seed, period) * length
        return [*said[:gap], *[None] * (longest - length), *said[gap:length]]


@st.composite
def drawn_rows(draw: st.DrawFn, batch: int, longest: int, *, shortest: int = 1) -> Drawn:
    rows = []
    for _ in range(batch):
        # Mostly long enough for something to be evicted.
        length = draw(st.integers(shortest, longest) | st.integers(max(longest // 2, 1), longest))
        # A short period makes a text that repeats itself, so that looking it up finds drafts.
        period = draw(st.sampled_from([length, length, min(length, 5)]))
        # Most padding stands on the left, some before a later token.
        gap = draw(st.sampled_from([0, 0, length // 2, length - 1]))
        rows.append((length, draw(st.integers(0, 999)), period, gap))
    return Drawn(tuple(rows), draw(st.sampled_from([0, 0, 0, 2])))
