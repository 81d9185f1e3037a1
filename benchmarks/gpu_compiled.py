"""Measure the GPU benchmark's last stage, decoding compiled by `generate`, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import attrs

from benchmarks.clocks import OutOfTimeError
from benchmarks.common import allowed, random_prompt
from benchmarks.compiled import Answer, Compilations, fresh_compiler, generate_timed
from benchmarks.gpu_bench import Runner
from benchmarks.gpu_cells import FULL, MEASURED

# The prefill's token, one whose forward is compiled, and enough more to record CUDA graphs.
WARM_UP_TOKENS = 5
# The assumed time of compiling until one has been measured: a guess, for dozens of layers.
FIRST_COMPILE_SECONDS = 60.0


@attrs.frozen
class CompiledCell:
    """The measurements of compiled decoding for one policy at one context length.

    What was not measured is None or empty. Full context is held in a `StaticCache`, a policy's
    choice in a `PolicyCache` with ``max_new_tokens``.

    Args:
        policy: Name of the policy.
        context: Tokens of the prompt.
        status: As in `Cell`.
        note: Why it was not measured, or what is missing from a measured one.
        compile_ms: Time of the few tokens decoded in the warm-up, compiling included.
        compiled_graphs: Graphs that the warm-up compiled; one if there was no graph break.
        prefill_ms: Time of the measured `generate` to its first token, which is not compiled.
        compiled_decode_ms: Time of every further token. The first may be slow: CUDA graphs are
            recorded again if a cache's memory lies elsewhere than the warm-up's. The median is not
            affected.
        peak_bytes: The most allocated on the GPU in the measured `generate`.
        decode_allowed: Full context over the policy by the bytes that a decoded token reads.
        speedup_to_static: Median token of full context, also compiled, over this one's.
        speedup_to_uncompiled: Median token of full context in the loop, uncompiled and on
            `DynamicCache`, over this one's.
    """

    policy: str
    context: int
    status: str
    note: str = ""
    compile_ms: float | None = None
    compiled_graphs: int | None = None
    prefill_ms: float | None = None
    compiled_decode_ms: tuple[float, ...] = ()
    peak_bytes: int | None = None
    decode_allowed: float | None = None
    speedup_to_static: float | None = None
    speedup_to_uncompiled: float | None = None

    def against(self, static: Sequence[float], uncompiled: Sequence[float]) -> CompiledCell:
        """Return the cell with its ratios to full context at the same context.

        Args:
            static: Milliseconds of full context's tokens, compiled; empty if not measured.
            uncompiled: The same in the hand-written loop, uncompiled.
        """
        ours = median(self.compiled_decode_ms) if self.compiled_decode_ms else None
        return attrs.evolve(
            self,
            speedup_to_static=median(static) / ours if ours and static else None,
            speedup_to_uncompiled=median(uncompiled) / ours if ours and uncompiled else None,
        )


class CompiledBench(Runner[CompiledCell]):
    """A runner that measures cells of compiled decoding, which are compared with the loop's."""

    kind = CompiledCell

    def rated(self, cell: CompiledCell) -> CompiledCell:
        """See `Runner.rated`; full context is both compiled and in the loop."""
        static = self.found(FULL, cell.context)
        loop = self.bench.found(FULL, cell.context)
        return cell.against(
            static.compiled_decode_ms if static else (), loop.decode_ms if loop else ()
        )

    def predicted_seconds(self, name: str, context: int) -> float:
        """Predict the longest time that a cell takes, in seconds.

        This is the time of two prefills and the tokens, plus the longest compile time so far.
        Prefill and tokens are taken from the uncompiled cell or from the policy's compiled cell at
        a shorter context, whichever is more.
        """
        prefills, tokens = [0.0], [0.0]
        if (cell := self.bench.found(name, context)) is not None and cell.prefill_ms:
            prefills.append(median(cell.prefill_ms))
            tokens += [median(cell.decode_ms)] if cell.decode_ms else []
        for each in self.cells:
            if each.policy == name and each.context < context and each.prefill_ms is not None:
                prefills.append(each.prefill_ms * (context / each.context) ** 2)
                tokens.append(median(each.compiled_decode_ms))
        compiling = [each.compile_ms / 1e3 for each in self.cells if each.compile_ms is not None]
        needed = 2 * max(prefills) + self.bench.settings.new_tokens * max(tokens)
        return max(compiling, default=FIRST_COMPILE_SECONDS) + needed / 1e3

    def _measure(self, name: str, context: int) -> CompiledCell:
        bench = self.bench
        policy, new_tokens = bench.plans[name].policy, bench.settings.new_tokens
        with fresh_compiler():
            before = Compilations.so_far()
            warm_up = self._generate(name, context, min(WARM_UP_TOKENS, new_tokens))
            warm = Compilations.so_far()
            answer = self._generate(name, context, new_tokens)
            after = Compilations.so_far()
        graphs, again = warm.since(before).graphs, after.since(warm).graphs
        notes = [
            self.early(answer.decode_ms),
            "" if graphs else "nothing was compiled",
            "compiled again while measured" if again else "",
            "without CUDA graphs" if after.since(before).without_cuda_graphs else "",
        ]
        return CompiledCell(
            policy=name,
            context=context,
            status=MEASURED,
            note="; ".join(filter(None, notes)),
            compile_ms=sum(warm_up.decode_ms),
            compiled_graphs=graphs,
            prefill_ms=answer.prefill_ms,
            compiled_decode_ms=answer.decode_ms,
            peak_bytes=answer.peak_bytes,
            decode_allowed=allowed(policy, context, bench.model)["decode_allowed"],
        )

    def _generate(self, name: str, context: int, count: int) -> Answer:
        """Generate one answer into a cache of fixed size, with at least one timed step."""
        bench = self.bench
        vocab_size, room = bench.model.config.vocab_size, bench.settings.new_tokens
        prompt = random_prompt(vocab_size, context).to(bench.model.device)
        how: dict[str, Any] = {"room": room, "deadline": bench.cell_deadline}
        try:
            answer = generate_timed(bench.model, prompt, bench.plans[name].policy, count, **how)
        except OutOfTimeError:
            answer = None
        if answer is None or not answer.decode_ms:
            raise OutOfTimeError("no compiled token timed")
        return answer
