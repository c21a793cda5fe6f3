"""A recipe for test_hub.py: a stream for which the Hub does not answer is given up after the second request."""

import runpy
from pathlib import Path

from datasets import config
from huggingface_hub.utils import http_backoff

http_backoff.__kwdefaults__["max_retries"] = 0
config.STREAMING_READ_MAX_RETRIES, config.STREAMING_READ_RETRY_INTERVAL = 1, 0.1
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
