"""Which machines a run has, from the variables of SLURM or of the user; contradictions are errors."""

import os

from harness.nodes import cluster

import pytest
from runs import assert_one_error

pytestmark = pytest.mark.unit

PLAIN = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def nodes_from(monkeypatch):
    """Calls `nodes_from_environment` in an environment with the given variables."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "N", "MASTER_"))]:
        monkeypatch.delenv(name)

    def call(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return cluster.nodes_from_environment()

    return call


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, cluster.Nodes(head="")),
        ({"NPROC_PER_NODE": "2"}, cluster.Nodes(head="", processes=2)),
        (PLAIN, cluster.Nodes(2, 1, "127.0.0.1", another="127.0.0.1")),
        (PLAIN | {"MASTER_PORT": "1234"}, cluster.Nodes(2, 1, "127.0.0.1", 1234, another="127.0.0.1")),
        (STEP | {"SLURM_GPUS_ON_NODE": "4"}, cluster.Nodes(2, 1, "127.0.0.1", 10_007, "127.0.0.1", 4)),
        (STEP | {"SLURM_GPUS_ON_NODE": "4", "NPROC_PER_NODE": "2"}, cluster.Nodes(2, 1, "127.0.0.1", 10_007, "127.0.0.1", 2)),
    ],
)
def test_nodes_from_variables(nodes_from, variables, expected):
    assert nodes_from(variables) == expected


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"NNODES": "2"}, "NODE_RANK"),
        ({"NNODES": "two"}, "NNODES"),
        ({"NNODES": "0"}, "NNODES"),
        (PLAIN | {"NODE_RANK": "2"}, "2 of 2"),
        (PLAIN | {"MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "--ntasks-per-node=1"),
        ({"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8"}, "--ntasks-per-node=1"),
    ],
)
def test_wrong_variables_are_an_error(nodes_from, error_of, variables, word):
    assert word in error_of(nodes_from, variables)


@pytest.mark.parametrize(
    ("config", "variables", "word"),
    [
        ("3xt4_shard_grad_op", {}, "NNODES=3"),
        ("2x4gpu_hybrid_shard", PLAIN | {"NNODES": "3"}, "3 machines with 4 GPUs each"),
        ("2x4gpu_hybrid_shard", PLAIN | {"NPROC_PER_NODE": "2"}, "2 machines with 2 GPUs each"),
    ],
)
def test_machines_must_fit_the_config(launch, tmp_path, config, variables, word):
    assert_one_error(launch("qwen2_fineweb_edu", config, cwd=tmp_path, **variables), word)
    assert not list(tmp_path.iterdir())
