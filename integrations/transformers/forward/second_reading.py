"""Read a prompt a second time, and score its keys by the attention of the repeated tokens.

After the prompt has been read, the decoder runs once more for each chunk of it, on the ids that the
cache remembers. Its layers then hold all keys of the prompt and are discarded afterwards; recurrent
layers get their states back. Each run ends inside the last layer to be scored. The scorer sees a
chunk as a prompt of its own, whose keys are those of the first tokens, of the chunk and of the
repeated tokens, so that any scorer of queries can be used. A row without this chunk is padding.
"""

from collections.abc import Generator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.forward.inputs import Incoming, mask_of
from kvpolicy.integrations.transformers.forward.layer_contexts import layer_context
from kvpolicy.integrations.transformers.forward.passes import AtQueries, KeyUse, Pass, PassState
from kvpolicy.integrations.transformers.forward.selecting import DeferredKV
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import why_whole
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.kinds import TokenKind
from kvpolicy.part_calls import DeferredChecks, saliency_of
from kvpolicy.policy import CachePolicy
from kvpolicy.precision import without_autocast
from kvpolicy.repetition import Repetition
from kvpolicy.selection import compress, gather_positions, gather_slots


class ScoreChunk(AtQueries):
    """Score the keys of one chunk of a prompt by the attention of the chunk's repeated tokens.

    Args:
        span: The first position of the chunk, and the position after its last one.
        found: The result: saliency by layer, float32 ``[batch, heads, key_len + 1]``.
    """

    keys = KeyUse.DISCARD

    def __init__(
        self, span: tuple[int, int], scored: frozenset[int], found: dict[int, Tensor]
    ) -> None:
        self._span, self._scored, self._found = span, scored, found

    def observe(
        self, at: PassState, index: int, inputs: AttentionInputs, stored: tuple[Tensor, Tensor]
    ) -> None:
        """Score a layer's keys of the chunk by the queries of the repeated tokens."""
        if index not in self._scored:
            return
        layer, scorer = at.layers[index], at.policy.scorer
        assert scorer is not None
        positions = at.masks.positions(layer, inputs.keys.shape[1], inputs.keys.device)
        slots, of_chunk = self._shown(at.policy, layer.kept_len, positions)
        keys, values = gather_slots(inputs.keys, slots), gather_slots(inputs.values, slots)
        context = layer_context(
            at,
            index,
            AttentionInputs(inputs.queries, keys, values, inputs.scores),
            gather_positions(positions, slots),
            new_valid=at.reach.valid,
            seen_len=tuple(at.before.lengths.tolist()),
        )
        checks = DeferredChecks()
        # Autocast would round the scores to half precision, where many tokens tie.
        with without_autocast(keys.device):
            saliency = saliency_of(scorer, context, checks)
        checks.look()
        length, heads = layer.kept_len, saliency.shape[1]
        if index not in self._found:
            shape = (saliency.shape[0], heads, length + 1)  # the last slot takes keys of no chunk
            self._found[index] = saliency.new_zeros(shape)
        target = torch.where(of_chunk, slots, length)
        target = target.repeat_interleave(heads // target.shape[1], dim=1)
        self._found[index].scatter_(2, target, saliency)

    def _shown(
        self, policy: CachePolicy, held_len: int, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the slots of the keys to show the scorer, and which of them are the chunk's."""
        assert policy.rereading is not None
        held, new = positions.tensor_split([held_len], dim=2)
        start, stop = self._span
        of_chunk = (held >= start) & (held < stop)
        sinks = (held >= 0) & (held < policy.rereading.num_sinks)
        shown = torch.cat([of_chunk | sinks, new >= 0], dim=2)
        slots = compress(shown, int(shown.sum(dim=-1).max()))
        found = pad(of_chunk, (0, new.shape[2])).gather(2, slots.clamp(min=0))
        return slots, found & (slots >= 0)


@attrs.frozen(eq=False)
class SecondReading:
    """A second reading of a whole prompt, chunk by chunk, by which its keys are scored.

    Args:
        layers: The layers of the cache; they stay unchanged.
        waiting: The layers with a deferred selection, by index.
    """

    reading: Repetition
    parts: ModelParts
    layers: list[PolicyLayer]
    waiting: Mapping[int, DeferredKV]
    tokens: SeenTokens
    cache: Any

    def passes(self) -> Generator[Pass, object, dict[int, DeferredKV]]:
        """Yield one pass of the decoder for each chunk of the prompt that is read again.

        Return the layers that wait to choose, with the scores found; 0 if no chunk was read.
        """
        layers, found = list(self.layers), dict[int, Tensor]()
        for index, each in self.waiting.items():
            layers[index] = _holding(each, self.layers[index], self.tokens)
        scored = frozenset(self.waiting)
        for start, stop in self.reading.spans(int(self.tokens.lengths.max())):
            arguments, valid = self._inputs(start, stop)
            padded = not bool(valid.all())
            yield Pass(
                Incoming(arguments, self.tokens, None, valid, valid, padded=padded),
                ScoreChunk((start, stop), scored, found),
                in_prompt=False,
                ends_inside=max(scored),
                layers=layers,
            )
        waiting = {}
        for index, each in self.waiting.items():
            shape = each.undecided.context.positions.shape
            saliency = torch.zeros(shape, device=each.keys.device)
            if found:
                saliency = found[index][..., :-1]
            undecided = each.undecided.with_saliency(saliency)
            waiting[index] = attrs.evolve(each, undecided=undecided)
        return waiting

    def _inputs(self, start: int, stop: int) -> tuple[dict[str, Any], Tensor]:
        """Return the decoder's arguments to read a chunk again, and which columns are tokens."""
        asked, overlap = self.reading.before(start)
        device = self.tokens.valid.device
        instruction, answer = (
            torch.tensor(ids, dtype=torch.int64, device=device)
            for ids in (asked, self.reading.answer_ids)
        )
        rows = []
        for own, is_token in zip(self.tokens.ids, self.tokens.valid, strict=True):
            ids = own[is_token]
            parts = [instruction, ids[start - overlap : start], answer, ids[start:stop]]
            rows.append(torch.cat(parts) if len(ids) > start else ids[:0])
        longest = max(len(row) for row in rows)
        repeated = torch.stack([pad(row, (longest - len(row), 0)) for row in rows])
        lens = torch.tensor([len(row) for row in rows], device=device)
        valid = torch.arange(longest, device=device) >= (longest - lens)[:, None]
        places = self.tokens.rotary_positions_of(valid)
        self._check_places(places)
        arguments = {
            "input_ids": repeated,
            "position_ids": places,
            "attention_mask": mask_of(self.tokens, valid),
            CACHE: self.cache,
            "use_cache": not self.parts.own_caches_only,
        }
        return arguments, valid

    def _check_places(self, places: Tensor) -> None:
        most = getattr(self.parts.config, "max_position_embeddings", None)
        rotary = getattr(self.parts.decoder, "rotary_emb", None)
        if rotary is not None or not isinstance(most, int):
            return
        needed = int(places.max()) + 1
        if needed > most:
            raise UnsupportedModelError(
                f"prompt and its second reading must fit into the model's {most} positions, but "
                f"they need {needed}; give a shorter prompt, or a smaller chunk_size than that of "
                f"{self.reading}"
            )


def _holding(waiting: DeferredKV, layer: PolicyLayer, tokens: SeenTokens) -> PolicyLayer:
    """Make a layer that holds all the keys from which a waiting layer will later choose."""
    whole = PolicyLayer()
    slots = torch.arange(waiting.positions.shape[2], device=waiting.positions.device)
    everything = torch.where(waiting.positions >= 0, slots, -1)
    counts = waiting.undecided.context._held_len
    whole.store(
        waiting.keys, waiting.values, waiting.positions, everything, counts=counts, whole=True
    )
    whole.follow(tokens)
    whole.facts.query_heads, whole.facts.spread = layer.facts.query_heads, layer.facts.spread
    return whole


def check_layers(policy: CachePolicy, layers: list[PolicyLayer]) -> None:
    """Check that all layers of a model can wait to choose until every layer is scored."""
    again = policy.rereading is not None
    unlike = [
        index
        for index, layer in enumerate(layers)
        if layer.one_choice or (again and why_whole(layer) is not None)
    ]
    if not unlike:
        return
    if again:
        raise UnsupportedModelError(
            f"rereading of {policy} must be None with this model, since its layers {unlike} share "
            "keys, have an indexer, attend to images, hold a state beside their keys, or show no "
            "queries; a prompt cannot be read twice there yet"
        )
    raise UnsupportedModelError(
        f"selector of {policy} must choose layer by layer with this model, since its layers "
        f"{unlike} have an indexer, and some follow the choice of an earlier layer; use a "
        "selector that does not decide for all layers together"
    )


def check_tokens(policy: CachePolicy, incoming: Incoming) -> None:
    """Check that a prompt can be read again from its token ids: known, and without images."""
    seen, remedy = incoming.tokens, f"use a policy without the second reading of {policy}"
    known = incoming.ids is not None and not bool(((seen.ids < 0) & seen.valid).any())
    if not known:
        raise UnsupportedGenerationError(
            "input_ids of the whole context must be known if a policy reads it again, got "
            f"embeddings; give ids, or {remedy}"
        )
    others = (
        bool((kinds != TokenKind.TEXT).logical_and(valid).any())
        for kinds, valid in ((incoming.kinds, incoming.columns), (seen.kinds, seen.valid))
        if kinds is not None
    )
    if any(others):
        raise UnsupportedGenerationError(
            "prompt must be only text if a policy reads it again, got images in it, which ids do "
            f"not contain; {remedy}"
        )
