"""Serve compressed documents from vLLM: read once under a policy, answered from by a server.

Only `kvpolicy.integrations.vllm.connector` imports vLLM.
"""

from kvpolicy.integrations.vllm.document import ServedDocument
from kvpolicy.integrations.vllm.exporting import export
from kvpolicy.integrations.vllm.files import DocumentError

__all__ = ["DocumentError", "ServedDocument", "export"]
