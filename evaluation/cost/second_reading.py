"""Compute the bytes in use while layers make deferred choices or read the prompt again."""

from __future__ import annotations

from kvpolicy.evaluation.cost.reading import POSITION_BYTES, Reading
from kvpolicy.policies import GQAGroupSelector, PassAllPropagation
from kvpolicy.policy import CachePolicy

SALIENCY_BYTES = 4


def choosing_bytes(reading: Reading) -> int:
    """Return the extra peak bytes while tokens are chosen for all layers after a prompt."""
    stored = sum(map(reading.stored, reading.waiting))
    if reading.policy.rereading is None:
        return stored
    return max(stored, _again(reading))


def _again(reading: Reading) -> int:
    """Return the peak bytes of reading the prompt a second time.

    Every layer shows what it holds in memory of its own; the forward over a repeated chunk joins
    it with the chunk's own keys, layer by layer, under a mask of all.
    """
    policy, context, model = reading.policy, reading.context_len, reading.model
    again = policy.rereading
    assert again is not None
    new = shown = 0
    if not again.spans(context):
        return 0
    for start, stop in again.spans(context):
        asked, overlap = again.before(start)
        repeated = len(asked) + overlap + len(again.answer_ids) + stop - start
        new = max(new, repeated)
        shown = max(shown, again.num_sinks + stop - start + repeated)
    scores = CachePolicy(policy.scorer, GQAGroupSelector(1.0), PassAllPropagation())
    forward = model.forward(new, context)
    peak = held = 0
    for index in reading.waiting:
        layer, size = reading.shape.layers[index], reading.token_bytes[index]
        held += context * (size + layer.kv_heads * (2 * POSITION_BYTES + SALIENCY_BYTES))
    for index in reading.waiting:
        layer, size = reading.shape.layers[index], reading.token_bytes[index]
        place = index, reading.shape.num_layers
        joined = (context + new) * size
        scoring = shown * size + model.deciding(
            scores, layer, place, shown, reading.device, query_len=new
        )
        here = forward.layers[index]
        mask = new * (context + new)
        # Keys are scored before the layer attends.
        moments = here.attending + joined, here.observing + joined + scoring, here.after
        peak = max(peak, mask + max(moments))
    return held + peak
