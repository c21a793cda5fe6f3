"""qwen3_distill: what its loss is, one `generate` a step, resumed runs, tiny teachers, and what is refused."""

import json
import shutil

from harness.compat.transformers import transformer_layers
from harness.messages import UserError
from harness.model.models import check_teacher
from harness.run.training import report_dropped_rows

import pytest
import torch
from runs import begin_at, losses, read, tiny_model, train, write_rows
from safetensors.torch import load_file
from transformers import AutoTokenizer
from trl import DistillationConfig, ModelConfig

RECIPE = "qwen3_distill"
STEPS = ["--max_steps", "6", "--save_steps", "3", "--eval_steps", "3", "--logging_steps", "1", "--max_eval_samples", "5"]


@pytest.fixture(scope="session")
def questions(shared):
    path = shared / "questions_for_a_teacher.jsonl"
    if not path.exists():
        rows = [{"prompt": f"What is {number} times {number + 1}?", "completion": "A number."} for number in range(25)]
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("config", ["1x3090", "4gpu_full_shard"])
def test_resumed_equals_uninterrupted(rehearse, fork_launch, workdir, questions, tmp_path, config):
    """Of 23 rows, so step 3 begins the second epoch. On two processes, the loss is that of DDP: both have the teacher."""
    command = [RECIPE, config, "--dataset_name", questions, *STEPS, "--global_batch_size", "8"]
    run = rehearse(*command)
    killed = begin_at(run / "checkpoint-3", tmp_path / "killed")
    processes = {} if config == "1x3090" else {"NPROC_PER_NODE": "2"}
    process = fork_launch("--tiny", *command, "--output_dir", killed, **processes)
    assert process.returncode == 0 and "Resuming from" in process.stdout, process.stdout + process.stderr
    assert losses(killed) == losses(run) and len({*losses(run).values()}) == 6
    assert read(run)["eval_loss"] == read(killed)["eval_loss"] < read(run)["eval_loss_on_start"]
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (run, killed))
    assert all(torch.equal(before[name], after[name]) for name in before)
    if config == "4gpu_full_shard":
        of_ddp = rehearse(RECIPE, "4gpu_ddp", *command[2:])
        assert losses(run)[1] == pytest.approx(losses(of_ddp)[1], rel=0.03)


def test_steps_and_the_loss_of_an_evaluation(build_trainer):
    """It is the mean reverse KL divergence per token of all answers, however long they are. A step generates once."""
    flags = ["--max_steps", "8", "--save_strategy", "no", "--max_eval_samples", "5"]
    flags += ["--learning_rate", "1e-12", "--eval_steps", "8", "--per_device_eval_batch_size", "2"]
    flags += ["--gradient_accumulation_steps", "2", "--activation_checkpointing", "true"]
    trainer = build_trainer(RECIPE, *flags)
    trainer.generation_config.eos_token_id = trainer.eos_token_ids = [*range(5, 500)]  # so that answers have different lengths
    generate = trainer.model.generate
    evaluated, hooks, has_autocast = [], [], set()

    def record(**inputs):
        hooks.append(sum(len(module._forward_hooks) for module in trainer.model.modules()))
        answers = generate(**inputs)
        if len(evaluated) < 3:
            evaluated.append((inputs["attention_mask"], answers))
        return answers

    trainer.model.generate = record
    for model in (trainer.model, trainer.teacher_model):
        layer = next(iter(transformer_layers(model).values()))
        layer.register_forward_hook(lambda *_: has_autocast.add(torch.is_autocast_enabled("cpu")))
    train(trainer)

    assert len(hooks) == 3 + 8 + 3 + 1 and len({*hooks[3:11]}) == 1  # evaluations of 3 batches; the samples
    assert has_autocast == {True}
    assert trainer.parts.progress.so_far()["rows"] == 8 * 4
    divergence = tokens = 0
    for mask, answers in evaluated:
        for of_prompt, row in zip(mask, answers, strict=True):
            start = mask.shape[1] - int(of_prompt.sum())
            answer = row[mask.shape[1] :].tolist()
            ends = [place for place, token in enumerate(answer) if token in trainer.eos_token_ids]
            length = ends[0] + 1 if ends else len(answer)
            ids = row[None, start : mask.shape[1] + length]
            student, teacher = (log_probabilities(model, ids)[-length:] for model in (trainer.model, trainer.teacher_model))
            divergence += (student.exp() * (student - teacher)).sum()
            tokens += length
    found = trainer.state.log_history[0]["eval_loss"]
    assert found == pytest.approx(float(divergence / tokens), rel=0.02)


