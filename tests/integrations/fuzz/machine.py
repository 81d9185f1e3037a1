"""A state machine that draws conversations and holds a cache against the reference throughout."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpolicy.integrations.transformers import OffloadedStorage, PlainStorage, PolicyCache
from tests.integrations.fuzz.drawing import drawn_rows, situations
from tests.integrations.fuzz.side_by_side import Interrupted, SideBySide
from tests.integrations.support.comparison import NearTieError
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
PLACES = st.sampled_from(["", ".self_attn", ".self_attn.o_proj", ".mlp"])


def has_read(machine: "Conversation") -> bool:
    return machine.side.batch > 0


def may_append(machine: "Conversation") -> bool:
    return has_read(machine) and not machine.side.starts


def has_appended(machine: "Conversation") -> bool:
    return machine.side.appended > 0


class Conversation(RuleBasedStateMachine):
    """One model, one policy, one cache; after every action all of it is compared.

    Args:
        kind: of the policy, one of `drawing.KINDS`.
    """

    side: SideBySide

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.failures = 0

    @initialize(
        data=st.data(),
        storage=st.sampled_from([PlainStorage(), OffloadedStorage()]),
        room=st.sampled_from([None, LONGEST_ANSWER]),
    )
    def begin(self, data: st.DataObject, storage: Any, room: int | None) -> None:
        situation = data.draw(situations(self.kind))
        cache = PolicyCache(situation.policy, storage, max_new_tokens=room)
        self.side = SideBySide(
            situation.model,
            situation.weights,
            situation.windows,
            situation.policy,
            situation.method,
            cache,
        )

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
        try:
            self.side.prompt(new, ended, call, chunks, fork)
        except NearTieError:
            self.side.reset()

    @rule(data=st.data(), count=st.integers(1, LONGEST_ANSWER), alone=st.booleans())
    def generate(self, data: st.DataObject, count: int, alone: bool) -> None:
        new, ended = self.prompt_of(data)
        ends = ENDS if data.draw(st.booleans()) else ()
        how: dict[str, Any] = {}
        if not self.side.drops and data.draw(st.booleans()):
            how["chunk"] = data.draw(st.integers(1, 30))
        elif len(new) == 1 and not alone and data.draw(st.booleans()):
            how["drafts"] = data.draw(st.integers(1, 4))
        try:
            self.side.generate(new, ended, count=count, ends=ends, alone=alone, **how)
        except NearTieError:
            self.side.reset()

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
            self.side.append([[token] for token in tokens], call)

    @precondition(may_append)
    @rule(data=st.data(), call=CALLS)
    def append(self, data: st.DataObject, call: Call) -> None:
        self.side.append(data.draw(drawn_rows(self.side.batch, 5)).columns, call)

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

    def teardown(self) -> None:
        if hasattr(self, "side"):
            self.side.close()

    @invariant()
    def is_the_reference(self) -> None:
        self.side.check()
