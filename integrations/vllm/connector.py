"""Define the KV connector with which vLLM serves compressed documents.

It is named in vLLM's own configuration, without a fork or a patch::

    --kv-transfer-config '{"kv_connector": "PolicyConnector", "kv_role": "kv_consumer",
        "kv_connector_module_path": "kvpolicy.integrations.vllm.connector",
        "kv_connector_extra_config": {"documents": "DIR", "resident_gib": 4}}'

vLLM builds it once in the scheduler and once in each worker.
"""

import re
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpolicy.integrations.vllm.folder import DocumentFolder
from kvpolicy.integrations.vllm.loading import DocumentLoader, Writer, own_heads
from kvpolicy.integrations.vllm.scheduling import DocumentScheduler, Load
from kvpolicy.integrations.vllm.served_model import ServedModel

RESIDENT_GIB = 4.0


@attrs.define
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """The loads of one scheduler step, which the scheduler sends to the workers."""

    loads: list[Load]


class PolicyConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A KV connector that loads compressed documents into requests that name them.

    Its configuration is ``documents``, the folder, and ``resident_gib``, how much memory each
    worker may use to keep documents for the next requests.

    Raises:
        ValueError: The server is configured in a way in which documents cannot be served right.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_server(vllm_config, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        given = extra("documents", None)
        if not isinstance(given, str):
            raise ValueError(
                "kv_connector_extra_config must have documents, the folder of the documents, got "
                f"{given!r}"
            )
        self._folder = DocumentFolder(Path(given))
        self._resident_bytes = int(float(extra("resident_gib", RESIDENT_GIB)) * 2**30)
        self._loader: DocumentLoader | None = None
        if role == KVConnectorRole.SCHEDULER:
            served = vllm_config.model_config
            self._scheduler = DocumentScheduler(
                self._folder,
                ServedModel.named(served.model, served.hf_text_config, served.dtype),
                bool(vllm_config.cache_config.enable_prefix_caching),
            )

    # The scheduler's side.

    def on_new_request(self, request: Any) -> None:
        """See `DocumentScheduler.add`."""
        self._scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `DocumentScheduler.match`."""
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `DocumentScheduler.allocate`."""
        (block_ids,) = blocks.get_block_ids()
        self._scheduler.allocate(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the loads that were planned in this step."""
        return Loads(self._scheduler.take_loads())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a finished request; its blocks may be freed at once."""
        self._scheduler.finish(request.request_id)
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Record the block tensors of this worker's layers."""
        parallel = self._vllm_config.parallel_config
        layers = self._vllm_config.compilation_config.static_forward_context
        device = next(iter(kv_caches.values())).device
        self._loader = DocumentLoader(
            self._folder,
            {_index(name): _writer(layers[name]) for name in kv_caches},
            own_heads(
                get_tensor_model_parallel_rank(),
                parallel.tensor_parallel_size,
                self._vllm_config.model_config.get_total_num_kv_heads(),
            ),
            self._vllm_config.cache_config.block_size,
            device,
            self._resident_bytes,
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step, without waiting for them."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, Loads)
        if meta.loads:
            assert self._loader is not None
            self._loader.start(meta.loads)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report the requests whose loads have finished."""
        if self._loader is None:
            return KVConnectorTransferResults()
        ended, failed = self._loader.poll()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after its load has finished."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: documents are only read."""

    def wait_for_save(self) -> None:
        """Do nothing: documents are only read."""

    def shutdown(self) -> None:
        """Stop reading documents."""
        if self._loader is not None:
            self._loader.close()


def _check_server(vllm_config: Any, kv_cache_config: Any) -> None:
    """Check that vLLM's configuration lets every request for a document be answered correctly."""
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "fail":
        raise ValueError(
            f"kv_load_failure_policy must be 'fail' with PolicyConnector, got {policy!r}: what is "
            "not loaded would be computed from placeholders"
        )
    if vllm_config.speculative_config is not None:
        raise ValueError(
            "speculative_config must be None with PolicyConnector: drafts are made from prompt "
            "ids or from a draft model's own keys, and a document has only placeholders"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ValueError(
                f"{name} must be 1 with PolicyConnector, got {getattr(parallel, name)}: a block "
                "must hold consecutive tokens"
            )
    stored = vllm_config.cache_config.cache_dtype
    own = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if stored not in ("auto", own):
        raise ValueError(
            f"kv_cache_dtype must be 'auto' with PolicyConnector, got {stored!r}: quantised "
            "blocks are not supported"
        )
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not _is_full(specs[0]):
        raise ValueError(
            "every layer of the model must have full attention with PolicyConnector, got "
            f"{[type(each).__name__ for each in specs]}"
        )


def _is_full(spec: Any) -> bool:
    windows = (getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return type(spec) is FullAttentionSpec and not any(windows)


def _index(layer_name: str) -> int:
    """Return the index of a layer in the model, as in ``model.layers.3.self_attn.attn``."""
    (found,) = re.findall(r"\.(\d+)\.", layer_name)
    return int(found)


def _writer(layer: Any) -> Writer:
    """Return the attention backend's function that writes keys and values into blocks."""

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    return torch.no_grad()(write)
