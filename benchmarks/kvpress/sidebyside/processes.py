"""Start the worker processes, send them commands, and end them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
LARGE_BLOCK = 1 << 16
"""Block size in bytes from which an allocator that shows peaks returns memory at once."""


def worker_environment(threads: int, *, returns_memory: bool = False) -> dict[str, str]:
    """Return a worker's environment variables: thread counts, and no Python path.

    Args:
        threads: Threads of every library that computes.
        returns_memory: Whether freed memory goes back to the system at once, which costs time.
    """
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    found |= {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    if returns_memory:
        found |= {
            "MALLOC_MMAP_THRESHOLD_": str(LARGE_BLOCK),
            "MALLOC_TRIM_THRESHOLD_": str(LARGE_BLOCK),
        }
    return found


class Worker:
    """A process that runs one library and answers one command after another.

    Args:
        python: The interpreter of its environment.
        script: Its file in `SCRIPTS`.
        log: File that receives what it prints.
        threads: Threads it computes with.
        returns_memory: See `worker_environment`.
    """

    def __init__(
        self, python: Path, script: str, log: Path, threads: int, *, returns_memory: bool = False
    ) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [str(python), str(SCRIPTS / script), "--threads", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=worker_environment(threads, returns_memory=returns_memory),
            )

    def ask(self, do: str, **command: Any) -> Any:
        """Send a command of `serving` and return its answer.

        Raises:
            RuntimeError: The worker has ended; the message holds the end of its log.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **command}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            end = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the worker ended while asked to do {do!r}; its last words:\n{end}")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
