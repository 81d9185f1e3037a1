"""The base class of all named methods, which build their parts from their arguments."""

from abc import abstractmethod
from typing import ClassVar

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.checks import check_count
from kvpolicy.decoding import DecodingEviction
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.policies.selectors.wrapping import WrappingSelector
from kvpolicy.policy import CachePolicy
from kvpolicy.repetition import Repetition
from kvpolicy.short_repr import brief

Parts = tuple[Scorer | None, KVSelector, PropagationPolicy]


def _as_given(decoding: DecodingEviction | int | None) -> DecodingEviction | None:
    """Return the ``decoding`` argument unchanged; only its type is cast, for the type checker."""
    return decoding  # type: ignore[return-value]


@attrs.frozen
class Method(CachePolicy):
    """Base of named methods: a policy that builds its parts from its own arguments.

    Two methods are equal if their arguments are equal. A method that only ranks tokens for eviction
    is shorter as an `EvictionMethod`.

    Args:
        decoding: Bounds the layers while an answer is decoded: a `DecodingEviction` of any parts; a
            number of tokens, for the method's own rule with this budget (`decoding_rule`); or True,
            for its own rule with ``retention_tokens``. None lets the layers grow.

    Example:
        >>> from kvpolicy.policies import SnapKV
        >>> SnapKV(window_size=4)
        SnapKV(prefill_block=None, decoding=None, retention_rate=0.1, window_size=4, \
retention_tokens=None, protect=0, kernel_size=7, group_first=False)
        >>> SnapKV(window_size=4).scorer
        WindowMaxPoolScorer(window_size=4, kernel_size=7, group_first=False, peak_first=False)
        >>> SnapKV(decoding=512).decoding.most_tokens
        512
    """

    every: ClassVar[int] = 128  # decoded tokens between evictions, unless `decoding` says otherwise

    scorer: Scorer | None = attrs.field(init=False, eq=False, repr=False)
    selector: KVSelector = attrs.field(init=False, eq=False, repr=False)
    propagation: PropagationPolicy = attrs.field(init=False, eq=False, repr=False)
    decoding: DecodingEviction | None = attrs.field(default=None, kw_only=True, converter=_as_given)
    rereading: Repetition | None = attrs.field(default=None, init=False, eq=False, repr=False)
    gapless: bool = attrs.field(default=False, init=False, eq=False, repr=False)

    def __str__(self) -> str:
        tokens = None if self.decoding is None else _tokens_of(self.decoding.selector)
        own = self.has_decoding_rule
        if tokens is not None and own and self.decoding == self.decoding_rule(tokens):
            return brief(self, instead={"decoding": tokens})  # the argument as given
        return brief(self)

    @abstractmethod
    def _parts(self) -> Parts:
        """Make the scorer, the selector and the propagation policy from the method's arguments."""

    def _rereading(self) -> Repetition | None:
        """Return the settings for a second reading of the prompt; None if it is read once."""
        return None

    def __attrs_post_init__(self) -> None:
        names = ("scorer", "selector", "propagation")
        for name, part in zip(names, self._parts(), strict=True):
            object.__setattr__(self, name, part)  # the class is frozen to everyone else
        object.__setattr__(self, "rereading", self._rereading())
        object.__setattr__(self, "decoding", self._own_decoding(self.decoding))
        super().__attrs_post_init__()
        self._drop_rates_that_gave_way()

    @property
    def has_decoding_rule(self) -> bool:
        """True if the method's scorer and selector can also evict while an answer is decoded."""
        return self.rereading is None and self._bounded_selector(1) is not None

    def decoding_rule(self, tokens: int, every: int | None = None) -> DecodingEviction:
        """Make a rule for the method's scorer and selector to evict while an answer is decoded.

        Args:
            tokens: Entries that a layer keeps of all it holds, at least 1.
            every: Tokens from one choice to the next, at least 1; the method's own if None.

        Raises:
            TypeError: An argument is not an int.
            ValueError: An argument is below 1; or the method keeps everything or reads a prompt
                twice, and so has no rule of its own (`has_decoding_rule`).

        Example:
            >>> from kvpolicy.policies import H2O
            >>> H2O(decoding=H2O().decoding_rule(64, every=16)).decoding.every
            16
        """
        check_count("tokens", tokens, minimum=1)
        selector = self._bounded_selector(tokens)
        if selector is None or self.rereading is not None:
            if self.rereading is not None:
                reason = "a context that grows cannot be read a second time at every eviction"
            else:
                reason = f"{self.selector} does not bound a layer by itself"
            raise ValueError(
                f"decoding of {type(self).__name__} must be a DecodingEviction or None, since "
                f"{reason}, got {tokens}"
            )
        return DecodingEviction(self.scorer, selector, every=self.every if every is None else every)

    def _bounded_selector(self, tokens: int) -> KVSelector | None:
        """Return a selector that bounds every layer while decoding; None if there is none."""
        return under_tokens(self.selector, tokens)

    def _own_decoding(self, given: object) -> DecodingEviction | None:
        if given is None or given is False or isinstance(given, DecodingEviction):
            return None if given is False else given
        if given is not True:  # True is an int too
            return self.decoding_rule(check_count("decoding", given, minimum=1))
        tokens = _tokens_of(self.selector)
        if tokens is None:
            raise ValueError(
                "retention_tokens must be given if decoding is True, since a rate does not bound "
                f"a context that grows, got decoding=True of {type(self).__name__}; or give a "
                "number of tokens, as in decoding=512"
            )
        return self.decoding_rule(tokens)

    def _drop_rates_that_gave_way(self) -> None:
        """Set default rates to None if a token count replaces them, so that the repr omits them."""
        for field in attrs.fields(type(self)):
            tokens = field.name.removesuffix("_rate") + "_tokens"
            yields = isinstance(getattr(self, field.name), DefaultRate)
            if yields and getattr(self, tokens, None) is not None:
                object.__setattr__(self, field.name, None)


def _tokens_of(selector: KVSelector) -> int | None:
    """Return a selector's budget as a number of tokens; None if it is not set as one."""
    while isinstance(selector, WrappingSelector):
        selector = selector.selector
    tokens: int | None = getattr(selector, "retention_tokens", None)
    return tokens


def under_tokens(selector: KVSelector, tokens: int) -> KVSelector | None:
    """Return a copy of a selector that keeps ``tokens`` tokens; None if it cannot by layer."""
    if selector.decides_together:
        return None
    if isinstance(selector, WrappingSelector):
        within = under_tokens(selector.selector, tokens)
        return None if within is None else selector.around(within)
    if not hasattr(selector, "retention_tokens"):
        return None
    bounds = {"retention_rate": None, "retention_tokens": tokens}
    bounded: KVSelector = attrs.evolve(selector, **bounds)  # type: ignore[misc]
    return bounded
