"""Kernels and operations of a profile by family."""

from __future__ import annotations

import pytest

from machinery.kernels import GAPS, OTHERS, TRANSFERS, family, operations


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
