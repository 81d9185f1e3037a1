"""Measure the cells of the GPU benchmark within a time limit, even if some cells fail."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, Generic, TypeVar

import attrs
import torch
from transformers import PreTrainedModel

from benchmarks.clocks import Deadline, Interval, OutOfTimeError, TimedPolicy
from benchmarks.common import allowed, random_prompt
from benchmarks.gpu_cells import (
    FAILED,
    FULL,
    MEASURED,
    OUT_OF_MEMORY,
    OUT_OF_TIME,
    SKIPPED,
    Cell,
    Plan,
    Settings,
)
from benchmarks.turns import MaskWatch, Turn, take_turn

C = TypeVar("C")

WARM_UP_LEN = 512
WARM_UP_TOKENS = 4


class Runner(Generic[C]):
    """A base class of what measures the cells of one part of the benchmark.

    Args:
        bench: The runner of ``cells``, which come first; it has the model, settings and deadline.

    Attributes:
        kind: The class of the cells.
        places: Their first fields, by which they are told apart.
        cells: The cells so far.
        predicted_seconds: Returns how long the cell at a place may take at most.
    """

    kind: type[C]
    places: tuple[str, ...] = ("policy", "context")
    predicted_seconds: Callable[..., float]
    _measure: Callable[..., C]

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cells: list[C] = []

    def run(self, *place: Any) -> C:
        """Measure the cell at a place, and return it with its ratios to full context."""
        cell = self.bench.attempt(
            partial(self.kind, *place),
            self.predicted_seconds(*place),
            self.bench.settings.limit_of(place[1]),
            partial(self._measure, *place),
        )
        self.cells.append(cell)
        self.cells[-1] = self.rated(cell)
        return self.cells[-1]

    def found(self, *place: Any) -> C | None:
        """Return the cell at a place; None if there is none yet."""
        return next((each for each in self.cells if self._place(each) == place), None)

    def rated(self, cell: C) -> C:
        """Return a cell with its ratios to full context, as far as that was measured."""
        full: Any = self.found(FULL, *self._place(cell)[1:])
        rated: C = cell if full is None else cell.against(full)  # type: ignore[attr-defined]
        return rated

    def _place(self, cell: C) -> tuple[Any, ...]:
        return tuple(getattr(cell, name) for name in self.places)

    def early(self, decoded: Sequence[object]) -> str:
        """Return a note on tokens for which no time was left; empty if there are none."""
        missing = self.bench.settings.new_tokens - 1 - len(decoded)
        return f"time ended {missing} tokens early" if missing else ""


class Bench(Runner[Cell]):
    """A runner that measures cells one after the other, even if some of them fail.

    Args:
        model: The model.
        plans: The plans by name.
        settings: How cells are measured.
        deadline: When to end.
        clock: Returns the time in seconds.
    """

    kind = Cell

    def __init__(
        self,
        model: PreTrainedModel,
        plans: dict[str, Plan],
        settings: Settings,
        deadline: Deadline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(self)
        self.model = model
        self.plans = plans
        self.settings = settings
        self.deadline = deadline
        # Of the cell that is being measured.
        self.cell_deadline = deadline
        self.clock = clock
        self._warm: set[str] = set()

    def predicted_seconds(self, name: str, context: int) -> float:
        """Predict the longest time of a cell in seconds, from a shorter context; 0 without one.

        This is the time of two prefills, or of one if a rehearsal takes too long, and the time of
        the tokens. A prefill is assumed to grow as the square of the context, the most it can.
        """
        prefill, token = self._predicted_ms(name, context)
        prefills = 1 if self._too_long(prefill) else 2
        return (prefills * prefill + self.settings.new_tokens * token) / 1e3

    def _too_long(self, prefill_ms: float) -> bool:
        """Return whether a prompt is read once only, since it takes longer than a cell should."""
        return prefill_ms > 1e3 * self.settings.cell_seconds

    def _predicted_ms(self, name: str, context: int) -> tuple[float, float]:
        """Return the longest time of a prefill, and of a token, from a shorter context."""
        shorter = [
            each
            for each in self.cells
            if each.policy == name and each.context < context and each.status == MEASURED
        ]
        if not shorter:
            return 0.0, 0.0
        last = max(shorter, key=lambda each: each.context)
        prefill = median(last.prefill_ms) * (context / last.context) ** 2
        return prefill, median(last.decode_ms) if last.decode_ms else 0.0

    def attempt(
        self, empty: Callable[[str, str], C], needed: float, limit: float, measure: Callable[[], C]
    ) -> C:
        """Measure a cell; return a cell that says why if it fails or is skipped.

        Args:
            empty: Makes a cell without measurements from a status and a note.
            needed: Seconds that the cell may take; it is skipped if fewer are left.
            limit: Seconds after which the cell ends.
            measure: Measures the cell.
        """
        left = self.deadline.left()
        if left <= 0:
            return empty(SKIPPED, "no time was left")
        if left <= needed:
            return empty(SKIPPED, f"may need {needed:.0f} s, {left:.0f} s were left")
        started = self.clock()
        self.cell_deadline = self.deadline.within(limit)
        try:
            return measure()
        except OutOfTimeError as error:
            what = str(error) or "no prefill done"
            status, note = OUT_OF_TIME, f"{what} after {self.clock() - started:.0f} s"
        except torch.OutOfMemoryError as error:
            status, note = OUT_OF_MEMORY, _first_line(error)
        except Exception as error:  # one cell's failure shall not cost the others
            where = traceback.extract_tb(error.__traceback__)[-1]
            status = FAILED
            note = f"{type(error).__name__}: {_first_line(error)} ({where.name}:{where.lineno})"
        # Not earlier: while an exception is handled, its frames keep their tensors alive.
        gc.collect()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        return empty(status, note)

    def _measure(self, name: str, context: int) -> Cell:
        plan, settings = self.plans[name], self.settings
        if name not in self._warm:
            self._turn(plan, min(WARM_UP_LEN, context), WARM_UP_TOKENS)
            self._warm.add(name)
        masks = MaskWatch()
        # Of as many tokens as count: every length has been seen when it is timed.
        once = self._too_long(self._predicted_ms(name, context)[0])
        rehearsal = self._turn(plan, context, settings.new_tokens, masks)
        turns: list[Turn] = []
        try:
            for _ in range(0 if once else settings.repeats_of(rehearsal.prefill.wall_ms)):
                # The first turn decodes: if time runs out, that matters more than repeats.
                turns.append(self._turn(plan, context, 1 if turns else settings.new_tokens))
        except OutOfTimeError:
            pass  # what has been measured counts
        scored = plan.policy is not None and not once
        counted = turns or [rehearsal]
        scoring = self._scoring(plan, context, counted[0]) if scored else None
        cell = self._cell(name, context, counted)
        masked = masks.prefill + masks.decode
        notes = [
            "read once, without a rehearsal" if once else "the rehearsal only" if not turns else "",
            cell.note,
            f"attention masks in {masked} layers" if masked else "",
        ]
        return attrs.evolve(
            cell,
            note="; ".join(filter(None, notes)),
            rehearsal_ms=None if once else rehearsal.prefill.wall_ms,
            masked_layers_prefill=masks.prefill,
            masked_layers_decode=masks.decode,
            **({} if scoring is None else scoring),
        )

    def _turn(
        self,
        plan: Plan,
        context: int,
        new_tokens: int,
        masks: MaskWatch | None = None,
    ) -> Turn:
        prompt = random_prompt(self.model.config.vocab_size, context).to(self.model.device)
        return take_turn(
            self.model,
            prompt,
            plan.policy,
            new_tokens,
            chunk=plan.chunk,
            deadline=self.cell_deadline,
            masks=masks,
        )

    def _scoring(self, plan: Plan, context: int, turn: Turn) -> dict[str, Any] | None:
        """Return the times of one more prefill, with the policy's decisions timed."""
        if self.cell_deadline.left() < 1.2 * turn.prefill.wall_ms / 1e3:
            return None
        assert plan.policy is not None
        timed = TimedPolicy(plan.policy, self.model.device)
        try:
            prefill = self._turn(attrs.evolve(plan, policy=timed), context, 1).prefill.wall_ms
        except OutOfTimeError:
            return None
        inside = timed.total_ms()
        return {
            "scoring_ms": inside,
            "scoring_prefill_ms": prefill,
            "scoring_share": inside / prefill,
        }

    def _cell(self, name: str, context: int, turns: list[Turn]) -> Cell:
        prefill, decode = [turn.prefill for turn in turns], turns[0].decode
        memory, policy = turns[0].memory, self.plans[name].policy
        prefill_ms = tuple(each.wall_ms for each in prefill)
        decode_ms = tuple(each.wall_ms for each in decode)
        limits = allowed(policy, context, self.model)
        return Cell(
            policy=name,
            context=context,
            status=MEASURED,
            note=self.early(decode),
            prefill_ms=prefill_ms,
            prefill_device_ms=_device_ms(prefill),
            decode_ms=decode_ms,
            decode_device_ms=_device_ms(decode),
            held_bytes=turns[0].held_bytes,
            before_bytes=None if memory is None else memory.before,
            prefill_peak_bytes=None if memory is None else memory.prefill_peak,
            decode_peak_bytes=None if memory is None else memory.decode_peak,
            generate_ms=median(prefill_ms) + math.fsum(decode_ms) if decode_ms else None,
            prefill_allowed=limits["prefill_allowed"],
            decode_allowed=limits["decode_allowed"],
        )


def _device_ms(intervals: Iterable[Interval]) -> tuple[float, ...]:
    return tuple(each.device_ms for each in intervals if each.device_ms is not None)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
