"""The hub: what is missing or locked is said in one line, by the real libraries."""

from harness import hub

import pytest
from stand_in_hub import serve


class TestHub:
    """The real libraries against a hub that answers as the real one does."""

    @pytest.fixture
    def server(self, tmp_path, monkeypatch):
        with serve(tmp_path / "hub") as server:
            for name, module in (("ENDPOINT", "huggingface_hub.constants"), ("HF_ENDPOINT", "datasets.config")):
                monkeypatch.setattr(f"{module}.{name}", server.url)
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
            monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
            template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
            yield server

    def test_unknown_and_gated_models(self, server, says):
        (server.root / "models/locked/model").mkdir(parents=True)
        (server.root / "models/locked/model/.gated").touch()
        message = says(hub.reachable, "locked/model", "main")
        assert "locked/model is gated" in message and "hf auth login" in message
        assert "no/such-model is unknown" in says(hub.reachable, "no/such-model", "main")

    def test_a_model_that_is_there(self, server):
        (server.root / "models/open/model").mkdir(parents=True)
        (server.root / "models/open/model/config.json").write_text("{}")
        hub.reachable("open/model", "main")
        server.shutdown()
        hub.reachable("open/model", "main")  # from the cache

    def test_nobody_answers(self, server, says):
        server.shutdown()
        server.server_close()
        assert "hub cannot be reached" in says(hub.reachable, "no/network", "main")

    def test_a_folder_that_is_no_model(self, tmp_path, says):
        assert "no config.json" in says(hub.reachable, str(tmp_path), "main")
        assert "there is no folder ./nowhere" in says(hub.reachable, "./nowhere", "main")
        assert "unknown to the hub" in says(hub.reachable, "a b", "main")
