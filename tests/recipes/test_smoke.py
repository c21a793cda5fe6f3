"""Every recipe trains with its configs, and leaves a model that loads as usual and has the logged loss.

A recipe in docs/which-recipe.md is rehearsed with the configs of its rows, any other with the configs that its docstring names
(CONFIG if it names none), and a config that no recipe names with RECIPE. `--recipe PATH` and `--config PATH` select one of each;
`--rehearsal_flag WORD` are flags for their rehearsal.
A config of the project for four or more GPUs is rehearsed with two processes, or four if it replicates shards.
"""

import ast
import math
import re
from pathlib import Path

from harness.run.losses import is_cross_entropy

import golden
import pytest
from conftest import ALL_CONFIGS, ALL_RECIPES, TABLE_PAIRS, at_night
from runs import SHORT, fewer_processes, losses, read
from safetensors.torch import load_file
from trained import held_out_loss, reload
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

RECIPE, CONFIG = "qwen2_fineweb_edu", "1x3090"
PAIRS_OF_ANSWERS = "qwen3_dpo"  # the recipe that trains on these
TEACHER = "qwen3_distill"  # the recipe whose loss is the distance from another model
REWARDS = "qwen3_grpo"  # the recipe that trains on rewards, which a random model never gets
UNPACKED = ("smollm2_chat", "qwen35_4b_lora", "qwen35_4b_images")  # the recipes that train on single rows
PAIRS = {(recipe, config): (processes, sharded) for recipe, config, processes, sharded in TABLE_PAIRS}
# What is in a rehearsal of a recipe after a change of any kind, on one process and on two.
QUICK = (("qwen2_fineweb_edu", "1x3090_offload"), ("qwen2_chat", "4gpu_shard_grad_op"))


def pytest_generate_tests(metafunc):
    if metafunc.function is test_pair_trains_and_saves_a_model:
        recipe, config = metafunc.config.getoption("recipe"), metafunc.config.getoption("config")
        by_day, night = [], []
        for pair in smoke_pairs(recipe, config):
            (by_day if recipe or config or pair not in PAIRS or pair in golden.PAIRS else night).append(pair)
        ids = ["-".join(Path(word).stem for word in pair) for pair in by_day + night]
        cases = [pytest.param(*pair, marks=pytest.mark.quick) if pair in QUICK else pair for pair in by_day]
        metafunc.parametrize(("recipe", "config"), [*cases, *at_night(*night)], ids=ids)


def smoke_pairs(recipe: str | None = None, config: str | None = None) -> list[tuple[str, str]]:
    """All pairs, or those of one recipe or config, given as a path. Files in the project's folders by name, others by path."""
    if config:
        return [(short_name(Path(recipe), ALL_RECIPES) if recipe else RECIPE, short_name(Path(config), ALL_CONFIGS))]
    pairs = [pair for file in ([Path(recipe)] if recipe else ALL_RECIPES) for pair in pairs_of_recipe(file)]
    if not recipe:
        pairs += [(RECIPE, file.stem) for file in ALL_CONFIGS if file.stem not in {config for _, config in pairs}]
    return pairs


def pairs_of_recipe(file: Path) -> list[tuple[str, str]]:
    name = short_name(file, ALL_RECIPES)
    if pairs := [pair for pair in PAIRS if pair[0] == name]:
        return pairs
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    named = [config.stem for config in ALL_CONFIGS if re.search(rf"(?<!\w){re.escape(config.stem)}(?!\w)", docstring)]
    return [(name, config) for config in named or [CONFIG]]


def short_name(file: Path, known: list[Path]) -> str:
    return file.stem if file in known else str(file)


@pytest.fixture(scope="session")
def trainers():
    return {}


def test_pair_trains_and_saves_a_model(
    rehearse, fork_launch, workdir, build_trainer, trainers, hybrid_2x2, tmp_path, recipe, config, pytestconfig
):
    flags = pytestconfig.getoption("rehearsal_flag")
    if (recipe, config) not in golden.PAIRS:
        check_start(fork_launch, recipe, config, tmp_path, *flags)
    rehearsed_config = hybrid_2x2 if config == golden.HYBRID else config
    run = rehearse(recipe, rehearsed_config, *([*SHORT, *flags] if flags else []))
    results, history = read(run), read(run, "trainer_state.json")["log_history"]
    logged = [loss for loss, _ in losses(run).values()]
    assert results["config"] == Path(rehearsed_config).stem
    assert results["tiny"] and results["resumed_from_step"] == 0 and results["final_loss"] == logged[-1]
    assert results["model_params_b"] >= results["trainable_params_b"] > 0
    assert (results["model_params_b"] > results["trainable_params_b"]) >= results["use_peft"]
    (of_transformers,) = (entry["train_loss"] for entry in history if "train_loss" in entry)
    assert results["train_loss"] == pytest.approx(of_transformers, rel=1e-5)  # the mean of all steps
    assert (run / "loss.png").stat().st_size > 5000
    if (recipe, config) in golden.PAIRS and not flags:
        golden.check(run, f"{recipe}-{config}")

    if recipe not in trainers:
        trainers[recipe] = build_trainer(recipe, *flags, "--load_in_4bit", "false")
    trainer = trainers[recipe]
    is_ours = recipe in {name for name, _ in PAIRS}
    if not is_ours and not is_cross_entropy(trainer):
        check_saved_model(run, trainer)
        return
    model = reload(run, workdir)
    if trainer.eval_dataset is not None:  # also of a recipe that the table does not name
        check_evaluation(recipe, run, results, logged, model, trainer)
    assert results["attention"] == trainer.model.config._attn_implementation
    # Nothing that a later run, a merge or another program reads depends on it.
    assert not [file for file in run.rglob("*.json") if "varlen" in file.read_text() and file != run / "train_results.json"]
    if not results["use_peft"]:
        saved, original = read(run, "config.json"), AutoConfig.from_pretrained(trainer.model.config.name_or_path)
        assert saved["dtype"] == str(original.dtype).removeprefix("torch.") and saved["use_cache"]
    assert AutoTokenizer.from_pretrained(run).chat_template == trainer.processing_class.chat_template
    if (recipe, config) in PAIRS and not flags:
        check_recipe_of_table(run, results, logged, *PAIRS[recipe, config])


