"""A hub that fails while a run reads from it: waited for, and left in good order when it stays away.

huggingface_hub gives up after 23 seconds of 503, and `datasets` does not try again after one.
"""

import logging
import os
import time

from harness.launched import fail

if not os.environ.get("HUB_PATIENCE", "600").isdecimal():
    fail(f"HUB_PATIENCE is {os.environ['HUB_PATIENCE']!r}, expected a whole number of seconds")
PATIENCE = int(os.environ.get("HUB_PATIENCE", 600))  # seconds
NOTICE = (5, 30)  # seconds to the first line about it, and between two
PASSING = (408, 429, 500, 502, 503, 504)  # status codes of a hub that may answer again


class Lost(Exception):
    """The hub stayed away for `PATIENCE`, or what it has is not what it was."""


def wait_for_the_hub():
    """Makes every file of the hub that this process opens or reads patient."""
    from huggingface_hub.hf_file_system import HfFileSystem, HfFileSystemFile

    for name in ("huggingface_hub.utils._http", "datasets.utils.file_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)  # the lines below say it
    if HfFileSystemFile._fetch_range is not _read:
        HfFileSystemFile._fetch_range = _read
        HfFileSystem.open = _patient(HfFileSystem.open)


def _read(file, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of a file of the hub."""
    return _patiently(_read_once, file, start, end)


def _read_once(file, start: int, end: int) -> bytes:
    from huggingface_hub import constants
    from huggingface_hub.utils import hf_raise_for_status, http_backoff

    headers = {"range": f"bytes={start}-{end - 1}", **file.fs._api._build_hf_headers()}
    answer = http_backoff("GET", file.url(), headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, max_retries=0)
    hf_raise_for_status(answer)
    # Behind a redirect it is the name that the storage gives; the hub's own is beside the redirect.
    version = next((one.headers["x-linked-etag"] for one in (*answer.history, answer) if "x-linked-etag" in one.headers), None)
    version = version or (None if answer.history else answer.headers.get("etag"))
    if version != file.__dict__.setdefault("_version", version):
        raise Lost(f"{file.path} is not on the hub any more as it was when this run began to read it")
    return answer.content


def _patient(function):
    return lambda *arguments, **options: _patiently(function, *arguments, **options)


def _patiently(function, *arguments, **options):
    """What `function` returns, when the hub answers again. Raises Lost after `PATIENCE`, and at once what will not pass."""
    began, notice, pause = time.monotonic(), NOTICE[0], 1.0
    while True:
        try:
            return function(*arguments, **options)
        except Exception as error:
            reason, asked = _passing(error)
            if not reason:
                raise
            waited = time.monotonic() - began
            if waited + asked > PATIENCE:
                raise Lost(f"the hub has not answered for {waited:.0f} of {PATIENCE} s (HUB_PATIENCE): {reason}") from error
        if waited >= notice:
            notice = waited + NOTICE[1]
            who = f"Process {os.environ['RANK']} is" if "RANK" in os.environ else "This run is"
            print(f"{who} waiting for the hub ({reason}), {waited:.0f} of {PATIENCE} s (HUB_PATIENCE) so far.", flush=True)
        time.sleep(asked or min(pause, PATIENCE - waited))
        pause = min(2 * pause, 30)


def _passing(error: Exception) -> tuple[str, float]:
    """Why the hub did not answer and how many seconds it asks to wait; ("", 0) for what is no failure of the hub."""
    from huggingface_hub.utils import httpx

    response = getattr(error, "response", None)
    if response is not None:
        asked = response.headers.get("Retry-After", "")
        seconds = float(asked) if asked.isdecimal() else 0.0
        return (f"HTTP status {response.status_code}", seconds) if response.status_code in PASSING else ("", 0.0)
    if isinstance(error, httpx.TransportError | TimeoutError | ConnectionError):
        return str(error) or type(error).__name__, 0.0
    return "", 0.0
