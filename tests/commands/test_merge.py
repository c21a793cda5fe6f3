"""`--merge` makes a plain model of an adapter or a sharded checkpoint; an interrupted merge writes nothing."""

import dataclasses
import json
import shutil

from harness.commands import merge
from harness.messages import UserError
from harness.run.sharding import quantization_of

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PrefixTuningConfig,
    VeloraConfig,
    get_peft_model,
)
from runs import read
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    Gemma3Config,
    GPT2Config,
    Qwen2Config,
    Qwen3MoeConfig,
)

QWEN35 = ["--model_name_or_path", "Qwen/Qwen3.5-4B", "--packing", "false", "--split_conversations", "true"]


@pytest.fixture(scope="module")
def adapter(rehearse, tmp_path_factory):
    """A folder with an adapter whose base model has float32 weights in several files."""
    run = rehearse("llama31_8b_lora", "4gpu_full_shard")
    folder = tmp_path_factory.mktemp("adapter")
    shutil.copytree(run, folder, dirs_exist_ok=True)
    settings = read(folder, "adapter_config.json")
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"], dtype=torch.float32)
    base.save_pretrained(folder / "base", max_shard_size="500KB")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder / "base")
    assert len(list((folder / "base").glob("*.safetensors"))) > 2
    settings["base_model_name_or_path"] = str(folder / "base")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def add_adapter(model, folder, **settings):
    """Saves the adapter, of random weights; returns the model with it."""
    model = get_peft_model(model, LoraConfig(r=4, **settings))
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return model


def logits(model):
    return model.eval()(torch.arange(40)[None]).logits.detach()


def test_merged_logits_equal_adapter_logits(launch, adapter, tmp_path, error_of):
    process = launch("--merge", adapter, tmp_path / "plain")
    assert process.returncode == 0 and "Warning" not in process.stderr, process.stderr
    with_adapter = logits(AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    base = logits(AutoModelForCausalLM.from_pretrained(adapter / "base"))
    torch.testing.assert_close(merged, with_adapter, atol=1e-4, rtol=0)
    assert (merged - base).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").eos_token == "<|end_of_text|>"
    assert "exists already" in error_of(merge.main, str(adapter), str(tmp_path / "plain"))


def test_processor_of_a_merged_model_is_that_of_the_run(tmp_path):
    """With the limit of its images. The base model can have it in files of an older version."""
    for folder in ("base", "run", "merged"):
        (tmp_path / folder).mkdir()
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "config.json"):
        (tmp_path / "base" / name).write_text("base")
    merge.copy_other_files(tmp_path / "base", tmp_path / "text run", tmp_path / "run")
    assert (tmp_path / "run/preprocessor_config.json").read_text() == "base"
    (tmp_path / "run/processor_config.json").write_text("run")
    merge.copy_other_files(tmp_path / "base", tmp_path / "run", tmp_path / "merged")
    found = {path.name: path.read_text() for path in (tmp_path / "merged").iterdir()}
    assert found == {"processor_config.json": "run", "config.json": "base"}


def test_interrupted_merge_writes_nothing(adapter, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(adapter, broken)
    settings = read(broken, "adapter_config.json") | {"base_model_name_or_path": str(broken / "base")}
    (broken / "adapter_config.json").write_text(json.dumps(settings))
    last = sorted((broken / "base").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:100])
    with pytest.raises(UserError, match="broken/base"):
        merge.main(str(broken), str(tmp_path / "plain"))
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_adapter_checkpoint_of_unfinished_run(rehearse, tmp_path):
    run = rehearse("llama31_8b_lora", "4gpu_full_shard")
    shutil.copytree(run / "checkpoint-6", tmp_path / "unfinished/checkpoint-6")
    for source, out in ((run, "finished"), (tmp_path / "unfinished", "plain")):
        merge.main(str(source), str(tmp_path / out))
    ours, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("plain", "finished"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()


def test_sharded_checkpoint_becomes_plain_model(fork_launch, rehearse, tmp_path, error_of):
    run = rehearse("qwen2_fineweb_edu", "4gpu_full_shard")
    process = fork_launch("--merge", run / "checkpoint-6", tmp_path / "plain")
    assert process.returncode == 0 and "Warning" not in process.stderr, process.stderr
    assert "Merged" not in process.stdout
    assert all(file.stat().st_mode & 0o044 for file in (tmp_path / "plain").iterdir())  # anyone who may read the folder
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    final = AutoModelForCausalLM.from_pretrained(run)
    assert merged.dtype == final.dtype == torch.bfloat16
    assert torch.equal(logits(merged), logits(final))


@pytest.mark.parametrize(("recipe", "model"), [("qwen3_30b_a3b_lora", []), ("qwen2_chat", QWEN35)])
def test_sharded_checkpoint_gets_the_names_of_the_saved_model(rehearse, tmp_path, recipe, model):
    """Of a mixture of experts, which are one weight in the model; and of a model that reads images too."""
    flags = ["--use_peft", "false", "--max_steps", "2", "--save_steps", "2", "--eval_strategy", "no"]
    run = rehearse(recipe, "4gpu_full_shard", *model, *flags, NPROC_PER_NODE="2")
    merge.main(str(run / "checkpoint-2"), str(tmp_path / "plain"))
    theirs, ours = load_file(run / "model.safetensors"), {}
    for file in (tmp_path / "plain").glob("*.safetensors"):
        ours |= load_file(file)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
EXPERTS |= {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
TIED = {"tie_word_embeddings": True}
GPT2 = {"target_modules": "all-linear"}


def save_base(folder, options, size, layers):
    """Saves the model of these options; returns those of its adapter."""
    names = {field.name for field in dataclasses.fields(LoraConfig)}
    sizes = {"vocab_size": 64, "hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": 2}
    torch.manual_seed(0)
    if options is GPT2:
        config = GPT2Config(**sizes, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)
    else:
        sizes |= {"intermediate_size": 2 * size, "num_key_value_heads": 2}
        kind = Qwen3MoeConfig if options is EXPERTS else Qwen2Config
        config = kind(**sizes | {name: options[name] for name in options.keys() - names})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if options is GPT2:  # as on the Hub
        weights = {name.removeprefix("transformer."): weight for name, weight in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return {"target_modules": ["q_proj", "down_proj"]} | {name: options[name] for name in names & options.keys()}


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"use_dora": True},
        EXPERTS,
        GPT2,
        TIED | {"target_modules": ["embed_tokens", "q_proj"]},
        TIED | {"modules_to_save": ["embed_tokens"]},
        TIED | {"modules_to_save": ["lm_head"]},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {"init_lora_weights": "orthogonal", "exclude_modules": ["q_proj"]},
    ],
    ids=lambda options: " ".join(options),
)
def test_merge_of_other_adapters(tmp_path, options):
    """The merged model computes what the adapter does, also if embeddings are trained that were tied to the output layer."""
    lora = save_base(tmp_path / "base", options, size=32, layers=1)
    model = add_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter", **lora)
    merge.main(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, logits(model), atol=1e-4, rtol=0)
    with model.disable_adapter():
        assert (logits(model) - merged).abs().max() > 0.01


