"""Compile the fused kernels for a GPU that need not be there, and print their shared memory."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpolicy import fused

target = GPUTarget("cuda", int(sys.argv[1]), 32)
counts = dict.fromkeys(("group", "count", "length"), "i32")
for kind, dim in (("bf16", 128), ("fp16", 256)):
    given = {"queries": f"*{kind}", "keys": f"*{kind}", "valid": "*u8", "totals": "*fp32"}
    given |= {"scaling": "fp32", "softcap": "fp32"} | counts
    constants = {"DIM": dim, "WIDTH": dim, "CAPPED": True, "SIZE": fused.BLOCK}
    for kernel, more, how in (
        (fused._denominators, {}, {}),
        *((fused._columns, {"found": "*fp32"}, {"LARGEST": each}) for each in (False, True)),
    ):
        fixed = constants | how
        signature = more | given | dict.fromkeys(fixed, "constexpr")
        compiled = triton.compile(ASTSource(kernel, signature, fixed), target=target)
        assert compiled.asm["cubin"]
        print(compiled.metadata.shared)
