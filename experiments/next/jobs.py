"""Measurements one after the other on each GPU, the most important first, as many as time allows.

    OUT=/tmp/out python experiments/next/jobs.py --seconds 580 [--study GPUS] [--only NAME ...]

A job starts on the first free GPU if its expected seconds are left, and is ended at the deadline.
Jobs of one `pin` share a GPU, as H200s differ by 5%: what is compared is measured on one. Those that
are done are named in `--done` (a file; the next call on the same machine leaves them out).
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

OUT = Path(os.environ["OUT"])
BENCH = "python3 benchmarks/"


class Job(NamedTuple):
    name: str
    seconds: float  # on an H200, compilation included
    command: str
    pin: int | None = None  # the GPU
    memory: int = 70  # GB that it needs


def throughput(name: str, rest: str) -> str:
    return f"{BENCH}throughput.py --output {OUT}/{name}.json {rest}"


def retriever(name: str, rest: str) -> str:
    return f"{BENCH}retriever.py --lr 2e-4 --output {OUT}/{name}.json {rest}"


L, B16 = "--models ViT-L-14", "--models ViT-B-16"
OPEN = "--contenders openclip-compiled"
JOBS = (
    Job("siglip-small", 50, f"{BENCH}single_gpu.py --only 20 --only 21 --output {OUT}/single-gpu-siglip.json"),
    Job("losses", 240, f"{BENCH}losses.py --budget-seconds 230 --output {OUT}/losses.json"),
    Job("b16-rows", 330, throughput("b16-rows", f"{B16} --batch-sizes 32768 {OPEN} --micro-batch-sizes 512 1024 2048 --steps 3"), None, 130),
    Job("l14-rows", 330, throughput("l14-rows", f"{L} --batch-sizes 4096 {OPEN} --micro-batch-sizes 128 256 512 --steps 3"), None, 130),
    Job("st-bert-library", 400, retriever("st-bert-library", "--mini-batch-tokens 65536 --model bert-base --steps 20 --every 5 --contenders sentence-transformers")),
    Job("st-bert-ours", 160, retriever("st-bert-ours", "--mini-batch-tokens 65536 --model bert-base --steps 20 --every 5 --contenders megabatch --kept-mini-batches 8")),
    # The library not compiled, at the size that was its best compiled (65,536 is in retriever-60-steps).
    Job("st-library-131072", 90, retriever("st-library-131072", "--mini-batch-tokens 131072 --steps 8 --every 8 --contenders sentence-transformers")),
    # Texts cut, at the best rows of those above; B/16 at 512 rows of 32,768 is measured.
    Job("b16-short", 120, throughput("b16-short", f"{B16} --batch-sizes 4096 --contenders openclip-compiled-short --micro-batch-sizes 1024 --steps 3"), None, 130),
    Job("l14-short", 120, throughput("l14-short", f"{L} --batch-sizes 4096 --contenders openclip-compiled-short --micro-batch-sizes 256 --steps 3"), None, 130),
    Job("l14-32768", 240, throughput("l14-32768", f"{L} --batch-sizes 32768 {OPEN} --micro-batch-sizes 256 --steps 3"), None, 130),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=580)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--study", type=int, default=0, help="the last GPUs, for batch_study.py")
    parser.add_argument("--data", default="texts icons", help="of the study")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--done", type=Path, default=Path("/tmp/done.txt"))
    o = parser.parse_args()
    ends = time.monotonic() + o.seconds
    if not o.gpus:
        o.gpus = len(subprocess.run(["nvidia-smi", "-L"], text=True, stdout=subprocess.PIPE).stdout.splitlines())
    total = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], text=True, stdout=subprocess.PIPE).stdout.split()  # fmt: skip
    memory = int(total[0]) / 1000 if total else 0
    done = set(o.done.read_text().split()) if o.done.exists() else set()
    waiting = [j for j in JOBS if j.name not in done and j.memory < memory and (not o.only or j.name in o.only)]
    lock, workers = threading.Lock(), o.gpus - o.study

    def take(gpu: int) -> Job | None:
        left = ends - time.monotonic() - 5
        with lock:
            for job in waiting:
                pinned = job.pin is not None and job.pin % workers != gpu
                if job.seconds <= left and not pinned:
                    waiting.remove(job)
                    return job
        return None

    def run(name: str, command: str, gpus: str) -> int:
        began, environment = time.monotonic(), {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
        limit = max(1.0, ends - began)
        with (OUT / f"{name}.txt").open("w") as log:
            code = subprocess.run(["timeout", "-k", "3", f"{limit:.0f}", *shlex.split(command)], stdout=log, stderr=subprocess.STDOUT, env=environment).returncode  # fmt: skip
        print(f"{name}: rc {code}, {time.monotonic() - began:.0f} s on GPU {gpus}", flush=True)
        return code

    def work(gpu: int) -> None:
        while job := take(gpu):
            if run(job.name, job.command, str(gpu)) == 0:
                with lock, o.done.open("a") as file:
                    file.write(job.name + "\n")

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in range(workers)]
    if o.study:
        own = ",".join(map(str, range(workers, o.gpus)))
        budget = ends - time.monotonic() + 40
        study = (f"{BENCH}batch_study.py --data {o.data} --icons /tmp/data/icons.npz --texts /tmp/data/texts.npz "
                 f"--output /tmp/bs.json --seeds 1 --gpus {o.study} --budget-seconds {budget:.0f}")  # fmt: skip
        threads.append(threading.Thread(target=run, args=("study", study, own)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    subprocess.run(["cp", "/tmp/bs.json", str(OUT)], stderr=subprocess.DEVNULL)
    for name in sorted(OUT.glob("*.txt")):
        lines = [line for line in name.read_text(errors="replace").splitlines() if line.strip() and "arn" not in line]
        print(f"== {name.name}", *(line[:220] for line in lines[-6:]), sep="\n", flush=True)
    # At most eight files come back.
    subprocess.run(f"cd {OUT} && tar czf all.tgz *.txt *.json && rm -f *.txt *.json", shell=True)


if __name__ == "__main__":
    main()
