"""Random calls of the losses and similarity functions: what is called, on what, with what."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: A call's whole configuration, of JSON's types.
Case = dict[str, Any]

#: Names of functions whose result is the mean over all rows; see `Result`.
LOSSES = (
    "clip",
    "distill",
    "siglip",
    "infonce",
    "ntxent",
    "dcl",
    "supcon",
    "matryoshka",
    "multimodal",
)
SUMS = ("logsumexp", "split_logsumexp", "softplus_sum", "paired")
RANKING = ("ranks", "topk")
LAYOUTS = ("plain", "plain", "plain", "transposed", "strided", "one row", "one column")
NAMES = ("a", "b", "c")
#: Ranks of groups beyond two and three.
LARGER = (4, 6)


@dataclass
class Given:
    """The tensors of a call: of one rank for the library, of all ranks for the dense expression."""

    features: dict[str, Tensor]
    scale: Any  #: a number or a tensor; 1 / temperature for the dense expression
    bias: Any
    ids: dict[str, Tensor]
    weights: Tensor | None
    log_q: dict[str, Tensor]
    masks: dict[str, Tensor]
    gaps: list[float]  #: distances from thresholds, where a rounding could decide


# --- what is drawn --------------------------------------------------------------------------------


def draw(seed: int, index: int, dtypes: tuple[str, ...], largest_world: int) -> Case:
    """The case of this number."""
    rng = random.Random(f"{seed} {index}")
    dtype = rng.choice(dtypes)
    name = rng.choice([*LOSSES, *LOSSES, *SUMS, *RANKING])
    # Larger groups come last, so that without them a case's number means the same.
    worlds = [1, 1, 1, 1, 1, 2, 3, *(n for n in LARGER if n <= largest_world)]
    world = min(largest_world, rng.choice(worlds)) if name != "paired" else 1
    case: Case = {"seed": seed, "index": index, "call": name, "dtype": dtype, "ranks": world}
    case["d"] = rng.choice([1, 2, 3, 5, 8, 16, 33, 70])
    case["rows"] = _sizes(rng, world, least=0 if name in (*SUMS, *RANKING) else 1)
    case["columns"] = _sizes(rng, world, least=1 if name in RANKING else 0)
    if rng.random() < 0.2 and sum(case["rows"]):
        case["columns"] = case["rows"]
    case["workspace"] = rng.choice([None, None, 64 << 10, 128 << 10, 1 << 20])
    case["workspace_after"] = rng.choice([None, None, 64 << 10, 2 << 20])
    case["gather"] = rng.choice([None, None, 0, 512, 4096]) if world > 1 else None
    case["values"] = rng.choice(["normal", "normal", "small", "learnt"])
    case["scale"] = rng.choice([1.0, rng.uniform(0.05, 3), rng.uniform(3, 30)])
    case["scale_as"] = rng.choice(["number", "()", "(1,)"])
    case["scale_learnt"] = case["scale_as"] != "number" and rng.random() < 0.7
    case["bias"] = rng.uniform(-12, 2)
    case["bias_as"] = rng.choice(["number", "()", "(1,)"])
    case["bias_learnt"] = case["bias_as"] != "number" and rng.random() < 0.7
    case["upstream"] = rng.choice([1.0, rng.uniform(-3, 3)])
    case["normalize"] = rng.random() < 0.3
    kinds = ["few", "many", "none equal", "all equal"]
    case["ids"] = rng.choice(kinds if name == "supcon" else [None, *kinds])
    case["ids_dtype"] = rng.choice(["int64", "int64", "int32"])
    case["weights"] = rng.choice(
        [None, None, None, "random", "some zero", "zero", "strided", "one"]
    )
    case["options"] = _options(rng, case)
    if case["options"].get("margin") is not None and dtype != "float64":
        case["values"], case["normalize"] = "integers", False  # whose products are exact
    if name == "infonce":  # not drawn, so that all else is as in earlier records
        case["options"]["margin_strategy"] = ("absolute", "relative")[index % 2]
        case["options"]["log_q"] = index % 3 == 0
        if case["options"]["log_q"]:  # without the options that it excludes
            case["options"] |= {"same_tower": [], "reverse": None, "hardness_mode": None}
            case["options"] |= {"hardness_strength": 0.0, "label_smoothing": 0.0, "tau_plus": 0.0}
    if name == "infonce" and (case["options"]["label_smoothing"] or case["options"]["tau_plus"]):
        case["ids"] = None
    if name in RANKING:
        case["values"] = "integers"
    case["features"] = _features(rng, case)
    # The number of columns of a grid of ranks; 0: none.
    columns = [n for n in range(1, world + 1) if world % n == 0]
    case["grid"] = rng.choice([0, *columns]) if world > 1 else None
    return case


def _sizes(rng: random.Random, world: int, least: int) -> list[int]:
    def one() -> int:
        few, some, many = rng.randint(0, 2), rng.randint(3, 12), rng.randint(13, 100 // world)
        return rng.choice([few, some, some, many])

    sizes = [one()] * world if rng.random() < 0.4 else [one() for _ in range(world)]
    if sum(sizes) < least:
        sizes[rng.randrange(world)] = least
    return sizes


def _options(rng: random.Random, case: Case) -> Case:
    name = case["call"]
    margin = rng.choice([None, None, 0.5, 0.0 if case["dtype"] == "float64" else 1.5, -0.5])
    if name == "clip":
        duplicates = rng.choice(["positive", "ignored"])
        smoothing = rng.choice([0.0, 0.1, 0.7]) if duplicates == "positive" else 0.0
        bias = rng.random() < 0.3
        return {"duplicates": duplicates, "label_smoothing": smoothing, "bias": bias}
    if name == "siglip":
        return {"bias": rng.random() < 0.8}
    if name == "infonce":
        return _infonce_options(rng, margin)
    if name == "distill":
        return {"teacher_d": rng.choice([1, 4, 24, case["d"]]), "teacher_scale": rng.uniform(0, 20)}
    if name in ("ntxent", "dcl"):
        views = rng.choice([2, 2, 3])
        further = {"tau_plus": [0.0, 0.05, 0.5]} if name == "ntxent" else {"sigma": [None, 0.5, 4]}
        option, values = further.popitem()
        value = rng.choice(values if views == 2 else values[:1])
        return {"views": views, "in_call": rng.random() < 0.5, option: value}
    if name == "supcon":
        form, references = rng.choice(["out", "in"]), rng.random() < 0.5
        return {"form": form, "references": references, "in_call": rng.random() < 0.5}
    if name == "matryoshka":
        dims = sorted({rng.randint(1, case["d"]), case["d"]})
        weights = [rng.uniform(0, 2) for _ in dims]
        return {"dims": dims, "weights": weights, "inner": rng.choice(["clip", "siglip"])}
    if name == "multimodal":
        pairs = rng.sample([["a", "b"], ["b", "c"], ["c", "a"]], rng.randint(1, 3))
        present = [n for n in NAMES if rng.random() < 0.5]
        absent = rng.choice([None, None, "c"]) if case["ranks"] == 1 else None
        inner, weights = rng.choice(["clip", "siglip"]), [rng.uniform(0, 2) for _ in pairs]
        used = {n for pair in pairs for n in pair} - {absent}
        absent = absent if used else None
        return {
            "pairs": pairs,
            "weights": weights,
            "present": present,
            "inner": inner,
            "absent": absent,
        }
    if name == "split_logsumexp":
        itself = rng.random() < 0.4
        positives = "ids" if itself else rng.choice(["ids", "ids", "paired"])
        sides = rng.choice(["both", "rows"])
        return {"itself": itself, "positives": positives, "margin": margin, "sides": sides}
    if name == "logsumexp":
        return {"sides": rng.choice(["both", "rows"])}
    if name == "topk":
        return {"k": rng.randint(1, sum(case["columns"]))}
    return {}


def _infonce_options(rng: random.Random, margin: float | None) -> Case:
    options: Case = {
        "negatives": rng.choice([None, "shared", "own"]),
        "own": rng.randint(0, 4),
        "queue": rng.choice([None, 0, 1, 7, 40]),
        "margin": margin,
        "same_tower": [t for t in ("query", "positive") if rng.random() < 0.4],
        "reverse": rng.choice([None, None, "joint", "separate"]),
        "in_call": rng.random() < 0.5,
        "hardness_mode": None,
        "hardness_strength": 0.0,
        "label_smoothing": 0.0,
        "tau_plus": 0.0,
    }
    options["share_negatives"] = options["negatives"] == "own" and rng.random() < 0.5
    if options["reverse"] == "separate":
        options["same_tower"] = []
    further = rng.choice(["", "", "weighted", "smoothed", "debiased"])
    if further == "weighted":
        modes = ["in_batch_negatives", "all_negatives", "hard_negatives"]
        mode = rng.choice(modes[:2] if options["negatives"] == "shared" else modes)
        options |= {"hardness_mode": mode, "hardness_strength": rng.uniform(0.0, 9.0)}
    elif further:
        options |= {"margin": None, "same_tower": [], "reverse": None}
        name = "label_smoothing" if further == "smoothed" else "tau_plus"
        options[name] = rng.choice([0.05, 0.5])
    #: The width of a guide model's features, whose similarities the margin is then about.
    options["guide"] = rng.choice([None, 1, 8, 24]) if options["margin"] is not None else None
    return options


def _features(rng: random.Random, case: Case) -> Case:
    """Each matrix's rows on each rank, layout, whether it is frozen or is another one itself."""
    name, options, rows = case["call"], case["options"], case["rows"]
    columns = case["columns"]
    sizes: dict[str, list[int]] = {"x": rows, "y": rows}
    if name == "multimodal":
        sizes = {n: rows for n in NAMES}
    elif name == "infonce":
        if options["negatives"] == "shared":
            sizes["negatives"] = columns
        if options["negatives"] == "own":
            sizes["negatives"] = rows
        if options["queue"] is not None:
            sizes["queue"] = [options["queue"]] * case["ranks"]
        if options["guide"]:
            sizes |= {f"guide {matrix}": on_ranks for matrix, on_ranks in sizes.items()}
    elif name == "distill":
        sizes |= {"teacher x": rows, "teacher y": rows}
    elif name in ("ntxent", "dcl"):
        sizes = {f"view {i}": rows for i in range(options["views"])}
    elif options.get("itself") or options.get("references") is False:
        sizes = {"x": rows}
    elif name in ("supcon", "logsumexp", *RANKING) or (
        name in ("split_logsumexp", "softplus_sum")
        and case["ids"]
        and options.get("positives") != "paired"
    ):
        sizes["y"] = columns
    made: Case = {}
    for matrix, on_ranks in sizes.items():
        own = matrix.endswith("negatives") and options["negatives"] == "own"
        layout = rng.choice(["plain", "strided"] if own else LAYOUTS)
        layout = "plain" if case["values"] == "learnt" else layout
        if case["normalize"] and case["dtype"] != "float64" and layout == "one column":
            layout = "plain"  # a gradient that cancels: all that is left of it are roundings
        same = [m for m in made if made[m]["rows"] == on_ranks and not made[m]["is"]]
        other = rng.choice(same) if same and rng.random() < 0.12 else None
        frozen = rng.random() < 0.2 or matrix.endswith("queue") or name in RANKING
        if matrix in ("negatives", "queue") or matrix.startswith(("teacher", "guide")):
            other = None
        made[matrix] = {"rows": on_ranks, "layout": layout, "frozen": frozen, "is": other}
    return made


