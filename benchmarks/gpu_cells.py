"""Measure the cells of the GPU benchmark: one method at one length, in a loop or in `generate`."""

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterable
from statistics import fmean, median
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from benchmarks.common import allowed, random_prompt
from benchmarks.timing import (
    COMPILED,
    Answer,
    Deadline,
    Interval,
    OutOfTimeError,
    TimedPolicy,
    Turn,
    compilations,
    fresh_compiler,
    generate_timed,
    take_turn,
)
from kvpolicy import CachePolicy

FULL = "full_context"
MEASURED, FAILED = "measured", "failed"
OUT_OF_MEMORY, OUT_OF_TIME = "out of memory", "out of time"
WARM_UP_LEN, WARM_UP_TOKENS = 512, 4
# The prefill's token, one whose forward is compiled, and enough more to record CUDA graphs.
COMPILING_TOKENS = 5

Row = dict[str, Any]


@attrs.frozen
class Job:
    """A cell that is to be measured, of the part ``cells``, ``answers`` or ``compiled``."""

    part: str
    policy: str
    context: int
    buffers: str = ""
    batch: int = 1

    def __str__(self) -> str:
        return "/".join(str(each) for each in attrs.astuple(self) if each != "")

    @property
    def place(self) -> Row:
        return attrs.asdict(self, filter=lambda field, _: field.name != "part")

    def is_of(self, row: Row) -> bool:
        return all(row.get(key) == value for key, value in self.place.items())


@attrs.frozen
class Cell:
    """The measurements of one method at one length; None or empty if not measured.

    - ``buffers`` of `generate`: ``growing``, ``fixed`` or ``compiled``; empty in a loop.
    - ``status``: ``measured``, ``out of memory``, ``out of time`` or ``failed``; ``note``: why it
      was not measured, or what is missing from a measured one.
    - ``rehearsal_ms``: prefill of the run before the counted ones; ``decode_ms``: every token after
      the first. The first of a compiled answer may be slow: CUDA graphs are recorded again if a
      cache's memory lies elsewhere. ``device``: the same between CUDA events.
    - ``scoring_ms``: time inside the policy's decisions, in a separate prefill.
    - ``before_bytes``: on the GPU before the prompt, the weights; the peaks are the most allocated
      during prefill, or in the whole `generate`, and while decoding.
    - ``masked_layers``: layers whose attention got a mask, in prefill and summed over all tokens.
    - ``compile_ms``: the few tokens decoded in the warm-up, compiling included; ``compiled_graphs``
      is one if there was no graph break.
    - ``allowed``: full context over the policy by the count of operations, or by the bytes that a
      decoded token reads.
    """

    policy: str
    context: int
    buffers: str
    batch: int
    status: str
    note: str = ""
    rehearsal_ms: float | None = None
    prefill_ms: tuple[float, ...] = ()
    prefill_device_ms: tuple[float, ...] = ()
    decode_ms: tuple[float, ...] = ()
    decode_device_ms: tuple[float, ...] = ()
    scoring_ms: float | None = None
    scoring_prefill_ms: float | None = None
    scoring_share: float | None = None
    held_bytes: int | None = None
    before_bytes: int | None = None
    prefill_peak_bytes: int | None = None
    decode_peak_bytes: int | None = None
    masked_layers_prefill: int | None = None
    masked_layers_decode: int | None = None
    compile_ms: float | None = None
    compiled_graphs: int | None = None
    prefill_allowed: float | None = None
    decode_allowed: float | None = None


