"""Kernels and operations of a profile by family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from machinery.kernels import GAPS, OTHERS, TRANSFERS, Profile, family, operations


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("void pytorch_flash::flash_bwd_kernel<cutlass::bfloat16_t>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_clone_3", "copies"),
        ("triton_poi_fused__to_copy_addmm_t_2", "copies"),
        ("triton_red_fused_gelu_gelu_backward_sum_4", "normalisation and activation"),
        ("triton_per_fused_sum_7", "sums"),
        ("triton_poi_fused_add_1", OTHERS),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", TRANSFERS),
        ("Memcpy DtoD (Device -> Device)", "copies"),
    ],
)
def test_families(name: str, expected: str) -> None:
    assert family(name) == expected != GAPS


def test_operations() -> None:
    assert operations("aten::addmm", [[5], [3, 4], [4, 5], [], []]) == {"products": 2 * 3 * 4 * 5}
    assert operations("aten::bmm", [[7, 3, 4], [7, 4, 5]]) == {"products": 7 * 2 * 3 * 4 * 5}
    assert operations("aten::linear", [[3, 4], [5, 4], [5]]) == {}
    q = [2, 3, 10, 8]
    forward, backward = "_efficient_attention", "_efficient_attention_backward"
    square = 2 * 2 * 3 * 10 * 10 * 8
    name = "aten::_scaled_dot_product"
    assert operations(name + forward, [q, q, q]) == {"attention": 2 * square}
    assert operations(name + backward, [q, q, q, q]) == {"attention": 5 * square}
    qkv = [q[0], q[2], 3, q[1], q[3]]
    for name in ("megabatch::short_attention", "megabatch::block_attention"):
        assert operations(name, [qkv, []]) == {"attention": 2 * square}
        assert operations(f"{name}_backward", [qkv, [], []]) == {"attention": 5 * square}


def event(name: str, start: float, end: float, *, gpu: bool, shapes: Any = ()) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU,
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
        input_shapes=shapes,
        is_user_annotation=name == "step_time mark",
    )


def test_parts_of_a_gpu() -> None:
    profile: Any = Profile.__new__(Profile)
    profile._on_gpu, profile._names = True, ["a", "loss", "a", "end"]
    product = {"shapes": [[2, 3], [3, 4]], "gpu": False}
    events = [event("aten::mm", start, start + 2, **product) for start in (10, 110, 210)]
    for i in range(4):
        events.append(event("step_time mark", 100 * i, 100 * i + 5, gpu=False))
        start = 1000 * i + 500
        events.append(event("step_time mark", start, start + 5, gpu=True))
        events.append(event("at::cuda::spin_kernel(long)", start, start + 1, gpu=True))
    # Inductor's kernels have the names of the host's calls.
    events.append(event("triton_poi_fused_gelu_0", 20, 21, gpu=False))
    for name, start in (("triton_poi_fused_gelu_0", 700), ("nvjet_x", 1600), ("nvjet_x", 2600)):
        events.append(event(name, start, start + 100, gpu=True))
    events.append(event("Memcpy HtoD (Pinned -> Device)", 2600, 2900, gpu=True))
    profile._read(events)
    assert profile.lengths == {"a": pytest.approx(2e-3), "loss": pytest.approx(1e-3)}
    assert profile.operations == {"a": {"products": 96}, "loss": {"products": 48}}
    assert profile.seconds_by_family("a", 2e-3) == pytest.approx(
        {"products": 1e-4, "normalisation and activation": 1e-4, TRANSFERS: 3e-4, GAPS: 1.8e-3}
    )
    assert profile.seconds_by_family("loss", 5e-4) == pytest.approx({"loss": 1e-4, GAPS: 4e-4})
