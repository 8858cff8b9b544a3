"""The private names of torch that megabatch uses, each with its purpose.

torch may change them in any version. This file alone uses them; an error names the purpose of one
that torch lacks, and `tests/test_torch_internals.py` tests their behaviour. Triton's private names
are in `similarity.triton.launch`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import Tensor, nn

_DDP = "nn.parallel.DistributedDataParallel"
#: Name -> its purpose, for errors.
PURPOSES = {
    "_C._are_functorch_transforms_active": "to know that torch.func is at work, as it takes "
    "operators in another way than a plain call",
    "distributed.distributed_c10d._resolve_process_group": "to find the process group that an "
    "operator was told by its name",
    "distributed.distributed_c10d._get_process_group_store": "to find the other ranks' hosts, "
    "before the first transfer and without a collective",
    "distributed.ProcessGroup._get_backend": "to exchange a few bytes by a group's CPU backend, "
    "and for its timeout",
    "nn.Module._compiled_call_impl": "to know whether a module was compiled in place",
    "nn.Module._call_impl": "to mark a module whose forward is compiled",
    "_dynamo.config.recompile_limit": "to let blocks with constants of their own be compiled, too",
    "_dynamo.config.optimize_ddp": "to compile a block of a model in DDP as one graph",
    "_dynamo.exc.TorchDynamoException": "to train a model uncompiled that cannot be compiled",
    "nn.Module._forward_pre_hooks": "to call a module's hooks where its forward does not run",
    "nn.Module._forward_hooks": "to call a module's hooks where its forward does not run",
    "_dynamo.OptimizedModule._orig_mod": "to know whether a module was compiled as a whole",
    "distributed.fsdp.FSDPModule._get_fsdp_state": "to ask FSDP2 what it synchronises, so that it "
    "can be put back",
    f"{_DDP}._delay_all_reduce_params": "to refuse this kind of DDP",
    f"{_DDP}._get_active_ddp_module": "to know that gradients will be reduced around a step",
    "_C._autograd._get_current_graph_task_keep_graph": "to know whether a backward pass is run "
    "with retain_graph=True",
    "_C._will_engine_execute_node": "to know which gradients a backward pass accumulates",
    "Tensor._backward_hooks": "to call a tensor's hooks once, with its whole gradient",
    "Tensor._post_accumulate_grad_hooks": "to call these hooks only if there is a gradient",
    "Tensor._version": "to know whether a tensor was changed in place since",
    "nn.utils.parametrize._cache_enabled": "to compute parametrized weights in each forward pass",
    "nn.utils.parametrize._cache": "to compute parametrized weights in each forward pass",
    "ops.aten._scaled_dot_product_flash_attention": "to plan attention's memory as a GPU has it",
    "ops.aten._scaled_dot_product_cudnn_attention": "to plan the memory of attention with a mask",
    "_subclasses.fake_tensor.FakeTensorMode": "to count a step's memory without making its tensors",
    "utils._python_dispatch.TorchDispatchMode": "to see each operation whose memory is counted",
    "utils._pytree.tree_leaves": "to find the tensors that an operation made",
    "utils._pytree.tree_flatten": "to list the inputs and outputs of a model's block",
    "utils._pytree.tree_unflatten": "to call a model's block with other inputs",
    "_functorch.partitioners.min_cut_rematerialization_partition": "to plan the tensors that "
    "compiled code keeps for the backward pass",
    "_inductor.decomposition.select_decomp_table": "to plan compiled code's memory by the "
    "operations that the compiler sees",
    "UntypedStorage._cdata": "to count tensors that share their memory once",
}


class InternalsError(RuntimeError):
    """This version of torch lacks a private name that megabatch uses."""


@cache  # needed at each call
def private(path: str) -> Any:
    """torch's `path`, one of `PURPOSES`.

    Raises:
        InternalsError: this torch lacks it; the message names its purpose.
    """
    try:
        return reduce(_member, path.split("."), torch)
    except AttributeError:
        raise InternalsError(
            f"torch {torch.__version__} has no torch.{path}, which megabatch needs "
            f"{PURPOSES[path]}; use a version that it was tested with"
        ) from None


def _member(parent: Any, name: str) -> Any:
    """An attribute, of a module also one of its modules that is not imported yet."""
    if not hasattr(parent, name) and hasattr(parent, "__path__"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{parent.__name__}.{name}")
    return getattr(parent, name)


# --- transforms of torch.func ---------------------------------------------------------------------

#: Whether a transform of torch.func is active. Used at each call of an operator, so it is not
#: wrapped in a function.
transforms_active: Callable[[], bool] = private("_C._are_functorch_transforms_active")


# --- torch.compile --------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


def constant_in_graphs(function: F) -> F:
    """Mark a function as `torch.compiler.assume_constant_result` does.

    The latter imports torch._dynamo: 1.3 s in every program that imports megabatch.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def allow_recompiles(count: int) -> None:
    """Let a function be compiled this many times, at least, before it runs uncompiled."""
    private("_dynamo.config.recompile_limit")
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def compile_for_ddp_in_one_piece() -> None:
    """Compile what runs inside DistributedDataParallel as elsewhere, not split at DDP's buckets.

    Blocks that are compiled one by one give their gradients one by one.
    """
    private("_dynamo.config.optimize_ddp")
    torch._dynamo.config.optimize_ddp = False


