"""Describe the served model, to decide which documents fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from kvpolicy.integrations.vllm.document import ServedDocument
from kvpolicy.integrations.vllm.files import DocumentError


@attrs.define(eq=False)
class ServedModel:
    """A served model, by the arguments of `ServedDocument.check`; remembers what fits it."""

    hf_config: Any
    dtype: str
    checkpoint: Path | None = None
    _verdicts: dict[str, str | None] = attrs.field(factory=dict, init=False)

    @staticmethod
    def named(name: str, hf_config: Any, dtype: object) -> ServedModel:
        """Describe a model from its folder, or from its Hub name if it was downloaded."""
        return ServedModel(hf_config, str(dtype).removeprefix("torch."), _checkpoint(name))

    def check(self, document: ServedDocument) -> None:
        """Check that a document fits the model."""
        if document.digest not in self._verdicts:
            try:
                document.check(self.hf_config, dtype=self.dtype, checkpoint=self.checkpoint)
                self._verdicts[document.digest] = None
            except DocumentError as error:
                self._verdicts[document.digest] = str(error)
        reason = self._verdicts[document.digest]
        if reason is not None:
            raise DocumentError(reason)


def _checkpoint(name: str) -> Path | None:
    """Return the local folder of a model's weights; None if there is none. The Hub is not asked."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
