"""Changes files that somebody else can have written, at random, and counts what the code that reads them does.

`python tests/fuzz.py [--inputs N] [--seed N] [KIND…]` prints a table; tests/test_fuzz.py runs it with few inputs.

Each input has to end in one message, or in what an unchanged file gives, or in another value of the same type: never in a
traceback, a hang, or a value of another type that a run would use.
"""

# ruff: noqa: RUF012 (nothing changes the class attributes)

import argparse
import contextlib
import copy
import io
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
ROOT = Path(__file__).resolve().parents[1]
SECONDS = 20  # of CPU time; more is a hang
OUTCOMES = ("message", "same", "other value", "other type", "traceback", "hang")
FAILURES = OUTCOMES[3:]
ODD = [
    None,
    True,
    False,
    0,
    -1,
    7,
    1.5,
    -0.0,
    10**30,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "1",
    "../../x",
    "/etc/x",
]
ODD += [
    "\0",
    "\x1b[31m",
    "\ud800",
    "(a+)+$",
    "(",
    "{{7*7}}",
    "x" * 5_000,
    [],
    [[]],
    [None],
    ["a"],
    [1, 2],
    [["a", 1]],
    {},
    {"a": None},
]
ODD += [{"a": {"a": {"a": {}}}}, {"": 1}, [{}], [{"a": 1}]]
ODD_TEXTS = [b"", b" ", b"{", b"[]", b"null", b"3", b'"a"', b"\xff\xfe", b"\0" * 9, b"[" * 50_000, b'{"a":' * 50_000]
OBJECTS = [b"{}", b'{"a": 1e999}', b"\xef\xbb\xbf{}"]  # of which everything is missing
ODD_TEXTS += [*OBJECTS, b"9" * 5_000, b"NaN", b"---\n...\n", b"a: b: c", b"- a\n- b", b"? [a, b]\n: c"]
ODD_YAML = [
    "&a [*a]",
    "&a {b: *a}",
    "!!python/object/apply:os.system [exit]",
    "!!binary aGk=",
    "2024-01-01",
    "0x10",
    "1_000",
    "~",
    ".inf",
]
ODD_YAML += [
    "{[1]: 2}",
    "!!set {a}",
    "!!omap [a: 1]",
    "<<: *a",
    "|\n  text",
    "2.0",
    "1e3",
    "'no'",
    "no",
    "0o7",
    "1:30",
    "!!float 2",
]
BOMB = "[" + ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 1}]" for n in range(9)) + "]"  # 9^9 items


class Hang(BaseException):
    pass


