"""Packed documents of a model whose layers carry a state from one token to the next."""

import json
import subprocess
import sys
import types

from harness.messages import UserError
from harness.model.attention import KEPT_APART_BY_KERNELS, carries_state, check_packing

import pytest
from conftest import ROOT
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

NO_STATE = ("qwen2", "qwen3", "qwen3_moe", "llama", "gpt2", "gpt_oss", "gemma3_text", "mistral", "deepseek_v3")
WITH_STATE = ("qwen3_5", "qwen3_5_text", "qwen3_next", "mamba2", "jamba", "granitemoehybrid", "minimax", "lfm2")
VALUES = {"lfm2": {"full_attn_idxs": [2, 5, 8]}}


def config_of(kind):
    name = "Qwen3_5ForConditionalGeneration" if kind == "qwen3_5" else CLASSES[kind]
    return AutoConfig.for_model(kind, architectures=[name], **VALUES.get(kind, {}))


def check(folder, kind, **changed):
    config_of(kind).save_pretrained(folder)
    training_args = types.SimpleNamespace(**{"packing": True, "packing_strategy": "bfd", "padding_free": False} | changed)
    model_args = types.SimpleNamespace(model_name_or_path=str(folder), model_revision="main", attn_implementation=None)
    check_packing(training_args, model_args, "some/model")


@pytest.mark.parametrize("kind", [*NO_STATE, *WITH_STATE])
def test_layers_that_carry_a_state(kind):
    assert carries_state(config_of(kind)) == (kind in WITH_STATE)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_packed_documents_that_would_change_each_other(tmp_path, kind):
    """One message before the start. transformers would refuse some of these models in the first step, and train others."""
    with pytest.raises(UserError) as raised:
        check(tmp_path, kind)
    message = str(raised.value)
    assert message.startswith("--packing: some/model (") and "pass --packing false" in message and "\n" not in message
    assert ("install flash-linear-attention and causal-conv1d" in message) == kind.startswith("qwen3")
    check(tmp_path, kind, packing_strategy="wrapped")  # documents change each other in any model, as the recipe wants it


@pytest.mark.parametrize(("kind", "attend"), [("qwen3", False), ("gpt_oss", True), ("bloom", True)])
def test_warning_if_packed_documents_attend_to_each_other(tmp_path, capsys, kind, attend):
    check(tmp_path, kind)
    assert ("attend to each other: pass --packing false" in capsys.readouterr().out) == attend


def test_kernels_get_the_lengths_of_documents():
    """With functions that compute one document at a time in place of the kernels, packed equals alone."""
    command = [sys.executable, ROOT / "tests/model/reference_kernels.py"]
    process = subprocess.run(command, env={"PYTHONPATH": str(ROOT / "recipes")}, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == dict.fromkeys(KEPT_APART_BY_KERNELS, True)
