"""Compile kernels for GPUs that this machine need not have; print the resources that each takes.

This is a program of its own: a process in which the interpreter runs kernels cannot compile them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from megabatch.models import block_attention, short_attention
from megabatch.similarity.triton import blocks, hopper, paired, sigmoid, soft_targets, softmax

TYPES = (
    dict.fromkeys(("row_ids", "col_ids", "row_ranges", "col_ranges"), "*i64")
    | dict.fromkeys(("target", "above", "equal", "order"), "*i64")
    | dict.fromkeys(("scale", "bias", "ceiling", "weight", "factor", "total", "row_scale"), "*fp32")
    | dict.fromkeys(("references", "group_references", "row_sums", "col_sums"), "*fp32")
    | dict.fromkeys(("row_state", "col_state", "states", "result", "score", "tops"), "*fp32")
    | dict.fromkeys(("row_upstream", "col_upstream", "row_extremes", "col_extremes"), "*fp32")
    | dict.fromkeys(("partials", "teacher_scale", "own", "scale_grad_parts"), "*fp32")
    | dict.fromkeys(("lse", "delta"), "*fp32")
    | {"sums": "*fp64", "seen": "*i1", "seed": "*i64"}
)
STACKS = dict.fromkeys(("rows", "cols", "gradient", "drows", "dcols", "out"), "*fp32")
#: Constants, and arguments that are None, of those kernels that have them.
TILE = {"BK": 64, "ROW_TILES": 1, "GROUP": 32, "EVEN_N": True, "TRIANGLE": False}
TILE |= {"CHUNK": 64, "ALL": False, "COLS": True, "GROUP_ROWS": 1024, "HAS_POSITIVES": True}
TILE |= {"DIAGONAL": 2, "PAIRED": False, "GAIN": 1.0, "GUIDE_BK": 64, "COL_TILES": 8, "EVEN": True}
NO_IDS = dict.fromkeys(("row_ids", "row_ranges", "col_ids", "col_ranges"))
NO_GUIDE = dict.fromkeys(("guide_x", "guide_y", "guide_d"))
PLAIN = TILE | NO_IDS | NO_GUIDE | dict.fromkeys(("weight", "ceiling"))
IDS = TILE | NO_GUIDE | {"ceiling": None, "CHUNK": 128, "GAIN": 32768.0}
LONG, UNEVEN, HALF = {"ROW_TILES": 8}, {"EVEN_N": False, "EVEN": False}, {"TRIANGLE": True}
GUIDED = TILE | {"DIAGONAL": 1, "PAIRED": True, "COLS": False, "col_upstream": None}
GUIDED |= {"col_extremes": None}
TARGETS = TILE | {"DIAGONAL": 1, "GROUP": 8}
TEXTS = {"HEADS": 12, "WIDTH": 64, "BLOCK": 64, "CAUSAL": False, "DROPOUT": 0.1}
SHORT = TEXTS | {"CAUSAL": True, "DROPOUT": 0.0, "seen": None, "seed": None}
BLOCKS = SHORT | {"ROWS": 64, "PARTLY": False, "REST": 16, "CAUSAL": False, "STAGES": 3}
ROWS = {"ROWS": 16, "COLS": 128, "CHOOSE": True, "GAIN": 32768.0}
#: name -> (kernel, dtype, warps, constants)
KERNELS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "sigmoid": (sigmoid.unmasked_tiles, "bf16", 4, PLAIN),
    "sigmoid, ids": (sigmoid.unmasked_tiles, "fp16", 4, IDS | UNEVEN),
    "sigmoid, masked": (sigmoid.masked_tiles, "bf16", 16, IDS),
    "clip": (softmax.unmasked_tiles, "bf16", 4, PLAIN | LONG),
    "clip, half": (softmax.unmasked_tiles, "bf16", 4, PLAIN | LONG | UNEVEN | HALF),
    "clip, ds": (softmax.unmasked_gradients, "bf16", 4, PLAIN),
    "clip, ds, half": (softmax.unmasked_gradients, "fp16", 4, PLAIN | HALF),
    "clip, guided": (softmax.unmasked_tiles, "bf16", 4, GUIDED | LONG),
    "combine": (softmax.combine_partials, "bf16", 8, GUIDED | HALF),
    "clip, guided, ds": (softmax.unmasked_gradients, "bf16", 4, GUIDED),
    "guided, masked ds": (softmax.masked_gradients, "bf16", 8, GUIDED),
    "clip, hopper": (hopper.unmasked_tiles, "bf16", 4, PLAIN | LONG),
    "clip, ds, hopper": (hopper.unmasked_gradients, "fp16", 4, PLAIN),
    "pairs": (paired.losses, "bf16", 4, {"B": 256}),
    "pairs, gradients": (paired.gradients, "bf16", 4, {"B": 256}),
    "scale rows": (blocks.scaled_rows, "fp16", 4, ROWS),
    "short attention": (short_attention.attention_forward, "bf16", 4, SHORT),
    "short attention, gradients": (short_attention.attention_backward, "bf16", 4, SHORT),
    "texts' attention": (short_attention.attention_forward, "bf16", 4, TEXTS),
    "texts' attention, gradients": (short_attention.attention_backward, "bf16", 4, TEXTS),
    "attention": (block_attention.attention_of_blocks, "bf16", 4, BLOCKS),
    "attention of queries": (block_attention.attention_of_queries, "bf16", 4, BLOCKS),
    "attention of keys": (block_attention.attention_of_keys, "bf16", 4, BLOCKS),
    "targets": (soft_targets.forward_tiles, "bf16", 8, TARGETS),
    "targets, small": (soft_targets.forward_tiles, "bf16", 8, TARGETS | {"BK": 32}),
    "targets, combine": (soft_targets.combine_partials, "bf16", 4, TARGETS),
    "targets, ds": (soft_targets.backward_tiles, "bf16", 8, TARGETS),
}


def compiled(name: str, capability: int) -> dict[str, int]:
    kernel, dtype, warps, constants = KERNELS[name]
    names = kernel.jitted.arg_names
    constants = {key: value for key, value in constants.items() if key in names}
    gluon = kernel.jitted.is_gluon()
    box = descriptor(dtype, constants.get("BK", 64), gluon)
    types = TYPES | dict.fromkeys(("features", "out", "qkv", "dout", "dqkv"), f"*{dtype}")
    types |= {"ds": descriptor(dtype, 128, gluon)}
    types |= dict.fromkeys(("x", "y", "guide_x", "guide_y"), box)
    types |= STACKS if name.startswith("pairs") else {}
    if name.startswith("targets"):
        types |= dict.fromkeys(("row_partials", "col_partials"), "*fp32")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {key: types.get(key, "i32") for key in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, key in enumerate(names)
        if signature[key].startswith("*") or key in ("d", "guide_d")
    }
    places = {(names.index(key),): value for key, value in constants.items()}
    made = triton.compile(
        (GluonASTSource if gluon else ASTSource)(kernel.jitted, signature, places, attributes),
        target=GPUTarget("cuda", capability, 32),
        # The defaults of `configs` for this generation.
        options={"num_warps": warps, "num_stages": 3}
        if capability == 90
        else {"num_warps": max(warps, 8), "num_stages": 2},
    )
    return {"shared": made.metadata.shared} | registers(made.asm["cubin"])


def descriptor(dtype: str, columns: int, gluon: bool) -> str:
    """Triton's name of the type of a descriptor; Gluon's has a layout."""
    if not gluon:
        return f"tensordesc<{dtype}[128, {columns}]>"
    layout = gl.NVMMASharedLayout.get_default_for([128, columns], gl.float16)
    return f"tensordesc<{dtype}[128, {columns}],{layout!r}>"


def registers(binary: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return {"registers": int(found[1]), "stack": int(found[2])}


if __name__ == "__main__":
    wanted = [(name, int(capability)) for name, capability in (w.split("@") for w in sys.argv[1:])]
    print(json.dumps({f"{n}@{c}": compiled(n, c) for n, c in wanted}))
