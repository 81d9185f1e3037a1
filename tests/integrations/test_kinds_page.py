"""The table of docs/kinds.md: what it says of a kind of layer is tried on a model that has it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, GemFilter, PyramidInfer, SnapKV, StreamingLLM
from tests.integrations.model.builds.catalogue import built
from tests.integrations.support.conversation import left_padded
from tests.reference import random_tokens

PAGE = Path(__file__).parents[2] / "docs" / "kinds.md"
LONG, SHORT = random_tokens(1, 40), random_tokens(2, 27)


def table() -> dict[str, dict[str, str]]:
    """By build, its cells by column."""
    text = PAGE.read_text().partition("| kind of layer |")[2].partition("\n\n")[0]
    lines = f"| kind of layer |{text}".splitlines()
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[1]: dict(zip(header[2:], row[2:], strict=True)) for row in rows}


CELLS = [(name, column) for name, cells in table().items() for column in cells]


def evicting(name: str, **bound: Any) -> CachePolicy:
    """One that the model takes."""
    asks = table()[name]["FastKV"] == "yes"
    amount: dict[str, Any] = {"retention_tokens": 12, **bound} if bound else {"retention_rate": 0.4}
    return SnapKV(window_size=4, **amount) if asks else StreamingLLM(**amount)


def generate(name: str, rows: list[list[int]], cache: PolicyCache, **how: Any) -> Tensor:
    return answer(name, *left_padded(rows), cache, **how)


def answer(name: str, ids: Tensor, mask: Tensor, cache: PolicyCache, **how: Any) -> Tensor:
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found: Any = built(name).generate(ids, attention_mask=mask, cache=cache, **{**given, **how})
    assert isinstance(found, Tensor)
    return found


def drafts(name: str) -> None:
    want = generate(name, [LONG], PolicyCache(evicting(name)))
    drafted = generate(name, [LONG], PolicyCache(evicting(name)), prompt_lookup_num_tokens=3)
    assert torch.equal(drafted, want)


def padding_between_turns(name: str) -> None:
    cache = PolicyCache(evicting(name))
    said = generate(name, [LONG, SHORT], cache)
    added = torch.tensor([random_tokens(5, 13), [0] * 4 + random_tokens(6, 9)])
    seen = torch.ones(2, said.shape[1], dtype=torch.int64)
    seen[1, : len(LONG) - len(SHORT)] = 0
    mask = torch.cat([seen, (added > 0).long()], dim=1)
    found = answer(name, torch.cat([said, added], dim=1), mask, cache)
    alone = PolicyCache(evicting(name))
    own = generate(name, [SHORT], alone)
    turn = torch.cat([own, added[1:, 4:]], dim=1)
    want = answer(name, turn, torch.ones_like(turn), alone)
    assert torch.equal(found[1, -6:], want[0, -6:])


def compiled_decoding(name: str) -> None:
    cache = PolicyCache(evicting(name), max_new_tokens=6)
    fixed = generate(name, [LONG], cache)
    assert torch.equal(fixed, generate(name, [LONG], PolicyCache(evicting(name))))
    if not cache.is_compileable:
        raise ValueError("not compiled")


def under(policy: CachePolicy) -> Callable[[str], None]:
    """A padded row says what it says alone."""

    def read(name: str) -> None:
        both = generate(name, [LONG, SHORT], PolicyCache(policy))
        alone = generate(name, [SHORT], PolicyCache(policy))
        assert torch.equal(both[1, -6:], alone[0, -6:])

    return read


def bounded_answers(name: str) -> None:
    cache = PolicyCache(evicting(name, decoding=12))
    generate(name, [LONG], cache, max_new_tokens=150)
    held = [layer.kept_len for layer in cache.layers if layer.attends]
    assert held
    assert max(held) <= 12 + 128 < len(LONG) + 150


TRIALS: dict[str, Callable[[str], None]] = {
    "drafts": drafts,
    "padding between turns": padding_between_turns,
    "compiled decoding": compiled_decoding,
    "FastKV": under(FastKV(tsp_rate=0.5, retention_rate=0.3, window_size=4)),
    "GemFilter": under(GemFilter(retention_rate=0.3)),
    "PyramidInfer": under(PyramidInfer(min_context=4)),
    "bounded answers": bounded_answers,
}


@pytest.mark.parametrize(("name", "column"), CELLS, ids=lambda each: each.replace(" ", "_"))
def test_a_cell_says_what_happens(name: str, column: str) -> None:
    said = table()[name][column]
    if said == "yes":
        TRIALS[column](name)
        return
    assert said == "no"
    with pytest.raises(ValueError, match=r"must|not compiled|cannot be"):
        TRIALS[column](name)
