"""Decide why a request cannot be answered from a document.

Blocks are known to vLLM's prefix cache by ids and salt alone. If placeholders were ever computed as
a text under the document's salt, every later request for the document would get these blocks,
without a word. So a request that has anything to do with a document is served from it or refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.integrations.vllm.document import PARAMETER, SALT, ServedDocument
from kvpolicy.integrations.vllm.files import DocumentError
from kvpolicy.integrations.vllm.folder import DocumentFolder
from kvpolicy.integrations.vllm.served_model import ServedModel


def named_document(parameters: object) -> Any:
    """Return the document's name in a request's ``kv_transfer_params``; None if there is none."""
    return parameters.get(PARAMETER) if isinstance(parameters, Mapping) else None


def concerns_documents(request: Any, folder: DocumentFolder) -> bool:
    """True if a vLLM request names a document, has the salt of one, or its placeholders."""
    return (
        named_document(request.kv_transfer_params) is not None
        or (request.cache_salt or "").startswith(SALT)
        or folder.begun_by(request.prompt_token_ids or ()) is not None
    )


def unnamed(begun: str | None) -> str:
    """Return why a request without a document's name is refused.

    It begins with the placeholders of document ``begun``, or has a salt if this is None.
    """
    what = f"the placeholders of document {begun!r}" if begun else "the salt of a document"
    return (
        f"the request has {what} but does not name it; give "
        f'"kv_transfer_params": {{"{PARAMETER}": NAME}}'
    )


def document_of(request: Any, folder: DocumentFolder, model: ServedModel) -> ServedDocument:
    """Return the document from which vLLM's request is answered, or raise why it is refused."""
    ids = request.prompt_token_ids
    name = named_document(request.kv_transfer_params)
    if name is None:
        raise DocumentError(unnamed(folder.begun_by(ids or ())))
    document = folder.get(name)
    model.check(document)
    if request.prompt_embeds is not None or ids is None:
        raise DocumentError(f"the prompt must be token ids to be served from {name!r}")
    check_prompt(document, ids, request.cache_salt)
    for reason, refused in _unserved(request).items():
        if refused:
            raise DocumentError(f"a request for document {name!r} must not have {reason}")
    return document


def check_prompt(document: ServedDocument, ids: Sequence[int], salt: object) -> None:
    """Check that a prompt begins with a document's placeholders, has its salt and a question."""
    name, length = document.name, document.length
    if salt != document.cache_salt:
        what = "none" if not salt else "another one"
        raise DocumentError(
            f"cache_salt must be that of document {name!r}, got {what}; load the document again, "
            "it may have been replaced"
        )
    if tuple(ids[:length]) != document.placeholders:
        raise DocumentError(
            f"the prompt must begin with the {length} placeholders of document {name!r}; make it "
            "by ServedDocument.request"
        )
    if len(ids) == length:
        raise DocumentError(f"a question must follow the placeholders of document {name!r}")


def _unserved(request: Any) -> dict[str, bool]:
    """Return, for each feature that a document request must not use, whether it uses it."""
    sampling = request.sampling_params
    if sampling is None:
        return {"pooling_params: documents are for generation": True}
    return {
        "prompt_logprobs: the document's tokens are not computed": (
            sampling.prompt_logprobs is not None
        ),
        "repetition_penalty: it reads the prompt's ids, which are placeholders": (
            sampling.repetition_penalty not in (None, 1)
        ),
        "a LoRA adapter: the document was read without it": request.lora_request is not None,
        "images or other media": bool(request.mm_features),
        "an input that is continued (resumable)": bool(request.resumable),
    }
