"""A recipe for test_mirror.py: sends itself SIGTERM while it uploads the first file of a checkpoint, which takes two seconds.

With the variable UPLOADS=fail all uploads fail from then on, and the run waits one second instead of a minute for them.
"""

import os
import runpy
import signal
import time
from pathlib import Path

from harness.run import mirror

upload, is_stopped = mirror.Storage.upload, False


def upload_slowly(storage, file, name):
    global is_stopped
    if not is_stopped:
        is_stopped = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)
    if os.environ["UPLOADS"] == "fail":
        raise OSError("the network is down")
    upload(storage, file, name)


mirror.Storage.upload, mirror.PATIENCE = upload_slowly, 1 if os.environ["UPLOADS"] == "fail" else mirror.PATIENCE
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
