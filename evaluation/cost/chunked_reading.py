"""Compute the bytes in use while a prompt is read in chunks."""

from __future__ import annotations

import attrs

from kvpolicy.evaluation.cost.activations import Activations, LayerActivations
from kvpolicy.evaluation.cost.chunk_attention import ChunkAttention
from kvpolicy.evaluation.cost.reading import Reading
from kvpolicy.integrations.transformers.forward.chunk_windows import MIN_WINDOWS
from kvpolicy.integrations.transformers.forward.chunks import sums_over_all
from kvpolicy.integrations.transformers.forward.narrowing import LARGEST_SHARE
from kvpolicy.integrations.transformers.forward.stage import PrefillStage, stages_of

STATE_BYTES = 4
# Bytes of a chunk's token: its id and position, for the stages that read it at the prompt's end.
INPUT_BYTES = 2 * 8


@attrs.frozen
class _Pieces:
    """The token counts of a chunked reading: in all, in one forward pass, and in the last one.

    Args:
        total: All of them.
        chunk: The most that one forward reads.
        last: What its last forward reads.
    """

    total: int
    chunk: int
    last: int

    @property
    def before_last(self) -> int:
        """The number of tokens in the last but one forward pass; 0 if there is only one."""
        return min(self.chunk, self.total - self.last)


