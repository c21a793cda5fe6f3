"""The model that a run saves: the trained weights, in the dtype of the original, and an adapter as it was trained."""

import json
import shutil
from pathlib import Path

from harness.configs import AccelerateConfig
from harness.run.checkpoints import WeightsOfModel
from harness.run.saving import load_original_config, save_model
from harness.run.sharding import prepare_gradient_scaler, prepare_sharding

import pytest
import torch
from runs import add_parts, read
from safetensors.torch import load_file
from transformers import AutoTokenizer


@pytest.mark.parametrize(
    ("recipe", "config", "dtype"),
    [("qwen2_fineweb_edu", "4gpu_full_shard", torch.bfloat16), ("gpt2_xl_wikitext", "3xt4_shard_grad_op", torch.float32)],
)
def test_weights_have_the_dtype_of_the_original(rehearse, recipe, config, dtype):
    """In training they are float32."""
    weights = load_file(rehearse(recipe, config) / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {dtype}


def test_adapter_is_not_rounded(rehearse):
    """After the evaluation of the last step FSDP still holds the weights unsharded, in the dtype of the arithmetic."""
    flags = ["--use_peft", "--max_steps", "2", "--eval_steps", "2", "--save_strategy", "no"]
    run = rehearse("qwen2_chat", "4gpu_shard_grad_op", *flags)
    state = read(run, "trainer_state.json")
    assert any("eval_loss" in entry for entry in state["log_history"] if entry["step"] == 2)
    weights = load_file(run / "adapter_model.safetensors")
    assert not [name for name, weight in weights.items() if torch.equal(weight, weight.bfloat16().float())]


def test_tokenizer_with_several_templates(build_trainer, tmp_path):
    """They are files in a folder, which others can read, and which a second start writes again. A link there is replaced."""
    trainer = build_trainer("qwen2_chat")
    run, templates = Path(trainer.args.output_dir), {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    trainer.processing_class.chat_template = templates
    add_parts(trainer)
    for _ in range(2):
        save_model(trainer, load_original_config(trainer))
    assert AutoTokenizer.from_pretrained(run).chat_template == templates and not (run / ".model.draft").exists()
    folder = run / "additional_chat_templates"
    assert folder.stat().st_mode & 0o111 and (run / "model.safetensors").stat().st_mode == (run / "run.json").stat().st_mode
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/tool_use.jinja").write_text("mine")
    save_model(trainer, load_original_config(trainer))
    assert not folder.is_symlink() and (tmp_path / "elsewhere/tool_use.jinja").read_text() == "mine"


class Embedder(torch.nn.Module):
    """As a SentenceTransformer: no model of transformers, but it has the config of the one in it, and writes its files itself."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.config = model, model.config

    def save_pretrained(self, path):
        self.inner.save_pretrained(path)


def test_model_of_another_library_writes_its_own_files(build_trainer):
    """Their names of weights are not those of the module."""
    trainer = build_trainer("qwen2_chat")
    trainer.model, run = Embedder(trainer.model), Path(trainer.args.output_dir)
    add_parts(trainer)
    save_model(trainer, load_original_config(trainer))
    weights = load_file(run / "model.safetensors")
    assert weights["model.norm.weight"].equal(trainer.model.inner.model.norm.weight)
    assert not WeightsOfModel(trainer.model).problem(run)


def test_weights_keep_the_dtype_of_files_whose_config_has_none(build_trainer, tmp_path):
    trainer = build_trainer("qwen2_chat")
    source, run = Path(shutil.copytree(trainer.model.config.name_or_path, tmp_path / "source")), Path(trainer.args.output_dir)
    settings = read(source, "config.json")
    assert settings.pop("dtype") == "bfloat16"
    (source / "config.json").write_text(json.dumps(settings))
    trainer.model.config.name_or_path = str(source)
    add_parts(trainer)
    save_model(trainer, load_original_config(trainer))
    assert {weight.dtype for weight in load_file(run / "model.safetensors").values()} == {torch.bfloat16}
    assert read(run, "config.json")["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "expected", "warning"),
    [
        (["--dtype", "bfloat16"], torch.float32, ""),
        (["--dtype", "float16", "--fp16", "true", "--bf16", "false"], torch.float32, ""),
        (["--dtype", "bfloat16", "--bf16", "false"], torch.bfloat16, "trained in torch.bfloat16, because mixed precision is off"),
        (["--use_peft", "--lora_modules_to_save", "lm_head", "--dtype", "bfloat16"], torch.float32, ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_trained_weights_are_float32(build_trainer, capsys, flags, expected, warning):
    """And Adam's moments, also if it is not sharded. In bf16, steps of 1e-6 and the decay of the moments round to nothing."""
    trainer = build_trainer("qwen2_chat", *flags, "--learning_rate", "1e-6", "--max_steps", "1", "--warmup_steps", "0")
    capsys.readouterr()
    prepare_sharding(trainer, AccelerateConfig())
    assert warning in capsys.readouterr().out if warning else "warning" not in capsys.readouterr().out
    trained = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert {weight.dtype for weight in trained.values()} == {expected}
    before = {name: weight.detach().clone() for name, weight in trained.items()}
    prepare_gradient_scaler(trainer)
    trainer.train()
    moments = [state[name] for state in trainer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * len(trained) and {moment.dtype for moment in moments} == {expected}
    unchanged = sum(int((weight == before[name]).sum()) for name, weight in trained.items())
    share = unchanged / sum(weight.numel() for weight in trained.values())
    assert (share > 0.5) == bool(warning), share
