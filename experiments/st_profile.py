"""Where a step of sentence-transformers' trainer goes: profile of steps 2.. with our loss."""

import sys

sys.path.insert(0, "benchmarks")
import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

import retriever as r

torch.set_num_threads(int(os.environ.get("T", "1")))
opt = argparse.Namespace(
    model="minilm",
    batch_size=int(sys.argv[1]),
    mini_batch_size=1024,
    mini_batch_tokens=int(sys.argv[2]),
    device=sys.argv[3],
    steps=4,
    every=100,
    lr=1e-4,
    compile=False,
    tf32="tf32" in sys.argv,
    kept_mini_batches=int(sys.argv[5]),
)
name = sys.argv[4]
pairs = r.words_and_definitions()
with tempfile.TemporaryDirectory() as f:
    bert = r.random_bert("minilm", pairs, Path(f) / "bert")
    model = r.SentenceTransformer(
        modules=[r.Transformer(str(bert)), r.Pooling(384)], device=opt.device
    )
    tok = r.Tokens(model, [t for p in pairs for t in p])
    print(
        "tokens: first",
        tok.mask[0::2].sum(1).float().mean(),
        tok.mask[1::2].sum(1).float().mean(),
        tok.mask.sum(1).max(),
    )
    trainer = r.library_trainer(model, r.LOSSES[name], pairs[2000:], opt, f)

    class C(r.TrainerCallback):
        n = 0

        def on_step_begin(s, *a, **k):
            s.n += 1
            if opt.device == "cuda":
                torch.cuda.synchronize()
            s.t = time.perf_counter()
            if s.n == 3:
                s.p = torch.profiler.profile()
                s.p.__enter__()

        def on_step_end(s, *a, **k):
            if opt.device == "cuda":
                torch.cuda.synchronize()
            print("step", s.n, time.perf_counter() - s.t)
            if s.n == 3:
                s.p.__exit__(None, None, None)
                key = "self_device_time_total" if opt.device == "cuda" else "self_cpu_time_total"
                print(s.p.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))
                if opt.device == "cuda":
                    print(
                        s.p.key_averages().table(
                            sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60
                        )
                    )

    trainer.add_callback(C())
    trainer.train()
