"""A state machine that draws conversations and holds a cache against the reference throughout."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpolicy.integrations.transformers import OffloadedStorage, PlainStorage, PolicyCache
from tests.integrations.fuzz.drawing import drawn_rows, situations
from tests.integrations.fuzz.side_by_side import SideBySide
from tests.integrations.support.comparison import NearTieError
from tests.integrations.support.reading import Interrupted
from tests.integrations.support.reading_both import Call

CALLS = st.builds(
    Call,
    embeds=st.booleans(),
    positions=st.booleans(),
    mask=st.sampled_from([True, True, False]),
    keep=st.sampled_from([0, 1, 2]),
    states=st.sampled_from([False, False, True]),
)
# So many that a row ends now and then.
ENDS = tuple(range(1, 97, 5))
LONGEST_ANSWER = 6
LONGEST_BOUNDED = 14  # in which layers choose several times
PLACES = st.sampled_from(["", ".self_attn", ".self_attn.o_proj", ".mlp"])


def has_read(machine: "Conversation") -> bool:
    return machine.side.batch > 0


def may_append(machine: "Conversation") -> bool:
    return has_read(machine) and not machine.side.starts


def has_appended(machine: "Conversation") -> bool:
    return machine.side.appended > 0


class Conversation(RuleBasedStateMachine):
    """One model, one policy, one cache; after every action all of it is compared."""

    side: SideBySide

    def __init__(self, kind: str, *, bounded: bool = False) -> None:
        super().__init__()
        self.kind, self.bounded = kind, bounded
        self.longest_answer = LONGEST_BOUNDED if bounded else LONGEST_ANSWER
        self.failures = 0

    @initialize(
        data=st.data(),
        storage=st.sampled_from([PlainStorage(), OffloadedStorage()]),
        fixed=st.booleans(),
    )
    def begin(self, data: st.DataObject, storage: Any, fixed: bool) -> None:
        situation = data.draw(situations(self.kind, bounds=self.bounded))
        room = self.longest_answer if fixed else None
        cache = PolicyCache(situation.policy, storage, max_new_tokens=room)
        self.side = SideBySide(
            situation.model,
            situation.weights,
            situation.windows,
            situation.policy,
            situation.method,
            cache,
            bound=situation.bound,
        )

    @contextmanager
    def unless_near(self) -> Iterator[None]:
        """Begins anew where a choice may rightly fall otherwise."""
        try:
            yield
        except NearTieError:
            self.side.reset()

    def prompt_of(self, data: st.DataObject) -> tuple[list[list[int | None]], list[int]]:
        """A prompt, and by row how many of the last columns the next mask calls padding."""
        side = self.side
        batch = side.batch or data.draw(st.integers(1, 3))
        new = data.draw(drawn_rows(batch, 20 if side.batch else 40)).columns
        ended = [0] * batch
        if side.appended and data.draw(st.sampled_from([True, True, False])):
            ended = [data.draw(st.integers(0, side.appended)) for _ in range(batch)]
        return new, ended

    @rule(data=st.data(), call=CALLS)
    def prompt(self, data: st.DataObject, call: Call) -> None:
        new, ended = self.prompt_of(data)
        chunks: list[int] = []
        if not self.side.drops and data.draw(st.booleans()):
            ends = st.integers(1, max(len(new[0]) - 1, 1))
            chunks = sorted(data.draw(st.sets(ends, min_size=1, max_size=3)) - {len(new[0])})
        fork = bool(chunks) and data.draw(st.booleans())
        with self.unless_near():
            self.side.prompt(new, ended, call, chunks, fork)

    @rule(data=st.data(), alone=st.booleans())
    def generate(self, data: st.DataObject, alone: bool) -> None:
        count = data.draw(st.integers(1, self.longest_answer))
        new, ended = self.prompt_of(data)
        ends = ENDS if data.draw(st.booleans()) else ()
        how: dict[str, Any] = {}
        if not self.side.drops and data.draw(st.booleans()):
            how["chunk"] = data.draw(st.integers(1, 30))
        elif len(new) == 1 and not (alone or self.bounded) and data.draw(st.booleans()):
            how["drafts"] = data.draw(st.integers(1, 4))
        with self.unless_near():
            self.side.generate(new, ended, count=count, ends=ends, alone=alone, **how)

    @rule(data=st.data(), beams=st.integers(2, 3))
    def search(self, data: st.DataObject, beams: int) -> None:
        new, _ = self.prompt_of(data)
        count = data.draw(st.integers(1, self.longest_answer))
        with self.unless_near():
            self.side.search(new, count=count, beams=beams)

    @precondition(may_append)
    @rule(data=st.data(), steps=st.integers(1, 3), call=CALLS)
    def decode(self, data: st.DataObject, steps: int, call: Call) -> None:
        for _ in range(steps):
            tokens: list[int | None] = [
                data.draw(st.integers(1, 96)) for _ in range(self.side.batch)
            ]
            absent = data.draw(st.sampled_from([None, None, None, 0]))
            if absent is not None and len(tokens) > 1:
                tokens[absent] = None
            with self.unless_near():
                self.side.append([[token] for token in tokens], call)
            if not self.side.batch:
                return

    @precondition(may_append)
    @rule(data=st.data(), call=CALLS)
    def append(self, data: st.DataObject, call: Call) -> None:
        new = data.draw(drawn_rows(self.side.batch, 5)).columns
        with self.unless_near():
            self.side.append(new, call)

    @precondition(has_appended)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        self.side.crop(data.draw(st.integers(0, self.side.appended)))

    @precondition(has_read)
    @rule(data=st.data(), reorder=st.booleans())
    def take_rows(self, data: st.DataObject, reorder: bool) -> None:
        size = self.side.batch
        rows = st.lists(st.integers(0, size - 1), min_size=1, max_size=4)
        self.side.take_rows(data.draw(rows), reorder=reorder)

    @precondition(lambda machine: 0 < machine.side.batch <= 2)
    @rule()
    def repeat(self) -> None:
        self.side.repeat(2)

    @precondition(has_read)
    @rule(how=st.sampled_from(["copy", "deepcopy", "pickle"]), take_copy=st.booleans())
    def fork(self, how: str, take_copy: bool) -> None:
        with self.unless_near():
            self.side.fork(how, take_copy=take_copy)

    @precondition(has_read)
    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.side.save_and_load(Path(folder) / "cache")

    @precondition(lambda machine: machine.side.batch and len(machine.side.columns[0]) > 30)
    @rule()
    def reset(self) -> None:
        self.side.reset()

    @rule()
    def attach_or_detach(self) -> None:
        self.side.attach()

    @precondition(may_append)
    @rule()
    def start_turn(self) -> None:
        self.side.start_turn()

    @precondition(has_read)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        self.side.refuses(data.draw(drawn_rows(self.side.batch, 5, shortest=2)).columns)

    @precondition(lambda machine: machine.failures < 4)
    @rule(
        data=st.data(),
        place=PLACES,
        error=st.sampled_from([RuntimeError, Interrupted]),
        how=st.sampled_from(["prompt", "append", "generate"]),
    )
    def fail(self, data: st.DataObject, place: str, error: Any, how: str) -> None:
        self.failures += 1
        side = self.side
        layer = data.draw(st.integers(0, side.num_layers - 1))
        new = data.draw(drawn_rows(side.batch or 2, 8)).columns
        acts = how != "append" or side.starts or not side.batch
        second = 0
        if acts and side.policy.propagation.restarts:
            (last,) = side.policy.propagation.acting_layers(side.num_layers)
            # The first pass ends inside the attention of the filter layer.
            if layer < last or (layer == last and place in ("", ".self_attn")):
                second = data.draw(st.integers(0, 1))
        side.fail(new, place, layer, second, error, how)

    @precondition(lambda machine: machine.failures < 4)
    @rule(data=st.data(), place=PLACES, error=st.sampled_from([RuntimeError, Interrupted]))
    def interrupt(self, data: st.DataObject, place: str, error: Any) -> None:
        self.failures += 1
        new, ended = self.prompt_of(data)
        count = data.draw(st.integers(2, self.longest_answer))
        step = data.draw(st.integers(1, count - 1))
        layer = data.draw(st.integers(0, self.side.num_layers - 1))
        with self.unless_near():
            self.side.interrupt(new, ended, place, layer, step, count, error)

    def teardown(self) -> None:
        if hasattr(self, "side"):
            self.side.close()

    @invariant()
    def is_the_reference(self) -> None:
        self.side.check()
