"""Measure the peak memory of one prefill on the processor, in a process of its own.

On Linux the peak is the kernel's own high-water mark of the resident set (VmHWM). It misses
nothing, which sampling would; and it does not start at the parent's peak, as a child's ru_maxrss
does. It is reset before the prompt if the kernel allows it. On other systems the peak is ru_maxrss.

    python benchmarks/memory.py SPECIFICATION   # in JSON, see `try_peak`; prints JSON
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ModelSpec, policy_of, random_prompt
from benchmarks.timing import take_turn

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def try_peak(
    spec: ModelSpec, policy: str, context: int, *, threads: int = 1, chunk: int | None = None
) -> dict[str, Any] | None:
    """Read one prompt in a fresh process and return its peak memory; None if the process failed.

    ``exact`` is False if memory was as high before the prompt, so that the growth is only an upper
    bound. ``cpu_ms`` is the processor's time of the prompt.
    """
    wanted = {"model": attrs.asdict(spec), "policy": policy, "context": context}
    wanted |= {"threads": threads, "chunk": chunk}
    command = [sys.executable, __file__, json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = f"failed with code {done.returncode}: {done.stderr.strip()[-500:]}"
        print(f"measuring {policy} at {context} tokens {said}", file=sys.stderr, flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(wanted: dict[str, Any]) -> dict[str, Any]:
    """Measure one prompt inside the new process; see `try_peak`."""
    torch.set_num_threads(wanted["threads"])
    spec = ModelSpec(**wanted["model"])
    model = spec.build()
    policy = policy_of(wanted["policy"])
    # A first call, so that its one-time memory (code, thread pools) is not counted for the prompt.
    chunk = wanted["chunk"]
    first = None if chunk is None else 32
    take_turn(model, random_prompt(spec.vocab_size, 64), policy, 1, chunk=first)
    prompt = random_prompt(spec.vocab_size, wanted["context"])
    reset = reset_peak()
    before, peak_before = resident_bytes(), peak_bytes()
    turn = take_turn(model, prompt, policy, 1, chunk=chunk)
    peak = peak_bytes()
    by = "VmHWM" if STATUS.exists() else "ru_maxrss"
    return {
        "before_bytes": before,
        "peak_bytes": peak,
        "growth_bytes": peak - before,
        "measured_by": f"{by}, set back before the prompt" if reset else by,
        "exact": peak > peak_before,
        "cpu_ms": turn.prefill.cpu_ms,
    }


def reset_peak() -> bool:
    """Reset the process's peak memory to the current value; return False if not possible."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def resident_bytes() -> int:
    """Return the bytes resident now, or the peak where only the peak is known."""
    return _status("VmRSS") if STATUS.exists() else peak_bytes()


def peak_bytes() -> int:
    if STATUS.exists():
        return _status("VmHWM")
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _status(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {name}")


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
