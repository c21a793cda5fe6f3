"""Which torch broke which: everything private that a simulation needs is there, and when it is not, --plan says so."""

from harness.plan import command, fakes

import pytest


@pytest.mark.parametrize("module", fakes.NEEDED)
def test_what_is_needed_is_there(module):
    missing = [name for name in fakes.broken() if name.startswith(module)]
    assert not missing, f"{', '.join(missing)} went with the installed version; --plan works without nothing of it"


def test_without_it_plan_says_so_and_nothing_else_breaks(monkeypatch, says, tmp_path):
    monkeypatch.setitem(fakes.NEEDED, "trl.kernels.chunked_logprob", ("_forward_kernel", "_no_such_kernel"))
    monkeypatch.setattr(command.server, "prepare", lambda: None)
    line = says(command.main, "recipes/qwen2_chat.py", "accelerate_configs/1x3090.yaml")
    assert "cannot plan with these versions: trl.kernels.chunked_logprob._no_such_kernel" in line
