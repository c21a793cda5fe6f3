"""Every change to a library is needed: without it something goes wrong, with it does not. If not, the change can be deleted."""

import json
import re
import subprocess
import sys

import list_changes
import pytest
from conftest import ROOT

# What a case of cases.py returns without the change, and with it. Of an error the type.
EXPECTED = {
    "allow_fsdp_on_cpu": ("MULTI_CPU", "FSDP"),
    "compute_loss_without_triton": (True, False),
    "give_weights_addresses": (1, 2),
    "hide_saved_buffers": ("AttributeError", ["model.expert_bias"]),
    "keep_4bit_layout": (False, True),
    "keep_activation_checkpointing": (3, 1),
    "load_tokenizers_as_offline": (False, True),
    "map_in_one_process": (2, 1),
    "read_no_weights": (["cpu"], ["meta"]),
    "set_date_of_chat_templates": ("this year", "2001"),
    "store_json_exactly": (
        [[6553255926290448384], ["20000000000000000000"], [0.12345678901234501], [0.12345678900000001]],
        [[25 * 10**18], [2 * 10**19], [0.12345678901234568], [0.12345678901234568]],
    ),
    "use_no_gpu_kernels": (["kernel", "kernel"], ["torch", "kernel"]),
}
# Changes that add something or read a private name, and the test that fails without them.
TESTED_ELSEWHERE = {
    "add_overrides": "run/test_batches.py::test_one_of_two_processes_cannot_read",
    "attention_of": "recipes/test_smoke.py::test_pair_trains_and_saves_a_model",
    "build_from_config": "commands/test_preview.py::test_every_recipe",
    "convert_masks_once": "compat/test_peft.py::test_masks_that_are_converted_once_give_the_same_answers",
    "gather_once_per_step": "run/test_sharding.py::test_weights_that_stay_gathered",
    "generate_in_evaluation_mode": "recipes/test_rewards.py::test_reward_rises",
    "generate_on": "run/test_outputs.py::test_samples_of_an_adapter_with_offload",
    "launch_environment": "start/test_plain_launchers.py::test_accelerate_launch",
    "is_stateful": "model/test_packing.py::test_layers_that_carry_a_state",
    "load_models_with": "commands/test_preview.py::test_every_recipe",
    "logged_metrics": "run/test_losses.py::test_metrics_of_dpo_are_means_over_pairs_and_tokens",
    "never_ask_for_code": "start/test_remote_code.py::test_code_of_a_model_does_not_run",
    "names_in_model": "commands/test_merge.py::test_merge_into_files_with_older_names",
    "merge_for_generation": "compat/test_peft.py::test_weights_are_the_same_afterwards",
    "multiply_in_float32": "rehearsal/test_products.py::test_factors_are_copied_to_float32",
    "reduce_each_batch": "run/test_sharding.py::test_collectives_per_step",
    "rewards_of": "recipes/test_rewards.py::test_preview_of_rewards",
    "set_allocator_settings": "cuda_build/test_libraries.py::test_allocator_is_set_by_a_call_once_cuda_has_started",
    "supports_flash_attention_2": "model/test_attention.py::test_choice",
    "takes_other_attention": "model/test_attention.py::test_choice",
    "transformer_layers": "run/test_sharding.py::test_run_that_is_not_sharded_as_its_config_says",
    "without_pixels": "data/test_images.py::test_line_breaks_around_images_are_those_of_the_processor",
}


@pytest.fixture(scope="module")
def results(environment):
    """What the cases returned, by name."""
    command = [sys.executable, ROOT / "tests/compat/cases.py", *EXPECTED]
    variables = environment | {"PYTHONPATH": str(ROOT / "recipes"), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("name", EXPECTED)
def test_change_is_needed(results, name):
    without, changed = (re.sub(r"^(\w+Error): .*", r"\1", r, flags=re.DOTALL) if isinstance(r, str) else r for r in results[name])
    assert (without, changed) == EXPECTED[name], results[name]


def test_every_change_of_compat_has_a_test():
    changes = {change.name for change in list_changes.load_all() if change.module.startswith("harness.")}
    assert EXPECTED.keys() | TESTED_ELSEWHERE.keys() == changes
    for place in TESTED_ELSEWHERE.values():
        file, test = place.split("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), place
