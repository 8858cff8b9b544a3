"""Compiles kernels for GPUs that need not be here; prints what each takes.

A process of its own: where the interpreter runs kernels, they cannot be compiled.
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

from megabatch.similarity.backends.triton import (
    paired,
    ranking,
    sigmoid,
    softmax_backward,
    softmax_forward,
)

POINTERS = {
    "parts": "*fp32",
    "sums": "*fp64",
    "row_ids": "*i64",
    "column_ids": "*i64",
    "target": "*i64",
    "above": "*i64",
    "equal": "*i64",
    "row_ranges": "*i64",
    "column_ranges": "*i64",
    "order": "*i64",
} | dict.fromkeys(
    (
        "scale",
        "bias",
        "weight",
        "total",
        "units",
        "factor",
        "inner",
        "references",
        "tops",
        "states",
        "result",
        "score",
    ),
    "*fp32",
)
POINTERS |= dict.fromkeys(
    ("row_sums", "column_sums", "row_state", "column_state", "row_pull", "column_pull"), "*fp32"
)
STACKS = dict.fromkeys(("rows", "columns", "gradient", "drows", "dcolumns", "out"), "*fp32")
TILE = {"BM": 128, "BN": 128, "BK": 64, "R": 1, "GROUP": 32, "SPLIT": 1, "GRADIENT": True}
MASKED = {"IDS": True, "WEIGHT": True, "DIAGONAL": 0, "GAIN": 32768.0}
PLAIN = {"IDS": False, "WEIGHT": False, "DIAGONAL": 0, "GAIN": 1.0}
ABSENT = dict.fromkeys(("weight", "row_ids", "row_ranges", "column_ids", "column_ranges"))
SIDES = {"IDS": False, "CEILING": False, "COLUMNS": True, "ceiling": None, "DIAGONAL": 2}
SETTLE = {"SIZE": 1024, "P": 64, "B": 128, "OWN": False, "POSITIVES": True, "IDS": True}
WHOLE, HALF = {"TRIANGLE": False}, {"TRIANGLE": True}
RANKS = {"PART": ranking.PART, "GROUP": ranking.GROUP}
FIND = RANKS | {"FIND": True, "IDS": False} | dict.fromkeys(("above", "equal"))
COUNT = RANKS | {"FIND": False}
ROWS = {"B": 16, "BD": 128, "ORDER": True, "UNITS": True, "INNER": True, "GAIN": 32768.0}
#: name -> (kernel, dtype, warps, constants)
KERNELS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "tile": (sigmoid.tile, "bf16", 4, TILE | PLAIN | ABSENT | {"EVEN": True}),
    "tile, masked": (sigmoid.tile, "fp16", 4, TILE | MASKED | {"EVEN": False}),
    "exact": (sigmoid.exact, "bf16", 16, TILE | MASKED | {"CHUNK": 128, "ALL": False}),
    "clip": (
        softmax_forward.tile,
        "bf16",
        4,
        TILE | ABSENT | SIDES | WHOLE | {"R": 8, "EVEN": True},
    ),
    "clip, half": (
        softmax_forward.tile,
        "bf16",
        4,
        TILE | ABSENT | SIDES | HALF | {"R": 8, "EVEN": False},
    ),
    "settle, half": (softmax_forward.settle, "bf16", 8, TILE | SIDES | SETTLE | HALF),
    "clip, ds": (softmax_backward.tile, "bf16", 4, TILE | ABSENT | SIDES | WHOLE),
    "clip, ds, half": (softmax_backward.tile, "fp16", 4, TILE | ABSENT | SIDES | HALF),
    "find": (ranking.ranks, "bf16", 4, TILE | ABSENT | FIND),
    "count": (ranking.ranks, "bf16", 4, TILE | ABSENT | COUNT | {"IDS": False}),
    "scores": (ranking.scores, "bf16", 8, TILE | ABSENT | {"GROUP": ranking.GROUP, "IDS": False}),
    "scores, ids": (ranking.scores, "fp16", 8, TILE | {"GROUP": ranking.GROUP, "IDS": True}),
    "count, ids": (ranking.ranks, "fp16", 8, TILE | COUNT | {"IDS": True}),
    "combine": (softmax_forward.combine, "bf16", 4, {"KINDS": 2, "FINISH": False, "B": 256}),
    "pairs": (paired.losses, "bf16", 4, {"B": 256}),
    "pairs, gradients": (paired.gradients, "bf16", 4, {"B": 256}),
    "keep": (sigmoid.keep, "fp16", 4, ROWS),
    "release": (sigmoid.release, "fp16", 4, ROWS),
}


def compiled(name: str, capability: int) -> dict[str, int]:
    kernel, dtype, warps, constants = KERNELS[name]
    names = kernel.jitted.arg_names
    constants = {key: value for key, value in constants.items() if key in names}
    box = f"tensordesc<{dtype}[128, 64]>"
    features = {"x": box, "y": box, "ds": f"tensordesc<{dtype}[128, 128]>"}
    features |= dict.fromkeys(("features", "kept"), f"*{dtype}")
    features["out"] = "*fp32" if kernel is ranking.scores else f"*{dtype}"
    kinds = features | POINTERS | (STACKS if name.startswith("pairs") else {})
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {key: kinds.get(key, "i32") for key in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, key in enumerate(names)
        if signature[key].startswith("*") or key == "d"
    }
    places = {(names.index(key),): value for key, value in constants.items()}
    made = triton.compile(
        ASTSource(fn=kernel.jitted, signature=signature, constexprs=places, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        # As `configs` has it for a generation.
        options={"num_warps": warps, "num_stages": 3}
        if capability == 90
        else {"num_warps": max(warps, 8), "num_stages": 2},
    )
    return {"shared": made.metadata.shared} | registers(made.asm["cubin"])


def registers(binary: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return {"registers": int(found[1]), "stack": int(found[2])}


if __name__ == "__main__":
    wanted = [(name, int(capability)) for name, capability in (w.split("@") for w in sys.argv[1:])]
    print(json.dumps({f"{n}@{c}": compiled(n, c) for n, c in wanted}))
