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

from megabatch.similarity.triton import paired, ranking, sigmoid, softmax_combine
from megabatch.similarity.triton import soft_target_backward as targets_backward
from megabatch.similarity.triton import soft_target_forward as targets_forward
from megabatch.similarity.triton import softmax_backward as backward
from megabatch.similarity.triton import softmax_forward as forward

IDS = ("row_ids", "col_ids", "row_ranges", "col_ranges", "target", "above", "equal", "order")
FLOATS = (
    *("scale", "bias", "ceiling", "weight", "factor", "total", "row_scale", "scale_grad_parts"),
    *("references", "group_references", "row_sums", "col_sums", "row_state", "col_state"),
    *("row_lse_and_grad", "col_lse_and_grad", "partials", "states", "result", "score", "tops"),
    *("teacher_scale", "row_upstream", "col_upstream", "row_extremes", "col_extremes", "own"),
)
PARTIALS = dict.fromkeys(("row_partials", "col_partials"), "*fp32") | {"flags": "*i32"}
POINTERS = dict.fromkeys(IDS, "*i64") | dict.fromkeys(FLOATS, "*fp32") | {"sums": "*fp64"}
STACKS = dict.fromkeys(("rows", "cols", "gradient", "drows", "dcols", "out"), "*fp32")
TILE = {"BM": 128, "BN": 128, "BK": 64, "ROW_TILES": 1, "GROUP": 32, "SPLIT": 1, "GRADIENT": True}
MASKED = {"IDS": True, "WEIGHT": True, "DIAGONAL": 0, "GAIN": 32768.0}
PLAIN = {"IDS": False, "WEIGHT": False, "DIAGONAL": 0, "GAIN": 1.0}
MASKED_DS = {"CHUNK": 64, "ALL": False, "ROWS": True, "HAS_POSITIVES": True, "LIMIT": 80.0}
ABSENT = dict.fromkeys(("weight", "row_ids", "row_ranges", "col_ids", "col_ranges"))
SIDES = {"IDS": False, "CEILING": False, "COLS": True, "ceiling": None, "DIAGONAL": 2}
COMBINE = {"GROUP_ROWS": 1024, "P": 64, "B": 128, "PAIRED": False, "HAS_POSITIVES": True}
COMBINE |= {"IDS": True}
NO_GUIDE = {"GUIDE": False, "GUIDE_BK": 64} | dict.fromkeys(("guide_x", "guide_y", "guide_d"))
GUIDE = {"GUIDE": True, "CEILING": True, "IDS": True, "DIAGONAL": 1, "PAIRED": True}
WHOLE, HALF = {"TRIANGLE": False}, {"TRIANGLE": True}
CLIP = TILE | ABSENT | SIDES | NO_GUIDE
GUIDED = TILE | WHOLE | {"GUIDE_BK": 64, "COLS": False, "EVEN_N": True} | GUIDE
RANKS = {"COL_TILES": ranking.COL_TILES, "GROUP": ranking.GROUP}
FIND = RANKS | {"FIND": True, "IDS": False} | dict.fromkeys(("above", "equal"))
COUNT = RANKS | {"FIND": False}
SCORES = {"GROUP": ranking.GROUP}
ROWS = {"B": 16, "BD": 128, "ORDER": True, "ROW_SCALE": True, "SCALE_GRAD": True, "GAIN": 32768.0}
MERGE = {"HAS_POSITIVES": True, "TO_LOGSUMEXP": False, "B": 256}
BLOCK = {"BM": 128, "BN": 128, "BK": 64, "GROUP": 8, "DIAGONAL": 1, "EVEN": True, "CHUNK": 32}
BLOCK |= {"B": 128, "P": 16, "LIMIT": 80.0}
#: name -> (kernel, dtype, warps, constants)
KERNELS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "sigmoid": (sigmoid.unmasked_tiles, "bf16", 4, TILE | PLAIN | ABSENT | {"EVEN_N": True}),
    "sigmoid, ids": (sigmoid.unmasked_tiles, "fp16", 4, TILE | MASKED | {"EVEN_N": False}),
    "sigmoid, masked": (sigmoid.masked_tiles, "bf16", 16, TILE | MASKED | {"CHUNK": 128, "ALL": 0}),
    "clip": (forward.unmasked_tiles, "bf16", 4, CLIP | WHOLE | {"ROW_TILES": 8, "EVEN_N": True}),
    "clip, half": (forward.unmasked_tiles, "bf16", 4, CLIP | HALF | {"ROW_TILES": 8, "EVEN_N": 0}),
    "combine, half": (
        softmax_combine.combine_partials,
        "bf16",
        8,
        TILE | SIDES | NO_GUIDE | COMBINE | HALF,
    ),
    "clip, ds": (backward.unmasked_tiles, "bf16", 4, CLIP | WHOLE),
    "clip, ds, half": (backward.unmasked_tiles, "fp16", 4, CLIP | HALF),
    "clip, guided": (forward.unmasked_tiles, "bf16", 4, GUIDED | {"ROW_TILES": 8}),
    "guided, combine": (softmax_combine.combine_partials, "bf16", 8, COMBINE | WHOLE | GUIDED),
    "clip, guided, ds": (backward.unmasked_tiles, "bf16", 4, GUIDED),
    "guided, masked ds": (backward.masked_tiles, "bf16", 8, GUIDED | MASKED_DS),
    "find": (ranking.ranks, "bf16", 4, TILE | ABSENT | FIND),
    "count": (ranking.ranks, "bf16", 4, TILE | ABSENT | COUNT | {"IDS": False}),
    "count, ids": (ranking.ranks, "fp16", 8, TILE | COUNT | {"IDS": True}),
    "scores": (ranking.scores, "bf16", 8, TILE | ABSENT | SCORES | {"IDS": False}),
    "scores, ids": (ranking.scores, "fp16", 8, TILE | SCORES | {"IDS": True}),
    "merge": (softmax_combine.merge_states, "bf16", 4, MERGE),
    "pairs": (paired.losses, "bf16", 4, {"B": 256}),
    "pairs, gradients": (paired.gradients, "bf16", 4, {"B": 256}),
    "defer": (sigmoid.defer_grad, "fp16", 4, ROWS),
    "write deferred": (sigmoid.write_deferred_grad, "fp16", 4, ROWS),
    "targets": (targets_forward.unmasked_forward, "bf16", 8, BLOCK),
    "targets, uneven": (targets_forward.unmasked_forward, "bf16", 8, BLOCK | {"EVEN": False}),
    "targets, float32": (targets_forward.unmasked_forward, "fp32", 8, BLOCK | {"BK": 32}),
    "targets, small": (targets_forward.unmasked_forward, "bf16", 8, BLOCK | {"BK": 32}),
    "targets, masked": (targets_forward.masked_forward, "bf16", 8, BLOCK),
    "targets, combine": (targets_forward.combine_partials, "bf16", 4, BLOCK),
    "targets, ds": (targets_backward.unmasked_backward, "bf16", 8, BLOCK),
    "targets, masked ds": (targets_backward.masked_backward, "bf16", 8, BLOCK),
}


