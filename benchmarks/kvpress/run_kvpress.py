"""The worker of kvpress, in an environment with only torch, Transformers and kvpress.

A press is used as its README says: its hooks are set while the prompt is read, or around
``generate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import kvpress
import torch
from kvpress.presses import kvzip_press
from kvpress.utils import compute_n_kept
from sidebyside.reading import REPETITION, Kept, Library, Reading, Settings, match_rows
from sidebyside.serving import serve
from torch import Tensor
from transformers import PreTrainedModel


def build_press(method: str, settings: Settings) -> Any:
    """Return the kvpress press of a method, with the parameters that both libraries share."""
    ratio = 1 - settings["rate"]
    window = {"window_size": settings["window_size"], "kernel_size": settings["kernel_size"]}
    if method == "snapkv":
        return kvpress.SnapKVPress(ratio, **window)
    if method == "pyramidkv":
        return kvpress.PyramidKVPress(ratio, **window)
    if method == "streamingllm":
        return kvpress.StreamingLLMPress(ratio, n_sink=settings["num_sinks"])
    around = {
        "adakv": kvpress.AdaKVPress,
        "chunkkv": kvpress.ChunkKVPress,
        "criticalkv": kvpress.CriticalKVPress,
        "critical_ada_kv": kvpress.CriticalAdaKVPress,
    }
    if method in around:
        return around[method](kvpress.SnapKVPress(ratio, **window))
    torch.manual_seed(0)  # of LeverageScorePress
    others = {
        "h2o": kvpress.ObservedAttentionPress,
        "tova": kvpress.TOVAPress,
        "keydiff": kvpress.KeyDiffPress,
        "key_norm": kvpress.KnormPress,
        "lagkv": kvpress.LagKVPress,
        "curdkv": kvpress.CURPress,
        "expected_attention": kvpress.ExpectedAttentionPress,
        "leverage": kvpress.LeverageScorePress,
        "chunk_attention": kvpress.NonCausalAttnPress,
        "compactor": kvpress.CompactorPress,
        "kvzip": kvpress.KVzipPress,
    }
    return others[method](ratio)


class InstructionIds:
    """A replacement for the tokenizer that KVzipPress loads; the models here have no tokenizer."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, name: str) -> InstructionIds:
        """Return one replacement tokenizer for any model."""
        return cls()

    def encode(self, text: str, **options: Any) -> Tensor:
        """Return fixed ids for an instruction of KVzipPress, ``[1, length]``."""
        kinds = {"": (), "\n": REPETITION["answer_ids"]}
        later = "starting with" in text
        asked = REPETITION["later_ids" if later else "instruction_ids"]
        return torch.tensor([list(kinds.get(text, asked))], dtype=torch.long)


class PressReading(Reading):
    """A cache filled under a press; if watched, it records keys before and after the press."""

    def __init__(self, model: PreTrainedModel, press: Any, *, watched: bool) -> None:
        super().__init__(model)
        self.press = press
        self.watched = watched
        self._full: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        """Attach the press's hooks; if watched, also a hook before and a hook after them."""
        layers = self.model.model.layers
        handles = self._watch(layers, self._full) if self.watched else []
        try:
            with self.press(self.model):
                handles += self._watch(layers, self._kept) if self.watched else []
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, layers: Any, into: dict[int, Tensor]) -> list[Any]:
        def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            layer = module.layer_idx
            # The first forward reads the prompt; later ones append to what it left.
            into.setdefault(layer, kwargs["past_key_values"].layers[layer].keys)

        return [each.self_attn.register_forward_hook(note, with_kwargs=True) for each in layers]

    def kept(self, lengths: Sequence[int]) -> Kept:
        """Return the positions of kept keys, found by comparing key tensors. See `Reading.kept`."""
        padding = [max(lengths) - length for length in lengths]
        return [
            [
                [
                    [
                        column - pad
                        for column in match_rows(kept, full)
                        if (row, head, column) not in masked
                    ]
                    for head, (kept, full) in enumerate(
                        zip(self._kept[layer][row], self._full[layer][row], strict=True)
                    )
                ]
                for row, pad in enumerate(padding)
            ]
            for layer in sorted(self._full)
            for masked in [self._masked(layer)]
        ]

    def _masked(self, layer: int) -> set[tuple[int, ...]]:
        """Return row, head and column of keys that are held but masked for later queries."""
        attention = self.model.model.layers[layer].self_attn
        masked = getattr(attention, "masked_key_indices", None)
        return (
            set() if masked is None else set(zip(*(each.tolist() for each in masked), strict=True))
        )


class Kvpress(Library):
    """The kvpress library."""

    packages: ClassVar[tuple[str, ...]] = ("kvpress", "transformers")

    def attention(self, method: str) -> str:
        """Return "eager" for methods that read attention weights (ObservedAttentionPress)."""
        return "eager" if method in ("h2o", "full_eager") else "sdpa"

    def begin_method(
        self, model: PreTrainedModel, method: str, settings: Settings, *, watched: bool
    ) -> Reading:
        """Return the reading of a prompt under the method's press; see `Library.begin`."""
        return PressReading(model, build_press(method, settings), watched=watched)

    def count(self, length: int, rate: float) -> int:
        """Return the number of tokens that kvpress keeps of a prompt by its compression ratio."""
        return int(compute_n_kept(length, 1 - rate))


if __name__ == "__main__":
    kvzip_press.AutoTokenizer = InstructionIds
    serve(Kvpress())