def paths_of(content: Any, path: tuple = ()) -> list[tuple]:
    """The places of all values in a JSON object."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [found for key, value in items for found in [(*path, key), *paths_of(value, (*path, key))]]


def type_of(value: Any) -> type:
    return float if type(value) is int else type(value)


def mutate(content: dict, rng: random.Random, free: set[str]) -> tuple[bytes | dict, bool]:
    """A changed copy of an object, or another text; and whether its values have the types that they had, or are below `free`."""
    how = rng.choice(["value"] * 8 + ["delete", "add", "rename", "text", "cut", "bytes"])
    changed, text = copy.deepcopy(content), json.dumps(content).encode()
    if how == "text":
        text = rng.choice(ODD_TEXTS)
        return text, text in OBJECTS
    if how == "cut":
        return text[: rng.randrange(len(text))], False
    if how == "bytes":
        broken = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        return bytes(broken), True
    path = rng.choice(paths_of(content))
    place = changed
    for key in path[:-1]:
        place = place[key]
    old, new = place[path[-1]], copy.deepcopy(rng.choice(ODD))
    if how == "value":
        place[path[-1]] = new
    elif how == "add" and isinstance(old, dict):
        old[rng.choice(["a", "", "__class__", "../x", "\x1b"])] = new
    elif how == "add" and isinstance(old, list):
        old.insert(rng.randint(0, len(old)), new)
    elif how == "rename" and isinstance(place, dict):
        place[f"{path[-1]}_"] = place.pop(path[-1])
    else:
        del place[path[-1]]
    if how == "value" and (new is None or old is None):
        return changed, True
    return changed, how != "value" or type_of(old) is type_of(new) or bool(free & set(path))


def outcome_of(read: Callable[[], Any], expected: str, is_same_type: bool) -> tuple[str, str]:
    """What `read` does, one of OUTCOMES, with its message or traceback. `expected`: what it returns for an unchanged file."""
    from harness.messages import UserError, printable

    def stop(number, frame):
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = read()
        if repr(found) == expected:
            return "same", ""
        return "other value" if is_same_type else "other type", repr(found)[:300]
    except UserError as error:
        return "message", printable(" ".join(str(error).split()))
    except SystemExit as error:
        return "message", f"exit {error.code}"
    except Hang:
        return "hang", traceback.format_exc()
    except Exception:
        return "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Kind:
    """A kind of file: `content` is what an unchanged one has, `write` makes a file of it, `read` returns what a run would use."""

    path = ""
    content: dict[str, Any] = {}
    free: set[str] = set()  # keys of values that can have several types

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / self.path
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def write(self, content: bytes | dict) -> None:
        self.file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    def mutate(self, rng: random.Random) -> tuple[bytes | dict, bool]:
        return mutate(self.content, rng, self.free)

    def read(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


IDENTITY = {
    "recipe": "r",
    "config": "c",
    "model": "m",
    "dataset": "d",
    "tiny": True,
    "sharded": False,
    "recipe_digest": "12345678",
}
IDENTITY |= {"data_files": [["d/a.jsonl", 10, 1_700_000_000_000_000_000]], "max_samples": None, "dataset_streaming": False}
IDENTITY |= dict.fromkeys(("max_eval_samples", "column_map", "chat_template_kwargs", "split_conversations", "text_rows"))
MIXTURE = {
    "datasets": ["/data/a", "/data/b"],
    "dataset_weights": [0.5, 0.5],
    "date": "2026-01-01T00:00:00",
    "column_map": {"a": "b"},
}
MIXTURE |= {"settings": {"learning_rate": 1e-3, "optim": "adamw"}, "defaults": {"learning_rate": 2e-5, "optim": "adamw_torch"}}
RESULTS = {"recipe": "r", "config": "c", "tiny": False, "device": "NVIDIA A100-SXM-64GB", "num_nodes": 1, "world_size": 2}
RESULTS |= {
    "train_runtime": 9.5,
    "tokens_per_second": 1000.0,
    "peak_gpu_gb": 9.0,
    "peak_host_gb": 1.0,
    "peak_gpu_reserved_gb": 10.0,
}
RESULTS |= {"final_loss": 1.5, "train_loss": 1.6, "eval_loss": 1.7, "global_step": 6, "epoch": 1.0, "tokens": 9000}
RESULTS |= {
    "gpu_utilization": [97.0, 98.0],
    "gpu_memory_gb": [14.5, 14.5],
    "versions": {"torch": "2.13"},
    "quantized_weights": "",
    "data_files": [["d/a.jsonl", 10, 1_700_000_000_000_000_000]],
    "settings": {"learning_rate": 1e-3},
    "defaults": {"learning_rate": 2e-5},
}
PLAN = {"recipe": "r", "config": "c", "processes": 2, "peak_gpu_gb": 8.5, "peak_host_gb": 2.0, "reserved_gb": 9.5}
PLAN |= {"reserved_on_gb": {"A100 64 GB": 9.5}, "tokens_per_step": 8192, "tokens_per_second": {"A100 64 GB": [900, 1100]}}
PLAN |= {"step_seconds": {"A100 64 GB": [7.5, 9.1]}}
HISTORY = [{"step": 1, "loss": 2.5, "grad_norm": 1.0}, {"step": 2, "loss": 2.25}, {"step": 2, "eval_loss": 2.0}]
TURNS = [{"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "Cold."}]
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}],
}
FSDP = """distributed_type: FSDP
num_processes: 4
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_ignored_modules: .*lm_head
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


