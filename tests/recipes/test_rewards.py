"""GRPO and RLOO: what a step generates and learns, resumed runs, the preview of rewards, and what is refused."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

from harness.commands.rewards import score
from harness.messages import UserError
from harness.run.losses import Means
from harness.run.metrics import format_metrics, own_metrics

import pytest
import torch
from datasets import Dataset
from runs import begin_at, history, losses, read, train, write_rows
from safetensors.torch import load_file

RECIPE = str(Path(__file__).parent / "own/rewards.py")
STEPS = ["--max_steps", "6", "--save_steps", "3", "--eval_steps", "3", "--logging_steps", "1", "--max_eval_samples", "5"]


@pytest.fixture(scope="session")
def sentences(shared):
    path = shared / "short_sentences.jsonl"
    if not path.exists():
        texts = [f"The number {number} comes before {number + 1}, and after {number - 1}" for number in range(25)]
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


@pytest.mark.parametrize(
    ("trainer", "config", "flags"),
    [
        ("GRPO", "1x3090", ["--global_batch_size", "16", "--dtype", "bfloat16"]),  # of 20 rows, so step 3 begins the second epoch
        ("GRPO", "4gpu_full_shard", ["--beta", "0.1", "--bf16", "false"]),
        ("RLOO", "1x3090", ["--use_peft", "false", "--learning_rate", "1e-3"]),
    ],
)
def test_resumed_equals_uninterrupted(rehearse, fork_launch, sentences, tmp_path, trainer, config, flags):
    recipe = tmp_path / f"{trainer}.py"
    recipe.write_text(Path(RECIPE).read_text().replace("GRPO", trainer))
    command = [recipe, config, "--dataset_name", sentences, *STEPS, *flags]
    run = rehearse(*command)
    killed = begin_at(run / "checkpoint-3", tmp_path / "killed")
    processes = {} if config == "1x3090" else {"NPROC_PER_NODE": "2"}
    process = fork_launch("--tiny", *command, "--output_dir", killed, **processes)
    assert process.returncode == 0 and "Resuming from" in process.stdout, process.stdout + process.stderr
    assert losses(killed) == losses(run) and any(loss for loss, _ in losses(run).values())
    rewards = [entry["reward"] for entry in history(run, "reward")]
    assert rewards == [entry["reward"] for entry in history(killed, "reward")] and len({*rewards}) > 1
    [name] = {"model.safetensors", "adapter_model.safetensors"} & {path.name for path in run.iterdir()}
    before, after = load_file(run / name), load_file(killed / name)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert read(run)["eval_reward"] == read(killed)["eval_reward"] != read(run)["eval_reward_on_start"]
    assert (run / "samples.txt").is_file()


def test_reward_rises(build_trainer, sentences, capsys):
    """In 60 steps with one `generate` each, with a merged adapter, besides the evaluations; hooks do not accumulate."""
    flags = ["--max_steps", "60", "--save_strategy", "no", "--logging_steps", "1", "--max_eval_samples", "4"]
    flags += ["--global_batch_size", "32", "--num_generations", "8", "--per_device_train_batch_size", "8"]
    trainer = build_trainer(RECIPE, "--dataset_name", str(sentences), "--activation_checkpointing", "true", *flags)
    assert (trainer.args.steps_per_generation, trainer.args.generation_batch_size) == (4, 32)
    called, hooks = [], []
    generate = trainer.model.generate

    def counted(**inputs):
        is_merged = any(getattr(layer, "merged", False) for layer in trainer.model.modules())
        called.append(trainer.model.training or not is_merged)
        hooks.append(sum(len(module._forward_hooks) for module in trainer.model.modules()))
        return generate(**inputs)

    trainer.model.generate = counted
    train(trainer)
    assert len(called) == 60 + 5 + 1 and not any(called)  # evaluations before the training and at each quarter; the samples
    assert len({*hooks[1:-1]}) == 1
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1
    assert trainer.parts.progress.so_far()["rows"] == 60 * 32
    shown = format_metrics(own_metrics(next(entry for entry in trainer.state.log_history if "reward" in entry)))
    names = ["completions/mean_length", "completions/clipped_ratio", "reward", "reward_std"]
    assert [part.split()[0] for part in shown.split(", ")] == names
    assert "reward " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (lambda step: 1.0, ""),
        (lambda step: None, "in step 1 no answer got a reward"),
        (lambda step: 1 / (2 - step), "ZeroDivisionError.* resumes from .*checkpoint-2"),
    ],
    ids=["equal", "none", "fails in step 3"],
)
def test_useless_rewards_of_a_run(build_trainer, sentences, capsys, reward, problem):
    """Equal ones are warned of once. Without any, or if the function fails, the run ends."""
    flags = ["--max_steps", "3", "--save_steps", "1", "--eval_strategy", "no", "--eval_on_start", "false"]
    trainer = build_trainer(RECIPE, "--dataset_name", str(sentences), *flags)
    trainer.reward_funcs = [lambda completions, **others: [reward(trainer.state.global_step)] * len(completions)]
    if problem:
        with pytest.raises(UserError, match=problem):
            train(trainer)
    else:
        train(trainer)
        assert capsys.readouterr().out.count("got the same reward") == 1


def test_step_without_any_reward_after_others(build_trainer, sentences):
    """A function may leave out some answers, and later all of a step."""
    flags = ["--max_steps", "2", "--save_strategy", "no", "--eval_strategy", "no", "--eval_on_start", "false"]
    trainer = build_trainer(RECIPE, "--dataset_name", str(sentences), *flags)
    left = [[None, 1.0]]
    trainer.reward_funcs = [lambda completions, **_: ((left.pop(0) if left else [None]) * len(completions))[: len(completions)]]
    train(trainer)


def raises(completions, **others):
    return [1 / len(text[0]["content"]) for text in completions]


def all_alike(completions, **others):
    return [1.0] * len(completions)


def rates_nothing(completions, **others):
    return [None] * len(completions)


def is_equal(completions, answer, **others):
    return [float(messages[0]["content"] == right) for messages, right in zip(completions, answer, strict=True)]


@pytest.fixture
def score_of(build_trainer):
    """Calls `score` with other functions, and other rows, than those of qwen3_grpo."""

    def call(*functions, rows=None):
        trainer = build_trainer("qwen3_grpo")
        if functions:
            trainer.reward_funcs = [*functions]
            trainer.reward_func_names = [getattr(function, "__name__", "model") for function in functions]
            trainer.reward_weights = torch.ones(len(functions))
            trainer.reward_processing_classes = [None] * len(functions)
        trainer.train_dataset = trainer.train_dataset if rows is None else Dataset.from_list(rows)
        return score(trainer, Path(__file__))

    return call


@pytest.mark.parametrize("reward", [raises, lambda **_: None, lambda **_: [1.0], all_alike, rates_nothing])
def test_preview_of_useless_rewards(score_of, reward):
    with pytest.raises(UserError):
        score_of(reward)


def rows_with(answers):
    return [{"prompt": [{"role": "user", "content": "Is it so?"}], "answer": answer} for answer in answers]


@pytest.mark.parametrize(
    ("rows", "functions", "reason", "best"),
    [
        (None, [], "", "its own answer"),
        (rows_with(["yes", "yes", "yes", "no", "yes", "no"]), [is_equal], "", "its own answer"),
        (rows_with(["yes"] * 6), [is_equal], "same answer", "its own answer"),
        (rows_with(["yes", "no"] * 3), [torch.nn.Linear(1, 1)], "no weights", None),
        ([{"prompt": [{"role": "user", "content": "Is it so?"}]}] * 4, [all_alike], "no column", None),
    ],
)
def test_preview_of_rewards(score_of, rows, functions, reason, best):
    found = score_of(*functions, rows=rows)
    assert reason in found["rewards_not_compared"] and bool(reason) == bool(found["rewards_not_compared"])
    if best:
        assert {one["kind"] for one in found["rewards"] if one["reward"]} == {best}
    elif reason == "no column":
        assert len(found["rewards"]) == 12 and "all_alike" in found["warnings"][0]


def test_preview_of_several_functions(score_of):
    """Each is shown, and those that tell nothing apart are named."""
    found = score_of(is_equal, all_alike, rates_nothing, rows=rows_with(["yes", "no", "perhaps", "yes"]))
    assert found["rewards"][0]["functions"] == {"is_equal": 1, "all_alike": 1, "rates_nothing": None}
    assert "all_alike" in found["warnings"][0] and "rates_nothing" in found["warnings"][1]
    assert json.loads(json.dumps(found, allow_nan=False))


def test_metrics_of_an_evaluation():
    """Means over rows, without batches that have no reward."""
    metrics = {"reward": [1.0, math.nan, 0.0], "rewards/min_words/mean": [1.0, 0.0, 0.0], "reward_std": [math.nan] * 3}
    accelerator = SimpleNamespace(gather=lambda steps: steps, num_processes=1)
    means = Means(SimpleNamespace(accelerator=accelerator, gather_function=None, _metrics={"eval": metrics}), loader=None)
    rows = torch.tensor([3.0, 4.0, 1.0])
    means.steps = [torch.stack([torch.tensor(0.0), *[count] * 5]) for count in rows]
    means.finish()
    assert metrics["reward"] == [0.75] and metrics["rewards/min_words/mean"] == [3 / 8]
    assert all(map(math.isnan, metrics["reward_std"]))


NUMBERS = {"So 1,000.50.": 1000.5, "#### 72": 72, "\\boxed{-3}": -3, "3 and 4": 4, "none": None, "$5.": 5, "12-7": 7}
NUMBERS |= {"(12)-7": 7, "x = -7": -7, "x = \u22127": -7, "12\u22127": 7, "1,2,3": 3, "3,14": 14, "12,3456": 3456}
NUMBERS |= {"-12,345,678.9": -12345678.9, "It costs $.75.": 0.75, "-.5": -0.5, "He has -$5.": -5, "-\\$5": -5}
NUMBERS |= {"x = \u20137": -7, "pages 12\u20137": 7, "so...5": 5}


@pytest.mark.parametrize(("text", "number"), NUMBERS.items())
def test_last_number(text, number):
    import qwen3_grpo

    assert qwen3_grpo.last_number(text) == number


def test_questions_without_a_number_are_left_out(build_trainer, tmp_path, capsys):
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1) if number else "one"} for number in range(20)]
    trainer = build_trainer("qwen3_grpo", "--dataset_name", str(write_rows(tmp_path / "sums.jsonl", rows)))
    assert {*trainer.train_dataset["answer"], *trainer.eval_dataset["answer"]} == {row["answer"] for row in rows[1:]}
    rows = write_rows(tmp_path / "words.jsonl", [row | {"answer": "a word"} for row in rows])
    with pytest.raises(SystemExit) as end:
        build_trainer("qwen3_grpo", "--dataset_name", str(rows))
    assert end.value.code == 2 and capsys.readouterr().err.startswith("error: --dataset_name: ")
