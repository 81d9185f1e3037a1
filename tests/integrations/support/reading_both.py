"""Reads one conversation with a `PolicyCache` and with the slow reference, step by step."""

import copy
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from tests.integrations.support.bounded_row import Bound, BoundedRow
from tests.integrations.support.comparison import Columns, Comparison, Row, tensors
from tests.reference import PAD_TOKEN_ID


@attrs.frozen
class Call:
    """The form of a forward's arguments; results must not depend on it."""

    embeds: bool = False
    positions: bool = False
    mask: bool = True
    keep: int = 0
    states: bool = False


@attrs.define
class ReadingBoth(Comparison):
    """A comparison that feeds the same prompts and tokens to the cache and to the reference."""

    bound: Bound | None = None
    row_kind: type[Row] = Row

    def new_row(self) -> Row:
        """Returns a reference row that has read nothing."""
        how = self.weights, self.method, self.windows
        return self.row_kind(*how) if self.bound is None else BoundedRow(*how, bound=self.bound)

    def prompt(
        self,
        new: Columns,
        ended: Sequence[int],
        call: Call,
        chunks: Sequence[int] = (),
        fork: bool = False,
    ) -> None:
        """Reads a turn's prompt in one forward, or in chunks that end at given columns.

        Args:
            new: the prompt.
            ended: by row, how many of the last columns turn out to be padding.
            call: how the forwards are written.
            chunks: where chunks end, ascending, the last one's end not among them.
            fork: whether to replace the cache by a copy after the first chunk.
        """
        before = self.cache.get_seq_length()
        expected = self._act(new, ended)
        if chunks:
            self.cache.start_turn(prompt_len=len(new[0]))
        elif not self.starts and before:
            self.cache.start_turn()
        for start, stop in zip([0, *chunks], [*chunks, len(new[0])], strict=True):
            logits = self._forward([row[start:stop] for row in new], call)
            if stop < len(new[0]):
                self._refuses_amid_chunks()
                if fork and not start:
                    self._go_on_with(copy.deepcopy(self.cache))
        self._acted()
        self.assert_close(logits[:, -1], torch.stack(expected))

    def generate(
        self,
        new: Columns,
        ended: Sequence[int],
        *,
        count: int,
        ends: Sequence[int] = (),
        alone: bool = False,
        drafts: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """Runs a turn by `generate`; `alone` gives the new tokens alone, with a mask over all."""
        before = self.cache.get_seq_length()
        expected = self._act(new, ended)
        whole, mask = tensors(self.columns)
        ids = whole[:, before:] if alone else whole
        output: Any = self.model.generate(
            ids,
            attention_mask=mask,
            cache=self.cache,
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            eos_token_id=list(ends) or None,
            pad_token_id=PAD_TOKEN_ID,
            prompt_lookup_num_tokens=drafts,
            prefill_chunk_size=chunk,
        )
        said = output.sequences[:, ids.shape[1] :].tolist()
        self._acted()
        assert len(said[0]) == count or ends
        self.assert_close(output.logits[0], torch.stack(expected))
        # The last token has not been read.
        self._fed_one_by_one([row[:-1] for row in said], torch.stack(output.logits, dim=1)[:, 1:])

    def append(self, new: Columns, call: Call) -> None:
        """Runs a forward between two turns, which appends its tokens."""
        self._fed(new, self._forward(new, call))

    def start_turn(self) -> None:
        self.cache.start_turn()
        self.starts = True

    def _act(self, new: Columns, ended: Sequence[int]) -> list[Tensor]:
        """Lets the reference read a prompt and returns its logits, one tensor per row."""
        if not self.rows:
            self.rows = [self.new_row() for _ in new]
            self.columns = [[] for _ in new]
        for row, columns, count in zip(self.rows, self.columns, ended, strict=False):
            row.take_back(count)
            columns[len(columns) - count :] = [None] * count
        logits = []
        for row, columns, tokens in zip(self.rows, self.columns, new, strict=True):
            logits.append(row.act([token for token in tokens if token is not None]))
            columns.extend(tokens)
        return logits

    def _acted(self) -> None:
        self.starts, self.filled = False, True
        self._chosen()

    def _chosen(self) -> None:
        """Records that layers have just evicted, so that nothing has been appended since."""
        self.appended = 0
        held = [
            [len(head) for row in self.rows for head in row.cache[layer]]
            for layer in range(self.num_layers)
        ]
        self.widths = [max(lengths) for lengths in held]

    def _fed_one_by_one(self, new: Columns, logits: Tensor) -> None:
        """Calls `_fed` for each column alone, as each came in its own forward."""
        for step in range(len(new[0])):
            self._fed([row[step : step + 1] for row in new], logits[:, step : step + 1])

    def _fed(self, new: Columns, logits: Tensor) -> None:
        """Feeds columns to the reference and compares logits `[batch, at most new_len, vocab]`."""
        for index, (row, columns, tokens) in enumerate(
            zip(self.rows, self.columns, new, strict=True)
        ):
            columns.extend(tokens)
            for step, expected in enumerate(row.feed_all(tokens)):
                from_end = step - len(tokens)
                if expected is not None and -from_end <= logits.shape[1]:
                    self.assert_close(logits[index, from_end], expected)
        self.appended += len(new[0])
        self.filled = True
        settled = [row.settle() for row in self.rows]
        if any(settled):
            self._chosen()

    @torch.no_grad()
    def _forward(self, new: Columns, call: Call) -> Tensor:
        """Runs a forward and returns its logits `[batch, at most new_len, vocab]`."""
        seen = self.cache.get_seq_length()
        ids, valid = tensors(new)
        # A prompt's columns are in `columns` before they are read, those appended are not.
        mask = torch.cat([tensors(self.columns)[1][:, :seen], valid], dim=1)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if call.embeds:
            inputs["inputs_embeds"] = self.model.get_input_embeddings()(inputs.pop("input_ids"))
        if call.positions:
            inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, seen:]
        if not call.mask and bool(mask.all()):
            del inputs["attention_mask"]
        inputs[CACHE] = self.cache
        if call.keep:
            inputs["logits_to_keep"] = call.keep
        if call.states:
            inputs["output_hidden_states"] = True
        if self.block is not None:
            output = self.model(**inputs)
        else:
            with self.cache.attached(self.model):
                output = self.model(**inputs)
        if call.states and not self.policy.propagation.restarts:
            assert output.hidden_states[0].shape[:2] == ids.shape  # whatever is dropped later
        logits: Tensor = output.logits
        return logits

    def _refuses_amid_chunks(self) -> None:
        with pytest.raises(ValueError, match="while a prompt is read in chunks"):
            self.cache.crop(-1)
        with pytest.raises(ValueError, match="while a prompt is read in chunks"):
            self.cache.reorder_cache(torch.tensor([0]))

    def close(self) -> None:
        if self.block is not None:
            self.block.close()
            self.block = None

    def _go_on_with(self, cache: PolicyCache) -> None:
        self.close()
        self.cache = cache
