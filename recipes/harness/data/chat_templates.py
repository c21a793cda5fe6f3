"""Chat templates: what they leave out of a conversation is an error, and the answers are marked for the loss.

TRL takes the loss mask from a template with `{% generation %}` markers, and has marked copies of some families' templates.
Here any template is marked: MARKED renders the conversation answer by answer with the model's own template and marks what each
answer added. Its output is the same text.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import folder
from harness.data.conversion import other_keys, split_answers, turns_of
from harness.data.formats import CONVERSATIONS
from harness.data.images import IMAGE, as_parts
from harness.data.reading import DataSettings, PlacedRow, Rows
from harness.data.turns import REASONING, TEMPLATE_ARGUMENTS, THOUGHT, without
from harness.hub import hub_errors
from harness.messages import UserError, print_once
from harness.runs import PROJECT, UncutRows

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from trl import ModelConfig
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.data_utils import is_conversational

COMPARED_ROWS = 256  # whose system messages are compared
KEPT_CONVERSATIONS = 16  # for --verify

# %s is the model's own template, %r the error message. A turn with train: false is not marked. A marked answer ends
# with a letter: a space at its end can belong to no token, and transformers would mark all tokens after it.
MARKED = """
{%%- macro own(messages, add_generation_prompt) %%}%s{%% endmacro %%}
{%%- set done = namespace(text='') %%}
{%%- for message in messages %%}
{%%- if message['role'] == 'assistant' and not loop.first and message['train'] | default(true) %%}
{%%- set before = own(messages[:loop.index0], true) %%}
{%%- set after = own(messages[:loop.index], false).rstrip() %%}
{%%- if not (before.startswith(done.text) and after.startswith(before)) %%}{{ raise_exception(%r) }}{%% endif %%}
{{- before[done.text|length:] }}
{%%- set answer = after[before|length:] %%}
{%%- if answer %%}{%% generation %%}{{ answer }}{%% endgeneration %%}{%% endif %%}
{%%- set done.text = after %%}
{%%- endif %%}
{%%- endfor %%}
{%%- set complete = own(messages, add_generation_prompt) %%}
{%%- if not complete.startswith(done.text) %%}{{ raise_exception(%r) }}{%% endif %%}
{{- complete[done.text|length:] }}
"""
REASON = "its chat template renders a turn differently when another turn follows"
NO_THINKING = (
    "--chat_template_kwargs: enable_thinking is false, but %s has an answer with reasoning: remove the reasoning, or leave out "
    "enable_thinking"
)
QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "So."}
ONE_ANSWER = [QUESTION, ANSWER]
TWO_ANSWERS = [QUESTION, ANSWER, QUESTION, ANSWER]


def training_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """A template that renders the same text as the tokenizer's own and marks the answers: its own one, if that marks them.

    Raises ValueError if there is none. A template that is right for one answer only raises TemplateError when it meets a
    conversation that it would render differently.
    """
    templates = templates_of(tokenizer)
    number_of_marked = sum(map(has_generation_markers, templates))
    if number_of_marked == len(templates):
        return own_template(tokenizer)
    if number_of_marked:
        raise ValueError("of its two chat templates only one marks the answers")
    marked = MARKED.replace("\n", "") % (own_template(tokenizer), REASON, REASON)
    try:
        copy_of_trl = get_training_chat_template(tokenizer)
    except ValueError:
        copy_of_trl = None
    for template, conversation in ((marked, TWO_ANSWERS), (copy_of_trl, TWO_ANSWERS), (marked, ONE_ANSWER)):
        text = _text_of(tokenizer, conversation)
        if template and text is not None and text == _text_of(tokenizer, conversation, chat_template=template):
            return template
    raise ValueError(REASON)


def templates_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The chat template of a tokenizer; of named ones, that for rows without tools and that for rows with tools."""
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        return [templates]
    return [templates[name] for name in ("default", "tool_use") if name in templates]


def own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """A template that renders what the tokenizer does, which uses one of two named templates for rows with tools."""
    templates = templates_of(tokenizer)
    plain = templates[0].removesuffix("\n")
    if len(templates) == 1:
        return plain
    return "{%- if tools %}" + templates[1].removesuffix("\n") + "{% else %}" + plain + "{% endif %}"


