"""Keys turned back to what projections and norms have made them, family by family."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, DecodingEviction, LayerContext, Scorer
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.model.rotary import Gapless, LayerRotary, RotaryChannels
from kvpolicy.policies import (
    GQAGroupSelector,
    PassAllPropagation,
    RestartPropagation,
    TokenSelectivePropagation,
)
from tests.families import FAMILIES, Family
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.asking import TurnedBackScorer
from tests.integrations.support.conversation import left_padded
from tests.reference import random_tokens

Keys = dict[int, Tensor]  # by layer, ``[batch, kv_heads, length, head_dim]``, never turned

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
    "factor": 16.0,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
SCALED = {
    "llama3": Family("llama", {"rope_parameters": _LLAMA3}),
    "longrope": Family("llama", {"rope_parameters": _LONG}),
    "dynamic": Family("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 32}),
}


def seen_by(names: tuple[str, ...], made: Callable[[Any, Tensor], Tensor]) -> Any:
    """How to hook a model: the modules of an attention of which the first is there, and its keys.

    Args:
        names: Of the modules.
        made: Keys ``[batch, kv_heads, length, head_dim]`` of the attention and their output.
    """

    def hook(model: PreTrainedModel) -> Keys:
        seen: Keys = {}
        for index, layer in enumerate(model.get_decoder().layers):
            attention = getattr(layer, "self_attn", None) or getattr(layer, "attention", None)
            if attention is None:
                continue
            module = next(getattr(attention, n) for n in names if hasattr(attention, n))

            def note(
                module: nn.Module,
                args: Any,
                output: Tensor,
                index: int = index,
                own: Any = attention,
            ) -> None:
                seen[index] = made(own, output)

            module.register_forward_hook(note)
        return seen

    return hook


def heads(attention: Any, output: Tensor) -> Tensor:
    """Of a projection's output, or of a norm's over each head."""
    width = attention.head_dim
    flat = output.reshape(*output.shape[:2], -1, width) if output.ndim == 3 else output
    return flat if flat.shape[2] == output.shape[-2] and output.ndim == 4 else flat.transpose(1, 2)


def of_tokens_first(attention: Any, output: Tensor) -> Tensor:
    """Of a norm that gets heads behind tokens."""
    return output.transpose(1, 2)


def thirds(attention: Any, output: Tensor) -> Tensor:
    """Of GPT-NeoX, whose projection makes queries, keys and values of each head together."""
    each = output.view(*output.shape[:2], -1, 3 * attention.head_size).transpose(1, 2)
    return each.chunk(3, dim=-1)[1]


def latent(attention: Any, output: Tensor) -> Tensor:
    """Of DeepSeek's rotary part alone, one for all heads."""
    return output[:, None, :, attention.kv_lora_rank :]


def latent_by_twos(attention: Any, output: Tensor) -> Tensor:
    """Of DeepSeek V3's: queries and keys are brought into another order to be turned."""
    found = latent(attention, output)
    return torch.cat([found[..., ::2], found[..., 1::2]], dim=-1)


PROJECTION = seen_by(("k_proj",), heads)
NORM = seen_by(("k_norm",), of_tokens_first)
FAMILY_KEYS: dict[str, Any] = {
    "llama": PROJECTION,
    "llama3": PROJECTION,
    "longrope": PROJECTION,
    "dynamic": PROJECTION,
    "qwen3": NORM,
    "glm4": PROJECTION,
    "phi": PROJECTION,
    "gemma3": seen_by(("k_norm",), lambda attention, output: output),
    "gpt_oss": PROJECTION,
    "cohere": PROJECTION,
    "cohere2": PROJECTION,
    "smollm3": PROJECTION,
    "gpt_neox": seen_by(("query_key_value",), thirds),
    "deepseek_v2": seen_by(("kv_a_proj_with_mqa",), latent),
    "deepseek_v3": seen_by(("kv_a_proj_with_mqa",), latent_by_twos),
    "deepseek_v32": seen_by(("kv_a_proj_with_mqa",), latent_by_twos),  # with an indexer
    "qwen3_next": NORM,
    "falcon_h1": PROJECTION,  # side by side with a recurrence
}


