"""What megabatch expects of torch's private names: a torch that has changed one is told so here."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch import torch_internals

SOURCES = Path(megabatch.__file__).parent
#: Attributes that begin with an underscore and belong to this project, to Python itself, or to the
#: models of transformers, whose guide for their authors names it.
OWN = re.compile(r"_replace|_asdict|_fields|_exit|_make|_attn_implementation|__\w+__")


def attention() -> None:
    with torch_internals.fake_tensor_mode():
        # Batch and heads are in the middle, as in CLIP; the result is in the queries' order.
        query, key, value = (
            torch.empty(5, 2, 3, 8, device="cuda", dtype=torch.bfloat16).permute(1, 2, 0, 3)
            for _ in range(3)
        )
        mask = torch.empty(5, 5, device="cuda", dtype=torch.bfloat16)
        for bias in (None, mask):
            found = torch_internals.fused_attention(query, key, value, bias, True, 0.0, False)
            assert (found[0].shape, found[0].stride()) == (query.shape, query.stride())


def compiled_in_place() -> None:
    module = torch.nn.Linear(2, 2)
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None
    replaced = {"_compiled_call_impl": lambda x: "called"}
    vars(module).update(replaced)
    assert module(torch.ones(2)) == "called"


def compiled_wrapper() -> None:
    module = torch.nn.Linear(2, 2)
    assert torch_internals.uncompiled(torch.compile(module, backend="eager")) is module
    assert torch_internals.uncompiled(module) is module


def compiled_inside() -> None:
    module = torch.nn.Linear(2, 2)
    before = module(torch.ones(2))
    module.register_forward_hook(lambda m, args, output: output + 1)
    torch_internals.mark_compiled_in_place(module)
    assert module._compiled_call_impl is not None
    assert torch.equal(module(torch.ones(2)), before + 1)


def compiler() -> None:
    """A function is compiled three times before it runs uncompiled, and inside DDP in one piece."""
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with torch._dynamo.config.patch(recompile_limit=2, optimize_ddp=True):
        torch_internals.configure_compiler(3)
        torch_internals.configure_compiler(1)
        twice = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
        for size in range(2, 7):
            twice(torch.ones(size))
        assert len(compiled) == 3
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
        model.forward = torch.compile(model.forward, backend=backend)
        small = 0.001  # MiB: a bucket for each layer
        DistributedDataParallel(model, bucket_cap_mb=small)(torch.ones(2, 32))
    dist.destroy_process_group()
    torch._dynamo.reset()
    assert len(compiled) == 4


def constants() -> None:
    def marked() -> None: ...

    def by_torch() -> None: ...

    torch_internals.constant_in_graphs(marked)
    torch.compiler.assume_constant_result(by_torch)
    assert vars(marked) == vars(by_torch) != {}


def products() -> None:
    found = torch_internals.cpu_multiplies_bf16()
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available():
        assert found is True
    assert isinstance(found, bool)


#: The private names in `torch_internals`, as they are written there.
CHECKS: dict[str, Callable[[], None]] = {
    "_dynamo.config": compiler,
    "_compiled_call_impl": compiled_in_place,
    "_call_impl": compiled_inside,
    "_scaled_dot_product_cudnn_attention": attention,
    "_dynamo_marked_constant": constants,
    "_orig_mod": compiled_wrapper,
    "_is_mkldnn_bf16_supported": products,
}
#: Those that a test of behaviour needs.
BY_BEHAVIOUR = {
    "_are_functorch_transforms_active": "losses/test_everywhere.py::test_vmap_and_its_gradients",
    "_inductor.config": "models/test_blocks.py::"
    "test_dropout_is_the_same_with_and_without_gradients",
    "_dynamo.exc:TorchDynamoException": "training/test_trainer.py::"
    "test_a_failing_compiler_names_the_option",
    "_resolve_process_group": "test_ranks.py::test_rows_of_all_ranks",
    **dict.fromkeys(
        ("_get_process_group_store", "_get_backend"),
        "similarity/distributed/test_comm.py::test_every_function_compares_settings",
    ),
    "_timeout": "similarity/distributed/test_failure.py::test_the_others_raise_in_time",
    **dict.fromkeys(
        (
            *("_cdata", "_python_dispatch:TorchDispatchMode", "_pytree:tree_leaves"),
            "_subclasses.fake_tensor:FakeTensorMode",
        ),
        "planning/test_towers.py::test_live_and_peak_of_operations_and_views",
    ),
    **dict.fromkeys(
        ("_cache_enabled", "_cache"),
        "gradient_cache/test_state.py::"
        "test_parametrized_weights_that_are_cached_get_their_gradients",
    ),
    **dict.fromkeys(
        ("_get_fsdp_state", "_fsdp_param_group", "_fsdp_param_groups"),
        "gradient_cache/test_wrappers.py::"
        "test_the_users_synchronisation_settings_hold_and_are_restored",
    ),
    "_get_active_ddp_module": "gradient_cache/test_wrappers.py::"
    "test_ddp_around_a_step_with_leaves_that_are_no_parameters",
    "_delay_all_reduce_params": "gradient_cache/test_wrappers.py::"
    "test_ddp_that_cannot_hold_back_reductions_is_refused",
    "_version": "gradient_cache/test_refusals.py::test_a_parameter_or_a_batch_changed_in_place",
    "_backward_hooks": "gradient_cache/test_backward.py::test_hooks_are_called_once_per_step",
    "_post_accumulate_grad_hooks": "gradient_cache/test_refusals.py::"
    "test_hooks_that_change_no_weight",
    "_autograd._get_current_graph_task_keep_graph": "gradient_cache/test_refusals.py::"
    "test_one_backward_pass_without_retain_graph_and_create_graph",
    "_will_engine_execute_node": "gradient_cache/test_backward.py::"
    "test_torch_autograd_grad_and_inputs",
}


@pytest.mark.parametrize("check", dict.fromkeys(CHECKS.values()), ids=lambda check: check.__name__)
def test_private_names_of_torch(check: Callable[[], None]) -> None:
    try:
        check()
    except Exception as error:
        names = ", ".join(name for name, known in CHECKS.items() if known is check)
        pytest.fail(f"torch {torch.__version__}: not what megabatch needs: {names}: {error!r}")


def test_every_private_name_is_checked() -> None:
    source = inspect.getsource(torch_internals).replace("torch._C:", "torch:")
    written = re.findall(r'(?<=["._:])_[a-z]+[\w.:]*(?=")|(?<=\w\.)_[a-z]\w*', source)
    modules = {"_dynamo", "_python_dispatch"}
    assert {*written} - modules == {*CHECKS} | {*BY_BEHAVIOUR}
    for file, _, test in (place.partition("::") for place in BY_BEHAVIOUR.values()):
        assert f"\ndef {test}(" in (Path(__file__).parent / file).read_text()


def private_names(path: Path) -> Iterator[str]:
    """Attributes and modules that begin with an underscore, of anything but `self` and `cls`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            whose = ast.unparse(node.value)
            if whose not in ("self", "cls", "argparse") and not OWN.fullmatch(node.attr):
                yield f"{whose}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            if any(part.startswith("_") for part in parts):
                yield f"{node.module}: {parts[-1]}"


def test_no_private_name_of_torch_anywhere_else() -> None:
    """Attributes of this project's own modules and classes, which have no stub in torch, apart."""
    others = {}
    for path in SOURCES.rglob("*.py"):
        # Defined by this file, or a private function of one of its neighbours.
        own = re.findall(r"(?:def|class) (\w+)", path.read_text())
        for other in path.parent.glob("*.py"):
            own += re.findall(r"^(?:def|class) (\w+)", other.read_text(), re.M)
        names = [name for name in private_names(path) if name.rpartition(".")[2] not in own]
        if names and path.name != "torch_internals.py":
            others[str(path.relative_to(SOURCES))] = names
    assert others == {}
