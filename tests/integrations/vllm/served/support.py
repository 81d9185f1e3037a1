"""Tiny models and documents for a real vLLM, and what kvpolicy's own `generate` answers."""

import contextlib
import copy
import gc
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.vllm import ServedDocument, export
from kvpolicy.policies import FastKV, FullContext, GemFilter, KeyDiff, SnapKV, StreamingLLM
from kvpolicy.policy import CachePolicy
from tests.integrations.vllm.plain import read_prompt

# What vLLM warns of is not ours. Without vLLM the tests are left out: `make vllm-tests` has it.
NEEDS_VLLM = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make vllm-tests"
    ),
    pytest.mark.filterwarnings("ignore"),
]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
VOCAB_SIZE = 512
READ_LEN = 300
NEW_TOKENS = 16
# By as much logits of a bfloat16 model may differ in vLLM and Transformers. A wrong document
# changes them by 10.
ROUNDING = 0.3
QUESTIONS = [[5], [7, 8, 9, 10, 11], list(range(40, 80))]
POLICIES: dict[str, CachePolicy] = {
    "snapkv": SnapKV(0.25, window_size=8),
    "whole_blocks": SnapKV(retention_tokens=64, window_size=8),
    "few": StreamingLLM(retention_tokens=20),
    "gapless": StreamingLLM(0.3, gapless=True),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.25, window_size=8),
    "keydiff": KeyDiff(0.5),
    "gemfilter": GemFilter(retention_rate=0.4),
    "full": FullContext(),
}
FAMILIES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def random_model(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A model of 4 layers with random weights and peaked attention.

    In bfloat16 attention is less peaked. Else vLLM and Transformers differ by up to 2 in the logits
    of a plain text.
    """
    peak = 2.0 if dtype == torch.float32 else 1.0
    config_class, model_class = FAMILIES[family]
    windows = {} if family == "llama" else {"sliding_window": None}
    config = config_class(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "eos_token_id": None,
            "bos_token_id": None,
            "pad_token_id": 0,
            **windows,
            **settings,
        }
    )
    generator = torch.Generator().manual_seed(sum(map(ord, family)))
    model = model_class(config).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            size = peak if "q_proj" in name or "k_proj" in name else 1.0
            size = 4.0 if "lm_head" in name else size  # so that rounding changes no choice
            drawn = torch.randn(weight.shape, generator=generator)
            weight.data = drawn * size / weight.shape[1] ** 0.5
    return model.to(dtype)


class Written:
    """A model and documents of it on disk, with the answers that are wanted."""

    def __init__(
        self,
        folder: Path,
        family: str = "llama",
        dtype: torch.dtype = torch.float32,
        names: Sequence[str] = tuple(POLICIES),
        **settings: Any,
    ) -> None:
        self.model: PreTrainedModel = random_model(family, dtype, **settings)
        self.path, self.documents_path = folder / "model", folder / "documents"
        self.documents_path.mkdir()
        self.model.save_pretrained(self.path)
        generator = torch.Generator().manual_seed(1)
        self.ids: Tensor = torch.randint(0, VOCAB_SIZE, (1, READ_LEN), generator=generator)
        self.caches: dict[str, PolicyCache] = {}
        self.documents: dict[str, ServedDocument] = {}
        for name in names:
            self.caches[name] = read_prompt(self.model, POLICIES[name], self.ids)
            path = self.documents_path / f"{name}.safetensors"
            self.documents[name] = export(self.caches[name], self.model, path)

    def wanted(self, name: str, question: Sequence[int], count: int = NEW_TOKENS) -> list[int]:
        """The answer of kvpolicy's own `generate`, greedy."""
        cache = copy.deepcopy(self.caches[name])
        whole = torch.cat([self.ids, torch.tensor([list(question)])], dim=1)
        with cache.appending():
            output = self.model.generate(whole, cache=cache, max_new_tokens=count, do_sample=False)
        return output[0, whole.shape[1] :].tolist()

    @torch.no_grad()
    def shortfall(self, name: str, question: Sequence[int], answer: Sequence[int]) -> float:
        """How far an answer's tokens are at most from the best ones, in logits of kvpolicy.

        In bfloat16 two programs round differently, and the best two tokens may change places.
        """
        cache = copy.deepcopy(self.caches[name])
        ids = torch.tensor([[*question, *answer[:-1]]])
        with cache.attached(self.model):
            output = self.model(ids, cache=cache)
        logits = output.logits[0, len(question) - 1 :].float()
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return float((logits.amax(dim=1) - chosen).max())

    def transfer_config(self, **extra: Any) -> dict[str, Any]:
        return {
            "kv_connector": "PolicyConnector",
            "kv_role": "kv_consumer",
            "kv_connector_module_path": "kvpolicy.integrations.vllm.connector",
            "kv_connector_extra_config": {"documents": str(self.documents_path), **extra},
        }


@contextlib.contextmanager
def engine(written: Written, *, processes: bool = False, **settings: Any) -> Iterator[Any]:
    """A vLLM engine that serves the model and its documents."""
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    dtype = str(written.model.dtype).removeprefix("torch.")
    llm = LLM(
        str(written.path),
        **{
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "block_size": 32,
            "enforce_eager": True,
            "max_num_seqs": 16,
            "kv_transfer_config": written.transfer_config(),
            **settings,
        },
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def sampling(name: str | None, count: int = NEW_TOKENS, **settings: Any) -> Any:
    """Greedy sampling for a request that names a document."""
    from vllm import SamplingParams

    named = {} if name is None else {"kv_transfer_params": {"kvpolicy_document": name}}
    return SamplingParams(
        temperature=0, max_tokens=count, detokenize=False, extra_args=named, **settings
    )


def ask(llm: Any, written: Written, asked: Sequence[tuple[str, Sequence[int]]]) -> list[Any]:
    """Ask questions about documents, all at once."""
    prompts = [written.documents[name].prompt(list(question)) for name, question in asked]
    chosen = [sampling(name) for name, _ in asked]
    return list(llm.generate(prompts, chosen, use_tqdm=False))


def check_answers(
    written: Written, asked: Sequence[tuple[str, Sequence[int]]], outputs: Sequence[Any]
) -> None:
    """Check that answers are those of kvpolicy's own `generate`, and documents were loaded."""
    for (name, question), output in zip(asked, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        if written.model.dtype == torch.bfloat16:
            assert len(answer) == NEW_TOKENS
            assert written.shortfall(name, question, answer) < ROUNDING
        else:
            assert answer == written.wanted(name, question), name
        assert output.num_cached_tokens >= written.documents[name].length