def compiled(name: str, capability: int) -> dict[str, int]:
    kernel, dtype, warps, constants = KERNELS[name]
    names = kernel.jitted.arg_names
    constants = {key: value for key, value in constants.items() if key in names}
    box = f"tensordesc<{dtype}[128, {constants.get('BK', 64)}]>"
    features = {"ds": f"tensordesc<{dtype}[128, 128]>"}
    features |= dict.fromkeys(("x", "y", "teacher_x", "teacher_y", "guide_x", "guide_y"), box)
    features |= dict.fromkeys(("features", "deferred"), f"*{dtype}")
    features["out"] = "*fp32" if kernel is ranking.scores else f"*{dtype}"
    types = features | POINTERS | (STACKS if name.startswith("pairs") else {})
    types |= PARTIALS if name.startswith("targets") else {}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {key: types.get(key, "i32") for key in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, key in enumerate(names)
        if signature[key].startswith("*") or key in ("d", "guide_d")
    }
    places = {(names.index(key),): value for key, value in constants.items()}
    made = triton.compile(
        ASTSource(fn=kernel.jitted, signature=signature, constexprs=places, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        # The defaults of `configs` for this generation.
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
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return {"registers": int(found[1]), "stack": int(found[2])}


if __name__ == "__main__":
    wanted = [(name, int(capability)) for name, capability in (w.split("@") for w in sys.argv[1:])]
    print(json.dumps({f"{n}@{c}": compiled(n, c) for n, c in wanted}))
