"""`--profile`: traces, a table and a picture of some steps in the middle of a run."""

import gzip
import json

from harness.run.profile import Profile, covered, format_table, group_events, measure

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

RECIPE = "qwen2_fineweb_edu"
NCCL = "ncclDevKernel_{}(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("done", "max_steps", "interval", "accumulation", "steps"),
    [
        (0, 5, 0, 1, (3, 5)),
        (0, 20, 0, 1, (10, 12)),
        (0, 20, 10, 1, (12, 14)),  # an evaluation after step 10
        (0, 20, 1, 1, (10, 12)),  # an evaluation after every step
        (0, 1000, 0, 2, (20, 22)),
        (500, 1000, 0, 2, (520, 522)),
        (0, 1000, 0, 16, (20, 20)),  # one step: it has sixteen micro-batches
    ],
)
def test_recorded_steps(tmp_path, capsys, done, max_steps, interval, accumulation, steps):
    args = TrainingArguments(output_dir=tmp_path, use_cpu=True, gradient_accumulation_steps=accumulation)
    state = TrainerState(global_step=done, max_steps=max_steps, eval_steps=interval, save_steps=0)
    profile = Profile(args)
    profile.on_train_begin(args, state, TrainerControl())
    assert (profile.first, profile.last) == steps
    profile.on_train_end(args, state, TrainerControl())
    assert f"stopped before step {steps[1]}" in capsys.readouterr().out


def test_no_profile_of_a_short_run_or_a_second_time(tmp_path, capsys):
    args = TrainingArguments(output_dir=tmp_path, use_cpu=True)
    profile = Profile(args)
    profile.on_train_begin(args, TrainerState(global_step=96, max_steps=100), TrainerControl())
    assert profile.profiler is None
    message = capsys.readouterr().out
    assert message.startswith("No profile: 4 steps are left, and it needs 5") and message.count("\n") == 1
    profile.table.parent.mkdir()
    profile.table.touch()
    profile.on_train_begin(args, TrainerState(global_step=0, max_steps=100), TrainerControl())
    assert profile.profiler is None and "has one already" in capsys.readouterr().out


def test_run_that_stops_while_it_is_recorded(build_trainer, capsys):
    """Training ends as it would without a profile, and no part of a profile is written."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 4

    trainer = build_trainer(RECIPE, "--profile", "--max_steps", "6", "--eval_strategy", "no", "--save_strategy", "no")
    trainer.add_callback(Stop())
    trainer.add_callback(profile := Profile(trainer.args))
    trainer.train()
    assert trainer.state.global_step == 4 and profile.first == 3 and not profile.folder.exists()
    assert "No profile: the run stopped before step 5" in capsys.readouterr().out


def test_profile_of_sharded_run(rehearse):
    """Two processes write a trace each; the table has FSDP's collectives."""
    flags = ["--profile", "--max_steps", "5", "--eval_strategy", "no", "--save_strategy", "no"]
    folder = rehearse(RECIPE, "4gpu_full_shard", *flags, NPROC_PER_NODE="2") / "profile"
    for rank in (0, 1):
        with gzip.open(folder / f"rank{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
        assert any(name.startswith("FSDP::all_gather") for name in names)
    text = (folder / "table.md").read_text()
    assert text.startswith(f"{RECIPE} × 4gpu_full_shard, steps 3 to 5, mean of 2 processes, on the CPU:")
    rows = {cells[1].strip(): cells[2:] for cells in (line.split("|") for line in text.splitlines() if line.startswith("| "))}
    for category in ("compute", "all-gather", "reduce-scatter", "all-reduce", "all communication", "one step"):
        assert float(rows[category][0].replace(",", "")) > 0
    assert "other collectives" not in rows and "host to GPU" not in rows
    assert (folder / "timeline.png").stat().st_size > 5000


def test_table():
    ranks = [
        {"compute": (60_000_000, 0), "all-reduce": (30_000_000, 15_000_000), "waiting": (25_000_000, 0)},
        {"compute": (80_000_000, 0), "all-reduce": (10_000_000, 5_000_000), "host to GPU": (2_000_000, 0), "waiting": (0, 0)},
    ]
    assert format_table([100_000_000, 100_000_000], ranks, steps=2).splitlines() == [
        "|             | ms per step | share | hidden behind compute |",
        "| ----------- | ----------: | ----: | --------------------: |",
        "| compute     |        35.0 |   70% |                       |",
        "| all-reduce  |        10.0 |   20% |                   50% |",
        "| host to GPU |         0.5 |    1% |                    0% |",
        "| waiting     |         6.2 |   12% |                       |",
        "| one step    |        50.0 |  100% |                       |",
    ]


def test_events_on_gpu():
    """Streams overlap. What the host does at the same time does not count, nor do ranges that only name kernels."""
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
    assert measure(group_events(events), 0, 100) == {
        "compute": (30 + 20 + 3, 0),
        "all-gather": (30, 10 + 10),
        "reduce-scatter": (20, 5),
        "host to GPU": (10, 0),
        "GPU to host": (4, 2),
        "all communication": (30 + 20, 20 + 5),
        "waiting": (10 + 7, 0),
    }


def test_events_on_cpu():
    """gloo runs next to the operators, and implements reduce-scatter by all-reduce."""
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
        ("gloo:all_reduce", "user_annotation", 70, 75),  # this and the next one are after both calls
        ("gloo:all_reduce", "user_annotation", 75, 78),
        ("aten::linalg_vector_norm", "cpu_op", 79, 95),  # of a sharded tensor: it waits for a collective
        ("_c10d_functional::wait_tensor", "cpu_op", 80, 90),
        ("aten::sum", "cpu_op", 91, 94),
    ]
    assert measure(group_events(events), 0, 100) == {
        "compute": (40 + 10 + 3, 0),
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
    assert list(group_events([(name, "kernel", 0, 1)])) == [expected]


def test_overlapping_intervals_count_once():
    assert covered([(5, 9), (0, 4), (1, 2), (3, 6)]) == 9
    assert covered([]) == 0
