"""Chat templates that mark the answers, so that the loss is on the assistant's turns only.

TRL takes the loss mask from a template with `{% generation %}` markers, and has marked copies of some families' templates.
Here any template is marked: MARKED renders the conversation answer by answer with the model's own template and marks what each
answer added. Its output is the same text.
"""

from pathlib import Path

from harness.hub import hub_errors
from harness.launched import UserError

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from trl import ModelConfig
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

# %s is the model's own template, %r the error message.
MARKED = """
{%%- macro own(messages, add_generation_prompt) %%}%s{%% endmacro %%}
{%%- set done = namespace(text='') %%}
{%%- for message in messages %%}
{%%- if message['role'] == 'assistant' and not loop.first %%}
{%%- set before = own(messages[:loop.index0], true) %%}
{%%- set after = own(messages[:loop.index], false).rstrip() %%}
{%%- if not (before.startswith(done.text) and after.startswith(before)) %%}{{ raise_exception(%r) }}{%% endif %%}
{{- before[done.text|length:] }}{%% generation %%}{{ after[before|length:] }}{%% endgeneration %%}
{%%- set done.text = after %%}
{%%- endif %%}
{%%- endfor %%}
{%%- set complete = own(messages, add_generation_prompt) %%}
{%%- if not complete.startswith(done.text) %%}{{ raise_exception(%r) }}{%% endif %%}
{{- complete[done.text|length:] }}
"""
PROJECT = Path(__file__).resolve().parents[3]
REASON = "its chat template renders a turn differently when another turn follows"
QUESTION, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
ONE_ANSWER, TWO_ANSWERS = [QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION, ANSWER]


def training_template(tokenizer: PreTrainedTokenizerBase | ProcessorMixin) -> str | None:
    """A template that renders the same text as the tokenizer's own and marks the answers; None if its own marks them.

    Raises ValueError if there is none. A template that is right for one answer only raises TemplateError when it meets a
    conversation that it would render differently.
    """
    if isinstance(tokenizer, ProcessorMixin) or has_generation_markers(tokenizer.chat_template):
        return get_training_chat_template(tokenizer)
    own = tokenizer.get_chat_template().removesuffix("\n")
    marked = MARKED.replace("\n", "") % (own, REASON, REASON)
    try:
        copy_of_trl = get_training_chat_template(tokenizer)
    except ValueError:
        copy_of_trl = None
    candidates = ((marked, [ONE_ANSWER, TWO_ANSWERS]), (copy_of_trl, [ONE_ANSWER, TWO_ANSWERS]), (marked, [ONE_ANSWER]))
    for template, conversations in candidates:
        if template and all(_renders_the_same(tokenizer, template, conversation) for conversation in conversations):
            return template
    raise ValueError(REASON)


def _renders_the_same(tokenizer: PreTrainedTokenizerBase, template: str, conversation: list[dict]) -> bool:
    try:
        own = tokenizer.apply_chat_template(conversation, tokenize=False)
        return own == tokenizer.apply_chat_template(conversation, tokenize=False, chat_template=template)
    except TemplateError:
        return False


def template_file(training_args: TrainingArguments, tokenizer: PreTrainedTokenizerBase, given: frozenset[str]) -> str | None:
    """The file of --chat_template_path. A recipe's own template is only for a model that has none.

    A path that does not exist here can be relative to the project's folder.
    """
    path = getattr(training_args, "chat_template_path", None)
    if not path or ("chat_template_path" not in given and tokenizer.chat_template):
        return None
    return str(PROJECT / path) if not Path(path).exists() and (PROJECT / path).is_file() else path


def set_template_file(training_args: TrainingArguments, model_args: ModelConfig, given: frozenset[str]) -> None:
    """Sets `chat_template_path` to the file that this model needs, None if it has a template."""
    if getattr(training_args, "chat_template_path", None):
        training_args.chat_template_path = template_file(training_args, load_tokenizer(model_args), given)


def check_conversations(
    training_args: TrainingArguments, model_args: ModelConfig, given: frozenset[str], rows: list[dict], model_name: str
) -> None:
    """Raises UserError unless the model's template can render the conversations among `rows`, and mark their answers."""
    conversations = [row.get("messages") or row["prompt"] + row["completion"] for row in rows if _is_conversation(row)]
    if not conversations or not hasattr(training_args, "chat_template_path"):
        return
    with hub_errors("model", model_name):
        tokenizer = load_tokenizer(model_args)
    if path := template_file(training_args, tokenizer, given):
        if not Path(path).is_file():
            raise UserError(f"--chat_template_path: file not found: {path}. Pass a chat template in Jinja, a .jinja file")
        tokenizer.chat_template = Path(path).read_text("utf-8")
    if not tokenizer.chat_template:
        raise UserError(
            f"--model_name_or_path: {model_name} has no chat template, because it is a base model: use its -Instruct or -Chat "
            "version, or train it on plain headings with --chat_template_path recipes/headings.jinja"
        )
    try:
        tokenizer.apply_chat_template(conversations[0], tokenize=False)
    except TemplateError as error:
        raise UserError(
            f"--chat_template_path: the chat template {path or f'of {model_name}'} fails ({str(error)[:200]}): pass another one"
        ) from error
    if not training_args.assistant_only_loss:
        return
    try:
        template = training_template(tokenizer)
        can_mark = all(_renders_the_same(tokenizer, template, turns) for turns in conversations if template)
    except ValueError:
        can_mark = False
    if not can_mark:
        raise UserError(
            f"--assistant_only_loss: the answers of {model_name} cannot be marked: {REASON}. Use another model, rows with one "
            "answer each, or --assistant_only_loss false to train on every turn"
        )


def _is_conversation(row: dict) -> bool:
    return isinstance(row.get("messages", row.get("completion")), list)


def load_tokenizer(model_args: ModelConfig) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
