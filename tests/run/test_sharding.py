"""Sharding changes no result: the same losses, the same 4-bit weights, and the collectives that the config asks for."""

from collections import OrderedDict

from harness import configs
from harness.commands import verify
from harness.compat.transformers import transformer_layers
from harness.configs import AccelerateConfig
from harness.data.streams import fill_last_step
from harness.model.quantized import install_byte_check
from harness.rehearsal import tiny
from harness.run.sharding import AfterWrapping, compile_layers, prepare_sharding

import pytest
import torch
import yaml
from conftest import ROOT, slow
from runs import losses, read, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

RECIPE = "qwen2_fineweb_edu"


def make_gpt2_without_dropout(folder):
    """With dropout, several processes would draw other random numbers than one process does."""
    tiny.make_tiny_model("openai-community/gpt2-xl", "main", folder)
    AutoConfig.from_pretrained(folder, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0).save_pretrained(folder)


FIVE_STEPS = ["--max_steps", "5", "--logging_steps", "1", "--eval_strategy", "no"]
FIVE_STEPS += ["--learning_rate", "3e-3", "--bf16", "false", "--fp16", "false"]


# The model has the same weights in both, and the adapter trains a copy of each.
UNTYING = ["--use_peft", "--lora_modules_to_save", "embed_tokens", "lm_head", "--lora_dropout", "0", "--dtype", "float32"]


@pytest.mark.parametrize(
    ("recipe", "config", "processes", "flags"),
    [
        (RECIPE, "4gpu_full_shard", 2, ["--dataset_streaming", "false"]),
        ("llama31_8b_lora", "hybrid", 4, ["--lora_dropout", "0", "--dtype", "float32", "--lora_modules_to_save", "lm_head"]),
        ("qwen2_chat", "4gpu_shard_grad_op", 2, UNTYING),
        ("gpt2_xl_wikitext", "3xt4_shard_grad_op", 3, []),
        pytest.param("qwen2_chat", "4gpu_shard_grad_op", 2, [], marks=slow),
        # The auxiliary loss of the routers is a mean over a micro-batch, of which one process has larger ones.
        ("qwen3_30b_a3b_lora", "4gpu_full_shard", 2, ["--dtype", "float32", "--router_aux_loss_coef", "0"]),
        ("qwen3_dpo", "4gpu_full_shard", 2, ["--dtype", "float32"]),
        # Rows of different lengths: one process pads them, and linear attention must not read the padding.
        ("qwen35_4b_lora", "4gpu_full_shard", 2, ["--dtype", "float32", "--lora_dropout", "0"]),
        ("llama31_70b_qlora", "2x3090_qlora", 2, ["--lora_dropout", "0", "--dataset_streaming", "false"]),
    ],
)
def test_sharded_equals_unsharded(rehearse, build_trainer, tmp_path, hybrid_2x2, recipe, config, processes, flags):
    """Several sharded processes and one unsharded process: the same global batches in float32 give the same losses."""
    if recipe == "gpt2_xl_wikitext":
        make_gpt2_without_dropout(tmp_path / "gpt2")
        flags = [*flags, "--model_name_or_path", str(tmp_path / "gpt2")]
    config = hybrid_2x2 if config == "hybrid" else config
    flags = [*flags, "--global_batch_size", str(processes)]
    flags_of_run = [*FIVE_STEPS, *flags, "--per_device_train_batch_size", "1"]
    run = rehearse(recipe, config, *flags_of_run, NPROC_PER_NODE=str(processes))
    assert read(run)["world_size"] == processes and read(run)["fsdp_enabled"]
    one = build_trainer(recipe, *FIVE_STEPS, *flags, "--per_device_train_batch_size", str(processes), "--save_strategy", "no")
    fill_last_step(one)  # as in a run, so that the rows have the same order
    one.train()
    unsharded = {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in one.state.log_history if "loss" in entry}
    assert len(unsharded) == 5 and unsharded.keys() == losses(run).keys()
    for step, (loss, grad_norm) in losses(run).items():
        in_4bit = "70b" in recipe  # computes in bf16
        assert loss == pytest.approx(unsharded[step][0], abs=1e-2 if in_4bit else 1e-4)
        assert grad_norm == pytest.approx(unsharded[step][1], rel=1e-1 if in_4bit else 1e-3)
    assert flags[:5] != UNTYING[:5] or verify.main(str(run)) == 0, "the saved adapter is what was trained"


