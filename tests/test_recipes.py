"""Each recipe's own promise: what is in the loss, what is frozen, that sharding and resuming change nothing."""

import json
import shutil
from pathlib import Path

from harness.commands import quantize
from harness.folder import latest
from harness.nodes import signals
from harness.rehearsal import tiny_model
from harness.run import session, sharding

import pytest
import torch
import trl
from conftest import ROOT, losses, read
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def in_the_loss(trainer, row) -> list[str]:
    """The text whose tokens enter the loss, for every document of a packed row."""
    pieces, start = [], 0
    for length in row["seq_lengths"]:
        part = slice(start, start + length)
        pieces.append([t for t, label in zip(row["input_ids"][part], row["labels"][part], strict=True) if label != -100])
        start += length
    return [trainer.processing_class.decode(piece) for piece in pieces]


def test_chat_trains_on_the_assistants_turns_and_their_end(build_trainer):
    trainer = build_trainer("qwen2_chat", "--max_length", "8192")
    row = trainer.train_dataset[0]
    text = trainer.processing_class.decode(row["input_ids"])
    # Everything between the assistant's header and the end of its turn, that end included, and nothing else.
    turns = [turn.split("<|im_end|>")[0] + "<|im_end|>" for turn in text.split("<|im_start|>assistant\n")[1:]]
    assert len(turns) > 3
    assert "".join(in_the_loss(trainer, row)) == "".join(turns)
    assert trainer.processing_class.chat_template == tiny_model.CHATML  # what is saved is the model's own template


def test_the_training_template_writes_what_the_models_own_writes(build_trainer):
    import runpy

    recipe = runpy.run_path(str(ROOT / "recipes/qwen2_chat.py"))
    tokenizer = build_trainer("qwen2_chat").processing_class
    for roles in (["user", "assistant"], ["system", "user", "assistant", "user"]):
        messages = [{"role": role, "content": f"{role} says"} for role in roles]
        for prompt in (True, False):
            own = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            ours = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, chat_template=recipe["TRAINING_TEMPLATE"]
            )
            assert own == ours


def test_code_trains_on_the_completion_only(build_trainer):
    trainer = build_trainer("llama31_8b_lora", "--max_length", "2048")
    tokenizer = trainer.processing_class
    for row in (trainer.train_dataset[0], trainer.eval_dataset[0]):
        text = tokenizer.decode(row["input_ids"])
        completions = [piece.split("<|end_of_text|>")[0] + "<|end_of_text|>" for piece in text.split("### Python")[1:]]
        assert len(completions) == len(row["seq_lengths"])
        assert in_the_loss(trainer, row) == completions
    frozen = [name for name, weight in trainer.model.named_parameters() if not weight.requires_grad]
    trained = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    assert all("lora_" in name for name in trained) and not any("lora_" in name for name in frozen)
    assert {name.split(".lora_")[0].split(".")[-1] for name in trained} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_full_fine_tune_of_the_lora_recipe(build_trainer):
    trainer = build_trainer("llama31_8b_lora", "--use_peft", "false")
    assert all(weight.requires_grad for weight in trainer.model.parameters())


def test_text_and_chat_data_for_the_70b(build_trainer):
    chat = build_trainer("llama31_70b_qlora", "--load_in_4bit", "false")
    assert "### User" in chat.processing_class.decode(chat.train_dataset[0]["input_ids"])
    flags = ["--dataset_name", "Salesforce/wikitext", "--dataset_train_split", "train", "--dataset_test_split", "test"]
    text = build_trainer("llama31_70b_qlora", "--load_in_4bit", "false", *flags)
    assert "### User" not in text.processing_class.decode(text.train_dataset[0]["input_ids"])
    lora = text.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (16, 16, 0.05)


