"""Run commands in a test, and put back what they change for the whole process."""

from collections.abc import Iterator
from logging import getLogger

import pytest
import torch
from transformers.utils import logging

from kvpolicy.evaluation.cli import main
from tests.evaluation.support import Run


@pytest.fixture
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command sets threads and the loudness of Transformers and the hub for its process."""
    monkeypatch.setenv("COLUMNS", "80")
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    hub = getLogger("huggingface_hub")
    hub_level = hub.level
    yield
    torch.set_num_threads(threads)
    hub.setLevel(hub_level)
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


@pytest.fixture
def run(process_state: None, capsys: pytest.CaptureFixture[str]) -> Run:
    """`kvpolicy` with these arguments: its exit status, what it prints, and its messages."""

    def run_main(*arguments: object) -> tuple[int, str, str]:
        status = main([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run_main
