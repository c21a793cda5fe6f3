"""Files as people have them: run, rehearsal and preview agree on the outcome, the counts and the rendered text of each."""

import functools

import datasets
import pytest
from files import FILES, make, make_tokenizer, outcome

tokenizer_of = functools.cache(make_tokenizer)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


@pytest.mark.parametrize("name", FILES)
def test_run_rehearsal_and_preview_agree(tmp_path, name):
    expected, options = FILES[name][3], FILES[name][4] if len(FILES[name]) > 4 else {}
    make(tmp_path, name)
    tokenizer = tokenizer_of(options.get("template", "qwen2_5"))
    run, preview, rehearsal = (outcome(tmp_path, name, mode, tokenizer) for mode in ("run", "preview", "rehearsal"))
    message, counted, rendered = run
    if isinstance(expected, str):
        assert expected in message, message
    else:
        assert not message and counted["counts"] == expected, (message, counted)
    assert preview == run
    if not message:  # a rehearsal evaluates on 16 of the rows that a run holds out
        trained, skipped, evaluated = counted["counts"]
        assert rehearsal[1] == counted | {"counts": (trained, skipped, min(evaluated, 16))}
    assert rehearsal[0] == message
    assert len(rehearsal[2]) == len(rendered)
    if "ool" not in name and "call" not in name:  # tools are cut in a rehearsal
        assert rehearsal[2] == rendered
