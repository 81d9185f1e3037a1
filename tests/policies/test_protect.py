"""``protect``: the first tokens of the context are kept, or go on, whatever their saliency."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy, KVSelector, LayerContext
from kvpolicy.policies import (
    H2O,
    TOVA,
    AdaKV,
    AdaptiveHeadSelector,
    ChunkKV,
    CurDKV,
    FastKV,
    GQAGroupSelector,
    KeepAllSelector,
    KeyDiff,
    KeyNorm,
    LagKV,
    NestedKV,
    PassAllPropagation,
    PyramidKV,
    PyramidSelector,
    Random,
    SinkAndRecentSelector,
    SnapKV,
    StreamingLLM,
    TokenSelectivePropagation,
)
from kvpolicy.testing import check_propagation, check_selector
from tests.contexts import layer_context, of_new
from tests.core.odd import odd
from tests.policies.views import passed_by

METHODS: list[Callable[..., CachePolicy]] = [
    StreamingLLM,
    H2O,
    SnapKV,
    FastKV,
    TOVA,
    KeyNorm,
    KeyDiff,
    Random,
    PyramidKV,
    AdaKV,
    LagKV,
    NestedKV,
    CurDKV,
    ChunkKV,
]


def context(positions: list[int], *, seen_len: int, new: int | None = None) -> LayerContext:
    """One row of tokens at these positions, the last ``new`` of them new; all new if None."""
    key_len = len(positions)
    return layer_context(
        torch.randn(1, 1, key_len, 3, generator=torch.Generator().manual_seed(0)),
        positions=torch.tensor(positions)[None, None],
        new_valid=of_new(new or key_len),
        seen_len=(seen_len,),
    )


# The later a token, the more salient.
RISING = torch.arange(10.0)[None, None]


@pytest.mark.parametrize(
    ("protect", "tokens", "expected"),
    [
        (0, 4, [6, 7, 8, 9]),
        (2, 4, [0, 1, 8, 9]),
        (1, 4, [0, 7, 8, 9]),
        (3, 4, [0, 1, 2, 8, 9]),  # five protected tokens exceed the budget
        (9, 4, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),  # the window is among them: ten, not eleven
        (99, 4, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
@pytest.mark.parametrize("selector", [GQAGroupSelector, AdaptiveHeadSelector, PyramidSelector])
def test_selectors_on_paper(selector: Any, protect: int, tokens: int, expected: list[int]) -> None:
    """A window of 2; the pyramid without a fall, one head without another."""
    flat = {"beta": 1} if selector is PyramidSelector else {}
    part = selector(window_size=2, retention_tokens=tokens, protect=protect, **flat)
    kept = part.select(RISING, context(list(range(10)), seen_len=10))
    assert kept.tolist() == [[expected]]
    protected = part.protected(context(list(range(10)), seen_len=10))
    assert protected.tolist() == [[[i < protect or i >= 8 for i in range(10)]]]


def test_a_later_turn_protects_by_original_position() -> None:
    """Of 30 tokens seen, those at 0, 2, 3 and 20 are held and the last six are new."""
    later = context([0, 2, 3, 20, *range(24, 30)], seen_len=30, new=6)
    for selector in (
        GQAGroupSelector(0.2, window_size=2, protect=3),
        AdaptiveHeadSelector(0.2, window_size=2, protect=3),
        PyramidSelector(0.2, window_size=2, beta=1, protect=3),
    ):
        # 6 = int(30 * 0.2): tokens 0 and 2 of the first three, the window, the two before it.
        assert selector.select(RISING, later).tolist() == [[[0, 1, 6, 7, 8, 9]]]


@pytest.mark.parametrize(
    ("protect", "tokens", "expected"),
    [
        (0, 4, [6, 7, 8, 9]),
        (2, 4, [0, 1, 8, 9]),
        (4, 4, [0, 1, 2, 3, 8, 9]),
        (8, 4, None),
        (50, 4, None),
    ],
)
def test_propagation_on_paper(protect: int, tokens: int, expected: list[int] | None) -> None:
    part = TokenSelectivePropagation(tsp_layer=0, window_size=2, tsp_tokens=tokens, protect=protect)
    passed = passed_by(part, RISING, context(list(range(10)), seen_len=10))
    assert passed == (None if expected is None else [expected])


def test_propagation_protects_among_the_new_tokens_only() -> None:
    """Tokens 0 to 3 are held from before, 4 to 9 new: of the first six, two are new."""
    later = context(list(range(10)), seen_len=10, new=6)
    part = TokenSelectivePropagation(tsp_layer=0, window_size=1, tsp_tokens=3, protect=6)
    assert part.protected(later).tolist() == [[True, True, False, False, False, True]]
    assert passed_by(part, RISING, later) == [[0, 1, 5]]


def test_padding_is_never_protected() -> None:
    """Row 1 has four tokens, and held ones where row 0 has new ones."""
    positions = torch.tensor([[[0, 1, 2, 3, 4, 5, 6, 7]], [[-1, -1, -1, -1, 0, 1, 6, 7]]])
    both = attrs.evolve(
        context(list(range(8)), seen_len=8),
        queries=torch.zeros(2, 1, 0, 3),
        keys=torch.zeros(2, 1, 8, 3),
        values=torch.zeros(2, 1, 8, 3),
        positions=positions,
        new_valid=torch.tensor([[True] * 8, [False] * 6 + [True] * 2]),
        seen_len=(8, 8),
    )
    assert both.is_first(2).tolist() == [
        [[i < 2 for i in range(8)]],
        [[i in (4, 5) for i in range(8)]],
    ]
    assert both.is_new_first(2).tolist() == [[i < 2 for i in range(8)], [False] * 8]
    assert both.is_new_first(7).tolist()[1] == [False] * 6 + [True, False]
    assert not both.is_first(0).any()


def test_protected_tokens_count_in_rates_of_a_number_of_tokens() -> None:
    for selector in (
        GQAGroupSelector(retention_tokens=5, window_size=4, protect=16),
        SinkAndRecentSelector(retention_tokens=5, num_sinks=4, protect=20),
        SinkAndRecentSelector(retention_tokens=5, num_sinks=20),
    ):
        assert selector.kept_rates(2, context_len=100) == [0.2, 0.2]
        assert selector.kept_rates(1, context_len=10) == [1.0]
    part = TokenSelectivePropagation(tsp_layer=0, tsp_tokens=5, window_size=4, protect=16)
    assert part.layer_rates(2, context_len=100) == [1.0, 0.2]


@pytest.mark.parametrize("build", METHODS, ids=lambda build: build.__name__)
def test_methods_hand_it_to_their_selectors(build: Callable[..., CachePolicy]) -> None:
    assert build(protect=7).selector.protected_first >= 7
    with pytest.raises(TypeError, match="protect must be an int, got 0.5"):
        build(protect=0.5)


@pytest.mark.parametrize(
    "part",
    [
        GQAGroupSelector,
        SinkAndRecentSelector,
        PyramidSelector,
        AdaptiveHeadSelector,
        TokenSelectivePropagation,
    ],
)
def test_parts_check_it(part: Any) -> None:
    assert part(protect=2).protected_first >= 2
    with pytest.raises(ValueError, match="protect must be at least 0, got -3"):
        part(protect=-3)
    with pytest.raises(TypeError, match="protect must be an int, got True"):
        part(protect=True)
    assert PassAllPropagation().protected_first == KeepAllSelector().protected_first == 0


def test_a_part_that_declares_it_gets_it_from_the_interface() -> None:
    """A third party's selector has only to say how many."""

    @attrs.frozen
    class Own(KVSelector):
        @property
        def protected_first(self) -> int:
            return 2

        def select(self, saliency: Any, context: LayerContext) -> Any:
            raise NotImplementedError

    assert Own().protected(context([0, 1, 2, 5], seen_len=6)).tolist() == [
        [[True, True, False, False]]
    ]


