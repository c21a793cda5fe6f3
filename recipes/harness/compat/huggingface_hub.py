"""Changes to huggingface_hub."""

from collections.abc import Callable
from typing import Any

from harness.compat.guards import changes


class HubLost(Exception):
    """The Hub stayed unreachable for too long, or a file on it was replaced while it was read."""


@changes(
    "huggingface_hub.hf_file_system:HfFileSystemFile._fetch_range(self, start, end)",
    "huggingface_hub.hf_file_system:HfFileSystem.open",
    "huggingface_hub.hf_api:HfApi._build_hf_headers",
    "huggingface_hub.utils:http_backoff",
)
def install_read_retries(retry: Callable[..., Any]) -> None:
    """Makes streams from the Hub wait for it when it fails, and checks that a file does not change while it is read.

    `retry(function, *args, **kwargs)` calls the function until it succeeds. Raises HubLost for a file that was replaced.

    huggingface_hub gives up after about 23 seconds of status 503, and `datasets` does not try again after one, so a short
    outage ends a run of days. Nothing compares the version of a file between two reads of it.
    Upstream: huggingface/datasets#6843, #7440 and #7506 for the retries; no issue found for If-Match.
    Checked with: huggingface_hub 2.4.0.
    Remove when: the number of retries of HfFileSystemFile can be set, and its reads send If-Match.
    """
    from huggingface_hub import constants
    from huggingface_hub.hf_file_system import HfFileSystem, HfFileSystemFile
    from huggingface_hub.utils import hf_raise_for_status, http_backoff

    if HfFileSystemFile._fetch_range.__module__ == __name__:
        return

    def fetch_once(file: HfFileSystemFile, start: int, end: int) -> bytes:
        """A part of a file, in one request. Raises HubLost if the file has another version than at the first request."""
        headers = {"range": f"bytes={start}-{end - 1}", **file.fs._api._build_hf_headers()}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        response = http_backoff("GET", file.url(), headers=headers, timeout=timeout, max_retries=0)
        hf_raise_for_status(response)
        # After a redirect the ETag is the storage's; the Hub's own is in a header of the redirect.
        linked = (one.headers.get("x-linked-etag") for one in (*response.history, response))
        version = next(filter(None, linked), None if response.history else response.headers.get("etag"))
        if version != file.__dict__.setdefault("_version", version):
            raise HubLost(f"{file.path} was replaced on the Hub while this run was reading it")
        return response.content

    def fetch_range(self: HfFileSystemFile, start: int, end: int) -> bytes:
        return retry(fetch_once, self, start, end)

    open_once = HfFileSystem.open

    def open_file(*args: Any, **kwargs: Any) -> Any:
        return retry(open_once, *args, **kwargs)

    HfFileSystemFile._fetch_range, HfFileSystem.open = fetch_range, open_file
