"""What may happen to a cache between its forwards, done to it and to the reference."""

import copy
import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers import PolicyCache
from tests.integrations.model.builds.dense import decoder_layers
from tests.integrations.support.comparison import Columns, tensors
from tests.integrations.support.reading_both import Call, ReadingBoth
from tests.reference import PAD_TOKEN_ID


@attrs.define
class Said:
    """A streamer that remembers an answer."""

    tokens: list[list[int]] = attrs.field(factory=list)
    _prompted: bool = False

    def put(self, value: Tensor) -> None:
        if self._prompted:  # the prompt comes first
            self.tokens.append(value.tolist())
        self._prompted = True

    def end(self) -> None:
        """Nothing to do."""


@attrs.define
class SideBySide(ReadingBoth):
    """What a user may do with a cache, done to the cache and to the reference."""

    def attach(self) -> None:
        """Opens a block around the actions that follow, or closes the one that is open."""
        if self.block is None:
            self.block = ExitStack()
            self.block.enter_context(self.cache.attached(self.model))
        else:
            self.close()

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        for row, columns in zip(self.rows, self.columns, strict=True):
            row.take_back(count)
            del columns[len(columns) - count :]
        self.appended -= count

    def take_rows(self, indices: Sequence[int], *, reorder: bool) -> None:
        which = torch.tensor(list(indices))
        (self.cache.reorder_cache if reorder else self.cache.batch_select_indices)(which)
        self.rows = [self.rows[index].fork() for index in indices]
        self.columns = [list(self.columns[index]) for index in indices]

    def repeat(self, times: int) -> None:
        self.cache.batch_repeat_interleave(times)
        self.rows = [row.fork() for row in self.rows for _ in range(times)]
        self.columns = [list(columns) for columns in self.columns for _ in range(times)]

    def fork(self, how: str, *, take_copy: bool) -> None:
        """Copies the cache, spoils one of the two and goes on with the other."""
        copied = {
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
        }[how](self.cache)
        spoiled = self.cache if take_copy else copied
        if take_copy:
            self._go_on_with(copied)
            self.filled = False
        ids, mask = tensors([[*columns, 7, 7] for columns in self.columns])
        if not self.starts:
            self.append([[5]] * self.batch, Call())  # what the other one writes is not to be here
        with torch.no_grad(), spoiled.attached(self.model):
            self.model(ids[:, -2:], attention_mask=mask, cache=spoiled)
        self.check()
        spoiled.reset()

    def save_and_load(self, path: Path) -> None:
        if not (self.named or self.filled):
            with pytest.raises(ValueError, match="while the model that filled it exists"):
                self.cache.save(path)
            return
        self.cache.save(path)
        self._go_on_with(PolicyCache.load(path, storage=self.cache.storage))
        assert self.cache.policy == self.policy
        self.named, self.filled = True, False

    def reset(self) -> None:
        self.cache.reset()
        self.rows, self.columns, self.widths = [], [], []
        self.appended, self.starts, self.named = 0, False, False

    def fail(self, new: Columns, place: str, layer: int, call: int, error: Any, how: str) -> None:
        """A prompt or an append that fails inside a layer, and leaves everything as it was.

        Args:
            new: the columns to read.
            place: a module of the layer.
            layer: index of the layer.
            call: which call of the module fails, 0 or 1: the second pass of a restart.
            error: what is raised.
            how: "prompt", "append" or "generate".
        """
        calls = []

        def fail(*args: Any) -> None:
            calls.append(1)
            if len(calls) > call:
                raise error

        module = self._module(layer, place)
        handle = module.register_forward_pre_hook(fail)
        try:
            with pytest.raises(error):
                self._read_in_vain(new, how)
        finally:
            handle.remove()
            if self.block is not None:
                self.cache.crop(0)  # what was interrupted is taken back at the next use
            if not self.rows:
                self.columns = []

    def _module(self, layer: int, place: str) -> nn.Module:
        return decoder_layers(self.model)[layer].get_submodule(place.removeprefix("."))

    def _read_in_vain(self, new: Columns, how: str) -> None:
        if not self.rows:
            self.columns = [[] for _ in new]
        if how == "generate":
            ids, mask = tensors([[*a, *b] for a, b in zip(self.columns, new, strict=True)])
            self.model.generate(ids, attention_mask=mask, cache=self.cache, max_new_tokens=2)
            return
        if how == "prompt" and self.rows:
            self.start_turn()
        self._forward(new, Call())

    def interrupt(
        self,
        new: Columns,
        ended: Sequence[int],
        place: str,
        layer: int,
        step: int,
        count: int,
        error: Any,
    ) -> None:
        """A turn by `generate` that fails while it answers: what was read before is there."""
        self._act(new, ended)
        whole, mask = tensors(self.columns)
        said = Said()

        def fail(*args: Any) -> None:
            if len(said.tokens) == step:
                raise error

        module = self._module(layer, place)
        handle = module.register_forward_pre_hook(fail)
        try:
            with pytest.raises(error):
                self.model.generate(
                    whole,
                    attention_mask=mask,
                    cache=self.cache,
                    max_new_tokens=count,
                    do_sample=False,
                    streamer=said,
                )
        finally:
            handle.remove()
        self._acted()
        unread = torch.empty(self.batch, 0, 0)
        columns: Columns = [list(row) for row in zip(*said.tokens[: step - 1], strict=True)]
        self._fed_one_by_one(columns or [[] for _ in self.rows], unread)

    def search(self, new: Columns, *, count: int, beams: int) -> None:
        """Beam search by a copy, whose answers are as likely as the reference says."""
        before = self.columns or [[] for _ in new]
        ids, mask = tensors([[*a, *b] for a, b in zip(before, new, strict=True)])
        searched = copy.deepcopy(self.cache)
        searched.batch_repeat_interleave(beams)
        output: Any = self.model.generate(
            ids,
            attention_mask=mask,
            cache=searched,
            max_new_tokens=count,
            num_beams=beams,
            length_penalty=0.0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=PAD_TOKEN_ID,
        )
        answers = output.sequences[:, ids.shape[1] :].tolist()
        rows = self.rows or [self.new_row() for _ in new]
        for row, tokens, answer, found in zip(
            rows, new, answers, output.sequences_scores.tolist(), strict=True
        ):
            own = row.fork()
            logits = own.act([token for token in tokens if token is not None])
            total = 0.0
            for token in answer:
                total += float(logits.log_softmax(dim=-1)[token])
                logits = own.feed(token)
                own.settle()
            difference = abs(total - found)
            assert difference <= 2 * self.tolerance * count, f"differs by {difference}"

    def refuses(self, new: Columns) -> None:
        """What a cache that has read something refuses leaves it as it was."""
        ids, valid = tensors(new)
        mask = torch.cat([tensors(self.columns)[1], valid], dim=1)
        with self.cache.attached(self.model), torch.no_grad():
            for arguments in (
                {"input_ids": ids[:, :0], "attention_mask": mask[:, : -len(new[0])]},
                {"input_ids": ids, "attention_mask": mask[:, 1:]},
                {"input_ids": ids[:1].repeat(self.batch + 1, 1)},
                {"input_ids": ids, "attention_mask": mask[:, None, None]},
            ):
                with pytest.raises(ValueError, match="must"):
                    self.model(**arguments, cache=self.cache)
            if self.bound is not None and self.batch == 1:
                with pytest.raises(UnsupportedGenerationError, match="evicts while it decodes"):
                    self.model.generate(
                        torch.cat([tensors(self.columns)[0], ids], dim=1),
                        cache=self.cache,
                        prompt_lookup_num_tokens=3,
                    )
        with pytest.raises(ValueError, match=f"only {self.appended} tokens were appended"):
            self.cache.crop(-self.appended - 1)
        with pytest.raises(ValueError, match="must be 0 or negative, got 1"):
            self.cache.crop(1)