class RunFile(Kind):
    path, content, free = "run/run.json", IDENTITY | MIXTURE, {"settings", "defaults"}

    def read(self) -> Any:
        from harness import folder

        return folder.check_output_dir(self.file.parent, IDENTITY, is_default=False)


class RunFileOfTrainedRun(RunFile):
    """The folder has a checkpoint, so that the run must be the same, or is a rehearsal that another one replaces."""

    def read(self) -> Any:
        from harness import folder

        identity = IDENTITY | MIXTURE | {"settings": {"learning_rate": 1e-4, "optim": "adamw"}, "tiny": True}
        for is_default in (False, True):
            run = self.file.parent
            checkpoint = run / "checkpoint-5/complete.json"
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.touch()
            content = self.file.read_bytes()
            try:
                folder.check_output_dir(run, identity, is_default)
                folder.claim_output_dir(run, copy.deepcopy(identity), is_default)
            finally:
                for path in self.folder.glob("run.*"):
                    shutil.rmtree(path)
                run.mkdir(exist_ok=True)
                self.file.write_bytes(content)


class Prompt(Kind):
    """As --chat and --merge read it."""

    path, free = "run/prompt.json", {"thinking"}
    content = {"rows": "prompts", "begins": "### ", "ends": ":", "chat_template_kwargs": {"thinking": False}}

    def read(self) -> Any:
        from harness import folder

        return folder.read_prompt(self.file.parent)


class Results(Kind):
    """As a start and --report read them."""

    path, content, free = "run/train_results.json", RESULTS, {"settings", "defaults", "versions"}

    def read(self) -> Any:
        from harness import folder
        from harness.commands import report

        finished = folder.finished_results(self.file.parent, 6, 1.0)
        run = report.read_run(self.file.parent) | {"speed_up": 1.0, "efficiency": 1.0}
        report.differences_of([run, RESULTS])
        return bool(finished), folder.describe_end(finished) if finished else "", report.table_row(run)


class ResultsWithForecast(Kind):
    path = "run/train_results.json"
    content = RESULTS | {
        "forecast": {name: PLAN[name] for name in ("peak_gpu_gb", "peak_host_gb", "reserved_gb", "tokens_per_step")}
    }
    content["forecast"] |= {"card": "A100 64 GB", "tokens_per_second": [900, 1100], "step_seconds": [7.5, 9.1]}

    def read(self) -> Any:
        from harness.commands import report
        from harness.run.forecast import describe_forecast

        run = report.read_run(self.file.parent) | {"speed_up": 1.0, "efficiency": 1.0}
        described = describe_forecast(run) if run.keys() >= report.MEASURED else []
        return described, report.table_row(run)


class History(Kind):
    """trainer_state.json, as --report reads it."""

    path, content = "run/trainer_state.json", {"log_history": HISTORY}

    def read(self) -> Any:
        from harness.commands import report

        (self.folder / "run/train_results.json").write_text(json.dumps(RESULTS))
        run = report.read_run(self.file.parent)
        return run["losses"], run["eval_losses"]


class Plan(Kind):
    """plan.json in an output directory, and as --report gets it."""

    path, content = "run/plan.json", PLAN

    def read(self) -> Any:
        from harness.commands import report
        from harness.run import forecast

        of_run = forecast.read_forecast(self.file.parent, RESULTS["device"])
        runs = [copy.deepcopy(RESULTS)]
        report.add_plans(runs, self.file)
        described = forecast.describe_forecast(runs[0])
        assert of_run == runs[0]["forecast"]
        return described


