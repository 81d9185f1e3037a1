"""Measure the GPU benchmark's answers of `generate`, packed heads, and the tests of a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import attrs

from benchmarks.clocks import OutOfTimeError
from benchmarks.common import allowed, random_prompt
from benchmarks.compiled import generate_timed
from benchmarks.gpu_bench import Runner
from benchmarks.gpu_cells import ABSENT, MEASURED
from benchmarks.unequal_heads import row_of

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/integrations/gpu"
# What pytest is given: of tests/conftest.py nothing is needed, but it needs more packages.
RUN: tuple[str, ...] = (TESTS, "--noconftest")
# `benchmarks` makes kvpolicy importable where it is not installed.
PYTEST = "import benchmarks, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
# Of packed heads.
ROUNDS = 3


@attrs.frozen
class AnswerCell:
    """The measurements of one uncompiled answer of `generate`; None or empty if not measured.

    Full context is held in a `DynamicCache` if buffers grow, and otherwise in a `StaticCache`.

    Args:
        policy: Name of the policy.
        context: Tokens of a row's prompt.
        buffers: ``growing`` or ``fixed``.
        batch: Rows.
        status: As in `Cell`.
        note: Why it was not measured, or what is missing from a measured one.
        prefill_ms: Time to the first token.
        decode_ms: Time of every further token.
        peak_bytes: The most allocated on the GPU.
        decode_allowed: Full context over the policy by the bytes that a decoded token reads, of one
            row.
        prefill_speedup: Prefill of full context, with the same buffers and rows, over this one's.
        decode_speedup: The same of the median token.
        mean_speedup: The same of the mean token. A bounded answer's includes what choosing takes.
    """

    policy: str
    context: int
    buffers: str
    batch: int
    status: str
    note: str = ""
    prefill_ms: float | None = None
    decode_ms: tuple[float, ...] = ()
    peak_bytes: int | None = None
    decode_allowed: float | None = None
    prefill_speedup: float | None = None
    decode_speedup: float | None = None
    mean_speedup: float | None = None

    def against(self, full: AnswerCell) -> AnswerCell:
        """Return the cell with its ratios to full context."""
        if not (self.prefill_ms and full.prefill_ms and self.decode_ms and full.decode_ms):
            return self
        return attrs.evolve(
            self,
            prefill_speedup=full.prefill_ms / self.prefill_ms,
            decode_speedup=median(full.decode_ms) / median(self.decode_ms),
            mean_speedup=fmean(full.decode_ms) / fmean(self.decode_ms),
        )


@attrs.frozen
class ExtraCell:
    """The results of something else that is measured, by name.

    Args:
        policy: Name of the policy, or of what was run.
        context: Tokens of the prompt; 0 without one.
        status: As in `Cell`.
        note: Why it was not measured.
        found: The results.
    """

    policy: str
    context: int
    status: str
    note: str = ""
    found: dict[str, Any] = attrs.field(factory=dict)


class AnswerBench(Runner[AnswerCell]):
    """A runner that measures answers and extras, even if some fail."""

    kind = AnswerCell
    places = ("policy", "context", "buffers", "batch")

    def predicted_seconds(
        self, name: str, context: int, buffers: str = "", batch: int = 1
    ) -> float:
        """Predict the longest time of a rehearsal and an answer, from the cell of the loop."""
        done = self.bench.found(name, context)
        if done is None or not done.prefill_ms:
            return 0.0
        token = median(done.decode_ms) if done.decode_ms else 0.0
        tokens = self.bench.settings.new_tokens * token
        return batch * 2 * (median(done.prefill_ms) + tokens) / 1e3

    def _measure(self, name: str, context: int, buffers: str, batch: int) -> AnswerCell:
        bench, policy = self.bench, self.bench.plans[name].policy
        count = bench.settings.new_tokens
        prompt = random_prompt(bench.model.config.vocab_size, context, batch)
        how: dict[str, Any] = {"room": count, "buffers": buffers}
        for _ in range(2):  # the first is a rehearsal of every length
            answer = generate_timed(
                bench.model,
                prompt.to(bench.model.device),
                policy,
                count,
                deadline=bench.cell_deadline,
                **how,
            )
        return AnswerCell(
            policy=name,
            context=context,
            buffers=buffers,
            batch=batch,
            status=MEASURED,
            note=self.early(answer.decode_ms),
            prefill_ms=answer.prefill_ms,
            decode_ms=answer.decode_ms,
            peak_bytes=answer.peak_bytes,
            decode_allowed=allowed(policy, context, bench.model)["decode_allowed"],
        )

    def packed(self, rate: float, context: int) -> ExtraCell:
        """Measure AdaKV's unequal heads, packed against padded tensors, at a retention rate."""
        name = f"adakv {rate}"
        return self.bench.attempt(
            partial(ExtraCell, name, context),
            self.predicted_seconds("adakv", context),
            self.bench.settings.limit_of(context),
            lambda: ExtraCell(
                name, context, MEASURED, found=row_of(self.bench.model, context, rate, ROUNDS)
            ),
        )

    def tests(self) -> ExtraCell:
        """Run the tests that need a GPU, in a process of their own."""
        empty = partial(ExtraCell, TESTS, 0)
        if find_spec("pytest") is None:
            return empty(ABSENT, "skipped, since there is no pytest")
        return self.bench.attempt(empty, 0.0, self.bench.settings.limit_of(0), self._tests)

    def _tests(self) -> ExtraCell:
        command = [sys.executable, "-c", PYTEST, "-q", "-p", "no:cacheprovider", *RUN]
        seconds = self.bench.cell_deadline.left()
        try:
            ran = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            raise OutOfTimeError("tests stopped") from None
        lines = (ran.stdout or ran.stderr).strip().splitlines() or ["nothing was said"]
        counted = re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1])
        found: dict[str, Any] = {what: int(count) for count, what in counted}
        if not found:
            said = f"{ran.stderr.strip()} {lines[-1]}".splitlines()[0]
            raise RuntimeError(f"pytest ended with {ran.returncode}: {said}")
        return ExtraCell(
            TESTS,
            0,
            MEASURED,
            found={**found, "failures": [each for each in lines if each.startswith("FAILED")]},
        )
