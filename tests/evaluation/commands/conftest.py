"""Run commands in a test, and put back what they change for the whole process."""

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import logging

from kvpolicy.evaluation.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "80")
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    yield
    torch.set_num_threads(threads)
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_main(*arguments: object) -> tuple[int, str, str]:
        status = main([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run_main
