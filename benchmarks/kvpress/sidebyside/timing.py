"""Measure the times and the peak memory of one prompt."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .reading import CACHE, Reading

Result = TypeVar("Result")


def timed(run: Callable[[], Result]) -> tuple[Result, dict[str, float]]:
    """Run a function; return its result, and the wall and CPU seconds it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return result, {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def prefill(reading: Reading, prompt: Sequence[int]) -> Tensor:
    """Read a prompt and return the next token ``[1, 1]``."""
    with reading.prefilling():
        output = reading.model(
            torch.tensor([list(prompt)]),
            **{CACHE: reading.cache},
            use_cache=True,
            logits_to_keep=1,
        )
    token: Tensor = output.logits[:, -1:].argmax(dim=-1)
    return token


def decode(reading: Reading, token: Tensor, seen: int, count: int) -> list[int]:
    """Decode greedily and return the tokens.

    Positions are passed, as in kvpress's pipeline: its cache counts only the tokens it still holds.

    Args:
        reading: A reading after its prefill.
        token: The first decoded token ``[1, 1]``, not seen yet.
        seen: Tokens seen.
        count: Tokens to decode.
    """
    decoded = []
    with reading.decoding():
        for position in range(seen, seen + count):
            output = reading.model(
                token,
                **{CACHE: reading.cache},
                position_ids=torch.tensor([[position]]),
                use_cache=True,
            )
            token = output.logits[:, -1:].argmax(dim=-1)
            decoded.append(int(token))
    return decoded


@torch.inference_mode()
def timed_turn(reading: Reading, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """Time prefill and decoding of one prompt, with the setup and removal of hooks."""
    token, reading_time = timed(lambda: prefill(reading, prompt))
    held = reading.held_bytes()
    _, decoding_time = timed(lambda: decode(reading, token, len(prompt), new_tokens))
    per_token = {name: seconds / new_tokens for name, seconds in decoding_time.items()}
    return {"prefill": reading_time, "decode": per_token, "held_bytes": held}


@torch.inference_mode()
def peak_memory(reading: Reading, prompt: Sequence[int]) -> int:
    """Return by how many bytes the process grew at most while it read a prompt.

    This reads the high-water mark of the resident set, which Linux lets a process reset. The reuse
    of small blocks that were freed before is not counted. So start a separate process, whose
    allocator returns large blocks (``MALLOC_MMAP_THRESHOLD_``).
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    prefill(reading, prompt)
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    """Return a field of ``/proc/self/status``: VmRSS (resident now) or VmHWM (its maximum)."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None, field
    return int(found[1]) * 1024