class Marker(Kind):
    """complete.json, with a right checksum."""

    path = "run/checkpoint-5/complete.json"
    geometry = {"world_size": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "seed": 42}
    content = {"geometry": geometry, "progress": {"seconds": 0.5, "tokens": 7}, "files": {}}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from harness.run import marker

        (self.file.parent / "a.bin").write_bytes(b"a")
        self.content = self.content | {"files": marker.sync_files(self.file.parent, lambda name: True)}

    def write(self, content: bytes | dict) -> None:
        from harness.run import marker

        with contextlib.suppress(Exception):  # no object, or one that has no checksum: as it is
            content = content | {"checksum": marker.checksum_of_content(content)}
        super().write(content)

    def read(self) -> Any:
        from harness.messages import UserError
        from harness.run import marker

        if damage := marker.find_damage(self.file.parent):
            raise UserError(damage)
        found = marker.read_marker(self.file.parent)
        return found["geometry"], found["progress"], found["files"], marker.settings_of_checkpoint(self.file.parent.parent)


class Expectations(Kind):
    path, free = "run/expected.json", {"generation", "content", "arguments"}
    content = {"step": 6, "eval_losses": {"": 2.5}, "batch_size": 2, "processes": 1, "tie_word_embeddings": True}
    content |= {"generation": {"do_sample": True, "temperature": 0.7}, "end_tokens": {"<|im_end|>": 5}}
    content |= {
        "tokenizer": {"special_tokens": {"eos": ["</s>", 2], "bos": [None, None]}, "vocabulary": "x", "chat_template": "y"}
    }
    content |= {
        "conversations": [
            {"messages": TURNS, "tools": None, "input_ids": [1, 2]},
            {"prompt": TURNS[:1], "completion": [CALL], "input_ids": [1]},
        ]
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import pyarrow
        import pyarrow.parquet

        rows = [{"dataset": "", "input_ids": [1, 2, 3], "labels": [-100, 2, 3], "seq_lengths": [3]}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), self.file.with_name("held_out.parquet"))

    def read(self) -> Any:
        from harness.commands import expectations, served, verify

        recorded = self._recorded()
        prompts = expectations.make_prompts(lambda turns, tools, options: [1], recorded)
        requests = [served.chat_request({}, prompt) for prompt in prompts]
        losses = verify.mean_as_logged([(1.0, 2)] * 3, recorded.batch_size, recorded.processes)
        ends = verify.check_ends("m", {5}, recorded)
        words = verify.in_words(recorded.tokenizer["special_tokens"])
        checks = [expectations.numeric_check("m", "loss", logged, losses, 0.1) for logged in recorded.eval_losses.values()]
        return requests, losses, ends, words, checks, verify.sampling(recorded.generation)

    def _recorded(self) -> Any:
        from harness.commands import expectations
        from harness.folder import read_json
        from harness.messages import UserError

        content = read_json(self.file)
        expectations.check_expectations(content, str(self.file))
        try:
            return expectations.Expected(**content)
        except TypeError as error:
            raise UserError(str(error)) from error