def ratios(row: Row, part: str, record: Row) -> Row:
    """Return the ratios of a part's row to full context: above 1 the policy is faster.

    They are of medians; ``mean_speedup`` of the mean token (a bounded answer's includes what
    choosing takes), and ``generate_speedup`` of a median prefill and all tokens, where both decoded
    as many. The other side has the same buffers and rows; ``loop_speedup`` is that of the loop.
    """

    def full(rows: list[Row], **place: Any) -> Row:
        like = {"policy": FULL, "context": row["context"], **place}
        nothing: Row = {"prefill_ms": (), "decode_ms": ()}
        found = (each for each in rows if all(each[key] == like[key] for key in like))
        return next(found, nothing)

    def ratio(take: Callable[[Any], float], other: Row, phase: str) -> float | None:
        both = other[phase], row[phase]
        return take(both[0]) / take(both[1]) if all(both) else None

    alike = full([*record[part], row], buffers=row["buffers"], batch=row["batch"])
    tokens = [len(each["decode_ms"]) for each in (alike, row)]
    whole = [
        median(each["prefill_ms"]) + math.fsum(each["decode_ms"]) if all(tokens) else 0.0
        for each in (alike, row)
    ]
    return {
        "prefill_speedup": ratio(median, alike, "prefill_ms"),
        "decode_speedup": ratio(median, alike, "decode_ms"),
        "mean_speedup": ratio(fmean, alike, "decode_ms"),
        "generate_speedup": whole[0] / whole[1] if whole[1] and tokens[0] == tokens[1] else None,
        "loop_speedup": ratio(median, full(record["cells"]), "decode_ms"),
    }


@attrs.frozen
class Settings:
    """The settings of a measurement.

    Of ``new_tokens``, the prefill gives the first. A cell has at most so many ``repeats``, which
    take ``cell_seconds`` together at most; if one takes longer, the rehearsal counts. It ends after
    ``limit_seconds``, in proportion later beyond 131,072 tokens.
    """

    new_tokens: int = 33
    repeats: int = 3
    cell_seconds: float = 20.0
    limit_seconds: float = 120.0

    def limit_of(self, context: int) -> float:
        return self.limit_seconds * max(1.0, context / 131072)


@attrs.frozen
class Plan:
    """A policy, None for Transformers' own caches, and the tokens that are read at once."""

    policy: CachePolicy | None
    chunk: int | None = None


