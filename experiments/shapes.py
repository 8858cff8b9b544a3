"""10,000 random shapes through the Hopper kernels: finite, every 100th compared with float64."""

import json
import random
import sys
import time

import torch

from megabatch import similarity
from megabatch.benchmarking.records import environment
from megabatch.similarity.triton import hopper

takes, count = hopper.takes, [0, 0]
hopper.takes = lambda x, block, items: takes(x, block, 1 << 30)
for i, k in enumerate((hopper.unmasked_tiles, hopper.unmasked_gradients)):

    def launch(*a, launch=k.launch, i=i, **n):
        count[i] += 1
        launch(*a, **n)

    k.launch = launch
draw, began, worst, compared, bad = random.Random(1), time.time(), 0.0, 0, 0
g = torch.Generator("cuda").manual_seed(0)
X, Y = (
    torch.nn.functional.normalize(torch.randn(6000, 1088, device="cuda", generator=g), dim=1)
    for _ in range(2)
)
n_shapes = int(sys.argv[1])
done = 0
for i in range(n_shapes):
    if time.time() - began > float(sys.argv[3]):
        break
    top = 6000 if i % 4 == 0 else 1500
    m, n = draw.randint(1, top), draw.randint(1, top)
    d = draw.choice((8, 16, 40, 64, 72, 80, 128, 200, 256, 512, 768, 1000, 1024, 1088))
    dtype = draw.choice((torch.bfloat16, torch.float16))
    x, y = X[:m, :d].to(dtype).requires_grad_(), Y[:n, :d].to(dtype).requires_grad_()
    rows, cols = similarity.logsumexp(x, y, 20.0)
    grads = torch.autograd.grad(rows.sum() + cols.sum(), (x, y))
    ok = all(bool(t.isfinite().all()) for t in (rows, cols, *grads))
    bad += not ok
    if i % 100 == 0:
        s = 20.0 * x.detach().double() @ y.detach().double().T
        worst = max(
            worst,
            float((rows - s.logsumexp(1)).abs().max()),
            float((cols - s.logsumexp(0)).abs().max()),
        )
        p = s.softmax(1) + s.softmax(0)
        for mine, true in zip(
            grads, (20 * p @ y.detach().double(), 20 * p.T @ x.detach().double())
        ):
            e = float((mine.double() - true).norm() / true.norm())
            assert e < 2**-7, (m, n, d, dtype, e)
        compared += 1
    done += 1
torch.cuda.synchronize()
json.dump(
    {
        "command": "script of an experiment, not kept",
        **environment(),
        "records": [
            {
                "device": torch.cuda.get_device_name(),
                "shapes": done,
                "not_finite": bad,
                "compared": compared,
                "largest_logsumexp_error": worst,
                "launches": count,
                "seconds": time.time() - began,
            }
        ],
    },
    open(sys.argv[2], "w"),
    indent=1,
)
print(done, bad, compared, worst, count, time.time() - began)