def choose_template(tokenizer: PreTrainedTokenizerBase, training_args: TrainingArguments, given: frozenset[str]) -> None:
    """Sets --chat_template_path to the file, None if it is not used, and gives the tokenizer its template.

    A template that only the recipe sets is for models without one. `given`: names of the arguments that the user has passed.
    A path that does not exist in the current folder can be relative to the project's folder.
    """
    path = getattr(training_args, "chat_template_path", None)
    if path and tokenizer.chat_template and "chat_template_path" not in given:
        path = training_args.chat_template_path = None
    if path:
        file = Path(path) if Path(path).exists() else PROJECT / path
        if not file.is_file():
            raise UserError(f"--chat_template_path: file not found: {path}. Pass a chat template in Jinja, a .jinja file")
        training_args.chat_template_path = str(file)
        tokenizer.chat_template = file.read_text("utf-8")


def fit_template(
    data: DataSettings, training_args: TrainingArguments, model_args: ModelConfig, given: frozenset[str]
) -> DataSettings:
    """The settings for rows that the chat template of the run renders. Sets `chat_template_path` to None if the model has one."""
    if not {*data.formats} & {*CONVERSATIONS} and not getattr(training_args, "chat_template_path", None):
        return data
    tokenizer = load_bare_tokenizer(model_args, "images" in data.formats)
    choose_template(tokenizer, training_args, given)
    if not tokenizer.chat_template:
        return data
    date = ""
    if "strftime_now" in own_template(tokenizer):
        print_once("The chat template prints the date. A run always uses the date of its first start.")
        date = _text_of(tokenizer, ONE_ANSWER) or ""
    template = None
    only_answers = getattr(training_args, "assistant_only_loss", None)
    if only_answers:
        with contextlib.suppress(ValueError):  # which the run will not need: its rows are no conversations
            template = training_template(tokenizer)
    drops_marks = ""
    if only_answers is not None:
        drops_marks = why_marks_are_dropped(only_answers, template or "")
    has_text_arguments = expects_text_arguments(tokenizer, template)
    return dataclasses.replace(data, template_date=date, has_text_arguments=has_text_arguments, drops_marks=drops_marks)


