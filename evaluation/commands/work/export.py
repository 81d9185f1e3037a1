"""Do the work of `kvpolicy export`."""

from __future__ import annotations

import attrs
from rich.console import Console

from kvpolicy.evaluation.chosen import chosen_variant
from kvpolicy.evaluation.commands.export import ExportOptions
from kvpolicy.evaluation.commands.terminal import load_shown, plain_console
from kvpolicy.evaluation.defaults import default_tsp_layer
from kvpolicy.evaluation.prompt_tokens import reads_chat
from kvpolicy.evaluation.readable import check_known, check_positions, positions_notes
from kvpolicy.evaluation.text_files import read_prompt
from kvpolicy.evaluation.variant import Variant
from kvpolicy.integrations.transformers import ReadDocument
from kvpolicy.integrations.vllm import export
from kvpolicy.integrations.vllm.exporting import check_target
from kvpolicy.registry import factory_of, parameters_of

DEFAULT = "replaykv"


def run_export(options: ExportOptions) -> None:
    """Do what `kvpolicy export` does."""
    chosen = _variant(options)
    policy = chosen.policy
    options.to.parent.mkdir(parents=True, exist_ok=True)
    check_target(options.to)
    text = read_prompt(options.prompt_file)
    loaded = load_shown(options.model, dtype=options.dtype, device=options.device)
    chosen.check_model(loaded.model.config.num_hidden_layers)
    chat = reads_chat(loaded, options.chat)
    ids = loaded.tokenizer(text)["input_ids"]
    check_known(loaded.tokenizer, ids, "prompt")
    check_positions(loaded, len(ids), beyond=options.beyond_positions)
    with Console(stderr=True).status(f"reading {len(ids):,} tokens"):
        read = ReadDocument(loaded.model, loaded.tokenizer, text, policy, chat=chat)
        document = export(read.cache, loaded.model, options.to, chat=chat)
    console = plain_console()
    console.print(
        f"{document.name}: {document.length:,} of {document.read_len:,} tokens held under "
        f"{policy}, {document.nbytes / 2**20:,.1f} MiB, as {'a chat' if chat else 'a text'}"
    )
    console.print(f"written to {options.to}")
    for note in positions_notes(loaded.model, document.read_len):
        console.print(note)


def _variant(options: ExportOptions) -> Variant:
    """Build the policy that the options ask for."""
    own = {"tsp_rate": options.tsp_rate, "tsp_layer": options.tsp_layer}
    given = {name: value for name, value in own.items() if value is not None}
    assigned = options.policies.assignments | given
    names = options.policies.names or (() if options.policies.parts else (DEFAULT,))
    if names and "head_uniform" in parameters_of(factory_of(names[0])):
        assigned = {"head_uniform": True} | assigned  # vLLM has the same slots for all heads
    policies = attrs.evolve(options.policies, assignments=assigned)
    return chosen_variant(policies, DEFAULT, tsp_layer=default_tsp_layer(options.model))
