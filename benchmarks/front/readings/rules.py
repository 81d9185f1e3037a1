"""The compared rules: where a saliency comes from, what it is multiplied with, how it is scaled.

A rule is named ``BASE[OP FACTOR][+SCALE][/equal]``, as in ``fixed*values+std``:

- ``BASE`` is a saliency of `BASES`;
- ``OP`` is ``*`` (product), ``&`` (product of the ranks within the head) or ``|`` (the larger
  rank), and ``FACTOR`` one of `FACTORS`;
- ``SCALE`` makes heads and layers comparable: ``mean`` (divided by the mean of the head), ``std``
  (standardised over the head), ``layer`` (divided by the mean of the layer), ``mean4`` and ``std4``
  (without the sinks); nothing if left out;
- with ``/equal`` all heads keep equally many tokens; otherwise one threshold holds for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import attrs
import torch
from torch import Tensor

from benchmarks.front.readings import one_reading as one
from benchmarks.front.readings import second_reading as second
from benchmarks.front.readings.given import SINKS
from benchmarks.front.readings.reading import Reading

CHUNK = 256
Saliency = tuple[Tensor, ...]


@attrs.frozen
class Base:
    """A saliency, and what it costs beside the first reading.

    Args:
        of: Computes it.
        tokens: Layer-tokens computed again, over those of one reading.
        products: Query-key pairs over those of one causal reading, if all of them are computed
            apart from the model's own attention, which shows no weights.
    """

    of: Callable[[Reading], Saliency]
    tokens: float = 0.0
    products: float = 0.0


def _repeated(part: float, layers: float = 1.0) -> Base:
    """Return the cost of repeating a part of the tokens in a part of the layers.

    The repeated tokens' attention is computed twice: by the model, and to score.
    """
    pairs = layers * (2 * part + part**2)
    return Base(lambda reading: (), part * layers, 2 * pairs)


def _with(cost: Base, of: Callable[[Reading], Saliency], others: float = 0.0) -> Base:
    """Return a base with the cost of another one, and ``others`` more products."""
    return attrs.evolve(cost, of=of, products=cost.products + others)


def _cut(layer: int, part: float) -> Base:
    whole, fewer, before = _repeated(1.0), _repeated(part), (layer + 1) / 6
    tokens = before * whole.tokens + (1 - before) * fewer.tokens
    products = before * whole.products + (1 - before) * fewer.products
    return Base(partial(second.fewer_behind, layer=layer, part=part), tokens, products)


BASES: dict[str, Base] = {
    "own-peaks": Base(one.own_peaks, 0, 1),
    "own-sums": Base(one.own_sums, 0, 1),
    "own-unmasked": Base(one.own_unmasked, 0, 2),
    "fixed": Base(one.fixed, 0, 2),
    "shifted": Base(one.shifted, 0, 2),
    "fixed-every2": Base(partial(one.fixed, every=2), 0, 1),
    "fixed-every4": Base(partial(one.fixed, every=4), 0, 0.5),
    "fixed-sums": Base(partial(one.fixed, total=True), 0, 2),
    "fixed-min": Base(partial(one.fixed, group="min"), 0, 2),
    "fixed-group-mean": Base(partial(one.fixed, group="mean"), 0, 2),
    "fixed-chunks": Base(partial(one.fixed_in_chunks, size=CHUNK), 0, 2 * CHUNK / 1024),
    **{
        f"fixed-from{source}": Base(
            partial(one.copied_down, source=source), 0, 2 * (1 - source / 6)
        )
        for source in (1, 2, 3)
    },
    "surprise": Base(one.surprise),
    "again": _with(_repeated(1.0), second.whole),
    "again-every2": _with(_repeated(0.5), second.every_second),
    "again-cut2-half": _cut(2, 0.5),
    "again-cut2-quarter": _cut(2, 0.25),
    **{
        f"again-to{stop}-{others}": _with(
            _repeated(1.0, stop / 6),
            partial(second.first_layers, stop=stop, others=others),
            2 * (1 - stop / 6),
        )
        for stop in (1, 2, 3)
        for others in ("fixed", "shifted")
    },
    **{
        f"again-from{start}": _with(
            _repeated(1.0, 1 - start / 6), partial(second.last_layers, start=start), 2 * start / 6
        )
        for start in (3, 4, 5)
    },
}
FACTORS: dict[str, Callable[[Reading], Saliency]] = {
    "values": one.value_norms,
    "outputs": one.output_norms,
    "surprise": one.surprise,
    "keydiff": one.key_difference,
    "leverage": one.leverage,
}
_NAME = re.compile(
    r"(?P<base>[\w-]+)(?:(?P<op>[*&|])(?P<factor>\w+))?(?:\+(?P<scale>\w+))?(?P<equal>/equal)?"
)


@attrs.frozen
class Rule:
    """One rule of the study, by its name; see this module.

    Raises:
        ValueError: The name is not that of a rule.
    """

    name: str
    base: str
    operator: str | None
    factor: str | None
    scale: str | None
    selector: str

    @staticmethod
    def named(name: str) -> Rule:
        """Return the rule of a name."""
        found = _NAME.fullmatch(name)
        known = found is not None and (
            found["base"] in (*BASES, "oracle")
            and found["factor"] in (*FACTORS, None)
            and found["scale"] in (*SCALES, None)
        )
        if found is None or not known:
            raise ValueError(
                f"rule must be BASE[*FACTOR][+SCALE][/equal], got {name!r}; bases are "
                f"{', '.join(BASES)}, factors {', '.join(FACTORS)}, scales {', '.join(SCALES)}"
            )
        chosen = "equal" if found["equal"] else "global"
        return Rule(name, found["base"], found["op"], found["factor"], found["scale"], chosen)

    def joined(self, base: Saliency, factor: Saliency | None) -> Saliency:
        """Return the rule's saliency from that of its base and its factor."""
        found = base
        if factor is not None and self.operator is not None:
            join = JOINS[self.operator]
            found = tuple(join(a, b) for a, b in zip(base, factor, strict=True))
        return found if self.scale is None else tuple(SCALES[self.scale](each) for each in found)


def ranks(saliency: Tensor) -> Tensor:
    """Return each token's rank within its head, from 0 (lowest) to 1."""
    return saliency.argsort(dim=-1).argsort(dim=-1) / (saliency.shape[-1] - 1)


def _over_mean(saliency: Tensor) -> Tensor:
    return saliency / saliency.mean(dim=-1, keepdim=True)


def _standardised(saliency: Tensor) -> Tensor:
    apart = saliency - saliency.mean(dim=-1, keepdim=True)
    return apart / saliency.std(dim=-1, keepdim=True)


def _behind_sinks(scale: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a scale whose mean and deviation leave the sinks out; those are kept anyway."""
    return lambda saliency: torch.cat(
        [torch.zeros_like(saliency[..., :SINKS]), scale(saliency[..., SINKS:])], dim=-1
    )


def _over_layer(saliency: Tensor) -> Tensor:
    return saliency / saliency.mean(dim=(1, 2), keepdim=True)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": _over_mean,
    "std": _standardised,
    "layer": _over_layer,
    "mean4": _behind_sinks(_over_mean),
    "std4": _behind_sinks(_standardised),
}
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "*": torch.mul,
    "&": lambda a, b: ranks(a) * ranks(b),
    "|": lambda a, b: torch.maximum(ranks(a), ranks(b)),
}