# --- its tensors ----------------------------------------------------------------------------------


def generator(case: Case, *what: object) -> torch.Generator:
    words = " ".join(map(str, (case["seed"], case["index"], *what)))
    return torch.Generator().manual_seed(zlib.crc32(words.encode()))


def width(case: Case, name: str) -> int:
    further = {"teacher": "teacher_d", "guide": "guide"}.get(name.split()[0])
    d: int = case["options"][further] if further else case["d"]
    return d


def leaf(case: Case, name: str, rank: int) -> Tensor:
    """The tensor of which a rank's features `name` are a view, float64, on the CPU."""
    made, d = case["features"][name], width(case, name)
    n = made["rows"][rank]
    layout = made["layout"]
    shape: tuple[int, ...] = {
        "plain": (n, d),
        "transposed": (d, n),
        "strided": (n, 2 * d),
        "one row": (1, d),
        "one column": (n, 1),
    }[layout]
    if name.endswith("negatives") and case["options"].get("negatives") == "own":
        shape = (n, case["options"]["own"], shape[1])
    owner = 0 if name.endswith("queue") else rank  # which all ranks hold alike
    source = generator(case, name, owner)
    if case["values"] == "integers":
        return torch.randint(-2, 3, shape, generator=source).double()
    values = torch.randn(shape, generator=source, dtype=torch.float64)
    if case["values"] == "learnt":
        shared = torch.randn((n, d), generator=generator(case, owner), dtype=torch.float64)
        values = 0.3 * values + (shared[:, None] if len(shape) == 3 else shared)
    if case["values"] == "normal" and case["scale"] < 3:
        return values
    return values / d**0.5


