"""Run `kvpolicy export`: read a document under a policy, and write it for vLLM."""

from pathlib import Path
from typing import Annotated

from kvpolicy.evaluation.commands import shared
from kvpolicy.evaluation.commands.shared import option, with_policies
from kvpolicy.evaluation.policy_options import PolicyOptions

DEFAULT = "replaykv"


@with_policies
def export(
    *,
    prompt_file: shared.RequiredPromptFile,
    to: Annotated[Path, option("FILE", "File to write: DIR/NAME.safetensors; requests use NAME.")],
    model: shared.ModelName = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "cpu",
    beyond_positions: shared.BeyondPositions = False,
    chat: shared.Chat = None,
    policies: PolicyOptions,
) -> None:
    """Read a document under a policy, and write what is kept of it for a vLLM server.

    Without --policy, ReplayKV is used, which needs no question, and keeps 20% of the document. All
    heads of all layers keep equally many tokens, as vLLM needs it.
    """
    import attrs
    from rich.console import Console

    from kvpolicy.evaluation.chosen import chosen_variant
    from kvpolicy.evaluation.commands.terminal import load_shown, plain_console
    from kvpolicy.evaluation.readable import (
        check_known,
        check_positions,
        positions_notes,
        reads_chat,
    )
    from kvpolicy.evaluation.texts import read_prompt
    from kvpolicy.integrations.transformers import ReadDocument
    from kvpolicy.integrations.vllm import export as write_document
    from kvpolicy.integrations.vllm.exporting import check_target
    from kvpolicy.registry import factory_of, parameters_of

    names = policies.names or (() if policies.parts else (DEFAULT,))
    if names and "head_uniform" in parameters_of(factory_of(names[0])):
        # vLLM has the same slots for all heads.
        parameters = {"head_uniform": True} | policies.parameters
        policies = attrs.evolve(policies, parameters=parameters)
    chosen = chosen_variant(policies, DEFAULT)
    to.parent.mkdir(parents=True, exist_ok=True)
    check_target(to)
    text = read_prompt(prompt_file)
    loaded = load_shown(model, dtype=dtype, device=device)
    chosen.check_model(loaded.model.config.num_hidden_layers)
    as_chat = reads_chat(loaded, chat)
    ids = loaded.tokenizer(text)["input_ids"]
    check_known(loaded.tokenizer, ids, "prompt")
    check_positions(loaded, len(ids), beyond=beyond_positions)
    with Console(stderr=True).status(f"reading {len(ids):,} tokens"):
        read = ReadDocument(loaded.model, loaded.tokenizer, text, chosen.policy, chat=as_chat)
        document = write_document(read.cache, loaded.model, to, chat=as_chat)
    console = plain_console()
    console.print(
        f"{document.name}: {document.length:,} of {document.read_len:,} tokens held under "
        f"{chosen.policy}, {document.nbytes / 2**20:,.1f} MiB, as "
        f"{'a chat' if as_chat else 'a text'}"
    )
    console.print(f"written to {to}")
    for note in positions_notes(loaded.model, document.read_len):
        console.print(note)
