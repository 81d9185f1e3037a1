"""Answer commands that arrive as lines of JSON on standard input.

Waiting for a line takes no CPU time, so that two workers can take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import behaviours
from .reading import Library
from .timing import peak_memory, prefill, timed_turn

Command = dict[str, Any]


def versions(library: Library, command: Command) -> Any:
    return {"versions": library.versions(), "threads": torch.get_num_threads()}


def count(library: Library, command: Command) -> Any:
    return [library.count(length, command["rate"]) for length in command["lengths"]]


def time(library: Library, command: Command) -> Any:
    model = library.model(command["model"], command["method"])
    reading = library.begin(model, command["method"], command["settings"])
    return timed_turn(reading, command["prompt"], command["new_tokens"])


def memory(library: Library, command: Command) -> Any:
    model = library.model(command["model"], command["method"])

    def begin() -> Any:
        return library.begin(model, command["method"], command["settings"])

    with torch.inference_mode():
        prefill(begin(), command["prompt"][:128])  # what is allocated once and stays
    return peak_memory(begin(), command["prompt"])


def kept(library: Library, command: Command) -> Any:
    model = library.model(command["model"], command["method"])
    method, settings = command["method"], command["settings"]
    return [
        behaviours.kept_of(library, model, method, settings, prompt)
        for prompt in command["prompts"]
    ]


def answers(library: Library, command: Command) -> Any:
    model = library.model(command["model"], command["method"])
    return behaviours.answers(
        library,
        model,
        command["method"],
        command["settings"],
        command["prompts"],
        command["new_tokens"],
    )


def batch(library: Library, command: Command) -> Any:
    model = library.model(command["model"], command["method"])
    return behaviours.padded_batch(
        library, model, command["method"], command["settings"], command["rows"]
    )


def turns(library: Library, command: Command) -> Any:
    model = library.model(command["model"], command["method"])
    return behaviours.second_turn(
        library,
        model,
        command["method"],
        command["settings"],
        command["first"],
        command["added"],
        way=command["way"],
    )


COMMANDS: dict[str, Callable[[Library, Command], Any]] = {
    each.__name__: each for each in (versions, count, time, memory, kept, answers, batch, turns)
}


def serve(library: Library) -> None:
    """Answer commands until standard input ends; other output goes to stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        answer = COMMANDS[command["do"]](library, command)
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