def view(case: Case, name: str, rank: int, source: Tensor) -> Tensor:
    """The features as they are given to a loss."""
    made, d = case["features"][name], width(case, name)
    if made["layout"] == "transposed":
        return source.T
    if made["layout"] == "strided":
        return source[..., ::2]
    if made["layout"] in ("one row", "one column"):
        return source.expand(made["rows"][rank], d)
    return source


def ids(case: Case, name: str, rank: int) -> Tensor:
    kind, source = case["ids"], generator(case, "ids", name, rank)
    size = case["features"][name]["rows"][rank]
    if kind == "none equal":  # but for columns that are rows' own
        first = 1000 * rank
        made = torch.arange(first, first + size)
    elif kind == "all equal":
        made = torch.full((size,), 3)
    else:
        made = torch.randint(-1, 4 if kind == "few" else 40, (size,), generator=source)
    return made.to(getattr(torch, case["ids_dtype"]))


def weights(case: Case, rank: int) -> Tensor | None:
    size, kind = case["rows"][rank], case["weights"]
    if kind is None or case["call"] not in ("clip", "siglip", "infonce", "softplus_sum"):
        return None
    source = generator(case, "weights", rank)
    made = torch.rand(size, generator=source, dtype=torch.float64)
    if kind == "zero":
        return torch.zeros_like(made)
    made = made.float().double()  # a low precision takes them as float32
    if kind == "one":
        return made[:1].expand(size)
    return made * (torch.rand(size, generator=source) < 0.7) if kind == "some zero" else made


def log_q(case: Case, name: str, rank: int) -> Tensor:
    source = generator(case, "log q", name, 0 if name.endswith("queue") else rank)
    size = leaf(case, name, rank).shape[1:-1]  # of each query's own negatives
    return -15 * torch.rand(case["features"][name]["rows"][rank], *size, generator=source).double()


def mask(case: Case, name: str, rank: int) -> Tensor:
    return torch.rand(case["rows"][rank], generator=generator(case, "mask", name, rank)) < 0.6
