"""What is chosen for a machine: the fastest combination that fits, found with few simulations."""

import dataclasses
import itertools
import json
import math
import random

from harness import configs
from harness.runs import Run
from planner import cache, cards, choose, chosen, hardware, links, machines, memory, roofline
from planner.grid import Grid, Option, make_grid
from planner.hardware import Gpu
from planner.ledger import Counts, Peak
from planner.machines import Machine
from planner.simulation import Refused
from planner.values import values_of_recipe

import pytest
from conftest import ROOT
from test_cards import FOUND, found_with

RECIPE = ROOT / "recipes/qwen2_fineweb_edu.py"
PATHS = [str(path) for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))]
CARD = cards.find_card("3090")


def names_of(grid: Grid) -> set[str]:
    return {configs.read(path).name for path, _ in grid.settings}


def grid_of(recipe, machine: str, *words: str) -> Grid:
    return make_grid(values_of_recipe(str(recipe), list(words)), machines.read_machine(machine), PATHS, list(words))


def test_machine_is_read():
    expected = {
        "4xA100": (1, 4, "A100 40 GB", math.inf, math.inf),
        "1 x RTX 4090 , 500GB disk": (1, 1, "RTX 4090", math.inf, 500e9),
        "2x8xa100-80gb,nvlink,1000 GB": (2, 8, "A100 80 GB", 1000e9, math.inf),
    }
    read = map(machines.read_machine, expected)
    assert [(one.nodes, one.gpus, one.card.name, one.host, one.disk) for one in read] == list(expected.values())


@pytest.mark.parametrize("text", ["3090", "0x3090", "1x3090; 2x3090", "2x3090,fast", "2x4090,nvlink"])
def test_misspelt_machine_is_one_error(error_of, text):
    assert "--for" in error_of(machines.read_machine, text)
    assert "--card RTX3091" in error_of(machines.read_machine, "2xRTX3091")


def test_grid_of_several_nodes(error_of):
    """SLURM's signal comes early enough for two steps, of twice their forecast, and a checkpoint; launch.sh asks for 300 s."""
    grid = grid_of(ROOT / "recipes/llama31_8b_lora.py", "2x4xA100,200GB")
    assert (grid.processes, grid.nodes) == (8, 2)
    assert names_of(grid) == {"1x3090_offload", "2x4gpu_hybrid_shard", "4gpu_ddp", "4gpu_full_shard", "4gpu_shard_grad_op"}
    path = next(path for path in PATHS if "hybrid" in path)
    for flops, signal in ((312e12, ""), (312e12 * 0.6 * 100, "--signal USR1@480 ")):  # a step takes 100 s, or 200 s
        candidate = choose.Candidate(Option(path, 4, False), found_with(step=Counts({"torch.bfloat16": flops}, {}, 0)), 1.0)
        line = chosen.command_line("r", machines.read_machine("2x4xA100"), candidate, ["--seed", "1"], grid)
        assert line.startswith(f"sbatch --nodes 2 --gpus-per-node 4 {signal}launch.sh r 2x4gpu_hybrid_shard --seed 1")
    assert [chosen.signal_seconds(step) for step in (60, 61, 152.5)] == [0, 360, 720]
    assert f"#SBATCH --signal=USR1@{chosen.SIGNAL}\n" in (ROOT / "launch.sh").read_text()
    assert "2x4gpu_hybrid_shard" not in names_of(grid_of(ROOT / "recipes/gpt2_xl_wikitext.py", "3x1xT4"))
    assert "--for" in error_of(grid_of, RECIPE, "3x2x3090")  # 16 rows