class CountsWhatIsHeld(GQAGroupSelector):
    """Protects the first tokens that it holds, whatever their positions."""

    def protected(self, context: LayerContext) -> Tensor:
        held_first = context.valid & (context.valid.cumsum(dim=-1) <= self.protect)
        return context.is_tail(self.protected_tail) | (
            held_first & context.is_first(self.protect - 1)
        )


def test_the_contract_finds_parts_that_do_not_protect() -> None:
    forgets = odd(
        GQAGroupSelector, protected=lambda self, context: context.is_tail(self.protected_tail)
    )
    for selector in (forgets, CountsWhatIsHeld):
        with pytest.raises(AssertionError, match="positions below protected_first=3"):
            check_selector(selector(0.2, window_size=1, protect=3))
    dropping = odd(
        TokenSelectivePropagation,
        protected=lambda self, context: context.is_new_tail(self.protected_tail),
    )
    with pytest.raises(AssertionError, match="positions below protected_first=3"):
        check_propagation(dropping(tsp_rate=0.2, window_size=1, protect=3))


def test_the_contract_finds_a_larger_budget_that_drops() -> None:
    with pytest.raises(AssertionError, match="a larger budget must only add tokens"):
        check_selector(PyramidSelector(0.4, window_size=2), PyramidSelector(0.2, window_size=2))
    with pytest.raises(TypeError, match="component must be a KVSelector"):
        check_selector(PyramidSelector(), TokenSelectivePropagation())  # type: ignore[arg-type]
