"""Files that somebody else can have written, changed at random: no traceback, no hang, nothing odd is accepted."""

import fuzz
import pytest

INPUTS, SEED = 60, 1  # `python tests/fuzz.py --inputs 100000` tries more


def check(name, folder):
    counts, failed = fuzz.fuzz(name, INPUTS, SEED, folder)
    assert not failed, "\n".join(failed[:3])
    assert counts["message"] > INPUTS / 4 and counts.total() == INPUTS, counts


@pytest.mark.unit
@pytest.mark.parametrize("name", fuzz.LIGHT)
def test_changed_file(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.parametrize("name", [name for name in fuzz.KINDS if name not in fuzz.LIGHT])
def test_changed_file_for_the_libraries(name, tmp_path):
    check(name, tmp_path)


class Odd(fuzz.Kind):
    """Reads without a check."""

    path, content = "a.json", {"a": 1, "b": [1]}

    def read(self):
        import json

        return 1 / json.loads(self.file.read_bytes())["a"]


@pytest.mark.unit
def test_missing_check_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(fuzz.KINDS, "odd", Odd)
    counts, failed = fuzz.fuzz("odd", 200, SEED, tmp_path)
    assert counts["traceback"] > 50 and counts["other value"] and len(failed) >= counts["traceback"]


@pytest.mark.unit
def test_expected_conversation_without_messages(error_of):
    from harness.commands.expectations import check_expectations

    recorded = fuzz.Expectations.content | {"conversations": [{"messages": [], "tools": None, "input_ids": [1]}]}
    assert "expected.json, conversation 0 is damaged: it has no messages" in error_of(
        check_expectations, recorded, "expected.json"
    )