@pytest.mark.parametrize("options", [{"use_rslora": True}, EXPERTS], ids=["file by file", "in memory"])
def test_small_changes_are_not_rounded_away(tmp_path, options):
    """Most are below half the distance of two numbers in bf16."""
    lora = save_base(tmp_path / "base", options, size=64, layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").bfloat16()
    add_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter", **lora)
    file, changes = tmp_path / "adapter/adapter_model.safetensors", []
    save_file({name: weight * (1e-4 if "lora_B" in name else 1) for name, weight in load_file(file).items()}, file)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).save_pretrained(tmp_path / "base")
        merge.main(str(tmp_path / "adapter"), str(tmp_path / str(dtype)))
        before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", str(dtype)))
        changes.append(torch.cat([(after[name].float() - before[name].float()).flatten() for name in sorted(before)]))
    assert changes[1] @ changes[0] / (changes[0] @ changes[0]) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(
    "settings",
    [
        *(LoraConfig(init_lora_weights=way) for way in ("pissa", "olora", "pissa_niter_4", "lora_ga", "corda")),
        LoraConfig(alora_invocation_tokens=[5, 6]),
        PrefixTuningConfig(num_virtual_tokens=4),
        IA3Config(),
        LoHaConfig(),
        LoraConfig(task_type="TOKEN_CLS"),
        LoraConfig(bias="all"),
        LoraConfig(ensure_weight_tying=True),
        LoraConfig(use_qalora=True),
        LoraConfig(layer_replication=[(0, 1), (0, 1)]),
        LoraConfig(trainable_token_indices=[1, 5]),
        LoraConfig(velora_config=VeloraConfig()),
    ],
)
def test_adapters_that_a_sum_cannot_merge(tmp_path, error_of, settings):
    settings.base_model_name_or_path = str(tmp_path / "base")
    settings.save_pretrained(tmp_path / "adapter")
    save_file({"any": torch.zeros(1)}, tmp_path / "adapter/adapter_model.safetensors")
    assert error_of(merge.main, str(tmp_path / "adapter"), str(tmp_path / "merged")).startswith(str(tmp_path / "adapter"))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("nested", [False, True], ids=["plain scales", "nested scales"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, EXPERTS, GPT2], ids=["linear layers", "dora", "experts", "GPT-2"])
def test_merge_into_the_4_bit_weights_that_were_trained(tmp_path, options, nested):
    """The merged model computes what the 4-bit model with its adapter does, which transformers and PEFT have loaded."""
    lora = save_base(tmp_path / "base", options, size=64, layers=2)
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested, bnb_4bit_compute_dtype=torch.float32
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings, dtype=torch.float32)
    model = add_adapter(base, tmp_path / "adapter", **lora)
    (tmp_path / "adapter/train_results.json").write_text(json.dumps(quantization_of(base)))
    trained = model.train()(torch.arange(40)[None]).logits.detach()  # some CPUs round more in eval mode
    merge.main(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), trained, atol=1e-4, rtol=0)
    merge.main(str(tmp_path / "adapter"), str(tmp_path / "original"), "--original_weights")
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "original")) - trained).abs().max() > 1e-3


def test_merge_into_files_with_older_names(tmp_path):
    """transformers renames the weights of many models that read images when it loads them."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    config = Gemma3Config(
        text_config=text,
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=63,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "base")
    assert "language_model.model.norm.weight" in load_file(tmp_path / "base/model.safetensors")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    model = add_adapter(base, tmp_path / "adapter", target_modules=r".*language_model\..*q_proj")
    merge.main(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    merged = logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, logits(model), atol=1e-4, rtol=0)
    with model.disable_adapter():
        assert not torch.equal(logits(model), merged)


def test_damaged_checkpoint(rehearse, tmp_path, error_of):
    shutil.copytree(rehearse("qwen2_fineweb_edu", "4gpu_full_shard") / "checkpoint-6", tmp_path / "checkpoint-6")
    next((tmp_path / "checkpoint-6/pytorch_model_fsdp_0").glob("*.distcp")).write_bytes(b"7" * 100)
    assert "checkpoint-6" in error_of(merge.main, str(tmp_path)) and not (tmp_path / "merged").exists()
