"""What a folder with a saved model or adapter says: of a run, of a checkpoint, or of what --merge or someone else has made."""

from pathlib import Path
from typing import Any

from harness.folder import CHECKPOINT, PROMPT, RUN, SHARDED, read_json
from harness.messages import UserError, last_line


def check_saved_model(folder: Path) -> None:
    """Raises UserError for a folder that is not that of a run with a saved model or adapter."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: pass the output directory of a finished run")
    has_model = (folder / "config.json").is_file() and not (folder / SHARDED).is_dir()
    if not (folder / "adapter_config.json").is_file() and not has_model:
        raise UserError(
            f"{folder} has no model and no adapter: pass the folder of a finished run or of a checkpoint that is not sharded; "
            "./launch.sh --merge makes a model of a sharded one"
        )


def read_prompt(folder: Path) -> dict:
    """How a prompt looks for the model in `folder`; {} if it is not known."""
    folder = folder.absolute()
    run = folder.parent if CHECKPOINT.fullmatch(folder.name) else folder
    if prompt := read_json(run / PROMPT, "rows"):
        return prompt
    if not (run / RUN).is_file():  # may have been downloaded
        return {}
    return {"rows": None, "chat_template_kwargs": read_json(run / RUN).get("chat_template_kwargs")}


def read_adapter_settings(folder: Path) -> Any:
    """The `peft.PeftConfig` of an adapter. Raises UserError if its file is damaged or names no base model."""
    from peft import PeftConfig

    file = folder / "adapter_config.json"
    if read_json(file).get("megatron_config"):
        raise UserError(f"{file} has a megatron_config, with which PEFT would import any module: it is not loaded")
    try:
        settings = PeftConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise UserError(f"{file} is damaged: {last_line(error)}") from error
    if not settings.base_model_name_or_path:
        raise UserError(f"{file} is damaged: base_model_name_or_path is missing")
    return settings
