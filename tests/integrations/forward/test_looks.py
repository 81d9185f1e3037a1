"""What is read off tensors on the host does not grow with the layers of a model.

On a GPU the processor waits for every such look, and has nothing asked of it meanwhile.
"""

import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy
from kvpolicy.host_counts import on_device
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import (
    H2O,
    TOVA,
    AdaKV,
    FastKV,
    FirstLayersWholeSelector,
    FullContext,
    GQAGroupSelector,
    KeyDiff,
    PassAllPropagation,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    WindowMaxPoolScorer,
)
from tests.integrations.support.conversation import left_padded
from tests.integrations.support.looks import Looks
from tests.reference import random_tokens, tiny_model

FEW, MANY = 2, 6
SECOND = 19  # tokens of a second turn

FIXED: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "snapkv": SnapKV(0.2),
    "snapkv_tokens": SnapKV(retention_tokens=24, protect=3),
    "pyramidkv": PyramidKV(0.3),
    "streamingllm": StreamingLLM(0.3),
    "streaming_llm_protected": StreamingLLM(retention_tokens=20, num_sinks=2, protect=5),
    "keydiff": KeyDiff(0.3),
    "h2o": H2O(0.3),
    "tova": TOVA(0.3),
    "fastkv": FastKV(),
    "first_layers_whole": CachePolicy(
        WindowMaxPoolScorer(),
        FirstLayersWholeSelector(GQAGroupSelector(0.3), whole_layers=1),
        PassAllPropagation(),
    ),
}
# More than FEW_QUERIES, for scorers that look at all of them.
LENS = {"one": (97,), "alike": (97, 97), "padded": (97, 71)}


def rows_of(lens: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    return left_padded([random_tokens(seed + row, length) for row, length in enumerate(lens)])


def looks_of(policy: CachePolicy, layers: int, lens: tuple[int, ...]) -> dict[str, Looks]:
    """Those of a prompt, of a token that is decoded, and of a second turn."""
    model = tiny_model("llama", seed=1, num_layers=layers)
    found = {each: Looks() for each in ("prompt", "step", "turn")}
    ids, mask = rows_of(lens)
    cache = PolicyCache(policy)
    with cache.attached(model), torch.no_grad():
        for name, looks in found.items():
            how = {CACHE: cache, "logits_to_keep": 1}
            with looks:
                model(input_ids=ids, attention_mask=mask, **how)
            count = 1 if name == "prompt" else SECOND
            ids = torch.tensor([random_tokens(7 + row, count) for row in range(len(lens))])
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            if name == "step":
                cache.start_turn()
    return found


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("name", FIXED)
def test_looks_do_not_grow_with_layers(name: str, lens: str) -> None:
    few, many = (looks_of(FIXED[name], layers, LENS[lens]) for layers in (FEW, MANY))
    for part, looks in few.items():
        if lens == "padded" and part == "turn":  # rows hold unlike numbers
            continue
        assert looks.count == many[part].count, (part, looks.places, many[part].places)


def test_where_content_decides_a_layer_is_looked_at_twice() -> None:
    few, many = (looks_of(AdaKV(0.3), layers, LENS["one"])["prompt"] for layers in (FEW, MANY))
    assert many.count - few.count <= 2 * (MANY - FEW), many.places


def test_looks_are_found() -> None:
    """Whatever waits for a GPU is counted, what does not is not."""
    tensor = torch.tensor([3, 1, 0])
    waits = [
        tensor.tolist,
        lambda: int(tensor[0]),
        lambda: bool(tensor[0]),
        lambda: float(tensor.sum()),
        tensor[0].item,
        tensor.numpy,
        tensor.nonzero,
        tensor.unique,
        lambda: tensor[tensor > 0],
        lambda: torch.equal(tensor, tensor),
        lambda: tensor.masked_select(tensor > 0),
        lambda: tensor.repeat_interleave(tensor),
        lambda: torch.tensor([1, 2], device="cpu"),
        lambda: torch.tensor([1, 2]).to(tensor.device),
        lambda: [1] if tensor[0] else [],
        lambda: list(range(tensor[0])),
    ]
    for index, wait in enumerate(waits):
        with Looks() as looks:
            wait()
        assert looks.count == 1, (index, looks.places)
    with Looks() as looks:
        tensor.repeat_interleave(tensor, output_size=4)
        tensor.repeat_interleave(2)
        tensor[torch.arange(2)].sort().values.masked_fill(tensor[:2] > 0, 1).any()
        torch.arange(3, device="cpu") + on_device([1, 2, 3], tensor.device)
    assert looks.count == 0, looks.places