def is_compile_error(error: BaseException) -> bool:
    """Whether torch.compile or its backend failed."""
    return isinstance(error, private("_dynamo.exc.TorchDynamoException"))


# --- processes ------------------------------------------------------------------------------------


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    group: dist.ProcessGroup = private("distributed.distributed_c10d._resolve_process_group")(name)
    return group


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The store by which the ranks of a group found each other."""
    store: dist.Store = private("distributed.distributed_c10d._get_process_group_store")(group)
    return store


def group_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that transfers a group's tensors on this kind of device."""
    private("distributed.ProcessGroup._get_backend")
    return group._get_backend(device)


def backend_timeout(backend: Any) -> timedelta:
    """The timeout of a backend's transfers; torch's default if it has none of its own."""
    known = getattr(getattr(backend, "options", None), "_timeout", None)
    default: timedelta = torch.distributed.distributed_c10d.default_pg_timeout
    return default if known is None else known


# --- modules --------------------------------------------------------------------------------------


@contextlib.contextmanager
def parametrizations_not_cached() -> Iterator[None]:
    """Compute parametrized weights inside, even within `torch.nn.utils.parametrize.cached()`."""
    for name in ("_cache_enabled", "_cache"):
        private(f"nn.utils.parametrize.{name}")
    module = torch.nn.utils.parametrize
    before = module._cache_enabled, module._cache
    module._cache_enabled, module._cache = 0, {}
    try:
        yield
    finally:
        module._cache_enabled, module._cache = before


#: The attribute that `nn.Module.compile` sets, by which the module is then called.
COMPILED_CALL = "_compiled_call_impl"


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called; its `COMPILED_CALL` then runs instead of `forward`."""
    private("nn.Module._compiled_call_impl")
    return getattr(module, COMPILED_CALL) is not None


def mark_compiled_in_place(module: nn.Module) -> None:
    """Make `is_compiled_in_place` true of a module whose `forward` alone is compiled."""
    vars(module)[COMPILED_CALL] = private("nn.Module._call_impl").__get__(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile translates a module as one: in place, or by a wrapper."""
    return is_compiled_in_place(module) or hasattr(module, "_orig_mod")


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper; any other module itself."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """A module's hooks before and after its forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def version_of(tensor: Tensor) -> int:
    """Number of changes of a tensor in place; changes of an inference tensor do not count."""
    private("Tensor._version")
    return tensor._version


def ddp_around() -> nn.Module | None:
    """The DistributedDataParallel whose forward is running, if any."""
    found: nn.Module | None = private(f"{_DDP}._get_active_ddp_module")()
    return found


