"""Run the `kvpolicy` command; print an error as one line on stderr."""

import logging
import os
import sys
from collections.abc import Sequence

from kvpolicy.evaluation.extras import MissingExtraError, require


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``kvpolicy`` command with the process's own arguments, or others.

    Returns:
        The exit status: 0, 1 where the work cannot be done, 2 where the command line is wrong, 130
        where the user stopped it. Other than 0 comes with a line ``error: ...`` on stderr.
    """
    try:
        # If torchao is installed, Transformers imports it, and it warns about missing libraries.
        for noisy in ("torchao", "torch.utils._pytree"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        require("typer", extra="cli")
        require("rich", extra="cli")
        from kvpolicy.evaluation.commands.app import run

        return run(sys.argv[1:] if arguments is None else list(arguments))
    except BrokenPipeError:  # the reader of stdout has closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    except Exception as error:
        # A command's work raises these for the user's mistakes; other errors are bugs.
        if not isinstance(error, MissingExtraError | ValueError | OSError | _out_of_memory()):
            raise
        print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _out_of_memory() -> type[Exception]:
    """Return torch's out-of-memory error; without torch, an error that is not raised here."""
    torch = sys.modules.get("torch")
    return MissingExtraError if torch is None else torch.OutOfMemoryError
