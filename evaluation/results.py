"""Write results as files, all or none, with the machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvpolicy
from kvpolicy.checks import check_count

if TYPE_CHECKING:
    import torch


def cpu_count() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Return the default number of threads: ``OMP_NUM_THREADS`` if it is set.

    Otherwise the processors that are idle of those this process may use, at least 1 and at most 4:
    threads that share a processor wait for each other at every operation, and small models gain
    nothing from more. What the variable asks for beyond the machine's processors is left out.
    """
    # OpenMP accepts a list with one entry for each level of nesting; only the first counts here.
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        return min(int(asked), os.cpu_count() or 1)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # not on Windows
    return max(1, min(cpu_count() - round(busy), 4))


def check_threads(threads: int) -> int:
    """Return a number of threads; ValueError if it is below 1 or above the machine's processors."""
    most = os.cpu_count() or 1
    if check_count("threads", threads, minimum=1) > most:
        raise ValueError(f"threads must be at most the machine's {most} processors, got {threads}")
    return threads


def environment(device: torch.device) -> dict[str, Any]:
    """Return the software versions and the machine of a measurement, as a dict for JSON."""
    import torch

    found: dict[str, Any] = {
        "versions": {
            "kvpolicy": kvpolicy.__version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "machine": {
            "system": platform.system(),
            "processor": _processor(),
            "cpus": cpu_count(),
            "threads": torch.get_num_threads(),
            "device": str(device),
        },
    }
    if device.type == "cuda":
        found["machine"]["gpu"] = torch.cuda.get_device_name(device)
    return found


def check_folder(folder: Path, files: Sequence[str] = ()) -> None:
    """Raise ValueError, before work begins, unless result files can be written to a folder."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"out must be a folder, got {folder}, but {existing} is a file")
    _try_to_write("out", existing, folder)
    for name in files:
        if (folder / name).is_dir():
            raise ValueError(
                f"out must not contain a folder named {name}, since a file of results has this "
                f"name, got the folder {folder / name}"
            )


def check_file(option: str, file: Path) -> None:
    """Raise ValueError, before work begins, unless a result file can be written."""
    if file.is_dir():
        raise ValueError(f"{option} must be a file, got the folder {file}")
    existing = next(path for path in file.absolute().parents if path.exists())
    if not existing.is_dir():
        raise ValueError(
            f"{option} must be a file in a folder, got {file}, but {existing} is not a folder"
        )
    _try_to_write(option, existing, file)


def _try_to_write(option: str, existing: Path, wanted: Path) -> None:
    """Write and remove a test file; ValueError if that fails, as on a read-only disk."""
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".trying-") as temporary:
            (Path(temporary) / "file").write_bytes(b"written")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"{option} must be a place that can be written to, got {wanted}: writing to {existing} "
            f"failed ({reason})"
        ) from None


def as_json(data: Mapping[str, Any]) -> bytes:
    """Encode a dict of results as JSON bytes for a file; NaN and infinity are refused."""
    return json.dumps(data, indent=2, allow_nan=False).encode()


def write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write result files into a folder, all or none; replace those of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as temporary:
        for name, content in files.items():
            (Path(temporary) / name).write_bytes(content)
        for name in files:
            os.replace(Path(temporary) / name, folder / name)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