@attrs.frozen
class Comparing(Scorer):
    """Holds keys that are turned back against what hooks on the model have seen of them.

    Args:
        seen: By layer, the keys of the forward under way.
        known: By layer, row, head and position, what they have seen so far.
        compared: By layer, how many were compared with a forward's, and in all.
        twice: Whether a prompt is read twice, of which the second time other keys come.
    """

    seen: Keys
    twice: bool = attrs.field(default=False, kw_only=True)
    known: dict[tuple[int, int, int, int], Tensor] = attrs.field(factory=dict)
    compared: dict[int, list[int]] = attrs.field(factory=dict)

    needs_rotary = True

    def score(self, context: LayerContext) -> Tensor:
        assert context.layer.rotary is not None
        back = context.layer.rotary.turned_back(context.keys, context.positions)
        again = context.layer.rotary.turned(back, context.positions)
        tokens = context.valid
        torch.testing.assert_close(again[tokens], context.keys[tokens], atol=1e-5, rtol=1e-5)
        own = self.seen[context.layer_idx]
        back = back[..., back.shape[-1] - own.shape[-1] :]  # of latent attention what is turned
        held, new = context.key_len - context.new_len, 0
        if own.shape[2] == context.new_len:
            wanted = own.expand(-1, context.kv_heads, -1, -1)
            places = context.new_valid[:, None].expand(-1, context.kv_heads, -1)
            torch.testing.assert_close(
                back[:, :, held:][places], wanted[places], atol=1e-4, rtol=1e-4
            )
            new = int(places.sum())
        for row, head, slot in [] if self.twice else tokens.nonzero().tolist():
            at = (context.layer_idx, row, head, int(context.positions[row, head, slot]))
            known = self.known.setdefault(at, back[row, head, slot])
            torch.testing.assert_close(back[row, head, slot], known, atol=1e-4, rtol=1e-4)
        counts = self.compared.setdefault(context.layer_idx, [0, 0])
        counts[0], counts[1] = counts[0] + new, counts[1] + int(tokens.sum())
        return context.keys.float().norm(dim=-1)


def build(name: str) -> PreTrainedModel:
    family = SCALED.get(name) or FAMILIES.get(name)
    return builds()[name].model() if family is None else family.build(seed=1)


def read(model: PreTrainedModel, cache: PolicyCache, seed: int, *lens: int) -> None:
    rows = [random_tokens(seed + row, length) for row, length in enumerate(lens)]
    ids, mask = left_padded(rows)
    seen = cache.seen_lengths if cache.get_seq_length() else (0,) * len(rows)
    if any(seen):
        before = torch.ones(len(rows), cache.get_seq_length(), dtype=torch.int64)
        for row, length in enumerate(seen):
            before[row, : before.shape[1] - length] = 0
        mask = torch.cat([before, mask], dim=1)
    with torch.no_grad(), cache.attached(model):
        cache.start_turn()
        model(ids, attention_mask=mask, cache=cache, logits_to_keep=1)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("name", FAMILY_KEYS)
def test_turned_back_is_what_was_projected(name: str, drops: bool) -> None:
    """Of padded rows, and of the tokens that went on."""
    model = build(name)
    scorer = Comparing(FAMILY_KEYS[name](model))
    part = TokenSelectivePropagation(tsp_rate=0.6) if drops else PassAllPropagation()
    cache = PolicyCache(CachePolicy(scorer, GQAGroupSelector(0.5), part))
    read(model, cache, 0, 50, 41)
    assert scorer.compared
    for compared, in_all in scorer.compared.values():
        assert compared == in_all > 0


@pytest.mark.parametrize("name", ["llama", "llama3", "gpt_oss", "qwen3", "gemma3"])
def test_of_later_turns_too(name: str) -> None:
    """What is held was turned at its own position, which stays."""
    model = build(name)
    scorer = Comparing(FAMILY_KEYS[name](model))
    policy = CachePolicy(scorer, GQAGroupSelector(0.5), TokenSelectivePropagation(tsp_rate=0.8))
    cache = PolicyCache(policy)
    read(model, cache, 0, 12, 10)
    first = {layer: list(counts) for layer, counts in scorer.compared.items()}
    read(model, cache, 5, 14, 9)
    assert any(counts[1] > 2 * first[layer][1] for layer, counts in scorer.compared.items())


