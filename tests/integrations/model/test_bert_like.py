"""Decoders whose layers lie in a module that reads no tokens, as BERT's and its like's."""

from typing import Any

import pytest
import torch

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, FullContext, GemFilter, SnapKV
from tests.integrations.hybrids.models import generate, tokens
from tests.integrations.model.builds.catalogue import Build, builds, built
from tests.integrations.support.alone import read_two_turns
from tests.integrations.support.conversation import left_padded

# Positions from 0, from behind the padding id, with a norm behind the module of the layers.
FAMILIES = ("bert", "roberta", "xlm-roberta-xl", "electra")
ROWS = [tokens(0, 40), tokens(1, 23)]
POLICIES: dict[str, CachePolicy] = {
    "snapkv": SnapKV(0.3, window_size=4),
    "fastkv": FastKV(tsp_rate=0.2, retention_rate=0.2, window_size=4),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_turns_of_padded_rows(name: str, policy: str) -> None:
    store = read_two_turns(built(name), POLICIES[policy], [40, 23], [9, 21])
    assert bool(store.propagated) is (policy == "fastkv")


@torch.no_grad()
def test_positions_that_a_model_counts_from_elsewhere() -> None:
    """In a loop of one's own a padded row's positions are known to nobody but the caller."""
    model, (ids, mask) = built("roberta"), left_padded(ROWS)
    store = PolicyCache(FullContext())
    with store.attached(model):
        whole: Any = model(ids[:1], cache=store)
        torch.testing.assert_close(whole.logits, model(ids[:1]).logits, atol=1e-4, rtol=1e-4)
        more: Any = model(ids[:1, :3], cache=store)
    want: Any = model(torch.cat([ids[:1], ids[:1, :3]], dim=1))
    torch.testing.assert_close(more.logits, want.logits[:, -3:], atol=1e-4, rtol=1e-4)
    store.reset()
    with store.attached(model):
        with pytest.raises(UnsupportedModelError, match="position_ids must be given to Roberta"):
            model(ids, attention_mask=mask, cache=store)
        places = (mask.cumsum(dim=1) - 1).clamp(min=0)
        given = {"attention_mask": mask, "position_ids": places}
        output: Any = model(ids, cache=store, **given)
    alone: Any = model(ids[1:, -23:], position_ids=places[1:, -23:])
    torch.testing.assert_close(output.logits[1, -23:], alone.logits[0], atol=1e-4, rtol=1e-4)
    restarting = PolicyCache(GemFilter(retention_rate=0.5))
    with restarting.attached(model):
        with pytest.raises(UnsupportedModelError, match="a policy restarts the prefill"):
            model(ids[:1], cache=restarting)
        model(ids[:1], position_ids=places[:1], cache=restarting)
    assert restarting.get_seq_length() == 40


@torch.no_grad()
def test_without_a_head() -> None:
    for name in ("bert", "roberta"):
        model: Any = built(name).base_model
        store, ids = PolicyCache(SnapKV(0.3, window_size=4)), torch.tensor(ROWS[:1])
        with store.attached(model):
            found = model(ids, cache=store).last_hidden_state
        torch.testing.assert_close(found, model(ids).last_hidden_state, atol=1e-4, rtol=1e-4)
        assert [layer.kept_len for layer in store.layers] == [12] * 4


def test_a_model_that_is_no_decoder() -> None:
    model = Build("bert", "bert", {"is_decoder": False}).model()
    with pytest.raises(UnsupportedModelError, match="load it with is_decoder=True"):
        generate(model, PolicyCache(FullContext()), torch.tensor(ROWS[:1]))


@pytest.mark.parametrize("inside", ["bert", "bert.encoder"])
def test_a_compiled_part_of_it(inside: str) -> None:
    model = builds()["bert"].model()
    model.get_submodule(inside).compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="must not be compiled"):
        generate(model, PolicyCache(FullContext()), torch.tensor(ROWS[:1]))