class Served(Kind):
    """The answers of a server."""

    path = "answer.json"
    content = {
        "choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1},
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        kind = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(kind.file.read_bytes())

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def read(self) -> Any:
        from harness.commands import served
        from harness.commands.expectations import Expected, Prompt

        address = f"http://127.0.0.1:{self.server.server_port}"
        prompt = Prompt(TURNS[:1], None, {}, [1], True)
        expected = Expected(**Expectations.content)
        answer = served.ask_chat(address, served.chat_request({}, prompt), served.CHOICES)
        first = (answer["choices"][0]["message"].get("content") or "").strip()
        return first, served.check_prompt_lengths(address, {}, [prompt]), served.check_end_tokens(address, {}, prompt, expected)


class AccelerateConfig(Kind):
    path, text, free = "config.yaml", FSDP, {"mixed_precision"}  # an unquoted no is false

    def mutate(self, rng: random.Random) -> tuple[bytes | dict, bool]:
        """Lines with other keys or values, missing or twice; odd texts."""
        lines = self.text.splitlines()
        how = rng.choice(["value"] * 6 + ["json"] * 2 + ["text", "delete", "twice", "indent", "bytes", "add"])
        number = rng.randrange(len(lines))
        key, _, old = lines[number].partition(":")
        new = rng.choice(
            [*ODD_YAML, BOMB, "[" * 300 + "]" * 300, *(json.dumps(value) for value in ODD[:-1] if value != "\ud800")]
        )
        kinds = set()
        if how == "text":
            return (text := rng.choice(ODD_TEXTS)), text in OBJECTS
        if how == "value":
            lines[number] = f"{key}: {new}"
            with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
                kinds = {type_of(yaml.safe_load(value)) for value in (old, new)}
        elif how == "json":
            try:
                return mutate(yaml.safe_load(self.text), rng, self.free)
            except (yaml.YAMLError, ValueError):
                return b"", False
        elif how == "delete":
            del lines[number]
        elif how == "twice":
            lines.insert(rng.randint(0, len(lines)), f"{key}: {new}")
        elif how == "add":
            lines.append(f"{rng.choice(['debug', 'gpu_ids', 'main_process_port', 'rdzv_backend', 'env', 'x'])}: {new}")
        elif how == "indent":
            lines[number] = " " * rng.randint(0, 5) + lines[number].strip()
        else:
            broken = bytearray(self.text.encode())
            broken[rng.randrange(len(broken))] = rng.randrange(256)
            return bytes(broken), True
        return "\n".join(lines).encode(), how in ("delete", "indent", "add") or len(kinds) == 1 or new in (
            "~",
            "null",
        ) or key.strip() in self.free

    def write(self, content: bytes | dict) -> None:
        super().write(self.text.encode() if content == {} else content)

    def read(self) -> Any:
        from harness import configs

        return configs.read(str(self.file))


class Fsdp1Config(AccelerateConfig):
    """As --convert reads it."""

    free = {"mixed_precision", "fsdp_reshard_after_forward", "fsdp_ignored_modules"}
    text = FSDP.replace("fsdp_version: 2", "fsdp_version: 1").replace("forward: true", "forward: FULL_SHARD")

    def read(self) -> Any:
        from harness.commands import convert

        keys, notes = convert.translate(str(self.file))
        return keys, convert.with_comments(keys, notes)


class DeepspeedConfig(Fsdp1Config):
    text = """distributed_type: DEEPSPEED
num_processes: 4
num_machines: 1
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: none
  offload_param_device: none
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
"""


LIGHT = {
    "run.json of a trained run": RunFileOfTrainedRun,
    "run.json": RunFile,
    "prompt.json": Prompt,
    "train_results.json": Results,
    "train_results.json with a forecast": ResultsWithForecast,
    "trainer_state.json in --report": History,
    "plan.json": Plan,
    "complete.json": Marker,
    "expected.json": Expectations,
    "answers of a server": Served,
    "Accelerate YAML": AccelerateConfig,
    "FSDP1 YAML in --convert": Fsdp1Config,
    "DeepSpeed YAML in --convert": DeepspeedConfig,
}


# Kinds that need the libraries


class TrainerState(Kind):
    """trainer_state.json of a checkpoint, with a right checksum, as a resumed run reads it."""

    path, free = "run/checkpoint-6/trainer_state.json", {"stateful_callbacks", "grad_norm", "learning_rate"}
    content = {"best_global_step": 3, "best_metric": 2.0, "best_model_checkpoint": "/elsewhere/run/checkpoint-3", "epoch": 1.5}
    content |= {"eval_steps": 6, "global_step": 6, "is_world_process_zero": True, "log_history": HISTORY, "logging_steps": 1}
    content |= {"max_steps": 12, "num_input_tokens_seen": 9, "num_train_epochs": 3, "save_steps": 6, "total_flos": 1e12}
    content |= {
        "stateful_callbacks": {"TrainerControl": {"args": {"should_save": True}, "attributes": {}}},
        "train_batch_size": 2,
    }

    def read(self) -> Any:
        from harness.messages import UserError
        from harness.run import checkpoints, results

        from transformers import TrainerState

        if damage := checkpoints.damage_of_state(self.file.parent):
            raise UserError(damage)
        state = TrainerState.load_from_json(str(self.file))
        results.draw_losses(state.log_history, "a", self.file.with_name("loss.png"))
        read = ("global_step", "max_steps", "epoch", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")
        return [getattr(state, name) for name in read], results.mean_loss(state.log_history), state.train_batch_size


class Stream(Kind):
    path, free = "run/checkpoint-6/stream_0.json", set()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stream = self.open()
        part = self.stream.shard(1, 0)
        for _ in zip(range(7), part, strict=False):
            pass
        self.content = {"parts": 1, "shards": self.stream.num_shards, "state": part.state_dict()}

    @staticmethod
    def open() -> Any:
        import datasets

        rows = datasets.Dataset.from_dict({"a": list(range(40))}).to_iterable_dataset(num_shards=4)
        return rows.filter(lambda row: row["a"] % 5 > 0).map(lambda row: {"b": row["a"]}).repeat(None)

    def read(self) -> Any:
        from harness.data import streams
        from harness.messages import UserError

        parts, states = streams._read_states(self.file.parent, self.stream)
        if not 0 < parts <= self.stream.num_shards or 0 not in states:
            raise UserError("the stream is read from its beginning, with a warning")
        part = self.open().shard(parts, 0)
        part.load_state_dict(states[0])
        return next(iter(part))


class Adapter(Kind):
    """adapter_config.json, as --chat and --merge read it."""

    path = "adapter/adapter_config.json"
    free = {"megatron_config", "eva_config", "runtime_config", "task_type", "auto_mapping", "layer_replication"}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import peft
        import transformers

        sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
        self.model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, num_key_value_heads=2))
        settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, base_model_name_or_path="m", task_type="CAUSAL_LM")
        settings.rank_pattern, settings.alpha_pattern = {"layers.0.self_attn.q_proj": 2}, {"v_proj": 4}
        peft.get_peft_model(copy.deepcopy(self.model), settings).save_pretrained(self.file.parent)
        self.content = json.loads(self.file.read_text()) | {"base_model_name_or_path": "m"}

    def read(self) -> Any:
        from harness import folder
        from harness.commands import chat, merge

        from safetensors.torch import load_file

        adapter = load_file(self.file.with_name("adapter_model.safetensors"))
        settings = folder.read_adapter_settings(self.file.parent)
        folder.check_patterns(settings, [name for name, _ in self.model.named_modules()], self.file.parent)
        merge.needs_peft(adapter, settings)
        loaded = chat.load_adapter(copy.deepcopy(self.model), self.file.parent)
        scalings = {name: module.scaling for name, module in loaded.named_modules() if hasattr(module, "lora_A")}
        weights = self.model.state_dict()
        changed = {name: float(change(weights[name]).sum()) for name, change in merge.changed_weights(adapter, settings).items()}
        return scalings, changed, settings.base_model_name_or_path, settings.revision


