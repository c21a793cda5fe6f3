"""Chat templates: every turn is written as the model's own template writes it, and the answers are marked to train on them.

TRL trains on the assistant's turns of a template that marks them. It has marked copies of many families' templates; here any
template is marked, by another one around it that writes a conversation answer by answer and looks where each begins and ends.
"""

from pathlib import Path

from harness import hub
from harness.launched import fail

from jinja2 import TemplateError
from transformers import AutoTokenizer, ProcessorMixin
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer import sft_trainer

MARKED = """
{%%- macro own(messages, add_generation_prompt) %%}%s{%% endmacro %%}
{%%- set done = namespace(text='') %%}
{%%- for message in messages %%}
{%%- if message['role'] == 'assistant' and not loop.first %%}
{%%- set asked = own(messages[:loop.index0], true) %%}
{%%- set told = own(messages[:loop.index], false).rstrip() %%}
{%%- if not (asked.startswith(done.text) and told.startswith(asked)) %%}{{ raise_exception(%r) }}{%% endif %%}
{{- asked[done.text|length:] }}{%% generation %%}{{ told[asked|length:] }}{%% endgeneration %%}
{%%- set done.text = told %%}
{%%- endif %%}
{%%- endfor %%}
{%%- set whole = own(messages, add_generation_prompt) %%}
{%%- if not whole.startswith(done.text) %%}{{ raise_exception(%r) }}{%% endif %%}
{{- whole[done.text|length:] }}
"""
PROJECT = Path(__file__).resolve().parents[3]
REASON = "its chat template writes a turn in another way once the conversation goes on"
ASKED, TOLD = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
ONE_ANSWER, MORE = [ASKED, TOLD], [ASKED, TOLD, ASKED, TOLD]


def training_template(tokenizer) -> str | None:
    """A template that writes what the tokenizer's own writes and marks the answers; None when its own marks them.

    Raises ValueError where there is none. A template that was tried on one answer only raises TemplateError when it meets a
    conversation that it would write in another way.
    """
    if isinstance(tokenizer, ProcessorMixin) or has_generation_markers(tokenizer.chat_template):
        return get_training_chat_template(tokenizer)
    own = tokenizer.get_chat_template().removesuffix("\n")
    marked = MARKED.replace("\n", "") % (own, REASON, REASON)
    try:
        of_trl = get_training_chat_template(tokenizer)
    except ValueError:
        of_trl = None
    for template, conversations in ((marked, [ONE_ANSWER, MORE]), (of_trl, [ONE_ANSWER, MORE]), (marked, [ONE_ANSWER])):
        if template and all(_writes_the_same(tokenizer, template, turns) for turns in conversations):
            return template
    raise ValueError(REASON)


def prepare(args, model, given: frozenset[str]):
    """To be called before an SFTTrainer is made, which then asks here for a template to train with."""
    sft_trainer.get_training_chat_template = training_template
    if getattr(args, "chat_template_path", None):
        args.chat_template_path = _file(args, _tokenizer(model), given)


def check(args, model, given: frozenset[str], rows: list[dict], name: str):
    """Ends the process with one line unless conversations among `rows` can be written, and trained on, with the model's template.

    `name` is what to call the model.
    """
    chats = [row.get("messages") or row["prompt"] + row["completion"] for row in rows if _is_chat(row)]
    if not chats or not hasattr(args, "chat_template_path"):
        return
    with hub.errors("model", name):
        tokenizer = _tokenizer(model)
    if path := _file(args, tokenizer, given):
        if not Path(path).is_file():
            fail(f"--chat_template_path {path} is no file: give a chat template in Jinja, in a file that ends in .jinja")
        tokenizer.chat_template = Path(path).read_text("utf-8")
    if not tokenizer.chat_template:
        fail(
            f"{name} has no chat template, as it is no chat model: take its -Instruct or -Chat, or teach it plain headings with "
            "--chat_template_path recipes/headings.jinja"
        )
    try:
        tokenizer.apply_chat_template(chats[0], tokenize=False)
    except TemplateError as error:
        fail(f"the chat template {path or f'of {name}'} fails ({str(error)[:200]}): give another with --chat_template_path")
    if not args.assistant_only_loss:
        return
    try:
        template = training_template(tokenizer)
        same = all(_writes_the_same(tokenizer, template, turns) for turns in chats if template)
    except ValueError:
        same = False
    if not same:
        fail(
            f"the answers cannot be told from the rest of what {name} is to read: {REASON}. Take another model, rows of one "
            "answer each, or --assistant_only_loss false to train on every turn"
        )


def _writes_the_same(tokenizer, template: str, turns: list[dict]) -> bool:
    try:
        own, other = (tokenizer.apply_chat_template(turns, tokenize=False, chat_template=text) for text in (None, template))
    except TemplateError:
        return False
    return own == other


def _file(args, tokenizer, given: frozenset[str]) -> str | None:
    """The file of the chat template to use in the place of the model's own: a recipe's is for a model that has none.

    A path that leads nowhere from here may lead somewhere from the project's folder.
    """
    path = args.chat_template_path
    if not path or ("chat_template_path" not in given and tokenizer.chat_template):
        return None
    return str(PROJECT / path) if not Path(path).exists() and (PROJECT / path).is_file() else path


def _is_chat(row: dict) -> bool:
    return isinstance(row.get("messages", row.get("completion")), list)


def _tokenizer(model):
    return AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision)
