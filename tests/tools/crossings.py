"""Count the calls between files of the library that each layer of a model costs.

A call counts if its caller stands in another file than what is called. A reader who follows a
forward crosses as many times from file to file. `python -m tests.tools.crossings` prints the
counts, and with the name of a situation the calls behind it.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvpolicy
from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, SnapKV

ROOT = Path(kvpolicy.__file__).resolve().parent.parent
FOLDERS = tuple(str(ROOT / each) for each in ("kvpolicy", "policies", "integrations"))
# Models whose difference shows what a layer costs, without what a forward costs once.
SIZES = (8, 16)

Call = tuple[str, str, str, str]  # caller's file and function, and those that are called


def model_of(num_layers: int) -> PreTrainedModel:
    """Make a tiny Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def counted(run: Callable[[], object]) -> tuple[Counter[Call], int]:
    """Count the crossings of a function, and all of its calls into the library."""
    found: Counter[Call] = Counter()
    calls = 0

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        called = frame.f_code.co_filename
        if event != "call" or not called.startswith(FOLDERS):
            return
        calls += 1
        before = frame.f_back
        caller = "" if before is None else before.f_code.co_filename
        if caller != called and before is not None:
            names = before.f_code.co_name, frame.f_code.co_name
            found[Path(caller).name, names[0], Path(called).name, names[1]] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found, calls


def _policy(name: str, num_layers: int) -> CachePolicy:
    return SnapKV(0.2) if name == "SnapKV" else FastKV(tsp_layer=num_layers // 2 - 1)


@torch.no_grad()
def situation(name: str, num_layers: int) -> tuple[Counter[Call], int]:
    """Count one of `SITUATIONS` in a model of so many layers."""
    model, ids = model_of(num_layers), torch.arange(96)[None] % 64
    policy = _policy("SnapKV" if "SnapKV" in name else "FastKV", num_layers)

    def read(cache: PolicyCache, given: Tensor) -> object:
        return model(given, cache=cache, logits_to_keep=1)

    for _ in range(2):  # what is found once for a model is not counted
        with PolicyCache(policy).attached(model) as cache:
            if name.startswith("chunk"):
                cache.start_turn(prompt_len=96)
                read(cache, ids[:, :48])
                last = ids[:, 48:]
            elif name.startswith("token"):
                read(cache, ids)
                last = ids[:, :1]
            else:
                last = ids
            found = counted(lambda cache=cache, last=last: read(cache, last))  # type: ignore[misc]
    return found


# The most crossings a layer that are allowed.
SITUATIONS = {
    "prompt under SnapKV": 37,
    "prompt under FastKV": 40,
    "chunk that ends a prompt under FastKV": 75,
    "token after SnapKV": 11,
}


def per_layer(name: str) -> float:
    """Return the crossings that one more layer costs in a situation."""
    fewer, more = (situation(name, size)[0].total() for size in SIZES)
    return (more - fewer) / (SIZES[1] - SIZES[0])


def main() -> None:
    """Print the counts of all situations, and the calls of those that are named."""
    print(f"{'situation':<40}{'crossings a layer':>18}{'calls a layer':>14}")
    width = SIZES[1] - SIZES[0]
    for name in SITUATIONS:
        (few, fewer), (many, more) = (situation(name, size) for size in SIZES)
        crossings = (many.total() - few.total()) / width
        print(f"{name:<40}{crossings:>18.1f}{(more - fewer) / width:>14.1f}")
        if name in sys.argv[1:]:
            many.subtract(few)
            for call, count in many.most_common():
                if count:
                    print(f"{count / width:>8.1f}  {call[0]}:{call[1]} -> {call[2]}:{call[3]}")


if __name__ == "__main__":
    main()
