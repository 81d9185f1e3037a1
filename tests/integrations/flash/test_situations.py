"""Situations of a cache under flash attention, against the slow reference.

The rows of the table of situations that together have every value of every axis, for models
without windows: prompts in chunks, drafts, padding between turns, bounded answers, rows that pause,
copies, failures, beams.
"""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from tests.covering import covering
from tests.integrations.flash.stand_in import CALLS, under_flash
from tests.integrations.situations import run
from tests.integrations.situations.policies import POLICIES
from tests.integrations.situations.table import Situation, situations
from tests.integrations.support.versions import OLD

pytestmark = pytest.mark.skipif(OLD, reason="this Transformers cuts the masks of chunks wrongly")


def chosen() -> list[Situation]:
    """Few rows of the table, with every value of its axes."""
    unequal = {name for name, (policy, _) in POLICIES.items() if policy.selector.unequal_heads}
    rows = [
        row
        for row in situations()
        if row.model in ("llama", "mistral_eager") and row.policy not in unequal
    ]
    cases = cast(list[Mapping[str, Hashable]], [attrs.asdict(row) for row in rows])
    return [rows[index] for index in covering([cases])[0]]


@pytest.mark.parametrize("situation", chosen(), ids=str)
def test_situation(situation: Situation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = under_flash(run.model_of(situation.model))
    monkeypatch.setattr(run, "model_of", lambda name: model)
    run.play(situation, tmp_path)
    assert CALLS