def test_gpt2_has_no_padding_and_documents_apart(build_trainer):
    trainer = build_trainer("gpt2_xl_wikitext", "--fp16", "false", "--max_samples", "20")
    assert len({token for row in trainer.train_dataset for token in row["input_ids"]}) > 100
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    assert max(lengths) <= 256 and sum(lengths) / (256 * len(lengths)) > 0.9
    end = trainer.processing_class.eos_token_id
    texts = [row["input_ids"] for row in trainer.train_dataset]
    assert sum(ids.count(end) for ids in texts) == 20  # each text of more than 50 characters, once

    # The loss the trainer computes on a packed row is the mean over its documents alone, by the plain model.
    row = next(row for row in trainer.train_dataset if len(row["seq_lengths"]) > 1 and min(row["seq_lengths"]) > 4)
    trainer.model.eval()
    batch = trainer._prepare_inputs(trainer.data_collator([row]))
    total, count, start = 0.0, 0, 0
    plain = AutoModelForCausalLM.from_pretrained(trainer.model.config.name_or_path, dtype=torch.float32).eval()
    for length in row["seq_lengths"]:
        ids = torch.tensor([row["input_ids"][start : start + length]])
        total += plain(input_ids=ids, labels=ids).loss.item() * (length - 1)
        count, start = count + length - 1, start + length
    with torch.no_grad():
        assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(total / count, rel=1e-4)


