"""Checks the types of the properties that a part declares and of the values it returns.

Part of `kvpolicy.testing`. A value of a wrong type may pass through a small test and fail deep
inside a model, far from the line that returned it. All functions raise AssertionError.
"""

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.budgets import Budget
from kvpolicy.interfaces import KVSelector, Part, PropagationPolicy, Scorer


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with the given message unless a condition holds."""
    if not condition:
        raise AssertionError(message)


def check_scorer_declares(scorer: Scorer) -> None:
    """Check the types of the values of a scorer's properties."""
    if scorer.num_queries is not None:
        _require_count("num_queries", scorer.num_queries, "an int of at least 0, or None for all")
    _require_counts(scorer, "unscored_tail", "state_size")
    _require_flags(scorer, "accumulates")
    _check_asked(scorer)


def check_selector_declares(selector: KVSelector) -> None:
    """Check the types of the values of a selector's properties."""
    _check_shared(selector)
    flags = ("is_bounded", "decides_together", "equal_counts", "unequal_heads", "keeps_all")
    _require_flags(selector, *flags)


def check_propagation_declares(propagation: PropagationPolicy) -> None:
    """Check the types of the values of a propagation policy's properties."""
    _require_flags(propagation, "restarts", "decides_by_content")
    _check_shared(propagation)
    require(
        propagation.budget is None or not propagation.decides_by_content,
        "budget must be None if decides_by_content is True, since the number of tokens that go "
        f"on is not known beforehand, got {propagation.budget!r}",
    )


def check_acting_layers(acting: object, num_layers: int) -> None:
    """Check that ``acting_layers`` is a frozenset of the model's layer indices."""
    ints = isinstance(acting, frozenset) and all(_is_int(layer) for layer in acting)
    require(ints, f"acting_layers must return a frozenset of ints, got {acting!r}")
    assert isinstance(acting, frozenset)
    require(
        all(0 <= layer < num_layers for layer in acting),
        f"acting_layers must lie in the model of {num_layers} layers, got {sorted(acting)}",
    )


def check_placed(propagation: PropagationPolicy, num_layers: int) -> None:
    """Check that ``placed`` returns a propagation policy, unchanged if all layers may drop."""
    for eligible in (list(range(num_layers)), list(range(1, num_layers, 2))):
        placed: object = propagation.placed(num_layers, eligible)
        require(
            isinstance(placed, PropagationPolicy),
            f"placed must return a PropagationPolicy, got {placed!r}",
        )
        require(
            placed == propagation or len(eligible) < num_layers,
            f"placed must change nothing if every layer is eligible, got {placed!r}",
        )


def check_rates(name: str, rates: object, num_layers: int, *, zero: bool = False) -> None:
    """Check that a method's rates are fractions, one a layer; ``zero`` for layers not run."""
    numeric = isinstance(rates, list) and all(
        isinstance(rate, numbers.Real) and not isinstance(rate, bool) for rate in rates
    )
    require(numeric, f"{name} must return a list of numbers, got {rates!r}")
    assert isinstance(rates, list)
    require(
        len(rates) == num_layers and all(0 < rate <= 1 or (zero and rate == 0) for rate in rates),
        f"{name} must be {num_layers} fractions in {'[' if zero else '('}0, 1], got {rates}",
    )


def check_passes(propagation: PropagationPolicy, num_layers: int) -> None:
    """Check that ``prefill_passes`` returns one list of rates, or two if the prefill restarts."""
    passes: object = propagation.prefill_passes(num_layers, context_len=1000)
    require(
        isinstance(passes, tuple), f"prefill_passes must return a tuple of lists, got {passes!r}"
    )
    assert isinstance(passes, tuple)
    count = 2 if propagation.restarts else 1
    require(
        len(passes) == count,
        f"prefill_passes must hold {count} pass{'es' * (count > 1)} where restarts is "
        f"{propagation.restarts}, got {len(passes)}",
    )
    for rates in passes:
        check_rates("prefill_passes", rates, num_layers, zero=True)
    last = propagation.layer_rates(num_layers, context_len=1000)
    require(
        passes[-1] == last, f"prefill_passes must end with layer_rates, {last}, got {passes[-1]}"
    )


def check_tensor(name: str, value: object, dtype: torch.dtype, shape: Sequence[int | None]) -> None:
    """Check that a part returned a tensor of a dtype and a shape; None is any length."""
    require(isinstance(value, Tensor), f"{name} must be a tensor, got {value!r}")
    assert isinstance(value, Tensor)
    require(value.dtype == dtype, f"{name} must be {dtype}, got {value.dtype}")
    fits = value.ndim == len(shape) and all(
        want is None or have == want for have, want in zip(value.shape, shape, strict=True)
    )
    axes = ", ".join("any" if length is None else str(length) for length in shape)
    require(fits, f"{name} must be of shape [{axes}], got {list(value.shape)}")


def _check_asked(part: Part) -> None:
    inner: object = part.inner_parts
    parts = isinstance(inner, tuple) and all(isinstance(each, Part) for each in inner)
    require(parts, f"inner_parts must return a tuple of parts, got {inner!r}")
    _require_counts(part, "history_layers")
    _require_flags(part, "needs_rotary", "needs_output_weight")


def _check_shared(part: KVSelector | PropagationPolicy) -> None:
    _check_asked(part)
    _require_flags(part, "needs_saliency")
    _require_counts(part, "protected_tail", "protected_first")
    require(
        part.budget is None or isinstance(part.budget, Budget),
        f"budget must be a Budget, or None where no one number holds, got {part.budget!r}",
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_counts(part: Part, *names: str) -> None:
    for name in names:
        _require_count(name, getattr(part, name), "an int of at least 0")


def _require_count(name: str, value: object, wanted: str) -> None:
    counts = _is_int(value) and isinstance(value, int) and value >= 0
    require(counts, f"{name} must be {wanted}, got {value!r}")


def _require_flags(part: Part, *names: str) -> None:
    for name in names:
        value: object = getattr(part, name)
        require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")
