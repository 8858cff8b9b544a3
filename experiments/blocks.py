"""Whole trainer steps with the blocks' own forward pass and with the parts of the fast one.

    PYTHONPATH=src:benchmarks python experiments/blocks.py --models ViT-B-32 --output $OUT/blocks.json

Variants on one machine, in one process: own, lean (step 1), pooled (1 + 2), short (1 + 2 + 3).
Loss and gradient norm of the first step tell whether they compute the same.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
import traceback
from pathlib import Path
from unittest import mock

import open_clip
import torch

from machinery.steps import Megabatch, make_pairs
from megabatch.data import Batch
from megabatch.models import fast_blocks
from megabatch.training.world import World

ROWS = {"ViT-B-32": 2048, "ViT-B-16": 512, "ViT-L-14": 512}
VARIANTS = ("all", "dynamic", "torch-gelu", "torch-attention")


def patches(variant):
    if variant == "torch-gelu":
        from megabatch.models.gelu import GraphGELU

        yield mock.patch.object(GraphGELU, "forward", torch.nn.GELU.forward)
    if variant == "dynamic":  # one graph for all sizes of micro-batches
        from megabatch.models import blocks

        compile_blocks = blocks.compile_blocks
        yield mock.patch(
            "megabatch.training.trainer.compile_blocks",
            lambda module, varying=(): compile_blocks(module, ["image", "text"]),
        )
    if variant == "old-gelu":
        import old_kernels

        from megabatch.models import mlp

        yield mock.patch.object(mlp, "gelu_values", old_kernels.gelu_values)
        yield mock.patch.object(mlp, "gelu_gradients", old_kernels.gelu_gradients)
    if variant == "torch-attention":
        yield mock.patch.object(fast_blocks, "LONGEST", 64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["ViT-B-32"])
    parser.add_argument("--model-config", type=Path)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--budget", type=float, default=500)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--inductor",
        nargs="*",
        default=[],
        help="options of torch.compile: coordinate_descent_tuning",
    )
    o = parser.parse_args()
    if o.model_config:
        open_clip.add_model_config(o.model_config)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in o.inductor:
        setattr(torch._inductor.config, name, True)
    world, cuda = World(torch.device(o.device)), o.device == "cuda"
    began, found = time.perf_counter(), []
    for model in o.models:
        pairs, took = None, 0.0
        for variant in o.variants:
            if time.perf_counter() - began + took > o.budget:
                print(model, variant, "no time left", flush=True)
                continue
            start = time.perf_counter()
            torch._dynamo.reset()
            stack = contextlib.ExitStack()
            record = {"model": model, "variant": variant, "torch": torch.__version__}
            record["device"] = torch.cuda.get_device_name() if cuda else "cpu"
            try:
                rows = o.rows or ROWS[model]
                settings = {"micro_batch_size": rows, "activation_memory": 0, "torchcompile": True}
                if variant == "fp8":
                    settings["precision"] = "fp8"
                # Graphs are compiled at the first steps: patches stay until the variant's end.
                for patch in patches(variant):
                    stack.enter_context(patch)
                contender = Megabatch(model, o.size, world, settings)
                pairs = pairs or make_pairs(contender.towers, o.size, world)
                batch = Batch(pairs.bytes(), pairs.tokens, torch.arange(o.size))
                step = contender.trainer.train_step
                t = time.perf_counter()
                first = step(batch)
                print("first", time.perf_counter() - t, flush=True)
                if cuda:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                seconds = []
                for _ in range(o.steps):
                    t = time.perf_counter()
                    step(batch)
                    if cuda:
                        torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - t)
                    print(seconds, flush=True)
                best = sorted(seconds)[len(seconds) // 2]
                record |= {
                    "rows": rows,
                    "pairs": o.size,
                    "seconds": seconds,
                    "pairs_s": o.size / best,
                    "loss": first["loss"],
                    "grad_norm": first["grad_norm"],
                    "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0,
                }
                del contender, step, batch
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error)[:500]}"
                traceback.print_exc()
            stack.close()
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
            took = time.perf_counter() - start
            record["took"] = took
            found.append(record)
            print({k: v for k, v in record.items() if k != "seconds"}, flush=True)
            if o.output:
                o.output.parent.mkdir(parents=True, exist_ok=True)
                o.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
