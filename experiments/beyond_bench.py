"""Issue 42, "beyond": whole losses with kept exponentials and in one sweep, beside the library's own path.

    PYTHONPATH=src python experiments/beyond_bench.py [--out FOLDER] [--budget SECONDS]      all, each in a process of its own
    PYTHONPATH=src python experiments/beyond_bench.py check | kept D | sweep D | configs | ... one of them

Lines go to stdout, JSON to FOLDER/beyond.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
#: (arguments, seconds before it is killed), in order of worth.
PLAN = [
    (["warm"], 60),
    (["check"], 40),
    (["kept", "768"], 40),
    (["sweep", "768"], 40),
    (["configs", "768"], 60),
    (["kept", "512"], 40),
    (["kept", "1024"], 40),
    (["sweep", "512"], 40),
    (["sweep", "1024"], 40),
]
SECONDS = 0.35


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--budget", type=float, default=195)
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    if options.what:
        global OUT
        OUT = options.out
        sys.path.insert(0, HERE)
        {"warm": warm, "check": check, "kept": kept, "sweep": sweep, "configs": configs}[
            options.what[0]
        ](*map(int, options.what[1:]))
        return
    start = time.time()
    for arguments, limit in PLAN:
        left = options.budget - (time.time() - start)
        if left < 15:
            print("NO TIME LEFT FOR", arguments, flush=True)
            continue
        began = time.time()
        child = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), *arguments, "--out", options.out],
            start_new_session=True,
        )
        try:
            code = child.wait(min(limit, left))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = "KILLED: out of time"
            child.wait()
        print(f"== {' '.join(arguments)}: exit {code}, {time.time() - began:.1f} s", flush=True)
    print(f"== all: {time.time() - start:.1f} s", flush=True)


def record(**values) -> None:
    values = {k: (float(f"{v:.5g}") if isinstance(v, float) else v) for k, v in values.items()}
    print(json.dumps(values), flush=True)
    with open(f"{OUT}/beyond.jsonl", "a") as f:
        f.write(json.dumps(values) + "\n")


# --- inputs, steps --------------------------------------------------------------------------------


def setup():
    """The modules, imported by children only."""
    global torch, F, mb, engine, k, clock, cfg, softmax, hopper
    import beyond_kernels as k
    import torch
    import torch.nn.functional as F

    import megabatch as mb
    from megabatch.benchmarking import clock
    from megabatch.similarity import softmax as engine
    from megabatch.similarity.triton import configs as cfg
    from megabatch.similarity.triton import hopper, softmax

    record(what="device", name=torch.cuda.get_device_name(), torch=torch.__version__)


def features(b, d, align=0.3, scale=50.0):
    torch.manual_seed(b + d)
    x = torch.randn(b, d, device="cuda")
    y = torch.randn(b, d, device="cuda") + align * x
    x, y = (F.normalize(t, dim=1).bfloat16().requires_grad_() for t in (x, y))
    return x, y, torch.tensor(scale, device="cuda", requires_grad=True)


def clip(x, y, s):
    loss = mb.ClipLoss()(x, y, s)
    return loss.detach(), *torch.autograd.grad(loss, (x, y, s))


def rows_only(x, y, s):
    """InfoNCE's loss on the library's path."""
    stack = engine.split_stacks(x, y, s, sides="rows").rows
    loss = F.softplus(stack[0] - stack[2], threshold=50).mean()
    return loss.detach(), *torch.autograd.grad(loss, (x, y, s))


def use(name: str) -> None:
    """Choose the path of `clip`: "library", or "kept" with options in its name."""
    k.Options.blocks.clear()
    engine._kernel_tiles = OWN if name == "library" else lambda o: k.KeptTiles
    k.Options.fixed, k.Options.in_place = "fixed" in name, "in place" in name


def row_errors(got, want):
    e = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
    return {
        "median": float(f"{e.median():.3g}"),
        "p99": float(f"{e.quantile(0.99):.3g}" if len(e) < 1e6 else 0),
        "max": float(f"{e.max():.3g}"),
    }


def truth(x, y, s, both):
    """Loss and gradients in float64, strip by strip, without a difference of rounded terms."""
    x, y, s = x.detach().double(), y.detach().double(), s.detach().double()
    b, step = len(x), 2048
    pos = s * (x * y).sum(1)

    def negatives(a, c):
        out = torch.empty(b, device="cuda", dtype=torch.float64)
        for i in range(0, b, step):
            S = s * (a[i : i + step] @ c.T)
            S[torch.arange(step), torch.arange(i, i + step)] = -math.inf
            out[i : i + step] = S.logsumexp(1)
        return out

    rneg, cneg = negatives(x, y), negatives(y, x)
    rlse, clse = torch.logaddexp(rneg, pos), torch.logaddexp(cneg, pos)
    loss = F.softplus(rneg - pos, threshold=50).mean()
    if both:
        loss = (loss + F.softplus(cneg - pos, threshold=50).mean()) / 2
    dx, dy = torch.empty_like(x), torch.zeros_like(y)
    dscale = 0.0
    for i in range(0, b, step):
        S = s * (x[i : i + step] @ y.T)
        r = slice(i, i + step)
        dS = (S - rlse[r, None]).exp()
        diagonal = (rneg[r] - rlse[r]).exp()
        if both:
            dS += (S - clse[None]).exp()
            diagonal = diagonal + (cneg[r] - clse[r]).exp()
        dS[torch.arange(step), torch.arange(i, i + step)] = -diagonal
        dS /= b * (2 if both else 1)
        dscale += (dS * S).sum() / s
        dx[r] = s * (dS @ y)
        dy += s * (dS.T @ x[r])
    return loss, dx, dy, dscale


# --- experiments ----------------------------------------------------------------------------------


def warm() -> None:
    """Compile the library's kernels, before those that may hang."""
    setup()
    for b in (16384, 65536):
        for step in (clip, rows_only):
            step(*features(b, 512))
    torch.cuda.synchronize()