@pytest.mark.parametrize("name", ["llama", "cohere", "glm4"])
def test_the_same_token_elsewhere(name: str) -> None:
    """In the first layer, a token's key at one position is that at another, turned there."""
    model, found = build(name), []

    class AtFirst(Scorer):
        needs_rotary = True

        def score(self, context: LayerContext) -> Tensor:
            assert context.layer.rotary is not None
            if context.layer_idx == 0:
                back = context.layer.rotary.turned_back(context.keys, context.positions)
                other = context.positions.flip(2)
                found.append((context.layer.rotary.turned(back, other), context.keys))
            return context.keys.float().norm(dim=-1)

    half = random_tokens(0, 20)
    ids = torch.tensor([half + half[::-1]])  # reads the same both ways
    cache = PolicyCache(CachePolicy(AtFirst(), GQAGroupSelector(0.5), PassAllPropagation()))
    with torch.no_grad(), cache.attached(model):
        model(ids, cache=cache)
    ((turned, keys),) = found
    torch.testing.assert_close(turned, keys.flip(2), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(keys, keys.flip(2), atol=0.1)


@pytest.mark.parametrize("rows", [(40,), (40, 27)])
def test_behind_a_restart(rows: tuple[int, ...]) -> None:
    """Chosen tokens are read without gaps, and shown at their original positions."""
    model = build("llama")
    scorer = Comparing(FAMILY_KEYS["llama"](model), twice=True)
    policy = CachePolicy(
        scorer, GQAGroupSelector(0.2), RestartPropagation(filter_layer=1, retention_rate=0.4)
    )
    cache = PolicyCache(policy)
    read(model, cache, 0, *rows)
    # Layer 2 is reached by the chosen tokens only, layer 1 by all and then by them.
    count = sum(max(int(0.4 * length), 1) for length in rows)
    assert scorer.compared[2] == [2 * count, 2 * count]
    assert scorer.compared[1] == [2 * (count + sum(rows)), 2 * (count + sum(rows))]


def test_places_behind_a_restart_by_hand() -> None:
    """Before the prompt as they are, then by count; behind the last chosen one without the gap."""
    read = torch.tensor([[10, 13, 14, 17], [-1, -1, 6, 9]])
    gapless = Gapless(read, torch.tensor([8, 0]))
    asked = torch.tensor([[[3, 10, 13, 14, 17, 18, 30]], [[6, 7, 9, 10, 11, 29, 6]]])
    found = gapless.places(asked)
    assert found.tolist() == [[[3, 8, 9, 10, 11, 12, 24]], [[0, 0, 1, 2, 3, 21, 0]]]
    states = torch.randn(2, 3, 7, 2)
    turns = RotaryChannels(torch.ones(1), 1.0, torch.tensor([[0], [1]]))
    one, other = LayerRotary(turns, gapless), LayerRotary(turns)
    torch.testing.assert_close(one.turned(states, asked), other.turned(states, found))


def test_half_precision() -> None:
    model = build("glm4").to(torch.bfloat16)
    found = []

    class Both(TurnedBackScorer):
        def score(self, context: LayerContext) -> Tensor:
            assert context.layer.rotary is not None
            back = context.layer.rotary.turned_back(context.keys, context.positions)
            found.append((context.layer.rotary.turned(back, context.positions), context.keys))
            return super().score(context)

    cache = PolicyCache(CachePolicy(Both(), GQAGroupSelector(0.5), PassAllPropagation()))
    read(model, cache, 0, 50, 41)
    for turned, keys in found:
        assert turned.dtype == torch.bfloat16
        torch.testing.assert_close(turned, keys, atol=0.1, rtol=0.03)


def test_several_axes_are_refused_if_tokens_move() -> None:
    model = FAMILIES["llama"].build()
    model.config.rope_parameters["mrope_section"] = [1, 1, 2]
    restart = RestartPropagation(filter_layer=1, retention_rate=0.4)
    policy = CachePolicy(TurnedBackScorer(), GQAGroupSelector(0.3), restart)
    with pytest.raises(UnsupportedModelError, match="several axes"):
        read(model, PolicyCache(policy), 0, 30)


def test_positions_of_the_callers() -> None:
    """They are those that the model reads; a model that reads others is refused."""
    model = build("llama")
    scorer = Comparing(FAMILY_KEYS["llama"](model))
    cache = PolicyCache(CachePolicy(scorer, GQAGroupSelector(0.5), PassAllPropagation()))
    ids = torch.tensor([random_tokens(0, 20)])
    with torch.no_grad(), cache.attached(model):
        cache.start_turn()
        model(ids, position_ids=torch.arange(5, 25)[None], cache=cache)
        cache.start_turn()
        model(ids, position_ids=torch.arange(40, 60)[None], cache=cache)
        cache.start_turn()
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 3
        model.model.rotary_emb.register_forward_hook(lambda *args: tuple(0.5 * e for e in args[2]))
        with pytest.raises(UnsupportedModelError, match="does not fit its tokens' positions"):
            model(ids, position_ids=torch.arange(60, 80)[None], cache=cache)
    assert {each[0] for each in scorer.compared.values()} == {40 * 2}


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_frequencies_that_have_changed_are_refused(name: str) -> None:
    """Within the length of training they stay, whatever turns there are."""
    model = build(name)
    scorer = Comparing(FAMILY_KEYS[name](model))
    cache = PolicyCache(CachePolicy(scorer, GQAGroupSelector(0.5), PassAllPropagation()))
    read(model, cache, 0, 14)
    read(model, cache, 1, 10)
    with pytest.raises(UnsupportedModelError, match="frequencies have changed with the length"):
        read(model, cache, 2, 30)
    assert cache.get_seq_length() == 24


def test_an_earlier_restart_is_refused() -> None:
    policy = CachePolicy(
        TurnedBackScorer(),
        GQAGroupSelector(0.3),
        RestartPropagation(filter_layer=1, retention_rate=0.4),
    )
    model, cache = build("llama"), PolicyCache(policy)
    read(model, cache, 0, 30)
    with pytest.raises(UnsupportedModelError, match="restart in an earlier turn"):
        read(model, cache, 1, 10)
    rule = DecodingEviction(TurnedBackScorer(), GQAGroupSelector(retention_tokens=12))
    cache = PolicyCache(attrs.evolve(policy, decoding=rule))
    with pytest.raises(UnsupportedModelError, match="after a restart"):
        read(model, cache, 0, 30)