def check_evaluation(recipe, run, results, logged, model, trainer):
    """Of the rows held out: what the run has logged is what the saved model has."""
    is_cross_entropy = recipe not in (REWARDS, PAIRS_OF_ANSWERS, TEACHER)
    assert ("perplexity" in results) == is_cross_entropy
    if recipe == REWARDS:
        assert results["eval_reward_on_start"] == results["eval_reward"] == 0
        return
    assert results.get("eval_loss_on_start", logged[0]) > results["eval_loss"]
    if recipe == PAIRS_OF_ANSWERS:
        assert results["eval_loss_on_start"] == pytest.approx(math.log(2), abs=1e-3)
    elif recipe == TEACHER:
        assert results["loss_is_mean_over"] == "tokens"
    else:
        assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    if "seq_lengths" in trainer.eval_dataset.column_names:
        assert held_out_loss(model, trainer.eval_dataset) == pytest.approx(results["eval_loss"], rel=0.01)


def check_start(fork_launch, recipe, config, folder, *flags):
    """A config that is rehearsed with fewer processes than it has starts with all of them."""
    if fewer_processes(config) or config == golden.HYBRID:
        process = fork_launch("--tiny", recipe, config, "--output_dir", folder / "checked", *flags, trains=False)
        assert process.returncode == 0, process.stderr


def check_saved_model(run, trainer):
    """What is known of any trainer's model: it loads as usual, and no weight is missing or new."""
    if not isinstance(trainer.model, PreTrainedModel):
        is_adapter = hasattr(trainer.model, "peft_config")
        assert load_file(run / ("adapter_model.safetensors" if is_adapter else "model.safetensors"))
        return
    _, loading = type(trainer.model).from_pretrained(run, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"], loading


def check_recipe_of_table(run, results, logged, processes, sharded):
    """What is known of the project's own recipes."""
    if results["config"] == "hybrid_2x2":
        processes = 4
    else:
        processes = int(fewer_processes(results["config"]).get("NPROC_PER_NODE", processes))
    assert (results["fsdp_enabled"], results["world_size"], results["num_nodes"]) == (sharded, processes, 1)
    assert results["replicas"] == (2 if results["config"] == "hybrid_2x2" else 1 if sharded else processes)
    recipe = results["recipe"]
    is_packed = recipe not in ("gpt2_xl_wikitext", PAIRS_OF_ANSWERS, TEACHER, REWARDS, *UNPACKED)  # GPT-2 has attention dropout
    assert results["attention"] == ("varlen" if is_packed else "sdpa")
    samples = (run / "samples.txt").read_text()
    assert samples.count("--- generated\n") == 3
    has_first = processes == 1 and not sharded and recipe not in (TEACHER, REWARDS)
    assert samples.count("--- before the training\n") == 3 * has_first
    rows = results["global_step"] * results["global_batch_size"]
    assert results["global_batch_size"] == processes * 2 * 2 or recipe == REWARDS
    if recipe in (TEACHER, REWARDS):  # tokens of batches that are not read, but written
        assert results["rows_per_second"] > 0
        return
    assert results["eval_loss_on_start"] == pytest.approx(logged[0], abs=0.8)  # the first step's loss, on other rows
    # Packed rows are nearly full (short conversations leave gaps); only a part of a conversation counts in the loss.
    length, full = (256, 0.2) if recipe == PAIRS_OF_ANSWERS else (128, 0.7 if is_packed or recipe.startswith("gpt2") else 0.3)
    assert full * length * rows < results["tokens"] <= length * rows
    if recipe != PAIRS_OF_ANSWERS:
        text_only = recipe in ("qwen2_fineweb_edu", "gpt2_xl_wikitext")
        assert (0.9 if text_only else 0.1) < results["loss_tokens"] / results["tokens"] <= 1


def test_pairs_of_other_recipes_and_configs(tmp_path):
    """A recipe that the table does not name is rehearsed with the configs of its docstring; either can be selected by path."""
    mine, own = tmp_path / "mine.py", str(tmp_path / "own.yaml")
    of_docstring = {"./launch.sh mine 4gpu_ddp    # or 1x3090_offload": ["1x3090_offload", "4gpu_ddp"], "Mine.": [CONFIG]}
    for text, found in of_docstring.items():
        mine.write_text(f'"""{text}"""')
        assert smoke_pairs(str(mine)) == [(str(mine), config) for config in found]
    assert smoke_pairs(str(mine), own) == [(str(mine), own)]
    assert smoke_pairs(config=own) == [(RECIPE, own)] and set(PAIRS) <= set(smoke_pairs())
