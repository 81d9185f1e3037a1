"""Every rule that evicts while an answer is decoded, with its reference; reading long answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import H2O, RKV, TOVA, FullContext, KeyDiff, SnapKV, StreamingLLM
from kvpolicy.policies.methods.method import Method
from tests import reference
from tests.integrations.model.builds.dense import Seen, seen_of
from tests.integrations.support.conversation import left_padded
from tests.reference.decoding import Summed

TOKENS, EVERY = 32, 37


def bounded(
    method: type[Method], tokens: int = TOKENS, every: int = EVERY, **arguments: Any
) -> Method:
    """A method that bounds an answer by its own rule, and keeps the prompt whole."""
    return FullContext(decoding=method(**arguments).decoding_rule(tokens, every))


# By name, the rule as the library has it, and as the reference does.
RULES: dict[str, tuple[Method, reference.Method]] = {
    "streamingllm": (bounded(StreamingLLM), reference.StreamingLLM(None, retention_tokens=TOKENS)),
    "h2o": (bounded(H2O), Summed(None, retention_tokens=TOKENS)),
    "tova": (bounded(TOVA), reference.TOVA(None, retention_tokens=TOKENS)),
    "snapkv": (bounded(SnapKV), reference.SnapKV(None, retention_tokens=TOKENS)),
    "keydiff": (bounded(KeyDiff), reference.KeyDiff(None, retention_tokens=TOKENS)),
    "rkv": (bounded(RKV), reference.RKV(None, retention_tokens=TOKENS)),
}
KEEPING_ALL = reference.FullContext()


def with_every(policy: Method, every: int) -> Method:
    """The same with another number of tokens from one choice to the next."""
    assert policy.decoding is not None
    return attrs.evolve(policy, decoding=attrs.evolve(policy.decoding, every=every))


Kept = list[list[list[list[int]]]]  # by row, layer and KV head


@dataclass
class Reading:
    """What a cache gave."""

    cache: PolicyCache  # the cache, after the last token
    logits: Tensor  # `[batch, steps, vocab]`, of the decoded tokens
    # By the number of decoded tokens after which layers chose, and 0 for the prompt, what they
    # held.
    kept: dict[int, Kept] = field(default_factory=dict)
    most: list[int] = field(default_factory=list)  # by layer, the most entries held after any step


def held(cache: PolicyCache, rows: int) -> Kept:
    """The positions that every row, layer and head holds; an empty list where there are none."""
    return [
        [
            []
            if layer.positions is None
            else [[each for each in head if each >= 0] for head in layer.positions[row].tolist()]
            for layer in cache.layers
        ]
        for row in range(rows)
    ]


def seen_at_every_step(kept: dict[int, Kept], row: int, prompt_len: int, length: int) -> list[Seen]:
    return seen_of({prompt_len + step: each[row] for step, each in kept.items()}, length)


@torch.no_grad()
def read(
    model: PreTrainedModel,
    policy: CachePolicy | PolicyCache,
    rows: Sequence[Sequence[int]],
    forced: Tensor,
) -> Reading:
    """Reads prompts, then feeds `forced` `[batch, steps]`, one column at a time."""
    cache = policy if isinstance(policy, PolicyCache) else PolicyCache(policy)
    ids, mask = left_padded(rows)
    call: Any = model
    reading = Reading(cache, torch.empty(0))
    found = []
    with cache.attached(model):
        call(ids, attention_mask=mask, cache=cache)
        reading.kept[0] = held(cache, len(rows))
        most = [layer.kept_len for layer in cache.layers]
        for step in range(forced.shape[1]):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            output = call(forced[:, step : step + 1], attention_mask=mask, cache=cache)
            found.append(output.logits[:, -1])
            most = [max(a, layer.kept_len) for a, layer in zip(most, cache.layers, strict=True)]
            if cache._reader.tokens is not None and not cache._reader.tokens.appended.shape[1]:
                reading.kept[step + 1] = held(cache, len(rows))
    reading.logits, reading.most = torch.stack(found, dim=1), most
    return reading