class ArgumentsFile(AccelerateConfig):
    """The YAML of --config."""

    types = {"learning_rate": float, "max_steps": int, "per_device_train_batch_size": int, "bf16": bool, "packing": bool}
    types |= {
        "max_length": int | None,
        "lora_target_modules": list[str] | str | None,
        "warmup_steps": float,
        "dataset_name": str | None,
    }

    free: set[str] = {"report_to", "model_init_kwargs", "fsdp", "seed", "lora_target_modules"}
    text = """learning_rate: 1.0e-4
max_steps: 12
per_device_train_batch_size: 2
bf16: false
packing: true
max_length: 64
lora_target_modules: [q_proj, v_proj]
warmup_steps: 2
optim: adamw_torch
lr_scheduler_type: cosine
report_to: none
model_init_kwargs: {use_cache: false}
dataset_name: my/dataset
"""

    def read(self) -> Any:
        from harness.configs import AccelerateConfig as Config
        from harness.contexts import Context
        from harness.json_types import has_type
        from harness.messages import UserError
        from harness.start import arguments, checks

        from trl import SFTConfig

        words, sys.argv = sys.argv, ["recipe.py", "--config", str(self.file), "--output_dir", str(self.folder / "run")]
        try:
            parsed = arguments.read_arguments(Context("recipe.py", Config(), on_cpu=True), SFTConfig, (), {})
            if getattr(parsed[2], "trust_remote_code", False) or "trust_remote_code" in str(parsed[1].model_init_kwargs):
                checks.check_remote_code(parsed[1], parsed[1].model_init_kwargs or {})
                raise AssertionError("trust_remote_code")
        except (ImportError, NotImplementedError) as error:
            raise UserError(str(error)) from error
        finally:
            sys.argv = words
        names = [line.split(":")[0] for line in self.text.splitlines()]
        values = [(name, getattr(part, name)) for name in names for part in parsed if hasattr(part, name)]
        wrong = [(name, value) for name, value in values if name in self.types and not has_type(value, self.types[name])]
        assert not wrong, wrong
        return values

    def mutate(self, rng: random.Random) -> tuple[bytes | dict, bool]:
        """A text is parsed as that of a flag is, so `read` compares the types."""
        return super().mutate(rng)[0], True


