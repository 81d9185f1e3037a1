"""Remember the arguments of the modules around a decoder, such as the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.forward.inputs import inputs_of
from kvpolicy.integrations.transformers.model.both_ways import types_in


@attrs.define(eq=False)
class OuterCall:
    """A record of what a model was called with and does not hand to its decoder.

    Args:
        keep_last: Number of last tokens whose outputs are asked for; None for all.
        ids: Ids of the tokens, if the decoder gets embeddings.
        kinds: ``[batch, new_len]`` int8, the `TokenKind` of the tokens; None if unknown.
        types: Types of the tokens, by the names of arguments.
        has_reached: Whether the call has reached the decoder.
    """

    keep_last: int | None = None
    ids: Any = None
    kinds: Tensor | None = None
    types: dict[str, Tensor] = attrs.field(factory=dict)
    has_reached: bool = False
    _mask: Any = None
    _noted: bool = False

    def note(self, arguments: Mapping[str, Any], kinds: Tensor | None) -> None:
        """Remember the arguments of a module that calls the decoder, such as the model itself."""
        mask = arguments.get("attention_mask")
        self.ids = arguments.get("input_ids", self.ids)
        self.kinds = self.kinds if kinds is None else kinds
        self.types |= types_in(arguments)
        if not self._noted or (isinstance(mask, Tensor) and mask.ndim == 2):
            self._noted, self._mask = True, mask

    def ids_of(self, arguments: dict[str, Any]) -> Tensor | None:
        """Return the ids ``[batch, new_len]`` of a forward; None if only embeddings are known."""
        shape = inputs_of(arguments).shape[:2]
        for ids in (arguments.get("input_ids"), self.ids):
            if isinstance(ids, Tensor) and ids.shape == shape:
                return ids
        return None

    def take_kinds(self, columns: Tensor) -> Tensor | None:
        """Return the `TokenKind` of each token in ``columns``, and forget it; None if unknown."""
        kinds, self.kinds = self.kinds, None
        return kinds if kinds is not None and kinds.shape == columns.shape else None

    def masks_made_outside(self, arguments: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Return whether an outer model makes the masks, and the arguments with the caller's mask.

        If so, the arguments get the outer model's own mask.
        """
        made, outer, noted = arguments.get("attention_mask"), self._mask, self._noted
        self._mask, self._noted = None, False
        if not isinstance(outer, Tensor) or outer.ndim != 2:
            # A call without padding may have no mask.
            outside = noted and outer is None and not _is_plain(made)
        else:
            # The outer model may have made no mask, although its own mask was given.
            outside = made is None or not _is_plain(made)
        return outside, {**arguments, "attention_mask": outer} if outside else arguments


def _is_plain(mask: Any) -> bool:
    """True if a mask is None, or a padding mask ``[batch, columns]``."""
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)
