"""Long answers of other families against their own dense attention under a mask of every step."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers.model.dense import dense_outputs
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.policies import H2O, FastKV
from tests.families import FAMILIES, VOCAB_SIZE
from tests.integrations.decoding.reading import Reading, read
from tests.integrations.decoding.rules import RULES, TOKENS, bounded
from tests.integrations.support.own_attention import dense
from tests.reference import Act, random_tokens, visible_after

# Windows and caps, windows and sinks, latents, experts.
NAMES = [name for name in ("gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe") if name in FAMILIES]
STEPS, EVERY = 300, 37
LENS = (41, 29)
TOLERANCE = 1e-4


def answered(
    model: PreTrainedModel, policy: CachePolicy, *, steps: int = STEPS
) -> tuple[list[list[int]], Reading]:
    """Rows of unlike lengths with the answers that they were given."""
    rows = [random_tokens(seed=length, length=length) for length in LENS]
    forced = torch.randint(1, VOCAB_SIZE, (2, steps), generator=torch.Generator().manual_seed(7))
    found = read(model, policy, rows, forced)
    return [prompt + forced[row].tolist() for row, prompt in enumerate(rows)], found


def acts_of(found: Reading, row: int) -> list[Act]:
    """What was chosen and when."""
    ends = [(LENS[row] + step, found.kept[step][row]) for step in sorted(found.kept)]
    return [Act(0 if not index else end, end, kept) for index, (end, kept) in enumerate(ends)]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("family", NAMES)
def test_a_long_answer_is_dense_attention_under_what_was_held(family: str, name: str) -> None:
    model = FAMILIES[family].build(attn_implementation="eager")
    whole, found = answered(model, RULES[name][0])
    assert len(found.kept) > 5
    for row, ids in enumerate(whole):
        want, _ = dense(model, ids, acts_of(found, row))
        assert (found.logits[row] - want[-STEPS:]).abs().max() <= TOLERANCE
        layers = [[len(head) for head in layer] for layer in found.kept[EVERY * 5][row]]
        windows = ModelParts(model).windows
        most = [TOKENS if window is None else window for window in windows]
        assert all(max(each) <= bound for each, bound in zip(layers, most, strict=True))
    assert max(found.most) <= LENS[0] + EVERY  # the prompt is whole until the first choice


@pytest.mark.parametrize("name", ["h2o", "r_kv"])
def test_recurrent_layers_go_on_with_every_token(name: str) -> None:
    """Of a hybrid: its layers with a state have read the answer whole."""
    model = FAMILIES["qwen3_next"].build(attn_implementation="eager")
    parts = ModelParts(model)
    whole, found = answered(model, RULES[name][0], steps=120)
    for row, ids in enumerate(whole):
        attending = [
            Act(act.start, act.end, [layer or [list(range(act.end))] for layer in act.kept])
            for act in acts_of(found, row)
        ]
        heads = model.config.num_key_value_heads
        see: list[Tensor] = visible_after(attending, heads, len(ids))
        every = [torch.ones(len(ids), dtype=torch.bool)] * len(see)
        want = dense_outputs(model, parts, torch.tensor([ids]), see, every)
        assert (found.logits[row] - want[-120:]).abs().max() <= TOLERANCE


def test_the_answers_evict_what_matters() -> None:
    """The tests above could not pass without eviction."""
    model = FAMILIES["qwen3_moe"].build(attn_implementation="eager")
    whole, found = answered(model, RULES["snapkv"][0])
    everything = [Act(0, len(whole[0]), [[list(range(len(whole[0])))] * 2] * 4)]
    full, _ = dense(model, whole[0], everything)
    assert (found.logits[0] - full[-STEPS:]).abs().max() > 100 * TOLERANCE


def test_a_drop_before_an_answer() -> None:
    """Layers behind a drop hold what reached them, then the answer, all of it bounded alike."""
    model = FAMILIES["llama"].build(attn_implementation="eager")
    policy = FastKV(
        tsp_layer=1, tsp_tokens=20, retention_tokens=14, decoding=bounded(H2O, 16, 10).decoding
    )
    whole, found = answered(model, policy, steps=60)
    for row, ids in enumerate(whole):
        passed = [each for each in found.cache.propagated[1][row].tolist() if each >= 0]
        everything = list(range(LENS[row]))
        acts = acts_of(found, row)
        acts[0] = Act(0, LENS[row], acts[0].kept, [everything] * 2 + [passed] * 2)
        want, _ = dense(model, ids, acts)
        assert (found.logits[row] - want[-60:]).abs().max() <= TOLERANCE
    assert max(found.most) <= 26
