"""Run the passes of a forward, around the main one that the model itself runs."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import nn

from kvpolicy.integrations.transformers.forward.facts import Call
from kvpolicy.integrations.transformers.forward.pass_run import Passes, PassRun
from kvpolicy.integrations.transformers.forward.passes import KeyUse, Pass, PassEnded
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import held_by, hold_again


@attrs.frozen(eq=False)
class ForwardRun:
    """A forward that is running as a sequence of passes, one of them the model's own call.

    Args:
        passes: Its passes; see `Arrival.passes`.
        call: What it asks for.
        layers: The layers of the cache.
        decoder: The model's decoder.
        begin: Called with every run before it starts.
    """

    passes: Passes
    call: Call
    layers: list[PolicyLayer]
    decoder: nn.Module
    begin: Callable[[PassRun], None]

    def up_to_main(self) -> PassRun:
        """Run the passes before the main pass; return the main pass, ready to start."""
        made = next(self.passes)
        while not made.main:
            made = self.passes.send(self._through(made))
        return self._begun(made)

    def rest(self, main: PassRun) -> None:
        """Run the passes that follow the main pass, which has ended."""
        run = main
        try:
            while True:
                run = self._through(self.passes.send(run))
        except StopIteration:
            self.begin(main)

    def _begun(self, made: Pass) -> PassRun:
        run = PassRun(self.call, self.layers, made)
        self.begin(run)
        return run

    def _through(self, made: Pass) -> PassRun:
        """Run the decoder for a pass other than the main one, until the pass ends."""
        run, discards = self._begun(made), made.at_queries.keys is KeyUse.DISCARD
        before = held_by(run.layers) if discards else ()
        try:
            # `forward` is called directly, since this code runs inside a hook of the decoder. What
            # is discarded is a choice of tokens, which has no gradient.
            with torch.set_grad_enabled(torch.is_grad_enabled() and not discards):
                self.decoder.forward(**made.incoming.arguments)
        except PassEnded:
            if not discards:
                run.finish()
            return run
        finally:
            if discards:  # recurrent layers have read the tokens
                hold_again(run.layers, before)
        raise AssertionError("the layer at which the pass ends was never reached")
