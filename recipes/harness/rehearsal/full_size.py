"""What `--plan` puts in the place of model and data: the model's own config.json, beside a small tokenizer, and some text.

Weights and the data's words change neither memory nor time, so the hub is asked for config.json alone.
"""

import shutil
import tempfile
from pathlib import Path

from harness import hub
from harness.folder import write_json
from harness.rehearsal import tiny_data, tiny_model

NAMES = "names.json"  # beside the config: what the folder stands for
# Where the family is not known: any tokenizer will do, and any template that says whose turn it is.
ANY = {
    "special": ["<|endoftext|>"],
    "tokenizer": {
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "chat_template": "{% for message in messages %}{{ message['role'] + '\n' + message['content'] + '\n' }}{% endfor %}",
    },
}


def substitute(data, args, model):
    """Names the folders to load instead. They are below the run's own folder, which is a temporary one."""
    name, folder = model.model_name_or_path, Path(tempfile.mkdtemp(prefix="stand-ins", dir=args.output_dir))
    hub.reachable(name, model.model_revision)
    tiny_model.make_tokenizer(tiny_model.family_of(name) or ANY).save_pretrained(folder / "model")
    shutil.copy(_config(name, model.model_revision), folder / "model/config.json")
    tiny_data.make(data, folder / "data")
    write_json(folder / "model" / NAMES, {"model": name, "dataset": data.dataset_name, "streaming": data.dataset_streaming})
    data.max_eval_samples = min(data.max_eval_samples, 16)  # of what little text there is
    model.model_name_or_path, data.dataset_name, model.model_revision = str(folder / "model"), str(folder / "data"), "main"
    if getattr(args, "model_init_kwargs", None):
        args.model_init_kwargs = {**args.model_init_kwargs, "revision": "main"}


def _config(name: str, revision: str) -> Path:
    from huggingface_hub import hf_hub_download

    if Path(name).is_dir():
        return Path(name, "config.json")
    return Path(hf_hub_download(name, "config.json", revision=revision))