class SavedDataset(Kind):
    """state.json of a folder that `save_to_disk` has written."""

    path, free = (
        "saved/state.json",
        {"_fingerprint", "_format_kwargs", "_format_type", "_output_all_columns", "_split", "_indices_data_files"},
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(self.file.parent)
        self.content = json.loads(self.file.read_text())

    def read(self) -> Any:
        from harness.data import reading

        rows = reading.open_splits(str(self.file.parent), None, streaming=False)["train"]
        return rows.column_names, len(rows), [row.get("text") for row in rows]


KINDS = LIGHT | {
    "trainer_state.json": TrainerState,
    "stream_0.json": Stream,
    "adapter_config.json": Adapter,
    "YAML of --config": ArgumentsFile,
    "state.json of a saved dataset": SavedDataset,
}


def fuzz(name: str, inputs: int, seed: int, folder: Path) -> tuple[Counter, list[str]]:
    """How often each outcome came, and the first inputs that failed."""
    rng, kind = random.Random(f"{name} {seed}"), KINDS[name](folder)
    counts, failed = Counter(), []
    try:
        kind.write(kind.content)
        expected = repr(kind.read())
        for _ in range(inputs):
            content, is_same_type = kind.mutate(rng)
            kind.write(content)
            outcome, text = outcome_of(kind.read, expected, is_same_type)
            counts[outcome] += 1
            if outcome in FAILURES:
                failed.append(f"{name}: {outcome}: {kind.file.read_bytes()[:600]!r}\n{text}")
            if outcome == "message" and (len(text) > 50_000 or re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)):
                failed.append(f"{name}: message of {len(text)} letters: {text[:600]!r}")
    finally:
        kind.close()
    return counts, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="KIND")
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=3, help="how many failures to print")
    parsed = parser.parse_args()
    print("| file | " + " | ".join(OUTCOMES) + " |\n|---" * 1 + "|---" * len(OUTCOMES) + "|")
    code = 0
    for name in parsed.kinds:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        counts, failed = fuzz(name, parsed.inputs, parsed.seed, folder)
        shutil.rmtree(folder)
        print(f"| {name} | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + " |", flush=True)
        print("\n".join(failed[: parsed.show]), file=sys.stderr)
        code = code or int(bool(failed))
    return code


if __name__ == "__main__":
    sys.exit(main())