class Bench:
    """Measures cells one after the other, even if some of them fail."""

    def __init__(
        self,
        model: PreTrainedModel,
        plans: dict[str, Plan],
        settings: Settings,
        deadline: Deadline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.plans, self.settings = model, plans, settings
        self.deadline, self.clock = deadline, clock
        # Of the cell that is being measured.
        self._until = deadline
        self._warm: set[str] = set()

    def run(self, job: Job) -> Cell:
        started = self.clock()
        self._until = self.deadline.within(self.settings.limit_of(job.context))
        measure = {"cells": self._loop, "answers": self._answer, "compiled": self._compiled}
        try:
            found = measure[job.part](job)
            limits = allowed(self.plans[job.policy].policy, job.context, self.model)
            return Cell(**job.place, status=MEASURED, **limits, **found)
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
        return Cell(**job.place, status=status, note=note)

    def _early(self, decoded: Iterable[object]) -> str:
        missing = self.settings.new_tokens - 1 - len(list(decoded))
        return f"time ended {missing} tokens early" if missing else ""

    def _prompt(self, context: int, batch: int = 1) -> torch.Tensor:
        return random_prompt(self.model.config.vocab_size, context, batch).to(self.model.device)

    def _turn(self, plan: Plan, context: int, new_tokens: int, **how: Any) -> Turn:
        how |= {"chunk": plan.chunk, "deadline": self._until}
        return take_turn(self.model, self._prompt(context), plan.policy, new_tokens, **how)

    def _loop(self, job: Job) -> Row:
        """Measure a loop of forwards: a rehearsal, counted prefills, and one that is taken apart.

        The rehearsal has as many tokens as count: every length has been seen when it is timed.
        """
        plan, settings, context = self.plans[job.policy], self.settings, job.context
        if job.policy not in self._warm:
            self._turn(plan, min(WARM_UP_LEN, context), WARM_UP_TOKENS)
            self._warm.add(job.policy)
        rehearsal = self._turn(plan, context, settings.new_tokens, count_masks=True)
        taken = rehearsal.prefill.wall_ms / 1e3
        turns: list[Turn] = []
        fitting = int(settings.cell_seconds / taken) if taken else settings.repeats
        try:
            for _ in range(min(settings.repeats, fitting)):
                # The first turn decodes: if time runs out, that matters more than repeats.
                turns.append(self._turn(plan, context, 1 if turns else settings.new_tokens))
        except OutOfTimeError:
            pass  # what has been measured counts
        found = _row_of(turns or [rehearsal])
        masks = rehearsal.masks or (0, 0)
        notes = [
            "" if turns else "the rehearsal only",
            self._early(found["decode_ms"]),
            f"attention masks in {sum(masks)} layers" if any(masks) else "",
        ]
        return {
            **found,
            "note": "; ".join(filter(None, notes)),
            "rehearsal_ms": rehearsal.prefill.wall_ms if turns else None,
            "masked_layers_prefill": masks[0],
            "masked_layers_decode": masks[1],
            **(self._scoring(plan, context, taken) if turns and plan.policy else {}),
        }

    def _scoring(self, plan: Plan, context: int, seconds: float) -> Row:
        """Return the times of one more prefill, with the policy's decisions timed."""
        if self._until.left() < 1.2 * seconds:
            return {}
        assert plan.policy is not None
        timed = TimedPolicy(plan.policy, self.model.device)
        try:
            prefill = self._turn(attrs.evolve(plan, policy=timed), context, 1).prefill.wall_ms
        except OutOfTimeError:
            return {}
        inside = timed.total_ms()
        share = {"scoring_share": inside / prefill}
        return {"scoring_ms": inside, "scoring_prefill_ms": prefill, **share}

    def _generate(self, job: Job, count: int, buffers: str) -> Answer:
        how: Row = {"room": self.settings.new_tokens, "buffers": buffers, "deadline": self._until}
        prompt = self._prompt(job.context, job.batch)
        return generate_timed(self.model, prompt, self.plans[job.policy].policy, count, **how)

    def _answer(self, job: Job) -> Row:
        """Measure an answer of `generate`, after a rehearsal of every length."""
        answers = [self._generate(job, self.settings.new_tokens, job.buffers) for _ in range(2)]
        return {**_row_of_answer(answers[1]), "note": self._early(answers[1].decode_ms)}

    def _compiled(self, job: Job) -> Row:
        """Measure an answer of `generate` that is compiled in a warm-up."""
        warm_up_tokens = min(COMPILING_TOKENS, self.settings.new_tokens)
        with fresh_compiler():
            before, skipped = compilations()
            try:
                warm_up = self._generate(job, warm_up_tokens, COMPILED)
                warm, _ = compilations()
                answer = self._generate(job, self.settings.new_tokens, COMPILED)
            except OutOfTimeError:
                raise OutOfTimeError("no compiled token timed") from None
            after, skips = compilations()
        if not (warm_up.decode_ms and answer.decode_ms):
            raise OutOfTimeError("no compiled token timed")
        notes = [
            self._early(answer.decode_ms),
            "" if warm > before else "nothing was compiled",
            "compiled again while measured" if after > warm else "",
            "without CUDA graphs" if skips > skipped else "",
        ]
        return {
            **_row_of_answer(answer),
            "note": "; ".join(filter(None, notes)),
            "compile_ms": sum(warm_up.decode_ms),
            "compiled_graphs": warm - before,
        }


def _row_of(turns: list[Turn]) -> Row:
    prefill, decode = [turn.prefill for turn in turns], turns[0].decode
    before, most, decode_most = turns[0].memory or (None, None, None)
    return {
        "prefill_ms": tuple(each.wall_ms for each in prefill),
        "prefill_device_ms": _device_ms(prefill),
        "decode_ms": tuple(each.wall_ms for each in decode),
        "decode_device_ms": _device_ms(decode),
        "held_bytes": turns[0].held_bytes,
        "before_bytes": before,
        "prefill_peak_bytes": most,
        "decode_peak_bytes": decode_most,
    }


def _row_of_answer(answer: Answer) -> Row:
    return {
        "prefill_ms": (answer.prefill_ms,),
        "decode_ms": answer.decode_ms,
        "prefill_peak_bytes": answer.peak_bytes,
    }


def _device_ms(intervals: Iterable[Interval]) -> tuple[float, ...]:
    return tuple(each.device_ms for each in intervals if each.device_ms is not None)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
