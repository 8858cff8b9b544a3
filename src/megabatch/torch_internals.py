"""The private names of torch that megabatch uses.

torch may change them in any release. This file alone uses them, and `tests/test_torch_internals.py`
tests the behaviour of each. Triton's private names are in the file that launches its kernels.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._python_dispatch
from torch import Tensor, nn

F = TypeVar("F", bound=Callable[..., Any])


#: The object at `module:name`; needed at each call.
private: Callable[[str], Any] = cache(pkgutil.resolve_name)


def _function(path: str) -> Any:
    """A function that calls `path`, which is looked up then, as some modules load slowly."""
    return lambda *args, **options: private(path)(*args, **options)


# --- torch.func and torch.compile -----------------------------------------------------------------

#: Whether torch.func is at work. No wrapper, as each operator calls it.
transforms_active: Callable[[], bool] = private("torch._C:_are_functorch_transforms_active")


def constant_in_graphs(function: F) -> F:
    """Mark a function as `torch.compiler.assume_constant_result` does.

    The latter imports torch._dynamo: 1.3 s in every program that imports megabatch.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def configure_compiler(compilations: int) -> None:
    """Let a function be compiled this many times, at least, and inside DDP in one piece.

    DDP's buckets would split it, for nothing: compiled blocks give their gradients one by one.
    """
    config = private("torch._dynamo.config")
    config.recompile_limit = max(config.recompile_limit, compilations)
    config.optimize_ddp = False


def draw_random_numbers_as_uncompiled() -> None:
    """Let graphs of inductor from now on have the numbers that torch draws without a compiler."""
    private("torch._inductor.config").fallback_random = True


def is_compile_error(error: BaseException) -> bool:
    """Whether torch.compile or its backend failed."""
    return isinstance(error, private("torch._dynamo.exc:TorchDynamoException"))


# --- products -------------------------------------------------------------------------------------


def cpu_multiplies_bf16() -> bool:
    """Whether oneDNN has products in bfloat16 for this CPU.

    torch's own take 40 times as long as in float32 (benchmarks/results/quickstart-avx2.json).
    """
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# --- process groups -------------------------------------------------------------------------------

_C10D = "torch.distributed.distributed_c10d"
#: The process group of a name.
resolve_group: Callable[[str], dist.ProcessGroup] = _function(f"{_C10D}:_resolve_process_group")
#: The store by which a group's ranks found each other.
group_store: Callable[[dist.ProcessGroup], dist.Store] = _function(
    f"{_C10D}:_get_process_group_store"
)


def group_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that transfers a group's tensors on this kind of device."""
    return group._get_backend(device)


def backend_timeout(backend: Any) -> timedelta:
    """The timeout of a backend's transfers; torch's default if it has none of its own."""
    default = dist.distributed_c10d.default_pg_timeout
    known: timedelta = getattr(getattr(backend, "options", None), "_timeout", None) or default
    return known


# --- modules --------------------------------------------------------------------------------------


@contextlib.contextmanager
def parametrizations_not_cached() -> Iterator[None]:
    """Compute parametrized weights inside, even within `torch.nn.utils.parametrize.cached()`."""
    module = torch.nn.utils.parametrize
    before = module._cache_enabled, module._cache
    module._cache_enabled, module._cache = 0, {}
    try:
        yield
    finally:
        module._cache_enabled, module._cache = before


def mark_compiled_in_place(module: nn.Module) -> None:
    """Mark a module whose `forward` alone is compiled as `module.compile()` marks it."""
    vars(module)["_compiled_call_impl"] = module._call_impl  # run instead of `forward`


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper; any other module itself."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def fsdp_groups(module: Any) -> list[Any]:
    """FSDP2's parameter groups of one module: none without parameters, in newer torch several."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(filter(None, [state._fsdp_param_group])) if groups is None else list(groups)


#: The DistributedDataParallel whose forward is running.
ddp_around: Callable[[], nn.parallel.DistributedDataParallel | None] = _function(
    "torch.nn.parallel:DistributedDataParallel._get_active_ddp_module"
)
#: DDP's `delay_all_reduce_named_params`, whose gradients it reduces in a hook of its own.
delays_all_reduce: Callable[[nn.Module], list[Any]] = attrgetter("_delay_all_reduce_params")

# --- tensors and backward passes ------------------------------------------------------------------

#: Number of changes of a tensor in place; changes of an inference tensor do not count.
version_of: Callable[[Tensor], int] = attrgetter("_version")
#: The hooks of `Tensor.register_hook` by id, in the dictionary that autograd itself holds, or None.
tensor_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
#: The hooks of `register_post_accumulate_grad_hook`, likewise.
accumulation_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)
#: The same for all objects that stand for one tensor's memory while it lives.
storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
#: Whether the running backward pass keeps its graph (retain_graph=True).
graph_is_retained: Callable[[], bool] = _function(
    "torch._C:_autograd._get_current_graph_task_keep_graph"
)
#: Whether the running backward pass goes through a node; RuntimeError: the node is of a leaf that
#: `torch.autograd.grad` asks for.
will_execute: Callable[[Any], bool] = _function("torch._C:_will_engine_execute_node")

# --- planning -------------------------------------------------------------------------------------

TorchDispatchMode = private("torch.utils._python_dispatch:TorchDispatchMode")
fake_tensor_mode = _function("torch._subclasses.fake_tensor:FakeTensorMode")
#: The leaves of nested containers.
tree_leaves: Callable[[Any], list[Any]] = _function("torch.utils._pytree:tree_leaves")
#: Attention as H100s and H200s compute it, with or without a mask.
fused_attention = _function("torch:ops.aten._scaled_dot_product_cudnn_attention")
