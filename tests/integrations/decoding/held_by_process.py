"""What a process comes to hold while it decodes a long answer, measured in one of its own.

    python -m tests.integrations.decoding.held_by_process METHOD FIXED STEPS

METHOD names a method, whose own rule bounds the answer, or is FullContext, which does not; FIXED is
1 for buffers of a fixed size. Prints the bytes by which the most that was resident at any time
exceeds what was before.
"""

import subprocess
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory import peak_bytes, reset_peak, resident_bytes
from kvpolicy import CachePolicy, policies
from kvpolicy.integrations.transformers import PolicyCache

LAYERS, HEADS, HEAD_DIM = 1, 8, 1024
ENTRY = 2 * HEADS * HEAD_DIM * 4  # bytes of a token in a layer
BUDGET, EVERY = 64, 64


def wide_model() -> LlamaForCausalLM:
    """Cheap to run, with much to hold."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def policy_of(name: str) -> CachePolicy:
    """A method whose rule bounds prompt and answer."""
    method = getattr(policies, name)
    if method is policies.FullContext:
        return method()
    every = min(EVERY, method.every)
    return method(
        retention_tokens=BUDGET,
        decoding=method(retention_tokens=BUDGET).decoding_rule(BUDGET, every),
    )


def growth(name: str, fixed: bool, steps: int) -> int:
    """Bytes that a process of its own comes to hold of an answer of so many tokens."""
    arguments = [name, str(int(fixed)), str(steps)]
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return int(done.stdout.splitlines()[-1])


def main(name: str, fixed: bool, steps: int) -> None:
    """What the process does."""
    torch.set_num_threads(1)
    model: Any = wide_model()

    def answer(count: int) -> None:
        cache = PolicyCache(policy_of(name), max_new_tokens=count if fixed else None)
        prompt = torch.arange(1, 65)[None]
        model.generate(prompt, cache=cache, max_new_tokens=count, do_sample=False)

    answer(8)  # what the first call brings along, such as code, is not the answer's
    assert reset_peak()
    before = resident_bytes()
    answer(steps)
    print(peak_bytes() - before)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]))