def test_loss_is_float32_with_mixed_precision_bf16(rehearse):
    """With the policy of `set_mixed_precision` the loss is that of float32 logits; with accelerate's it is rounded to bf16."""
    script = ROOT / "tests/run/measure_loss.py"
    run = rehearse(script, "1x3090_offload", "--max_steps", "3", "--save_strategy", "no", "--eval_strategy", "no")
    with_policy, without = read(run, "differences.json")
    assert len(with_policy) == len(without) == 6
    assert max(with_policy) < 1e-4 and 5e-4 <= max(without) < 1


def test_run_that_is_not_sharded_as_its_config_says(build_trainer, monkeypatch):
    """The config says FSDP, but the recipe was started as `python recipe.py`."""
    trainer = build_trainer(RECIPE, "--max_steps", "1")
    config = configs.read(str(ROOT / "accelerate_configs/4gpu_full_shard.yaml"))
    with pytest.raises(RuntimeError, match="the 4 processes of 4gpu_full_shard"):
        train(trainer, config=config, processes=4, tiny=True)
    assert trainer.state.global_step == 0


@pytest.fixture
def one_process():
    """A mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_next_layer_of_experts_is_gathered_early(monkeypatch, tmp_path, one_process):
    """Before a layer computes, while FSDP alone would do it when the host comes to the next layer."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    model, gathered = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)), []
    layers = list(transformer_layers(model).values())
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, bf16=False))
    for module in (*layers, model):
        fully_shard(module, mesh=one_process)
    AfterWrapping(trainer, AccelerateConfig(), 1, [], needs_float32=True).on_train_begin(None, None, None, model)
    layers[0].mlp.register_forward_hook(lambda module, inputs, output: gathered.append("computed"))
    unshard = FSDPParamGroup.unshard
    monkeypatch.setattr(
        FSDPParamGroup, "unshard", lambda group, async_op=False: gathered.append(group) or unshard(group, async_op)
    )
    model(input_ids=torch.ones(1, 8, dtype=torch.long))
    (of_next,) = layers[1]._get_fsdp_state()._fsdp_param_groups
    assert gathered.index(of_next) < gathered.index("computed")


def test_adapters_get_their_input_as_it_is(build_trainer):
    """PEFT would cast it to float32, and autocast back to bf16."""
    trainer, dtypes = build_trainer("llama31_8b_lora"), set()
    prepare_sharding(trainer, AccelerateConfig())
    model = trainer.accelerator.prepare_model(trainer.model)
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda module, inputs: dtypes.add(inputs[0].dtype))
    model(input_ids=torch.ones(1, 8, dtype=torch.long))
    assert dtypes == {torch.bfloat16}


def test_compiled_layers(build_trainer):
    """--torch_compile compiles the layers, which share one graph, and not the model."""
    graphs = []
    trainer = build_trainer(RECIPE, "--torch_compile", "true", "--torch_compile_backend", "eager")
    prepare_sharding(trainer, AccelerateConfig())
    trainer.args.torch_compile_backend = lambda graph, inputs: graphs.append(graph) or graph.forward
    compile_layers(trainer)
    assert trainer.accelerator.prepare_model(trainer.model) is trainer.model and len(transformer_layers(trainer.model)) == 2
    trainer.model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False)
    assert len(graphs) == 1


@pytest.fixture
def quantized_model():
    """Makes a model with one layer, which has one 4-bit weight."""
    from bitsandbytes.nn import Linear4bit

    class Layer(torch.nn.Sequential):
        pass

    class Model(torch.nn.Sequential):
        _no_split_modules = ("Layer",)

    def make():
        linear = Linear4bit(64, 64, compute_dtype=torch.float32, quant_storage=torch.float32)
        return Model(OrderedDict(layer=Layer(OrderedDict(linear=linear)))).to("cpu")

    yield make
    torch.compiler.set_stance("default")


def test_changed_4bit_weights_stop_the_run(quantized_model):
    """One bit is flipped between loading and the first forward pass."""
    model = quantized_model()
    install_byte_check(model)
    model.layer.linear.weight.data.view(torch.uint8)[100] ^= 1
    with pytest.raises(RuntimeError, match="changed the 4-bit weights"):
        model(torch.ones(1, 64))