def check() -> None:
    """Errors of values and of gradients' rows against float64 at 16,384 x 512."""
    setup()
    globals().update(OWN=engine._kernel_tiles)
    b, d = 16384, 512
    for scale, align in ((14.3, 0.3), (100.0, 0.3), (100.0, 0.0)):
        x, y, s = features(b, d, align, scale)
        want = truth(x, y, s, True)
        for name in ("library", "kept bf16", "kept fixed", "kept fixed in place"):
            use(name)
            k.Options.count, k.Options.out_of_range = True, 0
            report("check", name, clip(x, y, s), want, scale=scale, align=align, b=b, d=d)
        use("library")
        want = truth(x, y, s, False)
        report(
            "check rows", "library", rows_only(x, y, s), want, scale=scale, align=align, b=b, d=d
        )
        for strip, apart in ((4096, False), (4096, True), (b, True)):
            k.Options.out_of_range = 0
            got = k.one_sweep(x.detach(), y.detach(), s.detach(), strip, apart)
            report(
                "check rows",
                f"one sweep, strips of {strip}{', diagonal apart' if apart else ''}",
                got,
                want,
                scale=scale,
                align=align,
                b=b,
                d=d,
            )
        k.Options.count = False


def report(what, name, got, want, **more) -> None:
    torch.cuda.synchronize()
    r = dict(what=what, variant=name, **more)
    r["loss"] = abs(float((got[0].double() - want[0]) / want[0]))
    r["dscale"] = abs(float((got[3].double() - want[3]) / want[3]))
    r["dx"], r["dy"] = row_errors(got[1], want[1]), row_errors(got[2], want[2])
    r["out_of_range"] = k.Options.out_of_range
    record(**r)


def compare(what, d, sizes, variants, operations) -> None:
    """Time variants, {name: function(x, y, s)}, in two rounds on the same inputs, beside products."""
    for b in sizes:
        x, y, s = features(b, d)
        first = None
        rate = clock.product_rate("cuda", torch.bfloat16, 8192, 0.6)
        taken = {name: [] for name in variants(b)}
        memory = {}
        for turn in range(2):
            for name, step in variants(b).items():
                try:
                    step(x, y, s)
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    got = step(x, y, s)
                    torch.cuda.synchronize()
                    memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
                    if turn == 0 and first is None:
                        first = got
                    elif turn == 0:
                        record(
                            what=f"{what}: against the library's",
                            variant=name,
                            b=b,
                            d=d,
                            loss=abs(float((got[0] - first[0]) / first[0])),
                            dscale=abs(float((got[3] - first[3]) / first[3])),
                            dx=row_errors(got[1], first[1]),
                            dy=row_errors(got[2], first[2]),
                        )
                    del got
                    taken[name].append(
                        statistics.median(clock.times(lambda: step(x, y, s), "cuda", SECONDS, 3))
                    )
                except (
                    torch.AcceleratorError if hasattr(torch, "AcceleratorError") else RuntimeError
                ) as error:
                    record(what=what, variant=name, b=b, d=d, error=str(error)[:300])
                    os._exit(3)
                except Exception as error:
                    record(
                        what=what,
                        variant=name,
                        b=b,
                        d=d,
                        error=f"{type(error).__name__}: {error}"[:300],
                    )
        after = clock.product_rate("cuda", torch.bfloat16, 8192, 0.5)
        base = None
        for name, ms in taken.items():
            if not ms:
                continue
            best = min(ms)
            base = base or best
            record(
                what=what,
                variant=name,
                b=b,
                d=d,
                ms=[round(t, 3) for t in ms],
                gain=base / best,
                share=8 * b * b * d / best / 1e-3 / ((rate + after) / 2),
                share_of_own=operations(name) * b * b * d / best / 1e-3 / ((rate + after) / 2),
                tflops_products=[round(rate / 1e12), round(after / 1e12)],
                gib=memory[name],
            )
        for name, step in variants(b).items():
            if taken[name]:
                parts(what, name, b, d, lambda: step(x, y, s))
        k.Options.blocks.clear()
        torch.cuda.empty_cache()


