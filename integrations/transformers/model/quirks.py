"""Define how models differ: shortcuts in their forwards, and queries scaled by position."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen
class ModelQuirks:
    """A set of flags for shortcuts in a model's forwards that are right for nearly all models.

    If the self-check finds wrong results on a model, it tries again without some shortcuts, and
    keeps the set of flags with the fewest faults. What is still wrong is refused.

    Args:
        narrows: Whether a layer may be run for only some of the tokens that reach it.
        spares_masks: Whether a layer may get no mask if its attention function gives the right
            result without one.
        pads: Whether rows may be padded. A model that counts padding as positions reads a padded
            row differently from the same row without padding, with any cache.
        continues: Whether several tokens may be appended at once behind a recurrent state. In some
            models the recurrent layers then start again from an empty state, with any cache.
        counts: Whether a model that is given no positions counts a row's tokens from 0. Models like
            RoBERTa count from another number, so that only the caller knows where a padded row
            begins. A model that counts columns (BART) is refused with padded rows and restarts.
        placed: Whether ``generate`` gives such a model positions that count from 0.
        refills: Whether layers' outputs are padded to the input's length, although tokens were
            dropped. A model needs this if it reshapes the last output to the shape of the input
            (GPT-2), or combines outputs of several layers (Inkling 2); see `Filling`.
    """

    narrows: bool = True
    spares_masks: bool = True
    pads: bool = True
    continues: bool = True
    counts: bool = True
    placed: bool = False
    refills: bool = False


@attrs.frozen
class Temperature:
    """Settings of attention whose queries are scaled by the log of position (arXiv 2501.19399).

    A query at position ``p`` is scaled by ``1 + scale * log(1 + floor((p + 1) / floor))``. Such
    models count the tokens of a forward from the tokens that the cache has seen, padding included.
    So a padded token, or one that follows dropped tokens, is scaled for a wrong position.
    """

    scale: float
    floor: float

    @staticmethod
    def of(attention: Any) -> Temperature | None:
        """Read the settings of a module that scales by counted positions; None if it does not."""
        counts = getattr(attention, "attn_temperature_tuning", False)
        if not counts or getattr(attention, "use_rope", True):
            return None
        return Temperature(float(attention.attn_scale), float(attention.floor_scale))

    def corrected(self, queries: Tensor, counted: int, places: Tensor) -> Tensor:
        """Return the queries, rescaled from the positions that the model counted to ``places``.

        The first query's was ``counted``.
        """
        taken = torch.arange(counted, counted + queries.shape[2], device=queries.device)
        change = self._at(places.to(queries.device)) / self._at(taken)
        return (queries * change[:, None, :, None]).to(queries.dtype)

    def _at(self, places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1) / self.floor)) * self.scale + 1
