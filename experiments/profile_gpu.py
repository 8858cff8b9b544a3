"""Where the host's time of a step of the loss goes. Run from the repository root:

PYTHONPATH=src python experiments/profile_gpu.py [--maxsim] [pairs ...]
"""

import cProfile
import io
import os
import pstats
import statistics
import sys
from time import perf_counter

sys.path.insert(0, os.environ.get("SRC", "src"))
import torch

import megabatch as mb


def inputs(b, d=768):
    g = torch.Generator("cuda").manual_seed(0)
    x, y = (
        torch.nn.functional.normalize(torch.randn(b, d, device="cuda", generator=g), dim=1)
        .to(torch.bfloat16)
        .requires_grad_()
        for _ in range(2)
    )
    return x, y, torch.tensor(14.3, device="cuda", requires_grad=True)


def clip(b):
    x, y, s = inputs(b)
    loss = mb.ClipLoss()
    return lambda: loss(x, y, s), (x, y, s)


def maxsim(b=128):
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.nn.functional.normalize(torch.randn(b, 32, 128, device="cuda", generator=g), dim=-1)
    c = torch.nn.functional.normalize(torch.randn(b, 180, 128, device="cuda", generator=g), dim=-1)
    q, c = (t.to(torch.bfloat16).requires_grad_() for t in (q, c))
    loss = mb.MaxSimLoss(temperature=0.05)
    return lambda: loss(q, c), (q, c)


def profile(name, forward, leaves):
    print(f"\n===== {name} =====", flush=True)

    def clear():
        for t in leaves:
            t.grad = None

    def step():
        clear()
        forward().backward()

    for _ in range(20):
        step()
    torch.cuda.synchronize()
    # 1. with a synchronisation each step
    wall, gpu = [], []
    for _ in range(200):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        t = perf_counter()
        a.record()
        step()
        b.record()
        torch.cuda.synchronize()
        wall.append((perf_counter() - t) * 1e3)
        gpu.append(a.elapsed_time(b))
    print(
        f"ms a step, synchronised each: wall {statistics.median(wall):.3f} "
        f"(min {min(wall):.3f}), events {statistics.median(gpu):.3f} (min {min(gpu):.3f})"
    )
    # 2. back to back
    torch.cuda.synchronize()
    t = perf_counter()
    for _ in range(200):
        step()
    queued = perf_counter() - t
    torch.cuda.synchronize()
    print(
        f"ms a step, back to back: host {queued * 5:.3f}, until done {(perf_counter() - t) * 5:.3f}"
    )
    # 3. the host alone
    fwd, bwd = [], []
    for _ in range(200):
        clear()
        torch.cuda.synchronize()
        t0 = perf_counter()
        out = forward()
        t1 = perf_counter()
        torch.cuda.synchronize()
        t2 = perf_counter()
        out.backward()
        t3 = perf_counter()
        fwd.append((t1 - t0) * 1e3)
        bwd.append((t3 - t2) * 1e3)
    for what, values in (("forward", fwd), ("backward", bwd)):
        print(f"host ms {what}: median {statistics.median(values):.3f}, min {min(values):.3f}")
    launches(forward, clear)
    # 4. kernels
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    events = [e for e in found.events() if "CUDA" in str(e.device_type)]
    table = {}
    for e in events:
        count, us = table.get(e.name, (0, 0.0))
        table[e.name] = count + 1, us + e.time_range.elapsed_us()
    print(
        f"kernels and copies a step: {len(events) / 10}, "
        f"us in all: {sum(us for _, us in table.values()) / 10:.1f}"
    )
    for key, (count, us) in sorted(table.items(), key=lambda item: -item[1][1]):
        print(f"  {us / 10:9.1f} us  {count / 10:5.1f} x  {key[:110]}")
    ops = {}
    for e in found.events():
        if "CPU" in str(e.device_type):
            count, us = ops.get(e.name, (0, 0.0))
            ops[e.name] = count + 1, us + e.self_cpu_time_total
    print("operators and runtime calls on the host (own us a step, under the profiler):")
    for key, (count, us) in sorted(ops.items(), key=lambda item: -item[1][1])[:40]:
        print(f"  {us / 10:9.1f} us  {count / 10:5.1f} x  {key[:90]}")
    # 5. Python's functions; backward passes run on a thread of autograd's, so both halves apart
    for half in ("forward", "backward"):
        run = cProfile.Profile()
        if half == "forward":
            run.enable()
            for _ in range(300):
                forward()
            run.disable()
        else:
            run = profile_backward(forward, clear)
        torch.cuda.synchronize()
        text = io.StringIO()
        stats = pstats.Stats(run, stream=text)
        stats.strip_dirs().sort_stats("tottime").print_stats(40)
        print(f"--- cProfile of 300 {half} passes")
        print("\n".join(line for line in text.getvalue().splitlines() if line.strip()))


def profile_backward(forward, clear):
    """Profile the engine's backward function where it runs, on a thread of autograd's."""
    from megabatch.similarity.softmax import logsumexps

    run, inner = cProfile.Profile(), logsumexps._gradients.function

    def profiled(*flat):
        run.enable()
        try:
            return inner(*flat)
        finally:
            run.disable()

    logsumexps._gradients.function = profiled
    for _ in range(300):
        clear()
        forward().backward()
    logsumexps._gradients.function = inner
    return run


def launches(forward, clear):
    """Host microseconds of each kernel's launch, without a profiler."""
    from megabatch.similarity.triton.launch import Kernel

    found, saved = {}, []
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith("megabatch.similarity.triton"):
            continue
        for name, value in vars(module).items():
            if isinstance(value, Kernel) and all(value is not k for k, _ in saved):
                saved.append((value, value.launch))
                key = f"{module.__name__.rsplit('.', 1)[1]}.{name}"

                def timed(*args, _launch=value.launch, _key=key, **named):
                    t = perf_counter()
                    _launch(*args, **named)
                    found.setdefault(_key, []).append((perf_counter() - t) * 1e6)

                value.launch = timed
    for _ in range(200):
        clear()
        torch.cuda.synchronize()
        forward().backward()
    torch.cuda.synchronize()
    for k, launch in saved:
        k.launch = launch
    for key, values in found.items():
        print(f"  launch {key}: {len(values) / 200:.1f} x {statistics.median(values):.1f} us")


if __name__ == "__main__":
    given = sys.argv[1:]
    print(torch.__version__, torch.cuda.get_device_name(), sys.version.split()[0])
    sizes = [int(a) for a in given if a.isdigit()] or [1024, 8192, 16384]
    for b in sizes:
        profile(f"ClipLoss {b:,} x 768 bf16", *clip(b))
    if "--maxsim" in given:
        profile("MaxSimLoss 128 queries", *maxsim())