def test_4bit_layers_are_compiled_after_the_comparison(capsys, quantized_model):
    """A layer that is compiled before keeps the hooks of the comparison in its graph."""
    model, graphs = quantized_model(), []
    model.layer.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    install_byte_check(model)
    model(torch.ones(1, 64))
    assert "1 compared byte for byte" in capsys.readouterr().out and not graphs
    model(torch.ones(1, 64))
    assert len(graphs) == 1 and not capsys.readouterr().out


@pytest.fixture
def count(rehearse, hybrid_2x2, tmp_path):
    """Trains two steps of two micro-batches on two replicas of two shards; returns the collectives and the output directory."""

    def call(**fsdp_config):
        settings = yaml.safe_load(hybrid_2x2.read_text())
        settings["fsdp_config"] |= fsdp_config
        config = tmp_path / f"{'-'.join(['hybrid', *fsdp_config])}.yaml"
        config.write_text(yaml.safe_dump(settings))
        flags = ["--max_steps", "2", "--gradient_accumulation_steps", "2", "--logging_steps", "1"]
        flags += ["--save_strategy", "no", "--eval_strategy", "no"]
        run = rehearse(ROOT / "tests/run/count_collectives.py", config, *flags)
        return read(run, "collectives.json"), run

    return call


def test_collectives_per_step(count):
    """What each option of the config all-gathers and reduces."""
    each_batch, each_batch_run = count()
    last_batch, last_batch_run = count(fsdp_reduce_each_batch=False)
    for step, (loss, grad_norm) in losses(each_batch_run).items():  # summed in another order
        assert (loss, grad_norm) == pytest.approx(losses(last_batch_run)[step], rel=1e-3)
    for step in last_batch["steps"] + each_batch["steps"]:
        # Each of two micro-batches all-gathers every layer for the forward pass and again for the backward pass.
        assert total(step, "all_gather_single") > 2 * each_batch["parameters"]
    check_reductions(each_batch, 2)
    check_reductions(last_batch, 1)


@slow
def test_weights_that_stay_gathered(count):
    """They are all-gathered once per step, and the losses are the same."""
    last_batch = {"fsdp_reduce_each_batch": False}
    _, last_batch_run = count(**last_batch)
    stay = {"fsdp_reshard_after_forward": False, "fsdp_reshard_after_backward": False}
    gather_once, gather_once_run = count(**last_batch, **stay)
    assert losses(gather_once_run) == losses(last_batch_run)
    for step in gather_once["steps"]:
        gathers = [size for name, _, size in step if name == "all_gather_single"]
        assert len(gathers) == 3  # FSDP units: two layers, and the rest of the model
        assert sum(gathers) == pytest.approx(gather_once["parameters"], rel=0.01)
    check_reductions(gather_once, 1)


def total(step, kind):
    return sum(size for name, _, size in step if name == kind)


def check_reductions(run, reductions):
    """Only gradients cross the replicas, once per step."""
    for step in run["steps"]:
        assert total(step, "reduce_scatter_single") == pytest.approx(reductions * run["parameters"], rel=0.01)
        for name, ranks, _ in step:
            if name != "all_reduce":
                assert ranks == [0, 1], "rank 0 all-gathers and reduce-scatters within its replica"
        across_replicas = [size for name, ranks, size in step if name == "all_reduce" and ranks == [0, 2]]
        assert sum(across_replicas) == pytest.approx(run["parameters"] / 2, rel=0.01)  # rank 0's shard of the gradients


def test_gathers_of_frozen_head_and_embedding(rehearse):
    """The head in the first micro-batch of the run, the embedding in every forward pass.

    TRL's loss would all-gather a sharded head for every micro-batch, as a DTensor, and FSDP the embedding in backward passes too.
    """
    flags = ["--use_peft", "--model_name_or_path", "meta-llama/Llama-3.1-8B", "--max_steps", "2"]
    flags += ["--gradient_accumulation_steps", "3", "--save_strategy", "no", "--eval_strategy", "no"]
    run = rehearse(ROOT / "tests/run/count_collectives.py", "4gpu_full_shard", *flags, NPROC_PER_NODE="2")
    counted = read(run, "collectives.json")
    kinds = [[kind for kind, _, size in step if size == counted["head"]] for step in counted["steps"]]
    of_embedding = 3 * ["all_gather_single"]  # as large as the head
    assert kinds == [[*of_embedding, "all_gather_single"], of_embedding]
