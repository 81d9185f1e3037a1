"""What an attention module is told of columns, and which of its biases are taken."""

from typing import Any

import torch

from kvpolicy.integrations.transformers.forward.attending import Columns
from kvpolicy.integrations.transformers.model.mask_arguments import MaskArguments


def bias_of(columns: Columns, batch: int, heads: int) -> torch.Tensor:
    """A bias that is the distance itself, as a module makes it: 1000 a head more."""
    queries = torch.arange(len(columns.queries)) + columns.query_offset
    distance = queries[:, None] - torch.arange(columns.keys)[None]
    more = 1000 * torch.arange(heads)[:, None, None]
    return (distance + more).float().expand(batch, -1, -1, -1)


def test_biases_are_those_of_each_pair() -> None:
    """Two rows with unlike gaps, two KV heads of two query heads each."""
    queries = torch.tensor([[4, 7, 9], [-1, 3, 6]])
    keys = torch.tensor([[[0, 4, 9], [2, 7, 9]], [[-1, 3, 6], [0, 3, 6]]])
    columns = Columns(11, queries.amax(dim=0))
    bias = bias_of(columns, 2, 4)
    other = torch.ones(2, 4, 3, 1)
    taken = columns.taken({"position_bias": bias, "sinks": other, "scaling": 2.0}, queries, keys, 4)
    assert taken["sinks"] is other
    assert taken["scaling"] == 2.0
    found = taken["position_bias"]
    assert found.shape == (2, 4, 3, 3)
    for row in range(2):
        for head in range(4):
            for query in range(3):
                for key in range(3):
                    at, to = int(queries[row, query]), int(keys[row, head // 2, key])
                    if at >= 0 and 0 <= to <= at:
                        assert found[row, head, query, key] == 1000 * head + at - to


def test_one_choice_for_all_heads() -> None:
    columns = Columns(8, torch.tensor([7]))
    bias = bias_of(columns, 1, 3)
    keys = torch.tensor([[[1, 5, 7]]])
    taken = columns.taken({"bias": bias}, torch.tensor([[7]]), keys, 3)["bias"]
    assert taken[0, :, 0].tolist() == [[6, 2, 0], [1006, 1002, 1000], [2006, 2002, 2000]]


def test_two_masks_by_name() -> None:
    """As Falcon H1 and Inkling name them, as Zamba does, and as Zaya, in one dictionary."""
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"attention_mask": "own", "conv_mask": "state", "use_cache": True}, "attention_mask"),
        ({"attention_mask": "state", "causal_mask": "own", "layer_idx": 3}, "causal_mask"),
    )
    for arguments, name in cases:
        names = MaskArguments.of(arguments)
        assert names.attention == name
        taken = names.taken(arguments)
        assert taken["attention_mask"] == "own"
        assert "state" not in taken.values()
        new = {"own": "other", "state": "another"}
        given = names.given({**taken, "attention_mask": "other"}, "another")
        assert given == {key: new.get(each, each) for key, each in arguments.items()}
    together = {"attention_mask": {"causal": "own", "conv": "state"}, "position_ids": 4}
    names = MaskArguments.of(together)
    taken = names.taken(together)
    assert taken == {"attention_mask": "own", "position_ids": 4}
    given = names.given({**taken, "attention_mask": "other"}, "another")
    assert given == {"attention_mask": {"causal": "other", "conv": "another"}, "position_ids": 4}