@pytest.mark.parametrize(
    ("name", "mebibytes", "version", "card", "rates_of"),
    [
        ("NVIDIA GeForce RTX 3090", 24576, "8.6", "RTX 3090", "RTX 3090"),
        ("NVIDIA A100-SXM4-80GB", 81920, "8.0", "A100 80 GB", "A100 80 GB"),
        ("NVIDIA H100 PCIe", 81559, "9.0", "H100 PCIe", "H100 PCIe"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "12.0", "RTX PRO 6000", "RTX PRO 6000"),
        ("NVIDIA RTX A5000", 24564, "8.6", "RTX A5000", "RTX 3090"),
        ("Tesla V100-SXM2-32GB", 32768, "7.0", "Tesla V100-SXM2-32GB", "T4"),
    ],
)
def test_gpus_of_this_machine(monkeypatch, capsys, name, mebibytes, version, card, rates_of):
    """As nvidia-smi prints them. An unknown GPU has its own memory, and it is printed that its speed is that of another."""
    topology = "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n"
    listed = "".join(f"{name}, {mebibytes}, {version}, {index}\n" for index in (0, 1))
    for module in (hardware, machines):
        monkeypatch.setattr(module, "ask_nvidia_smi", lambda *words: topology if "topo" in words else listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = machines.this_machine(hardware.find_gpus())
    assert (machine.gpus, machine.card.name, machine.card.half) == (2, card, cards.find_card(rates_of).half)
    assert bool(capsys.readouterr().err) is (card != rates_of)
    assert machine.card.memory == pytest.approx(mebibytes * 2**20, rel=0.05)
    assert machine.card.link == machine.card.pcie, "PHB is PCIe"
    assert 0 < machine.host < 1e14 and machine.disk > 0
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    assert len(hardware.find_gpus()) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.find_gpus() == []


# Of a server with four GPUs and two network cards. The first two GPUs have NVLink. Terminals show the header underlined.
TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\tSYS\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPHB\tSYS\tPXB\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tPHB\t X \tSYS\tPXB\t32-63\t1\t\tN/A
"""


def test_links_of_the_gpus(capsys, monkeypatch):
    """Network cards, which are never connected by NVLink, do not count."""
    expected = {(0, 1): True, (2, 3): False, (0, 1, 2, 3): False, (0,): None, (0, 4): None}
    assert {gpus: links.are_linked(TOPOLOGY, list(gpus)) for gpus in expected} == expected
    a100, bridge = (machines.read_machine(text).card for text in ("4xA100,no nvlink", "2x3090,nvlink"))
    assert a100.link == a100.pcie < cards.find_card("A100").link == 210e9 and bridge.link == 39e9 > CARD.link
    own = (cards.card_of_user("A4000", 16.9, 77, 448), *cards.CARDS)
    assert machines.read_machine("2xA4000", own).card == own[0]
    monkeypatch.setattr(machines, "ask_nvidia_smi", lambda *options: TOPOLOGY)
    gpus = [Gpu(16.9e9, "NVIDIA RTX A4000", 8.6, index) for index in (0, 1)]
    assert machines.this_machine(gpus, own).card == own[0] and "NVLink" in capsys.readouterr().err


def test_grid_of_one_and_of_several_gpus():
    one = grid_of(RECIPE, "1x3090")
    assert names_of(one) == {"1x3090", "1x3090_offload"} and one.processes == 1 and not one.common_flags and not one.idle
    assert {checkpointing for _, checkpointing in one.settings} == {False, True}
    assert [option.micro_batch for option in next(iter(one.settings.values()))] == [1, 2, 4, 8, 16]
    several = grid_of(RECIPE, "3x3090")
    assert several.processes == 2 and "--global_batch_size 18" in several.idle, "three GPUs do not divide 16 rows"
    assert names_of(several) == {"1x3090_offload", "4gpu_ddp", "4gpu_full_shard", "4gpu_shard_grad_op"}
    # GPUs without bf16
    assert grid_of(RECIPE, "2xT4", "--use_peft").common_flags == ["--bf16", "false", "--fp16", "true", "--dtype", "float16"]


def test_grid_leaves_what_a_flag_sets():
    words = ["--per_device_train_batch_size", "4", "--activation_checkpointing", "--load_in_4bit", "--use_peft"]
    grid = grid_of(RECIPE, "3xA100", *words)
    assert all(options == [Option(path, None, None)] for (path, _), options in grid.settings.items())
    assert grid.processes == 2 and {"2x3090_qlora", "1x3090_qlora"} <= names_of(grid)


def made(option: Option, of: dict[str, float], rows: int = 16) -> choose.Simulation:
    """A simulation by formulas: memory grows with the micro-batch, and has gradients of earlier ones if there are several;
    traffic has a part that every micro-batch repeats."""
    size = option.micro_batch
    count = rows // size
    growing, gradients = int(of["growing"] * size), int(of["gradients"] * (count > 1))
    fixed = int(of["fixed"]) + gradients
    traffic = {"to_gpu": of["moved"] * count}, of["touched"] + of["repeated"] * count
    return found_with(
        **{"processes": 1, "shards": 1, "micro_batch": size, "accumulation": count},
        peaks={"backward": Peak(fixed + growing, {"gradients": gradients})},
        hull=[(fixed, growing)],
        step=Counts({"torch.bfloat16": of["flops"]}, *traffic),
    )


def test_choice_is_nearly_the_fastest_of_the_grid():
    """Of a hundred grids with random memory and traffic."""
    simulated = 0
    ranges = {"fixed": (2e9, 24e9), "growing": (1e8, 6e9), "moved": (0, 2e10), "gradients": (0, 8e9)}
    for seed in range(100):
        draw = random.Random(seed)
        grid = Grid(1, {}, [], (None, None))
        every = {}
        for setting in itertools.product(PATHS[:4], (False, True)):
            sizes = {name: draw.uniform(*ends) for name, ends in ranges.items()}
            # Every setting computes the same and touches at least the same for its tokens.
            sizes |= {"flops": 5e13 * (1 + 0.3 * setting[1]), "touched": 4e11 * draw.uniform(1, 1.5), "repeated": 2e10}
            grid.settings[setting] = [Option(setting[0], size, setting[1]) for size in (1, 2, 4, 8, 16)]
            every |= {option: made(option, sizes) for option in grid.settings[setting]}
        tried = []

        def simulate(options, every=every, tried=tried):
            tried.extend(options)
            return [every[option] for option in options]

        machine = Machine("1x3090", 1, CARD)
        candidates = choose.choose(machine, grid, simulate)
        fitting = {one.option: one.seconds for one in choose.possible(machine, list(every), list(every.values()))}
        assert bool(candidates) == bool(fitting)
        if fitting:
            assert candidates[0].seconds <= 1.1 * min(fitting.values()), seed
            assert [one.seconds for one in candidates[1:]] == sorted(fitting[one.option] for one in candidates[1:])
        assert len(tried) == len(set(tried))
        simulated += len(tried)
    assert simulated < 0.6 * 100 * 40


def test_fewer_kernels_are_chosen_where_gpu_and_host_wait_for_each_other():
    """Each needs 1 s, together 1.4 s; others with more FLOP need 1.2 s, or 1 % less with a later config."""
    one = found_with(processes=1, shards=1, peaks={"backward": Peak(10**9, {})})
    seconds = [(1, 1), (1.2, 0), (1.19, 0)]
    counts = [Counts({"torch.bfloat16": gpu * 0.6 * CARD.half}, launches=host / cards.LAUNCH) for gpu, host in seconds]
    found = {path: dataclasses.replace(one, step=step) for path, step in zip(PATHS[:3], counts, strict=True)}
    grid = Grid(1, {(path, False): [Option(path, 1, False)] for path in found}, [], (None, None))
    candidates = choose.choose(Machine("", 1, CARD), grid, lambda options: [found[option.config] for option in options])
    assert [PATHS.index(one.option.config) for one in candidates] == [1, 2, 0]
    assert candidates[2].seconds == pytest.approx(2**0.5)


def test_compiled_layers_earn_the_time_of_compiling():
    """On a card with 1e12 FLOP/s, a step takes 1 s, and 0.8 s if it is compiled: 600 steps earn two minutes."""
    card = dataclasses.replace(CARD, half=1e12)
    one = found_with(processes=1, shards=1, peaks={"backward": Peak(10**9, {})})
    plain, compiled = (dataclasses.replace(one, step=Counts({"torch.bfloat16": of * 0.6e12}, {}, 0)) for of in (1, 0.8))
    best = choose.Candidate(Option(PATHS[0], 2, None), plain, roofline.step_seconds(card, plain))

    def weigh(steps, simulate=lambda options: [compiled], **changes):
        values = {"load_in_4bit": False, "packing": True} | changes
        return choose.weigh_compiling(Machine("", 1, card), best, [best.option], values, simulate, lambda one: steps)[0]

    assert not weigh(200) and not weigh(-1)
    # Layers that are not compiled are not simulated.
    assert not weigh(600, None, load_in_4bit=True) and not weigh(600, None, packing=False)
    (found,) = weigh(600)
    assert found.option.flags == ["--per_device_train_batch_size", "2", "--torch_compile", "true"]
    assert found.seconds == pytest.approx(0.8)


def test_what_does_not_fit_is_not_chosen(error_of):
    """GPU memory with the margin, host memory, a dtype that the GPU has not, and refused runs."""
    fitting, large = (found_with(peaks={"forward": Peak(int(size), {})}) for size in (20.0e9, 22.5e9))
    machine = Machine("", 4, CARD)
    assert machines.is_possible(machine, fitting)
    assert memory.fits(CARD, large, 22.5e9) and not machines.is_possible(machine, large)
    assert not machines.is_possible(machine._replace(host=memory.needed_host_memory(fitting)), fitting)
    assert not machines.is_possible(machine._replace(card=dataclasses.replace(CARD, bf16=False)), fitting)
    # If everything is refused, the first reason is the message.
    grid = Grid(1, {(path, False): [Option(path, 1, False)] for path in PATHS}, [], (None, None))
    assert error_of(choose.choose, machine, grid, lambda new: [Refused("", one.config) for one in new]) == PATHS[0]


def test_plan_follows_the_file_of_the_flags(tmp_path):
    """The arguments of `--config FILE` are part of the run."""
    run, found = Run(str(RECIPE), processes=1, config=configs.read(str(ROOT / "accelerate_configs/1x3090.yaml"))), set()
    for length in (512, 16384):
        (tmp_path / "flags.yaml").write_text(f"max_length: {length}")
        found.add(cache.cache_path(run, ["--config", str(tmp_path / "flags.yaml")]))
    assert len(found) == 2


def test_damaged_simulation_is_simulated_again(tmp_path):
    """The cache can be on a disk that others write to."""
    file = tmp_path / "plans/any.json"
    cache.keep_simulation(file, FOUND)
    assert cache.cached_simulation(file) == found_with(hull=[list(pair) for pair in FOUND.hull])
    for damaged in (json.dumps(json.loads(file.read_text()) | {"other": 1}).encode(), b"\xff{"):
        file.write_bytes(damaged)
        assert cache.cached_simulation(file) is None


def test_command_has_only_flags_that_change_something():
    grid = grid_of(RECIPE, "2x3090")
    path = next(path for path, _ in grid.settings if path.endswith("4gpu_ddp.yaml"))
    flags = "--use_peft --per_device_train_batch_size 4 --activation_checkpointing true"
    for option, expected in ((Option(path, 2, False), "--use_peft"), (Option(path, 4, True), flags)):
        line = chosen.command_line("r", Machine("", 2, CARD), choose.Candidate(option, FOUND, 1.0), ["--use_peft"], grid)
        assert line == f"NPROC_PER_NODE=2 ./launch.sh r 4gpu_ddp {expected}"


def test_choice_for_a_machine(launch, small_model, tmp_path):
    """The plan has the choice as a command and as keys. Simulations are kept for the next choice."""
    arguments = ["qwen2_fineweb_edu", "--for", "1x3090,64GB", *small_model, "--activation_checkpointing", "false"]
    process = launch("--plan", *arguments, "--json", cwd=tmp_path, HF_HOME=str(tmp_path / "cache"))
    assert process.returncode == 0, process.stderr
    plan = json.loads(process.stdout)
    assert plan["config"] == "1x3090" and plan["micro_batch"] == 4 and plan["fits"]["RTX 3090"]
    assert plan["flags"] == ["--per_device_train_batch_size", "4"]
    assert plan["command"].startswith("./launch.sh qwen2_fineweb_edu 1x3090 --model_name_or_path ./model")
    assert [choice["slower"] for choice in plan["choices"]] == sorted(choice["slower"] for choice in plan["choices"])
    assert len(plan["choices"]) == 3 and plan["on_machine"]["hours"]
    assert 3 <= len(list((tmp_path / "cache/plans").iterdir())) <= 6
