"""Define flags for shortcuts in a model's forwards."""

from __future__ import annotations

import attrs


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