def fsdp_groups(module: Any) -> list[Any]:
    """FSDP2's parameter groups of one module: none without parameters, in newer torch several."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(filter(None, [state._fsdp_param_group])) if groups is None else list(groups)


def delays_all_reduce(module: Any) -> bool:
    """Whether DDP reduces gradients in a hook of its own (`delay_all_reduce_named_params`)."""
    return bool(module._delay_all_reduce_params)


# --- backward passes ------------------------------------------------------------------------------


def graph_is_retained() -> bool:
    """Whether the backward pass that is running keeps its graph (`retain_graph=True`)."""
    return bool(private("_C._autograd._get_current_graph_task_keep_graph")())


def will_execute(node: Any) -> bool:
    """Whether the backward pass that is running goes through a node.

    Raises:
        RuntimeError: the node is a leaf's that `torch.autograd.grad` asks for.
    """
    return bool(private("_C._will_engine_execute_node")(node))


def tensor_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """The hooks of `Tensor.register_hook` by id, in the dictionary that autograd itself holds."""
    hooks: dict[int, Any] | None = tensor._backward_hooks
    return hooks


def accumulation_hooks(leaf: Tensor) -> dict[int, Any] | None:
    """Those of `register_post_accumulate_grad_hook`, likewise."""
    hooks: dict[int, Any] | None = leaf._post_accumulate_grad_hooks
    return hooks


# --- counting memory ------------------------------------------------------------------------------


def fake_tensor_mode(**options: Any) -> Any:
    """A context in which new tensors have shapes, types and devices, but no values."""
    return private("_subclasses.fake_tensor.FakeTensorMode")(**options)


TorchDispatchMode = private("utils._python_dispatch.TorchDispatchMode")


def tensors_in(results: Any) -> Iterator[Tensor]:
    """The tensors among an operation's results."""
    for result in private("utils._pytree.tree_leaves")(results):
        if isinstance(result, Tensor):
            yield result


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for all objects that stand for one tensor's memory while it lives."""
    private("UntypedStorage._cdata")
    return storage._cdata


def flattened(nested: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and their structure."""
    leaves, structure = private("utils._pytree.tree_flatten")(nested)
    return list(leaves), structure


def unflattened(leaves: Sequence[Any], structure: Any) -> Any:
    """Containers of this structure with other leaves."""
    return private("utils._pytree.tree_unflatten")(leaves, structure)


def traced(
    function: Callable[..., Any], inputs: Sequence[Tensor], *, compiled: bool = False
) -> torch.fx.GraphModule:
    """The operations of a function of fake tensors; if `compiled`, those of torch.compile's.

    Each node's `meta["val"]` has the fake tensors of its result.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    table = private("_inductor.decomposition.select_decomp_table")() if compiled else None
    graph: torch.fx.GraphModule = make_fx(function, decomposition_table=table)(*inputs)
    return graph


def partitioned_as_compiled(
    joint: torch.fx.GraphModule, inputs: int, outputs: int, static: Sequence[int]
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Divide a trace of both passes into forward and backward pass, as torch.compile does.

    Args:
        joint: takes the inputs and the outputs' gradients, and returns outputs and the inputs'
            gradients.
        inputs, outputs: their numbers.
        static: indices of the inputs that stay where they are, as parameters do.

    Returns:
        the passes; the first one returns the outputs and what the second one needs of it.
    """
    given = [node for node in joint.graph.nodes if node.op == "placeholder"]
    for i, node in enumerate(given):  # the names by which the partitioner tells them apart
        name = f"primals_{i + 1}" if i < inputs else f"tangents_{i - inputs + 1}"
        node.name = node.target = name
    joint.recompile()
    partition = private("_functorch.partitioners.min_cut_rematerialization_partition")
    first, second = partition(
        joint, None, num_fwd_outputs=outputs, static_lifetime_input_indices=list(static)
    )
    return first, second


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool
) -> Tensor:
    """Attention as GPUs compute it without a mask."""
    attend = private("ops.aten._scaled_dot_product_flash_attention")
    result: Tensor = attend(query, key, value, dropout, causal)[0]
    return result


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float, causal: bool
) -> Tensor:
    """Attention as H100s and H200s compute it with a mask, `bias` in the queries' dtype."""
    attend = private("ops.aten._scaled_dot_product_cudnn_attention")
    result: Tensor = attend(query, key, value, bias, True, dropout, causal)[0]
    return result
