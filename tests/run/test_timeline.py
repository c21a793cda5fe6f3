"""What the intervals of a trace were for, on traces whose answers are known by hand."""

from harness.run.timeline import covered, measure, sort_out

import pytest

NCCL = "ncclDevKernel_{}(ncclDevKernelArgsStorage<4096ul>)"


def test_a_gpu():
    """Streams overlap; what the host does in the meantime does not count, nor do ranges that only name kernels."""
    events = [
        ("ampere_bf16_s16816gemm_128x128", "kernel", -10, 30),
        (NCCL.format("AllGather_RING_LL"), "kernel", 20, 50),
        ("void at::native::vectorized_elementwise_kernel<4>", "kernel", 40, 60),
        (NCCL.format("ReduceScatter_Sum_f32_RING_LL"), "kernel", 55, 75),
        ("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 58, 62),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 70, 80),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 90, 92),
        ("Memset (Device)", "gpu_memset", 92, 93),
        ("ampere_bf16_s16816gemm_128x128", "kernel", 101, 120),
        ("nccl:_all_gather_base", "gpu_user_annotation", 15, 55),
        ("cudaLaunchKernel", "cuda_runtime", 80, 90),
        ("aten::mm", "cpu_op", 0, 100),
        ("c10d::_allgather_base_", "cpu_op", 5, 10),
        ("gloo:all_reduce", "user_annotation", 85, 99),
    ]
    assert measure(sort_out(events), 0, 100) == {
        "arithmetic": (30 + 20 + 3, 0),
        "all-gather": (30, 10 + 10),
        "reduce-scatter": (20, 5),
        "host to GPU": (10, 0),
        "GPU to host": (4, 2),
        "all communication": (30 + 20, 20 + 5),
        "waiting": (10 + 7, 0),
    }


def test_a_cpu():
    """gloo's transfers run beside the operators, and reduce and scatter by an all-reduce."""
    events = [
        ("aten::mm", "cpu_op", 0, 40),
        ("aten::resolve_conj", "cpu_op", 1, 2),
        ("FSDP::all_gather (model.layers.0)", "user_annotation", 40, 70),
        ("c10d::_allgather_base_", "cpu_op", 41, 42),
        ("gloo:all_gather", "user_annotation", 43, 60),
        ("bitsandbytes::dequantize_4bit", "cpu_op", 55, 65),
        ("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 65, 99),
        ("c10d::_reduce_scatter_base_", "cpu_op", 66, 67),
        ("_c10d_functional::all_reduce", "cpu_op", 68, 71),
        ("c10d::allreduce_", "cpu_op", 69, 70),
        ("gloo:all_reduce", "user_annotation", 70, 75),  # both after both calls
        ("gloo:all_reduce", "user_annotation", 75, 78),
        ("aten::linalg_vector_norm", "cpu_op", 79, 95),  # of a sharded tensor: it waits for a collective
        ("_c10d_functional::wait_tensor", "cpu_op", 80, 90),
        ("aten::sum", "cpu_op", 91, 94),
    ]
    assert measure(sort_out(events), 0, 100) == {
        "arithmetic": (40 + 10 + 3, 0),
        "all-gather": (17, 5),
        "reduce-scatter": (5, 0),
        "all-reduce": (3, 0),
        "all communication": (17 + 8, 5),
        "waiting": (3 + 5 + 13 + 6, 0),
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (NCCL.format("AllReduce_Sum_bf16_TREE_LL"), "all-reduce"),
        (NCCL.format("AllReduce_SumPostDiv_u32_RING_SIMPLE"), "all-reduce"),
        (NCCL.format("Broadcast_RING_LL"), "broadcast"),
        (NCCL.format("Reduce_Sum_f32_RING_LL"), "reduce"),
        (NCCL.format("SendRecv"), "send"),
        ("ncclSymkDevKernel_ReduceScatter_LD_sum_bf16(ncclSymkDevWorkArgs)", "reduce-scatter"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "all-gather"),
        (NCCL.format("Generic_4"), "other collectives"),
    ],
)
def test_kernels_of_nccl(name, expected):
    assert list(sort_out([(name, "kernel", 0, 1)])) == [expected]


def test_what_overlaps_counts_once():
    assert covered([(5, 9), (0, 4), (1, 2), (3, 6)]) == 9
    assert covered([]) == 0