def log_probabilities(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of each token but the first one, by those in front of it."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)


def test_tiny_teacher_of_own_models(build_trainer, tmp_path, questions):
    """It has the vocabulary of the student, and other weights; also if only one of them is known without network."""
    own = [str(tiny_model("Qwen/Qwen3-4B", tmp_path / name)) for name in ("student", "teacher")]
    for flags in (["--model_name_or_path", own[0], "--teacher_model_name_or_path", own[1]], ["--model_name_or_path", own[0]]):
        trainer = build_trainer(RECIPE, "--dataset_name", str(questions), *flags)
        student, teacher = (model.get_input_embeddings().weight for model in (trainer.model, trainer.teacher_model))
        assert student.shape == teacher.shape and not torch.equal(student, teacher)
        assert trainer.teacher_model.is_loaded_in_4bit


def test_prompts_that_are_not_used(build_trainer, tmp_path, capsys):
    """Without a question there is nothing to answer; of long ones, the memory has no limit. Loggers write the arguments."""
    answer, rows = {"role": "assistant", "content": "An answer."}, []
    for number in range(40):
        rows.append({"messages": [{"role": "user", "content": f"Question {number}?"}, answer] * 2})
    rows += [{"messages": row["messages"][1:]} for row in rows[:3]]  # begins with an answer
    rows.append({"messages": [{"role": "user", "content": "long " * 29}] * 28 + [answer]})  # a rehearsal cuts each text
    path = write_rows(tmp_path / "chats.jsonl", rows)
    trainer = build_trainer(RECIPE, "--dataset_name", str(path), "--max_eval_samples", "1")
    prompts = [*trainer.train_dataset["prompt"], *trainer.eval_dataset["prompt"]]
    assert {turns[-1]["content"] for turns in prompts} <= {f"Question {number}?" for number in range(40)}
    dropped = 44 - 1 - len(trainer.train_dataset)
    report_dropped_rows(trainer)
    assert dropped and f"{dropped} of 43 training rows are not used" in capsys.readouterr().out
    assert json.loads(trainer.args.to_json_string())["teacher_model_init_kwargs"]["quantization_config"]["load_in_4bit"]


def test_fewer_prompts_than_a_step_needs(build_trainer, questions):
    """TRL would make no batch."""
    trainer = build_trainer(RECIPE, "--dataset_name", str(questions), "--global_batch_size", "64")
    with pytest.raises(UserError, match=r"64 answers at a time .* only 23"):
        train(trainer)


def test_teacher_of_another_vocabulary(tmp_path, environment):
    """It may have other tokens at the end only."""
    folders = {name: str(tiny_model(name, tmp_path / name)) for name in ("Qwen/Qwen3-4B", "Qwen/Qwen2-0.5B")}
    student = ModelConfig(model_name_or_path=folders["Qwen/Qwen3-4B"])
    args = DistillationConfig(output_dir=str(tmp_path), use_cpu=True, teacher_model_name_or_path=student.model_name_or_path)
    check_teacher(args, student)
    args.teacher_model_name_or_path = folders["Qwen/Qwen2-0.5B"]
    with pytest.raises(UserError, match="other tokens"):
        check_teacher(args, student)
    tokenizer = AutoTokenizer.from_pretrained(student.model_name_or_path)
    tokenizer.add_tokens(["<one more>"])
    shutil.copytree(student.model_name_or_path, tmp_path / "longer")
    tokenizer.save_pretrained(tmp_path / "longer")
    args.teacher_model_name_or_path = str(tmp_path / "longer")
    check_teacher(args, student)
