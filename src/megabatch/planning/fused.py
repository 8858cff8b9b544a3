"""Memory and work of a traced graph whose operations between products are fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from megabatch.planning.work import Work, is_product, kernel_work
from megabatch.torch_internals import storage_key, tensors_in


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass of compiled code.

    Attributes:
        extra: bytes at its peak in addition to those allocated when it begins.
        work: of its kernels.
    """

    extra: int
    work: Work


def storages(node: Any) -> dict[int, int]:
    """Bytes of the storages of a node's tensors, by their keys."""
    if not isinstance(node, fx.Node):
        return {}
    found = (tensor.untyped_storage() for tensor in tensors_in(node.meta.get("val")))
    return {storage_key(storage): storage.nbytes() for storage in found}


def pass_of(graph: fx.Graph) -> Pass:
    """Count the graph of a forward or a backward pass, on fake tensors (`node.meta["val"]`).

    Products read and write memory. Operations between them are fused: connected ones are a kernel,
    which reads tensors of others and writes those that products or the caller take.
    """
    nodes = list(graph.nodes)
    given = {key: size for n in nodes if n.op == "placeholder" for key, size in storages(n).items()}
    (results,) = next(n for n in nodes if n.op == "output").args
    returned = {key for node in results for key in storages(node)}
    sizes = dict(given)
    in_memory = set(given) | returned  # storages that are no intermediate values of a kernel
    for node in nodes:
        sizes |= storages(node)
        if node.op == "call_function" and is_product(node.target):
            in_memory |= storages(node).keys()
            in_memory |= {key for read in node.all_input_nodes for key in storages(read)}
    return Pass(_extra(nodes, sizes, in_memory, given, returned), _work(nodes, sizes, in_memory))


def _extra(
    nodes: list[fx.Node],
    sizes: dict[int, int],
    in_memory: set[int],
    given: dict[int, int],
    returned: set[int],
) -> int:
    """Peak bytes besides those given; what is kept for a backward pass is freed after its use."""
    # A fused operation runs when a tensor in memory is made of it.
    runs: dict[fx.Node, int] = {}
    last: dict[int, int] = {}
    for at, node in reversed(list(enumerate(nodes))):
        made = storages(node)
        fused = node.op == "call_function" and not made.keys() & in_memory
        runs[node] = max((runs[user] for user in node.users), default=at) if fused else at
        for read in node.all_input_nodes:
            for key in storages(read):
                last[key] = max(last.get(key, 0), runs[node])
    inputs = {key for node in nodes if _is_input(node) for key in storages(node)}
    ends: dict[int, list[int]] = {}
    for key in in_memory - returned - inputs:
        ends.setdefault(last.get(key, 0), []).append(key)
    level = peak = 0
    there = set(given)
    for at, node in enumerate(nodes):
        for key in (storages(node).keys() & in_memory) - there:
            there.add(key)
            level += sizes[key]
        peak = max(peak, level)
        level -= sum(sizes[key] for key in ends.get(at, ()) if key in there)
    return peak


def _is_input(node: fx.Node) -> bool:
    """Whether a node is a tensor of the caller's, which stays."""
    return node.op == "placeholder" and str(node.target).startswith(("primals", "tangents"))


def _work(nodes: list[fx.Node], sizes: dict[int, int], in_memory: set[int]) -> Work:
    work = Work()
    kernel_of: dict[int, int] = {}  # the first kernel that a fused storage was made by
    joined: list[int] = []  # for each kernel the one that it became a part of, or itself
    read_by: list[set[int]] = []

    def last(kernel: int) -> int:
        while joined[kernel] != kernel:
            kernel = joined[kernel]
        return kernel

    for node in nodes:
        read = {key for one in node.all_input_nodes for key in storages(one)}
        made = storages(node).keys() - read
        if node.op != "call_function" or not made:
            continue
        if is_product(node.target):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            nbytes = sum(sizes[key] for key in read | made)
            work += kernel_work(node.target, args, kwargs, node.meta["val"], nbytes)
            continue
        kernel = len(joined)
        joined.append(kernel)
        read_by.append(read)
        for key in read & kernel_of.keys():
            joined[last(kernel_of[key])] = kernel
        kernel_of |= dict.fromkeys(made, kernel)
    made_by: dict[int, set[int]] = {}
    for key, kernel in kernel_of.items():
        made_by.setdefault(last(kernel), set()).add(key)
    reads: dict[int, set[int]] = {}
    for kernel, keys in enumerate(read_by):
        reads.setdefault(last(kernel), set()).update(keys)
    for kernel, own in made_by.items():
        moved = (reads[kernel] - own) | (own & in_memory)
        work += Work(nbytes=sum(sizes[key] for key in moved), kernels=1)
    return work
