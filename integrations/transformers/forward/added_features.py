"""Add image features to the hidden states of some tokens between the layers of a decoder.

Decoders with deepstack (Qwen3-VL, Granite Vision) find these tokens by a mask over the whole input,
which is right only if every token reaches every layer. Where a policy acts, the decoder is called
without the features, and they are added here, to the tokens that still reach the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.inputs import inputs_of, span_of, take_columns

# Names of the mask and of the features in a decoder's arguments, and whether the features are added
# after a layer (else before).
_ARGUMENTS = (
    ("visual_pos_masks", "deepstack_visual_embeds", True),
    ("vision_mask", "deepstack_features", False),
)


@attrs.frozen(eq=False)
class AddedFeatures:
    """A table of the image features to add to hidden states, by layer and by token.

    Args:
        rows: ``[batch, new_len]`` int64, the row of a token's features; -1 on tokens without
            features.
        features: By layer, ``[count, hidden]``.
    """

    rows: Tensor
    features: Mapping[int, Tensor]
    after: bool
    names: tuple[str, str]

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> AddedFeatures | None:
        """Read the image features from a decoder's arguments; None if the call has none."""
        for mask_name, name, after in _ARGUMENTS:
            mask, given = arguments.get(mask_name), arguments.get(name)
            if mask is None or given is None:
                continue
            mask = mask[..., 0] if mask.ndim == 3 else mask
            counted = mask.flatten().cumsum(0).view(mask.shape) - 1
            features = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
            return AddedFeatures(torch.where(mask, counted, -1), features, after, (mask_name, name))
        return None

    @staticmethod
    def joined(
        chunks: Sequence[AddedFeatures | None], valid: Sequence[Tensor]
    ) -> AddedFeatures | None:
        """Combine the image features of a prompt's chunks into one table; None without any."""
        given = [each for each in chunks if each is not None]
        if not given:
            return None
        rows, count = [], 0
        for chunk, columns in zip(chunks, valid, strict=True):
            if chunk is None:
                rows.append(given[0].rows.new_full(columns.shape, -1))
                continue
            rows.append(torch.where(chunk.rows < 0, -1, chunk.rows + count))
            count += int((chunk.rows >= 0).sum())
        features = {
            layer: torch.cat([each.features[layer].flatten(0, -2) for each in given])
            for layer in given[0].features
        }
        return attrs.evolve(given[0], rows=torch.cat(rows, dim=1), features=features)

    def without(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the decoder's arguments with the image features set to None."""
        return {**arguments, **dict.fromkeys(self.names)}

    def taken(self, slots: Tensor) -> AddedFeatures:
        """Return the image features of only the tokens in ``slots`` ``[batch, count]``."""
        rows = take_columns(self.rows, slots)
        return attrs.evolve(self, rows=rows.masked_fill(slots.to(rows.device) < 0, -1))

    def added(self, hidden: Tensor, layer_idx: int, slots: Tensor | None) -> Tensor:
        """Add a layer's image features to the hidden states of the tokens in ``slots``."""
        features = self.features.get(layer_idx)
        if features is None or not len(features):
            return hidden
        rows = (self if slots is None else self.taken(slots)).rows.to(hidden.device)
        features = features.reshape(-1, hidden.shape[2]).to(hidden.device, hidden.dtype)
        more = features[rows.clamp(min=0)]
        return hidden + more.masked_fill((rows < 0)[:, :, None], 0)


def span_with_features(
    arguments: dict[str, Any], seen: int, start: int, stop: int
) -> dict[str, Any]:
    """Cut a forward's arguments, image features included, to a range of its columns."""
    span, features = span_of(arguments, seen, start, stop), AddedFeatures.of(arguments)
    if features is None:
        return span
    rows = features.rows[:, start:stop]
    own, mask_name, name = rows >= 0, *features.names
    if not bool(own.any()):
        return features.without(span)
    cut = {layer: each.flatten(0, -2)[rows[own]] for layer, each in features.features.items()}
    as_given = cut if isinstance(arguments[name], Mapping) else list(cut.values())
    return {**span, mask_name: own, name: as_given}


def without_seen(arguments: dict[str, Any], seen: int, prompt_end: int) -> dict[str, Any]:
    """Cut a forward that repeats the whole conversation to the columns not seen before."""
    mask, columns = arguments.get("attention_mask"), inputs_of(arguments).shape[1]
    whole = not isinstance(mask, Tensor) or mask.shape[-1] == columns
    if not whole or columns < prompt_end:
        return arguments
    return {**span_with_features(arguments, 0, seen, columns), "attention_mask": mask}
