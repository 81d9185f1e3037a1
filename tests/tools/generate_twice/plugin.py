"""The pytest plugin: ``pytest -p generate_twice.plugin --generate-twice-out FILE``."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from generate_twice.record import Record
from generate_twice.wrapping import generating_twice

_record = pytest.StashKey[Record]()
_running = pytest.StashKey[ExitStack]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--generate-twice-out", type=Path, help="a JSON file for all comparisons")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_record] = Record()
    config.stash[_running] = ExitStack()
    config.stash[_running].enter_context(generating_twice(config.stash[_record]))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_running].close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the comparisons decide the exit status: tests fail of their own, without a network."""
    record = session.config.stash[_record]
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = record.exit_status
    out = session.config.getoption("--generate-twice-out")
    if out is not None:
        record.write(out)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    terminalreporter.section("generate, twice")
    for line in config.stash[_record].lines():
        terminalreporter.write_line(line)