@pytest.fixture
def without_dropout(tmp_path, rehearse, workplace):
    """The stand-in of GPT-2 with its dropout off: ranks draw different random numbers than one process does."""
    rehearse("gpt2_xl_wikitext", "3xt4_full_shard")
    source = next((workplace / "outputs/tiny/.stand-ins").glob("openai-community--gpt2-xl-*"))
    folder = tmp_path / "gpt2-without-dropout"
    config = AutoConfig.from_pretrained(source, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


SHORT = ["--max_steps", "5", "--logging_steps", "1", "--gradient_accumulation_steps", "1", "--eval_strategy", "no"]
SHORT += ["--learning_rate", "3e-3", "--bf16", "false", "--fp16", "false"]


@pytest.mark.parametrize(
    ("recipe", "config", "processes", "flags"),
    [
        ("llama31_8b_lora", "hybrid", 4, ["--lora_dropout", "0", "--dtype", "float32"]),
        ("gpt2_xl_wikitext", "3xt4_full_shard", 3, []),
        ("qwen2_chat", "4gpu_shard_grad_op", 4, []),
        ("llama31_70b_qlora", "2x3090_qlora", 2, ["--lora_dropout", "0"]),
    ],
)
def test_sharded_equals_unsharded(
    rehearse, build_trainer, without_dropout, two_by_two, recipe, config, processes, flags, tmp_path
):
    """Several processes, sharded, and one, unsharded: the same global batches in float32 give the same losses."""
    if recipe == "gpt2_xl_wikitext":
        flags = [*flags, "--model_name_or_path", str(without_dropout)]
    config = two_by_two if config == "hybrid" else config
    run = rehearse(recipe, config, *SHORT, *flags, "--per_device_train_batch_size", "1", fresh=True)
    assert read(run)["world_size"] == processes and read(run)["fsdp_enabled"]
    one = build_trainer(recipe, *SHORT, *flags, "--per_device_train_batch_size", str(processes), "--save_strategy", "no")
    one.train()
    unsharded = {entry["step"]: entry["loss"] for entry in one.state.log_history if "loss" in entry}
    assert len(unsharded) == 5
    for step, (loss, _) in losses(run).items():
        assert loss == pytest.approx(unsharded[step], abs=1e-3 if "70b" not in recipe else 1e-2)  # 4-bit computes in bf16


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("llama31_70b_qlora", "2x3090_qlora"),
        ("llama31_8b_lora", "4gpu_full_shard"),
        ("gpt2_xl_wikitext", "3xt4_full_shard"),
        ("qwen2_chat", "1x3090"),
    ],
)
def test_resumed_equals_uninterrupted(rehearse, launch, workplace, recipe, config):
    """From the checkpoint in the middle of a finished run: the second half logs the same losses, bit for bit."""
    undisturbed = rehearse(recipe, config)
    middle = min(undisturbed.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    run = workplace / "runs" / f"resumed-{recipe}"
    shutil.copytree(middle, run / middle.name)
    shutil.copy(undisturbed / "run.json", run)
    process = launch("--tiny", recipe, config, "--output_dir", run)
    assert process.returncode == 0, process.stderr
    assert read(run)["resumed_from_step"] == 15
    assert losses(run) == losses(undisturbed)


def test_a_checkpoint_of_broken_weights_does_not_count(build_trainer, monkeypatch):
    """The loss turned NaN between two logs: the run stops before such a checkpoint is one to go on from."""
    flags = ["--max_steps", "2", "--save_steps", "1", "--logging_steps", "9", "--logging_first_step", "false"]
    trainer = build_trainer("qwen2_chat", *flags, "--eval_strategy", "no")
    monkeypatch.setattr(signals, "handle", lambda handler: None)
    next(trainer.model.parameters()).data[0] = float("nan")
    with pytest.raises(RuntimeError, match="no finite numbers at step 1: try a lower --learning_rate"):
        session.train(trainer)
    assert Path(trainer.args.output_dir, "checkpoint-1").is_dir()
    assert latest(Path(trainer.args.output_dir)) is None


def test_changed_4bit_weights_stop_the_run():
    """One flipped bit between loading and the first forward pass."""
    from bitsandbytes.nn import Linear4bit

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Linear4bit(64, 64, compute_dtype=torch.float32, quant_storage=torch.float32)

        def forward(self, x):
            return self.linear(x)

    class Model(torch.nn.Module):
        _no_split_modules = ("Layer",)

        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            return self.layer(x)

    for flips in (False, True):
        model = Model().to("cpu")
        sharding.BytesCheck(model)
        if flips:
            model.layer.linear.weight.data.view(torch.uint8)[100] ^= 1
            with pytest.raises(RuntimeError, match="4-bit weights were changed"):
                model(torch.ones(1, 64))
        else:
            assert model(torch.ones(1, 64)).shape == (1, 64)


def test_qlora_keeps_the_base_and_names_it(rehearse, workplace):
    """The adapter loads on the model that was quantized, scores as logged, and nothing else was gathered or saved."""
    run = rehearse("llama31_70b_qlora", "2x3090_qlora")
    stand_in = next((workplace / "outputs/tiny/.stand-ins").glob("meta-llama--Llama-3.1-70B-*"))
    assert read(run, "adapter_config.json")["base_model_name_or_path"] == str(stand_in)
    assert not list(run.glob("model*.safetensors"))
    saved = FileSystemReader(run / "checkpoint-30/pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    assert saved and all("lora_" in name for name in saved)
    model = AutoPeftModelForCausalLM.from_pretrained(run)
    assert sum(weight.abs().sum() for name, weight in model.named_parameters() if "lora_B" in name) > 0


def test_quantizing_writes_what_transformers_would(tmp_path, monkeypatch):
    """Weight by weight the same bytes, without ever holding the model."""
    monkeypatch.chdir(tmp_path)
    model = trl.ModelConfig(
        "meta-llama/Llama-3.1-70B",
        load_in_4bit=True,
        use_bnb_nested_quant=True,
        bnb_4bit_quant_storage="float32",
        dtype="bfloat16",
    )
    tiny_model.make(model.model_name_or_path, "main", tmp_path / "source")
    model.model_name_or_path = str(tmp_path / "source")
    quantize._quantize(model, tmp_path / "ours")
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "source",
        device_map={"": "cpu"},
        dtype="bfloat16",
        quantization_config=trl.get_quantization_config(model),
    ).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        mine = ours[name].reshape(-1).view(torch.uint8)  # packed weights may look like NaN, which equals nothing
        assert ours[name].dtype == tensor.dtype and torch.equal(mine, tensor.reshape(-1).view(torch.uint8)), name
    configs = [AutoConfig.from_pretrained(tmp_path / name).quantization_config for name in ("ours", "theirs")]
    assert configs[0] == configs[1]


def test_quantizing_happens_once(launch, rehearse, workplace, environment):
    rehearse("llama31_70b_qlora", "2x3090_qlora")
    again = launch("--quantize", "--tiny", "llama31_70b_qlora")
    assert again.returncode == 0 and "The 4-bit weights of meta-llama/Llama-3.1-70B are in" in again.stdout
    folder = next((workplace / "outputs/tiny/.quantized").glob("*Llama-3.1-70B*nf4*/"))
    settings = read(folder, "config.json")["quantization_config"]
    assert settings["bnb_4bit_quant_storage"] == "float32" and settings["bnb_4bit_use_double_quant"]
    # A draft that a kill left behind is not taken for a finished one.
    draft = folder.with_name(f".{folder.name}.draft")
    folder.rename(draft)
    next(draft.glob("*.safetensors")).write_bytes(b"half")
    assert "Quantizing" in launch("--quantize", "--tiny", "llama31_70b_qlora").stdout
    assert load_file(next(folder.glob("*.safetensors"))) and not draft.exists()


def test_every_node_reports(rehearse):
    run = rehearse("gpt2_xl_wikitext", "3xt4_full_shard")
    (report,) = read(run)["nodes"]
    assert report.keys() == {"node", "fsdp_enabled", "world_size", "model_params_b", "peak_gpu_gb", "final_loss"}
    assert report["world_size"] == 3 and report["fsdp_enabled"]


class TestMerge:
    @pytest.fixture(scope="class")
    @staticmethod
    def adapter(rehearse, tmp_path_factory):
        """An adapter on float32 base weights in several files."""
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

    def logits(self, model):
        return model.eval()(torch.arange(40)[None]).logits.detach()

    def test_merged_logits_equal_adapter_logits(self, launch, adapter, tmp_path):
        process = launch("--merge", adapter, tmp_path / "plain")
        assert process.returncode == 0, process.stderr
        with_adapter = self.logits(AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32))
        merged = self.logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
        base = self.logits(AutoModelForCausalLM.from_pretrained(adapter / "base"))
        torch.testing.assert_close(merged, with_adapter, atol=1e-4, rtol=0)
        assert (merged - base).abs().max() > 0.1
        assert AutoTokenizer.from_pretrained(tmp_path / "plain").eos_token == "<|end_of_text|>"
        again = launch("--merge", adapter, tmp_path / "plain")
        assert again.returncode == 2 and "exists already" in again.stderr

    def test_an_interrupted_merge_leaves_nothing_that_looks_finished(self, launch, adapter, tmp_path):
        broken = tmp_path / "broken"
        shutil.copytree(adapter, broken)
        settings = read(broken, "adapter_config.json") | {"base_model_name_or_path": str(broken / "base")}
        (broken / "adapter_config.json").write_text(json.dumps(settings))
        last = sorted((broken / "base").glob("*.safetensors"))[-1]
        last.write_bytes(last.read_bytes()[:100])
        assert launch("--merge", broken, tmp_path / "plain").returncode != 0
        assert not (tmp_path / "plain").exists()

    def test_adapter_checkpoint_of_an_unfinished_run(self, launch, rehearse, tmp_path):
        run = rehearse("llama31_8b_lora", "4gpu_full_shard")
        shutil.copytree(run / "checkpoint-30", tmp_path / "unfinished/checkpoint-30")
        for source, out in ((run, "finished"), (tmp_path / "unfinished", "plain")):
            assert launch("--merge", source, tmp_path / out).returncode == 0
        ours, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("plain", "finished"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()

    def test_sharded_checkpoint_becomes_a_plain_model(self, launch, rehearse, tmp_path):
        run = rehearse("qwen2_fineweb_edu", "4gpu_full_shard")
        process = launch("--merge", run / "checkpoint-30", tmp_path / "plain")
        assert process.returncode == 0, process.stderr
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        final = AutoModelForCausalLM.from_pretrained(run)
        assert merged.dtype == final.dtype == torch.bfloat16
        assert torch.equal(self.logits(merged), self.logits(final))
        assert "a plain model already" in launch("--merge", run, tmp_path / "other").stderr
