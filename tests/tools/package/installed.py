"""Try an installed kvpolicy, with the interpreter of an environment that has nothing else.

    python -I tests/tools/package/installed.py core    # without extras
    python -I tests/tools/package/installed.py cli     # with the extra cli

-I keeps the checkout, whose folders have the packages' names, off the path.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMAND = Path(sys.prefix) / "bin" / "kvpolicy"
LIBRARY = (
    "kvpolicy.policies",
    "kvpolicy.testing",
    "kvpolicy.integrations.transformers",
    "kvpolicy.integrations.vllm",
    "kvpolicy.evaluation",
)


def run(*arguments: str) -> str:
    """Run the command in an empty folder and return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [COMMAND, *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
    said = found.stdout + found.stderr
    assert found.returncode == 0, f"{arguments}: {said[-2000:]}"
    return said


def core() -> None:
    """Import the library, answer a prompt under a policy."""
    import kvpolicy

    place = Path(kvpolicy.__file__).resolve()
    assert place.is_relative_to(Path(sys.prefix).resolve()), f"{place} is not the installed one"
    for name in LIBRARY:
        importlib.import_module(name)
    assert len(kvpolicy.registered("policy")) >= 28
    assert kvpolicy.build("fastkv") is not None
    answer()


def model_of(layers: int) -> Any:
    """A tiny random Llama that reads bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def answer() -> None:
    """Answer a prompt under FastKV."""
    import torch

    from kvpolicy.integrations.transformers import PolicyCache
    from kvpolicy.policies import FastKV

    cache = PolicyCache(FastKV(tsp_layer=1, tsp_rate=0.2, retention_rate=0.1))
    ids = torch.arange(1024)[None] % 256
    output = model_of(4).generate(ids, cache=cache, max_new_tokens=3)
    assert output.shape == (1, 1027)
    assert 0.1 < cache.report().total.share < 0.11


def written(folder: str) -> str:
    """A folder with a model and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: at for at, each in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    model_of(4).save_pretrained(folder)
    return folder


def cli() -> None:
    """Run the commands that need no other extra."""
    assert "compare" in run("--help")
    assert "snapkv" in run("policies")
    with tempfile.TemporaryDirectory() as folder:
        model = written(folder)
        assert "policies can be applied" in run("check", model)
        small = ("--context", "900", "--count", "4", "--rounds", "1", "--answer-tokens", "2")
        assert "fastkv" in run("compare", "--model", model, "-p", "fastkv", *small)


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    {"core": core, "cli": cli}[sys.argv[1]]()
    print(f"kvpolicy installed, {sys.argv[1]}: works")
