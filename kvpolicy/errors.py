"""The errors kvpolicy raises where a plain ``ValueError`` or ``TypeError`` would say too little.

Every message names the argument, what it must be, what came and, where there is one, the remedy.
"""


class KVPolicyError(ValueError):
    """Base of the package's own errors: catch it to catch them all."""


class ShapeError(KVPolicyError):
    """A tensor's axes do not fit together; the message names axes and sizes."""


class UnknownPolicyError(KVPolicyError):
    """No policy or part is registered under a name; the message lists those that are."""


class NotAttachedError(KVPolicyError):
    """A cache whose policy has to reach the model was used without being attached to it."""


class UnsupportedModelError(KVPolicyError):
    """The model has a structure that the policy cannot be applied to without being wrong."""


class UnsupportedGenerationError(KVPolicyError):
    """A mode of generation, or an operation on a cache, that is not right with a policy yet."""
