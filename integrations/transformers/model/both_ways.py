"""Find where a prompt must not be cut in two, since tokens before the cut see tokens after it.

In vision-language models the tokens of an image may see each other in both directions (Gemma 3,
Molmo 2), or all tokens of a prompt may (PaliGemma). Such masks depend on the types of the tokens.
So the model itself makes the mask of a few tokens, whose types follow each other in the same order
as in the prompt.
"""

import copy
from collections.abc import Collection, Mapping
from itertools import groupby
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.model.modules import signature
from kvpolicy.integrations.transformers.surface import ATTN_IMPLEMENTATION, CACHE, MASKS_OF_STEP

_TYPES = ("token_type_ids", "mm_token_type_ids")


def types_in(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a call's arguments for token types, such as ``token_type_ids``, by name."""
    named = ((name, arguments.get(name)) for name in _TYPES)
    return {name: each for name, each in named if isinstance(each, Tensor)}


@attrs.frozen(eq=False)
class Cuts:
    """A table of the input columns at which a prompt may be cut into chunks.

    Args:
        forbidden: ``[columns + 1]`` bool, True if a token before a column sees that column or a
            later one.
    """

    forbidden: Tensor

    def refused(self, column: int, seen: int) -> UnsupportedModelError:
        """Make the error that refuses to cut a prompt at a column, and names the nearest to use."""
        allowed = [at for at, forbidden in enumerate(self.forbidden.tolist()) if not forbidden]
        before = [each for each in allowed if seen < each <= column]
        behind = [each for each in allowed if column < each < len(self.forbidden) - 1]
        ends = [f"at column {each}" for each in (*before[-1:], *behind[:1])]
        last = " or ".join(ends) if ends else "after the last of them"
        return UnsupportedModelError(
            f"a chunk of a prompt must not end at column {column}, where tokens see later ones, "
            f"as in an image; let the chunk end {last}"
        )

    def check_size(self, size: int, seen: int) -> None:
        """Check that chunks of ``size`` columns never end where a cut is forbidden."""
        end = len(self.forbidden) - 1

        def cut(each: int) -> int | None:
            ends = range(seen + each, end, each)
            return next((column for column in ends if self.forbidden[column]), None)

        if (column := cut(size)) is not None:
            fits = [f"{each}, or " for each in range(size + 1, end - seen) if cut(each) is None]
            raise UnsupportedGenerationError(
                f"prefill_chunk_size must not let a chunk end at column {column}, where tokens see "
                f"later ones, as in an image, got {size}; give {fits[0] if fits else ''}None"
            )


def cuts_of(model: Any, arguments: Mapping[str, Any], valid: Tensor, seen: int) -> Cuts | None:
    """Find where a prompt may be cut into chunks; None if token types do not restrict it.

    ``valid`` ``[batch, columns]`` is False on padding, of all columns so far; ``seen`` of them were
    read before the prompt.
    """
    makes = getattr(type(model), MASKS_OF_STEP, None)
    known: Collection[str] = () if makes is None else signature(makes).parameters
    given = [each for each in types_in(arguments).items() if each[0] in known]
    if not given:
        return None
    name, types = given[0]
    if types.ndim != 2 or types.shape[0] != valid.shape[0]:
        return None
    asked = _Masks(model, name)
    columns = types.shape[1]
    if columns < valid.shape[1]:
        if not any(
            asked.sees([each for each, _ in groupby(row)]).triu(1).any() for row in types.tolist()
        ):
            return None
        raise UnsupportedModelError(
            f"{name} must be given for all columns up to a chunk's end, [batch, "
            f"{valid.shape[1]}], since {type(model).__name__} reads them by position, got "
            f"{list(types.shape)}"
        )
    valid = pad(valid, (0, columns - valid.shape[1]), value=True)
    forbidden = torch.zeros(columns + 1, dtype=torch.bool)
    for row, own in zip(types.tolist(), valid.tolist(), strict=True):
        asked.forbid(forbidden, row, [each for each in range(seen, columns) if own[each]])
    return Cuts(forbidden)


class _Masks:
    """A cache of the masks that a model makes for short sequences of token types."""

    def __init__(self, model: Any, name: str) -> None:
        self._makes = getattr(type(model), MASKS_OF_STEP)
        self._name = name
        self._config = copy.deepcopy(model.config)
        setattr(self._config, ATTN_IMPLEMENTATION, "eager")  # has a number for every pair of tokens
        self._made: dict[tuple[int, ...], Tensor] = {}

    def sees(self, types: list[int]) -> Tensor:
        """Return which tokens see which as a bool matrix, with two tokens for each given type."""
        if tuple(types) in self._made:
            return self._made[tuple(types)]
        count = 2 * len(types)
        made: Any = self._makes(
            config=self._config,
            inputs_embeds=torch.zeros(1, count, 1),
            attention_mask=torch.ones(1, count, dtype=torch.int64),
            position_ids=torch.arange(count)[None],
            is_first_iteration=True,
            **{CACHE: None, self._name: torch.tensor(types).repeat_interleave(2)[None]},
        )
        sees = torch.zeros(count, count, dtype=torch.bool)
        for mask in made.values() if isinstance(made, dict) else [made]:
            if isinstance(mask, Tensor) and mask.ndim == 4:
                own = mask[0, 0]
                sees |= own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
        self._made[tuple(types)] = sees
        return sees

    def forbid(self, forbidden: Tensor, types: list[int], columns: list[int]) -> None:
        """Mark the columns in ``forbidden`` before which one row must not be cut."""
        runs = [list(run) for _, run in groupby(columns, key=lambda column: types[column])]
        if not runs:
            return
        sees = self.sees([types[run[0]] for run in runs])
        for index, run in enumerate(runs):
            # Each run has two tokens in the mask: a cut is before the first of them, or between the
            # two.
            if bool(sees[: 2 * index, 2 * index :].any()):
                forbidden[run[0]] = True
            if bool(sees[: 2 * index + 1, 2 * index + 1 :].any()):
                forbidden[run[0] + 1 : run[-1] + 1] = True