def parts(what, name, b, d, step) -> None:
    """Milliseconds of a step by kernel."""
    from torch.profiler import ProfilerActivity, profile

    try:
        step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
        found = {}
        for e in p.events():
            if e.device_type == torch.autograd.DeviceType.CUDA:
                n, t = found.get(e.name, (0, 0.0))
                found[e.name] = n + 1, t + e.device_time / 3e3
        top = sorted(found.items(), key=lambda f: -f[1][1])[:7]
        record(
            what=f"{what}: parts",
            variant=name,
            b=b,
            d=d,
            ms_by_kernel={n[:60]: [c // 3, round(t, 3)] for n, (c, t) in top},
            all=sum(t for _, t in found.values()),
        )
    except Exception as error:
        record(
            what=f"{what}: parts",
            variant=name,
            b=b,
            d=d,
            error=f"{type(error).__name__}: {error}"[:300],
        )


def kept(d: int) -> None:
    setup()
    globals().update(OWN=engine._kernel_tiles)

    def variants(b):
        def with_(name):
            def step(*a):
                use(name)
                return clip(*a)

            return step

        return {
            name: with_(name)
            for name in ("library", "kept bf16", "kept fixed", "kept fixed in place")
        }

    compare("kept", d, (16384, 65536), variants, lambda name: 8 if name == "library" else 6)


def sweep(d: int) -> None:
    setup()
    globals().update(OWN=engine._kernel_tiles)

    def variants(b):
        found = {"library": rows_only}
        for strip in (4096, 16384) if b == 16384 else (2048, 4096, 8192, 16384):
            found[f"one sweep, strips of {strip}"] = lambda x, y, s, strip=strip: k.one_sweep(
                x.detach(), y.detach(), s.detach(), strip
            )
        return found

    compare("sweep", d, (16384, 65536), variants, lambda name: 8 if name == "library" else 6)


def configs(d: int) -> None:
    """Kernels alone at 16,384 x 16,384: configurations of the forward pass and of dS from what it kept."""
    setup()
    globals().update(OWN=engine._kernel_tiles)
    b = 16384
    x, y, s = features(b, d)
    rate = clock.product_rate("cuda", torch.bfloat16, 8192, 0.6)

    def kernel_times(step):
        """Milliseconds of each kernel in a step, by the profiler."""
        from torch.profiler import ProfilerActivity, profile

        for _ in range(30):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(30):
                step()
            torch.cuda.synchronize()
        found = {}
        for e in p.events():
            if e.device_type == torch.autograd.DeviceType.CUDA:
                found.setdefault(e.name, []).append(e.device_time / 1e3)
        return {n: statistics.median(t) for n, t in found.items()}

    def line(name, wanted, operations, **more):
        try:
            step = lambda: clip(x, y, s)
            for n, ms in kernel_times(step).items():
                if n in wanted:
                    r = dict(what="kernel", kernel=n, variant=name, b=b, d=d, ms=ms, **more)
                    if n == "ds_from_kept":
                        r["tb_s"] = 4 * b * b / ms / 1e9
                    else:
                        r["share"] = 2 * b * b * d / ms / 1e-3 / rate
                    record(**r)
        except Exception as error:
            record(what="kernel", variant=name, error=f"{type(error).__name__}: {error}"[:300])

    use("library")
    line("library", ("unmasked_tiles", "unmasked_gradients"), 2)
    for fixed in (False, True):
        for rows, group in ((8, 2), (8, 4), (4, 4), (1, 16), (16, 2)):
            if fixed and (rows, group) != (8, 2):
                continue
            cfg.overrides["forward"] = cfg.Config(rows=rows, group=group)
            use("kept fixed" if fixed else "kept bf16")
            line(f"rows {rows} group {group}{' fixed' if fixed else ''}", ("kept_tiles",), 2)
    cfg.overrides.clear()
    for fixed in (True, False):
        use("kept fixed" if fixed else "kept bf16")
        for bm, bn, warps in (
            (32, 256, 8),
            (128, 128, 8),
            (64, 128, 4),
            (16, 512, 4),
            (16, 256, 4),
            (8, 1024, 4),
        ):
            if not fixed and bn != 256:
                continue
            k.Options.bm, k.Options.bn, k.Options.warps = bm, bn, warps
            line(f"{bm} x {bn}, {warps} warps{', fixed' if fixed else ''}", ("ds_from_kept",), 0)


if __name__ == "__main__":
    main()
