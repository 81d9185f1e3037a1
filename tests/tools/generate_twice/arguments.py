"""The arguments of a call of `generate`: copied for a further call, and padded on the left."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn


@attrs.frozen(eq=False)
class Arguments:
    """What `generate` is called with."""

    positional: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def mask(self) -> Tensor | None:
        """The attention mask ``[rows, columns]``, if it is one."""
        mask = self.named.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    @property
    def is_padded_right(self) -> bool:
        """Whether a row ends in padding, which no cache that drops tokens can read."""
        return self.mask is not None and not bool(self.mask[:, -1].all())

    def copied(self) -> Arguments:
        """A copy that a call may change; models are shared, and streamers are left out."""
        named = {name: value for name, value in self.named.items() if name != "streamer"}
        shared: dict[int, Any] = {}
        for value in (*self.positional, *named.values()):
            if isinstance(value, nn.Module):
                shared[id(value)] = value
            elif isinstance(value, Tensor):
                # Tensors with a gradient history cannot be copied deeply.
                shared[id(value)] = value.detach().clone()
        return Arguments(*copy.deepcopy((self.positional, named), shared))

    def padded_left(self) -> Arguments:
        """The same rows with their padding moved before their tokens.

        Columns of padding alone are left out: a draft's outputs are returned in the places of the
        first columns, where they could not be told from padding.
        """
        mask = self.mask
        assert mask is not None
        order = mask.bool().to(torch.uint8).argsort(dim=1, stable=True)
        order = order[:, -max(1, int(mask.bool().sum(dim=1).max())) :]

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape[:2] != mask.shape:
                return value
            index = order.view(*order.shape, *[1] * (value.ndim - 2))
            index = index.expand(*order.shape, *value.shape[2:])
            return value.gather(1, index)

        return Arguments(
            tuple(map(moved, self.positional)),
            {name: moved(value) for name, value in self.named.items()},
        )

    def models(self, model: nn.Module) -> list[Any]:
        """A call's model and those among its arguments, such as the assistant."""
        values = (*self.positional, *self.named.values())
        return [model, *(value for value in values if isinstance(value, nn.Module))]


@attrs.frozen(eq=False)
class Before:
    """What a call starts from beside its arguments, and changes: chance, and models' settings."""

    chance: tuple[Any, ...]
    settings: tuple[tuple[Any, Any], ...]

    @staticmethod
    def of(models: list[Any]) -> Before:
        """As it is now."""
        settings = [(each, each.generation_config) for each in models if _generates(each)]
        return Before(_chance(), tuple((each, copy.deepcopy(config)) for each, config in settings))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let a block start from the same; afterwards all is as it was before the block."""
        chance = _chance()
        settings = [(each, each.generation_config) for each, _ in self.settings]
        try:
            _set_chance(self.chance)
            for each, config in self.settings:
                each.generation_config = copy.deepcopy(config)
            yield
        finally:
            _set_chance(chance)
            for each, config in settings:
                each.generation_config = config


def _generates(model: Any) -> bool:
    return getattr(model, "generation_config", None) is not None


def _chance() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_chance(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