def expects_text_arguments(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> bool:
    """Whether a chat template needs the arguments of tool calls as JSON: it fails on an object, or writes it as Python does.

    `template`: None for the tokenizer's own. A template without tool calls needs nothing.
    """
    arguments = {"city": "Paris"}
    texts = []
    for form in (arguments, json.dumps(arguments)):
        call = {"type": "function", "function": {"name": "look", "arguments": form}}
        asking = {"role": "assistant", "content": "", "tool_calls": [call]}
        turns = [QUESTION, asking, {"role": "tool", "content": "1"}, ANSWER]
        texts.append(_text_of(tokenizer, turns, chat_template=template) or "")
    of_object, of_text = texts
    if "Paris" in of_object and str(arguments) not in of_object:
        return False
    return json.dumps(arguments) in of_text


def fit_calls(tokenizer: PreTrainedTokenizerBase, rows: list[PlacedRow], template: str | None = None) -> list[PlacedRow]:
    """The rows with tool calls as the template expects them, None for the tokenizer's own."""
    if not expects_text_arguments(tokenizer, template):
        return rows
    return [(place, with_text_arguments(row)) for place, row in rows]


def with_text_arguments(row: dict) -> dict:
    """A converted row in which the arguments of tool calls are JSON, as in OpenAI's form, not objects."""
    row = copy.deepcopy(row)
    for turn in turns_of(row):
        for call in turn.get("tool_calls") or []:
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return row


def check_conversations(
    rows: list[PlacedRow], training_args: TrainingArguments, model_args: ModelConfig, splits_answers: bool = False
) -> None:
    """Raises UserError unless the model's template renders all of the conversations among `rows`, and can mark their answers.

    After `fit_template`. `splits_answers`: whether conversations are split into one row for every answer (--split_conversations).
    """
    without = next((place for place, row in rows if "completion" not in row), None)
    if getattr(training_args, "completion_only_loss", None) and without:
        raise UserError(
            f"--completion_only_loss: {without} has no prompt and completion for the trainer, so all of it would count: leave "
            "out the flag; for conversations pass --assistant_only_loss true"
        )
    conversations = [(place, conversation) for place, row in rows for conversation in conversations_of(row)]
    has_pairs = any("chosen" in row for _, row in rows)
    if not conversations or not (has_pairs or hasattr(training_args, "chat_template_path")):
        return
    model_name = model_args.model_name_or_path
    with hub_errors("model", model_name):
        tokenizer = load_tokenizer_with_template(model_args, training_args, any("images" in row for _, row in rows))
    if not tokenizer.chat_template:
        raise UserError(
            f"--model_name_or_path: {model_name} has no chat template: use its -Instruct or -Chat version, or train it on plain "
            "headings with --chat_template_path recipes/headings.jinja, if the recipe has that flag"
        )
    if splits_answers:
        conversations = [(place, part) for place, row in conversations for part in split_answers(row)]
    fitted = fit_calls(tokenizer, conversations)
    only_answers = getattr(training_args, "assistant_only_loss", None)
    name = getattr(training_args, "chat_template_path", None) or f"of {model_name}"
    check_rendering(tokenizer, name, fitted, can_split=not splits_answers and only_answers is not None)
    print_ignored_arguments(tokenizer, conversations)
    print_ignored_keys(tokenizer, fitted)
    if only_answers is None:
        check_preferences(tokenizer, fitted)
    else:
        check_marks(tokenizer, conversations, only_answers, model_name, splits_answers)


def check_preferences(tokenizer: PreTrainedTokenizerBase, rows: list[PlacedRow]) -> None:
    """Raises UserError for answers of which the loss of preferences, which counts complete ones, would count something else."""
    for place, row in rows:
        if contradicts_no_thinking(row):
            prompt = _text_of(tokenizer, row["prompt"], add_generation_prompt=True, **options_of(row)) or ""
            if not (_text_of_row(tokenizer, row) or "").startswith(prompt):
                raise UserError(NO_THINKING % place)  # reasoning takes the place of the empty one that the prompt ends with
        if has_untrained_turn({"completion": row.get("completion")}):
            raise UserError(
                f"{place}: a part of an answer is marked not to count in the loss, but all of it would: delete the mark"
            )


def check_marks(
    tokenizer: PreTrainedTokenizerBase, rows: list[PlacedRow], only_answers: bool, model_name: str, splits_answers: bool
) -> None:
    """Raises UserError if tokens would count in the loss that must not: of questions, or of turns that are marked so."""
    if not only_answers and len({"messages" in row for _, row in rows}) > 1:
        raise UserError(
            "--assistant_only_loss: some rows are messages, some are a prompt and a completion. They become messages, and "
            "without this flag the prompts would count in the loss: pass --assistant_only_loss true"
        )
    template = ""
    if only_answers:
        with contextlib.suppress(ValueError):
            template = training_template(tokenizer)
    if only_answers and (found := find_unmarked(tokenizer, template, rows)):
        place, row = found
        if contradicts_no_thinking(row):
            raise UserError(NO_THINKING % place)
        split = ""
        if not splits_answers and not find_unmarked(tokenizer, template, [(place, part) for part in split_answers(row)]):
            split = "pass --split_conversations true, which makes one row for every answer, "
        raise UserError(
            f"--assistant_only_loss: the answers of {model_name} cannot be marked ({place}): {REASON}: {split}use another model, "
            "or train on every turn with --assistant_only_loss false"
        )
    if any(has_untrained_turn(row) for _, row in rows) and (reason := why_marks_are_dropped(only_answers, template)):
        raise UserError(reason)


def why_marks_are_dropped(assistant_only_loss: bool, template: str) -> str:
    """Why turns that are marked not to count in the loss would count, "" if they do not. `template`: of `training_template`."""
    reason = "without this flag every turn counts: pass --assistant_only_loss true"
    if assistant_only_loss:
        reason = (
            "the chat template marks the answers itself: delete {% generation %} and {% endgeneration %} in a copy of it, and "
            "pass that with --chat_template_path"
        )
    if assistant_only_loss and "message['train']" in template:
        return ""
    return f"--assistant_only_loss: some turns are marked not to count in the loss, but {reason}"


def find_unmarked(tokenizer: PreTrainedTokenizerBase, template: str, rows: list[PlacedRow]) -> PlacedRow | None:
    """The first row whose answers the template of `training_template`, "" if there is none, cannot mark."""
    for (place, row), (_, fitted) in zip(fit_calls(tokenizer, rows, template), fit_calls(tokenizer, rows), strict=True):
        if not template or _text_of_row(tokenizer, row, template) != _text_of_row(tokenizer, fitted):
            return place, row
    return None


def has_untrained_turn(row: dict) -> bool:
    """Whether a turn of a converted row is marked not to count in the loss."""
    return any(not turn.get("train", True) for turn in turns_of(row))


def contradicts_no_thinking(row: dict) -> bool:
    """Whether a row turns thinking off and has an answer with reasoning."""
    if options_of(row).get("enable_thinking") is not False:
        return False
    for turn in turns_of(row):
        if turn["role"] == "assistant" and (REASONING[0] in turn or THOUGHT.search(turn["content"])):
            return True
    return False


def options_of(row: dict) -> dict:
    """What a chat template gets besides the turns."""
    return {"tools": row.get("tools") or None, **(row.get(TEMPLATE_ARGUMENTS) or {})}


def print_ignored_arguments(tokenizer: PreTrainedTokenizerBase, rows: list[PlacedRow]) -> None:
    """Prints the names of chat_template_kwargs that do not occur in the chat template."""
    names = {name for _, row in rows for name in row.get(TEMPLATE_ARGUMENTS) or {}}
    if taken := names.intersection(inspect.signature(tokenizer.apply_chat_template).parameters):
        raise UserError(f"--{TEMPLATE_ARGUMENTS}: {min(taken)} is no variable of a chat template: leave it out")
    ignored = sorted(names - {*re.findall(r"\w+", own_template(tokenizer))})
    if ignored:
        print_once(f"warning: the chat template has no variable {', '.join(ignored)} (chat_template_kwargs): it has no effect.")


def print_ignored_keys(tokenizer: PreTrainedTokenizerBase, rows: list[PlacedRow]) -> None:
    """Prints the keys of turns without which the chat template renders the same."""
    found: dict[str, bool] = {}  # whether it changes the text
    for _, row in rows:
        for turn in turns_of(row):
            for key in other_keys(turn):
                if not found.get(key):
                    found[key] = _text_of_row(tokenizer, row) != _text_of_row(tokenizer, _without_key(row, key))
    ignored = [key for key, is_read in found.items() if not is_read]
    if ignored:
        print_once(f"The chat template ignores these keys of messages: {', '.join(ignored)}.")


def _without_key(row: dict, key: str) -> dict:
    """`key`: of `other_keys`."""
    row = copy.deepcopy(row)
    for turn in turns_of(row):
        turn.pop(key, None)
        if key.startswith("tool_calls."):
            for call in turn.get("tool_calls", []):
                call.pop(key.removeprefix("tool_calls."), None)
    return row


def check_rendering(tokenizer: PreTrainedTokenizerBase, name: str, rows: list[PlacedRow], can_split: bool) -> None:
    """Raises UserError if the chat template `name` fails on one of `rows`, or leaves something out of it.

    `can_split`: whether --split_conversations is possible.
    """
    for place, row in rows:
        try:
            missing = find_missing(tokenizer, row)
        except Exception as error:  # a template is a program: it can fail in any way
            raise UserError(
                f"{place}: the chat template {name} fails ({str(error)[:200]}) on the conversation {show_turns(turns_of(row))}: "
                "change the row, or pass another template with --chat_template_path"
            ) from error
        if not missing:
            continue
        where, part = missing
        advice = "pass another template, or use a model whose template has it"
        if part == "reasoning":
            advice = "write it into the content as <think>…</think>, or pass a template that has it"
            if can_split and not any(find_missing(tokenizer, answer) for answer in split_answers(row)):
                advice = "pass --split_conversations true, which makes one row for every answer with its reasoning"
        raise UserError(f"--chat_template_path: the chat template {name} leaves out the {part} of {where} of {place}: {advice}")


def _text_of_row(tokenizer: PreTrainedTokenizerBase, row: dict, template: str | None = None) -> str | None:
    return _text_of(tokenizer, turns_of(row), chat_template=template, **options_of(row))


def _text_of(tokenizer: PreTrainedTokenizerBase, turns: list[dict], **options: Any) -> str | None:
    """A rendered conversation, None if the chat template refuses it."""
    try:
        return tokenizer.apply_chat_template(contents_for(tokenizer, turns), tokenize=False, **options)
    except Exception:  # a template is a program: it can fail in any way
        return None


def contents_for(tokenizer: PreTrainedTokenizerBase, turns: list[dict]) -> list[dict]:
    """Turns whose contents are lists of parts, for the template of a model such as LLaVA, which ignores texts."""
    try:
        takes_texts = QUESTION["content"] in tokenizer.apply_chat_template([QUESTION], tokenize=False)
    except Exception:  # it may be for other conversations
        takes_texts = True
    if takes_texts:
        return turns
    return as_parts(turns)


def show_turns(turns: list[dict]) -> str:
    return f"“{' '.join(str(turns[0]['content']).split())[:60]}”"


def find_missing(tokenizer: PreTrainedTokenizerBase, row: dict) -> tuple[str, str] | None:
    """Where and what the chat template leaves out of a conversation: ("turn 2 (assistant)", "tool calls"); None if nothing.

    The conversation is rendered twice: as it is, and with every text replaced by a word that occurs nowhere else, because a
    short text can also occur elsewhere.
    """
    words = (f"qzx{number}xzq" for number in itertools.count())
    return _find_missing(tokenizer, row, None) or _find_missing(tokenizer, row, words)


def _find_missing(tokenizer: PreTrainedTokenizerBase, row: dict, words: Iterator[str] | None) -> tuple[str, str] | None:
    expected: list[tuple[str, str, str]] = []

    def visit(where: str, part: str, text: str, is_fixed: bool = False) -> str:
        if words and not is_fixed and text.strip():
            text = next(words)
        for piece in text.split(IMAGE) if "images" in row else [text]:
            expected.append((where, part, piece.strip()))
        return text

    conversation = json.loads(json.dumps(without(row, "images"), default=str))  # a copy in which no two turns are one object
    _visit_texts(conversation, visit)
    turns = contents_for(tokenizer, turns_of(conversation))
    rendered = " ".join(tokenizer.apply_chat_template(turns, tokenize=False, **options_of(conversation)).split())
    for where, part, text in expected:
        forms = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
        if part and not any(" ".join(form.split()) in rendered for form in forms):
            return where, part
    return None


def _visit_texts(row: dict, visit: Callable[..., str]) -> None:
    """Replaces each text that a rendered conversation must have by what `visit(where, part, text)` returns.

    `part` is "" for the thoughts of an answer that does not count in the loss, which a template may drop. The result of
    `visit(…, is_fixed=True)` is not used.
    """
    for number, turn in enumerate(turns_of(row), 1):
        where = f"turn {number} ({turn['role']})"
        reasoning = "reasoning" if turn.get("train", True) else ""
        pieces = THOUGHT.split(turn["content"])  # texts and thoughts in turn
        pieces[::2] = [visit(where, "content", piece) for piece in pieces[::2]]
        pieces[1::2] = [f"<think>{visit(where, reasoning, piece)}</think>" for piece in pieces[1::2]]
        turn["content"] = "".join(pieces)
        if REASONING[0] in turn:
            turn |= dict.fromkeys(REASONING[:2], visit(where, reasoning, turn[REASONING[0]]))
        for call in turn.get("tool_calls") or []:
            function = call["function"]
            function["name"] = visit(where, "tool calls", function["name"])
            function["arguments"] = _visit_json(function["arguments"], functools.partial(visit, where, "tool calls"))
    for tool in row.get("tools") or []:
        function = tool.get("function", tool)
        for name in ("name", "description"):
            if function.get(name):
                function[name] = visit("the conversation", "tools", str(function[name]))
        for name in (function.get("parameters") or {}).get("properties") or {}:
            visit("the conversation", "tools", name, is_fixed=True)


def _visit_json(value: Any, visit: Callable[..., str]) -> Any:
    """`_visit_texts` for a value of JSON; keys and numbers are fixed."""
    if isinstance(value, dict):
        for key in value:
            visit(str(key), is_fixed=True)
        return {key: _visit_json(part, visit) for key, part in value.items()}
    if isinstance(value, list):
        return [_visit_json(part, visit) for part in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        visit(json.dumps(value), is_fixed=True)
    if isinstance(value, str):
        return visit(value)
    return value


def conversations_of(row: dict) -> list[dict]:
    """The conversations in a row, as rows with `messages`, or with `prompt` and `completion`.

    Those whose contents are no texts are left out: of recipes without dataset_formats, in a form that cannot be judged here.
    """
    found = [row]
    if "chosen" in row:
        others = without(row, "chosen", "rejected")
        found = [others | {"completion": row[name]} for name in ("chosen", "rejected")]
    return [conversation for conversation in found if has_readable_turns(conversation)]


def has_readable_turns(row: dict) -> bool:
    columns = ("prompt", "completion")
    if "messages" in row:
        columns = ("messages",)
    for column in columns:
        if not isinstance(row.get(column), list):
            return False
    return all(isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in turns_of(row))


def load_bare_tokenizer(model_args: ModelConfig, reads_images: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer as the model has it. `reads_images`: with the chat template of the processor, which can have its own."""
    name = model_args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name, revision=model_args.model_revision)
    if reads_images:
        settings, _ = ProcessorMixin.get_processor_dict(name, revision=model_args.model_revision)
        tokenizer.chat_template = settings.get("chat_template") or tokenizer.chat_template
    return tokenizer


def load_tokenizer_with_template(
    model_args: ModelConfig, training_args: TrainingArguments, reads_images: bool = False
) -> PreTrainedTokenizerBase:
    """See `load_bare_tokenizer`; with the template of --chat_template_path, after `fit_template`."""
    tokenizer = load_bare_tokenizer(model_args, reads_images)
    if path := getattr(training_args, "chat_template_path", None):
        tokenizer.chat_template = Path(path).read_text("utf-8")
    return tokenizer


def keep_uncut(uncut: UncutRows, split: str, rows: Rows, tokens: Rows) -> None:
    """Keeps how prompts look, and conversations: --verify compares the prompts of a saved tokenizer with them.

    `split`: see `tokenize_split`; `rows`: as `tokenize` gets them; `tokens`: the same as tokens, of any length.
    """
    if split == "train":
        uncut.tokens = tokens
    if "system" not in uncut.prompt:  # of the training rows, unless they are a stream
        uncut.prompt |= describe_rows(rows)
    if split != "train" and isinstance(rows, Dataset) and is_conversational(rows[0]):
        for row, of_row in zip(rows.take(KEPT_CONVERSATIONS), tokens.take(KEPT_CONVERSATIONS), strict=True):
            uncut.conversations.append(row | {"input_ids": of_row["input_ids"]})


def describe_rows(rows: Rows) -> dict[str, Any]:
    """What prompt.json says about readable rows, {} for tokens. A stream is not read further than its first row.

    - rows: what they are.
    - system: of CONVERSATIONS in memory, the system message, None unless the first ones all have the same.
    """
    first = next(iter(rows), {})
    if "input_ids" in first:
        return {}
    if not is_conversational(first):
        return {"rows": folder.PROMPTS if "prompt" in first else folder.TEXTS}
    if not isinstance(rows, Dataset):
        return {"rows": folder.CONVERSATIONS}
    systems = set()
    for row in rows.take(COMPARED_ROWS):
        turn = (row.get("messages") or row["prompt"])[0]
        systems.add(str(turn["content"]) if turn["role"] == "system" else None)
    return {"rows": folder.CONVERSATIONS, "system": systems.pop() if len(systems) == 1 else None}
