"""What launch.sh decided reaches every process."""

from harness.launched import Launched


def test_what_launch_decided_travels_in_the_environment(monkeypatch):
    launched = Launched(recipe="a b.py", config="c.yaml", processes=4, tiny=True, on_cpu=True)
    for name, value in launched.to_environment().items():
        monkeypatch.setenv(name, value)
    assert Launched.from_environment() == launched
