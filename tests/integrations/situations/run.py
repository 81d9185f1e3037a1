"""Plays a situation: a cache beside an oracle that reads every row by itself.

The oracle is the slow reference where it knows the layers, and otherwise the row alone in a plain
loop, which is held against the model's own dense attention in its turn.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpolicy.integrations.transformers import (
    OffloadedStorage,
    PlainStorage,
    PolicyCache,
    QuantizedStorage,
)
from tests.integrations.fuzz.drawing import Drawn
from tests.integrations.fuzz.side_by_side import SideBySide
from tests.integrations.situations.models import KINDS, PLAIN, model_of, weights_of
from tests.integrations.situations.policies import (
    BOUNDS,
    EVERY,
    GAPLESS,
    TOGETHER,
    method_of,
    policy_of,
)
from tests.integrations.situations.table import Situation
from tests.integrations.support.alone import BesideAlone
from tests.integrations.support.comparison import Columns, GaplessRow, NearTieError, TogetherRow
from tests.integrations.support.reading import Interrupted
from tests.integrations.support.reading_both import Call

STORAGES = {
    "plain": PlainStorage(),
    "offloaded": OffloadedStorage(),
    "quantised": QuantizedStorage(q_group_size=4, residual_length=3),
}
# Tokens of the rows in the first and in the second prompt, and before a gap.
LENGTHS: dict[str, tuple[tuple[tuple[int, int], int], ...]] = {
    "one": (((34, 17), 0),),
    "padded": (((34, 13), 0), ((16, 19), 0)),  # the second as long as the sliding windows
    "alike": (((29, 17), 0), ((29, 17), 0)),
    "gaps": (((31, 9), 0), ((22, 17), 5)),
}
SHORT_ANSWER, LONG_ANSWER = 2, 5  # the second of a bounded answer, in which layers choose twice
CHUNK = 11


def play(situation: Situation, folder: Path) -> None:
    """Plays a situation, with another text where a choice is a near tie."""
    for seed in range(4):
        with contextlib.suppress(NearTieError):
            Play(situation, folder, seed)()
            return
    raise NearTieError


class Play:
    """A situation under way."""

    def __init__(self, situation: Situation, folder: Path, seed: int = 0) -> None:
        self.situation, self.folder = situation, folder
        self.answer = SHORT_ANSWER if situation.bound == "none" else LONG_ANSWER
        self.rounds = situation.storage == "quantised"
        self.side = self._side()
        self.said = 10 * seed  # columns that were drawn

    def __call__(self) -> None:
        situation = self.situation
        self._turn(0, situation.first)
        self.side.check()
        self.happen()
        self._turn(1, situation.second)
        self.side.check()
        self.side.close()

    def _side(self) -> SideBySide:
        told = self.situation
        model, policy = model_of(told.model), policy_of(told.policy, told.bound)
        room = None if told.buffers == "grown" else LONG_ANSWER + 2
        cache = PolicyCache(policy, STORAGES[told.storage], max_new_tokens=room)
        if told.model not in PLAIN or self.rounds:
            how: Any = model, model, (), policy, None, cache
            return BesideAlone(*how, rounds=self.rounds)
        _, windows = PLAIN[told.model]
        method = method_of(told.policy, told.bound)
        bound = BOUNDS[told.bound][1] if told.bound != "none" else None
        weights = weights_of(told.model)
        side = SideBySide(model, weights, windows, policy, method, cache, bound=bound)
        if told.policy in GAPLESS:
            side.row_kind = GaplessRow
        if told.policy in TOGETHER:
            side.row_kind = TogetherRow
        return side

    def columns(self, turn: int) -> list[list[int | None]]:
        """The columns of a turn's prompt; a repeated text, so that looking it up finds drafts."""
        self.said += 1
        batch = self.side.batch
        rows = LENGTHS[self.situation.rows]
        rows = tuple(rows[index % len(rows)] for index in range(batch or len(rows)))
        alike = turn and self._has_states()  # a state skips no padding
        counts = [rows[0][0][turn] if alike else lengths[turn] for lengths, _ in rows]
        drawn = tuple(
            (count, 10 * self.said + row, count // 2 + 3, gap)
            for row, (count, (_, gap)) in enumerate(zip(counts, rows, strict=True))
        )
        return Drawn(drawn).columns

    def _has_states(self) -> bool:
        kind = KINDS.get(self.situation.model)
        return kind is not None and kind.states

    def _turn(self, turn: int, how: str) -> None:
        new = self.columns(turn)
        ended = [0] * len(new)
        side, call = self.side, Call(embeds=how == "embeddings", keep=turn)
        if turn and self.situation.event == "ended":
            ended = [min(side.appended, index) for index in range(side.batch)]
        if how == "appended":
            side.append([row[-4:] for row in new], Call())
            self._decode(2)
        elif how.startswith("generate") or how == "drafts":
            options: dict[str, Any] = {
                "generate in chunks": {"chunk": CHUNK},
                "drafts": {"drafts": 3},
            }.get(how, {})
            side.generate(new, ended, count=self.answer + 1, alone=False, **options)
        else:
            chunks = [4, 5, 5 + CHUNK] if how == "chunks" else []
            ends = [end for end in chunks if end < len(new[0])]
            side.prompt(new, ended, call, ends, fork=turn == 1 and not self.rounds)
            self._decode(self.answer)

    def _decode(self, count: int) -> None:
        for step in range(count):
            self.side.append([[3 + 7 * step + row] for row in range(self.side.batch)], Call())

    # What happens behind the first answer.

    def happen(self) -> None:
        name = self.situation.event.replace(" ", "_")
        event: Callable[[], None] = getattr(self, name)
        event()
        self.side.check()
        if not self.side.starts:
            # A bounded answer ends between two choices.
            self._decode(1 if self.situation.bound == "none" else 1 + EVERY)
            self.side.check()

    def nothing(self) -> None:
        """Only the answer goes on."""

    def copy(self) -> None:
        self.side.fork("copy", take_copy=True)

    def pickle(self) -> None:
        self.side.fork("pickle", take_copy=True)

    def _part(self) -> None:
        """The last row pauses once, so that rows choose at unlike times."""
        if self.side.batch > 1 and not self._has_states():
            rows: Columns = [[11 + row] for row in range(self.side.batch - 1)]
            self.side.append([*rows, [None]], Call())

    def save(self) -> None:
        self._part()
        self.side.save_and_load(self.folder / "cache")

    def reorder(self) -> None:
        self._part()
        self.side.take_rows([*range(self.side.batch)][::-1], reorder=True)

    def repeat(self) -> None:
        self.side.repeat(2)
        self.side.take_rows([self.side.batch - 1, 0], reorder=False)

    def crop(self) -> None:
        self.side.crop(min(self.side.appended, 2))

    def pause(self) -> None:
        """The last row is given nothing, until the others have chosen twice."""
        for step in range(self.answer):
            column: Columns = [[11 + step + row] for row in range(self.side.batch - 1)]
            self.side.append([*column, [None]], Call())

    def ended(self) -> None:
        """The second prompt's mask calls the last tokens of rows padding."""
        self._decode(1)

    def failed_prompt(self) -> None:
        layer = self.side.num_layers - 1
        self.side.fail(self.columns(1), "", layer, 0, Interrupted, "prompt")

    def failed_step(self) -> None:
        new: Columns = [[7]] * self.side.batch
        self.side.fail(new, "", 1, 0, RuntimeError, "append")

    def interrupted_answer(self) -> None:
        new = self.columns(1)
        ended = [0] * len(new)
        self.side.interrupt(new, ended, "", 1, self.answer - 1, self.answer, Interrupted)

    def beams(self) -> None:
        self.side.search(self.columns(1), count=3, beams=2)
