"""Short cuts that a model's forwards may take."""

from __future__ import annotations

import attrs


@attrs.frozen
class Care:
    """Short cuts that are right on nearly all models, and left out where they are not.

    Args:
        narrows: Whether layers may be run for some of their tokens only.
        spares_masks: Whether a layer may get no mask where its attention function would do right
            without.
        pads: Whether rows may be padded: a model that counts padding as positions does not read a
            padded row as it reads it alone, with any cache.
        continues: Whether several tokens may follow what recurrent layers have read: not in a model
            whose layers then begin anew, with any cache.
        counts: Whether a model that is given no positions counts a row's tokens from 0: RoBERTa's
            like counts from another number then, so that nobody but the caller can say where a
            padded row begins.
        placed: Whether ``generate`` gives such a model positions, which count from 0.
        refills: Whether the last layer's output is filled up to the input's length, in a model that
            gives it the input's shape, whichever tokens went on.
    """

    narrows: bool = True
    spares_masks: bool = True
    pads: bool = True
    continues: bool = True
    counts: bool = True
    placed: bool = False
    refills: bool = False
