"""GELU's kernels, old and new, alone and after products that take the GPU's power."""
import json, os, sys
import torch
import old_kernels
from megabatch.models import mlp
COLUMNS = 128
def timed(call, n, busy):
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    events = []
    for _ in range(n):
        for _ in range(busy): a @ b
        one, two = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        one.record(); call(); two.record(); events.append((one, two))
    torch.cuda.synchronize()
    times = sorted(x.elapsed_time(y) for x, y in events)
    return times[len(times) // 2]
x, u = torch.randn(2, 512 * 257, 4096, device="cuda", dtype=torch.bfloat16)
out, dx = torch.empty_like(x), torch.empty_like(x)
found = []
def values(kernels, rows, summed, warps):
    size, columns = x.shape
    kernels.gelu_values.launch(-(-size // summed) * (columns // COLUMNS), x=x, out=out, size=size, WIDTH=columns, COLUMNS=COLUMNS, ROWS=rows, SUMMED=summed, num_warps=warps)
def gradients(kernels, rows, summed, warps):
    size, columns = x.shape
    sums = x.new_empty(-(-size // summed), columns, dtype=torch.float32)
    kernels.gelu_gradients.launch(-(-size // summed) * (columns // COLUMNS), x=x, dout=u, out=out, dx=dx, sums=sums, size=size, WIDTH=columns, COLUMNS=COLUMNS, ROWS=rows, SUMMED=summed, num_warps=warps)
for name, kernels in (("before", old_kernels), ("now", mlp)):
    for which, call, forms in (("forward", values, ((16, 16, 8), (16, 16, 4), (32, 32, 8), (8, 8, 4), (8, 8, 8))),
                        ("backward", gradients, ((16, 256, 8), (16, 512, 8), (8, 256, 8), (8, 256, 4), (16, 128, 8)))):
        for rows, summed, warps in forms[: None if name == "now" else 1]:
            run = lambda: call(kernels, rows, summed, warps)
            run()
            record = {"form": name, "which": which, "rows": rows, "rows_of_a_program": summed, "warps": warps, "shape": list(x.shape),
                "device": torch.cuda.get_device_name(), "ms": timed(run, 60, 0), "after_products_ms": timed(run, 60, 4)}
            found.append(record); print(record, flush=True)
copy = lambda: out.copy_(x)
record = {"form": "a copy", "ms": timed(copy, 60, 0), "after_products_ms": timed(copy, 60, 4)}
found.append(record); print(record, flush=True)
open(sys.argv[1], "w").write(json.dumps(found, indent=1))