@attrs.define
class ChunkedReading(Reading):
    """The memory it takes to read a prompt chunk by chunk under a policy.

    The layers of the first stage have memory for the whole prompt from the first chunk on, and
    hold all of it until the forward that ends it is over, so that a failure can be undone. Of a
    long prompt, layers with a window hold what the window sees.

    Args:
        chunk: Tokens of a forward, fewer than the prompt has.
    """

    chunk: int

    def most(self) -> int:
        """Return the peak bytes in use while the prompt is read in chunks."""
        stages = stages_of(self.policy, self.shape.num_layers, self._few_go_on)
        peak = beside = 0
        reaching = self.context_len
        for number, stage in enumerate(stages):
            arriving = self._reaching_stage(stages, number)
            # The same share of tokens goes on from the last chunk as from the others.
            last = self.context_len - (-(-self.context_len // self.chunk) - 1) * self.chunk
            own = max(round(last * arriving / self.context_len), 1)
            pieces = _Pieces(arriving, self.chunk, min(own, arriving))
            resumes = number > 0 and stages[number - 1].looks and not self._restarts
            most, stored = self._stage(stage, pieces, reaching, number=number, resumes=resumes)
            peak = max(peak, beside + most)
            beside += stored
            reaching = arriving
        inputs = (len(stages) > 1) * INPUT_BYTES * self.context_len
        return peak + inputs

    def when_read(self) -> int:
        """Return the bytes in use once the prompt is read, buffers for chunks included."""
        whole = self.context_len + self.room
        return sum(
            self.stored(index) if self._rolls(index) else whole * size
            for index, size in enumerate(self.token_bytes)
        )

    @property
    def _restarts(self) -> bool:
        return self.policy.propagation.restarts

    def _passes(self) -> list[list[float]]:
        propagation = self.policy.propagation
        return [
            list(rates)
            for rates in propagation.prefill_passes(self.shape.num_layers, self.context_len)
        ]

    def _few_go_on(self, index: int) -> bool:
        if not self._is_plain(index):
            return False
        if self.policy.propagation.decides_by_content:
            return True
        return self._passes()[0][index + 1] <= LARGEST_SHARE

    def _reaching_stage(self, stages: tuple[PrefillStage, ...], number: int) -> int:
        """Return how many prompt tokens reach a stage, a run of layers between two drops."""
        if not number:
            return self.context_len
        rates = self._passes()[-1]
        first = 0 if self._restarts else min(stages[number - 1].last + 1, len(rates) - 1)
        return max(int(rates[first] * self.context_len + 1e-6), 1)

    def _stage(
        self, stage: PrefillStage, pieces: _Pieces, before: int, *, number: int, resumes: bool
    ) -> tuple[int, int]:
        """Return the peak bytes while a run of layers reads all chunks, and those held after it.

        Args:
            stage: The stage.
            pieces: What it reads.
            before: Tokens that reached the stage before.
            number: Of the stage.
            resumes: Whether its first layer has shown its queries and keys, and decided.
        """
        held_layers = range(stage.first + resumes, stage.last + 1)
        slots = (pieces.total + self.room) * (pieces.before_last > 0)
        buffers = slots * sum(self.token_bytes[i] for i in held_layers if not self._rolls(i))
        buffers += sum(self._window_bytes(i) for i in held_layers) * (pieces.before_last > 0)
        asked = [i for i in held_layers if not self._rolls(i)]
        width = self.shape.hidden_size * self.model.dtype.itemsize
        is_last = stage.last == self.shape.num_layers - 1 and not (self._restarts and not number)
        # Hidden states that enter the stage, and those that leave it, stay until it is read.
        given = before * width * (number > 0 and not (self._restarts and number == 1))
        left = width * (not is_last and not self._restarts)
        looks = stage.looks or (is_last and self._is_plain(stage.last))
        keeps = not (self._restarts and not number)
        peak = 0
        if pieces.before_last:
            new = pieces.before_last
            held = pieces.total - pieces.last - new
            forward = self._forward(new, held)
            # In the first forward, memory is reserved layer by layer.
            had = buffers * (held > 0)
            moments = _Moments(had + given + left * held + (number > 0) * new * width)
            moments.beside += self._sums_held(asked, held)
            remembered = self._queries_held(held)
            moments.beside += remembered * len(asked)
            for index in range(stage.first, stage.last + 1):
                here = forward.layers[index]
                if not held and index in asked:
                    moments.beside += slots * self.token_bytes[index]
                if resumes and index == stage.first:
                    moments.see(self._resumed(index, new, (held + new) / pieces.total), whole=True)
                    continue
                moments.see(
                    here,
                    whole=not (looks and index == stage.last),
                    deciding=self._summing(index, held + new, new) * (index in asked),
                    joined=self._joined(index, held, new),
                )
                if self._rolls(index):  # the earlier window stays until the chunk is read
                    moments.beside += self._window_bytes(index)
                    continue
                moments.beside += self._sums_held([index], held + new)
                moments.beside += self._query_len(new) * self._query_bytes(index)
            joined = remembered * len(asked) * (not self._cuts(new))
            peak = max(moments.most, moments.beside + joined)
        most, stored = self._end(stage, pieces, resumes=resumes, looks=looks, keeps=keeps)
        own = (number > 0) * pieces.last * width
        peak = max(peak, buffers + given + left * (pieces.total - pieces.last) + own + most)
        stays = stored if number else stored + buffers
        return peak, stays

    def _end(
        self, stage: PrefillStage, pieces: _Pieces, *, resumes: bool, looks: bool, keeps: bool
    ) -> tuple[int, int]:
        """Return the peak bytes while a run of layers reads the last chunk, and those it stores."""
        held = pieces.total - pieces.last
        forward = self._forward(pieces.last, held)
        layers = [i for i in range(stage.first + resumes, stage.last + 1) if not self._rolls(i)]
        moments = _Moments(self._sums_held(layers, held))
        moments.beside += sum(self._queries_held(held) * self._looks(i) for i in layers)
        stored = 0
        for index in range(stage.first, stage.last + 1):
            if resumes and index == stage.first:
                moments.see(self._resumed(index, pieces.last, 1), whole=True)
                continue
            # The earlier chunks are joined with the last one, then cut and put in order.
            shown = self._looks(index) * self._query_bytes(index) * (not self._rolls(index))
            shown *= (not self._sums) * (
                self._queries_held(held) // max(self._query_bytes(index), 1)
                + pieces.last
                + self._shown_len(pieces.total)
            )
            here = forward.layers[index]
            kept = self.stored(index) if keeps and index not in self.waiting else 0
            in_place = held > 0 and self.kept[index] >= pieces.total
            kept *= not in_place
            acts = keeps or index == stage.last
            deciding = acts * self._deciding(index, pieces.total, self._deciding_len(pieces))
            whole = not (looks and index == stage.last)
            moments.see(
                here,
                whole=whole,
                deciding=shown + max(deciding, kept),
                stored=kept,
                joined=self._joined(index, held, pieces.last),
            )
            moments.beside += kept
            stored += kept
        return moments.most, stored

    # Layers that hold only the tokens in their windows.

    def _rolls(self, index: int) -> bool:
        """True if a layer holds only the tokens in its window, whatever the prompt's length."""
        window = self.shape.layers[index].window
        return window is not None and self.context_len > MIN_WINDOWS * window

    def _window_bytes(self, index: int) -> int:
        """Return the bytes of the tokens in a layer's window; 0 if it holds all tokens."""
        window = self.shape.layers[index].window
        if window is None or not self._rolls(index):
            return 0
        return (window - 1) * self.token_bytes[index]

    def _joined(self, index: int, held: int, new: int) -> int:
        """Return the bytes of a windowed layer's held and new keys and values while it attends."""
        if not (held and self._rolls(index)):
            return 0
        return self._window_bytes(index) + new * self.token_bytes[index]

    # The queries that the policy reads.

    @property
    def _sums(self) -> bool:
        return sums_over_all(self.policy)

    def _looks(self, index: int) -> bool:
        return self.policy.num_queries != 0 and bool(self._query_bytes(index))

    def _shown_len(self, seen: int) -> int:
        shown = self.policy.num_queries
        return seen if shown is None else min(shown, seen)

    def _deciding_len(self, pieces: _Pieces) -> int:
        return pieces.last if self._sums else self._shown_len(pieces.total)

    def _cuts(self, new: int) -> bool:
        """True if the policy reads only some of the queries of a last chunk of ``new`` tokens."""
        shown = self.policy.num_queries
        return shown is not None and shown < new

    def _query_len(self, new: int) -> int:
        """Return how many of a chunk's queries every layer stores for the policy."""
        if self._sums or self.policy.num_queries == 0:
            return 0
        return self._shown_len(new) if self._cuts(new) else new

    def _queries_held(self, seen: int) -> int:
        """Return the bytes of queries that a layer stores from all chunks so far."""
        if self._sums:
            return 0
        return self._shown_len(seen) * max(map(self._query_bytes, range(self.shape.num_layers)))

    def _sums_held(self, layers: list[int], key_len: int) -> int:
        """Return the bytes in which the scorer sums attention over all queries so far."""
        if not self._sums:
            return 0
        heads = sum(
            self.shape.layers[i].kv_heads for i in layers if self.shape.layers[i].query_heads
        )
        return heads * key_len * STATE_BYTES

    def _summing(self, index: int, key_len: int, new: int) -> int:
        """Return the bytes needed to add a chunk's attention to the scorer's attention sums."""
        return self._deciding(index, key_len, new) if self._sums else 0

    # The bytes that forwards need.

    def _forward(self, new: int, held: int) -> Activations:
        return self.model.forward(new, held, loops=bool(self._states), chunk=self._attention())

    def _resumed(self, index: int, new: int, share: float) -> LayerActivations:
        """Return the bytes that a layer needs to compute ``new`` tokens with stored keys."""
        held = max(round(share * self.context_len) - new, 0)
        attention = attrs.evolve(self._attention(), has_gaps=True)
        return self.model.forward(new, held, chunk=attention).layers[index]

    def _attention(self) -> ChunkAttention:
        return ChunkAttention(self.device, tuple(each.window for each in self.shape.layers))


@attrs.define
class _Moments:
    """The largest memory use seen so far in the layers of a forward pass.

    Args:
        beside: Bytes that are held beside what is live in the layer at hand.
        most: The most so far.
    """

    beside: int
    most: int = 0

    def see(
        self,
        here: LayerActivations,
        *,
        whole: bool,
        deciding: int = 0,
        stored: int = 0,
        joined: int = 0,
    ) -> None:
        """Update the largest memory use with one layer's measurements.

        Args:
            here: What is live in it.
            whole: Whether it is run to its end, not only until its queries and keys are known.
            deciding: Bytes of deciding.
            stored: Bytes held for the layer when it has decided.
            joined: Bytes of keys and values that were joined for its attention.
        """
        found = [here.observing + deciding + joined]
        if whole:
            found += [here.attending + joined, here.after + stored]
        self.most = max(self.most, self.beside + max(found))
