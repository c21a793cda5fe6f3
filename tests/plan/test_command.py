"""`launch.sh --plan` as a person calls it."""

import pytest
from conftest import is_one_line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--plan needs a RECIPE"]),
        (["qwen2_chatt"], ["no recipe is called 'qwen2_chatt'", "qwen2_chat"]),
        (["qwen2_chat", "1x3091"], ["no config is called '1x3091'", "1x3090"]),
        (["qwen2_chat", "1x3090", "--max_lenght", "5"], ["unknown flag --max_lenght", "--max_length"]),
        (["qwen2_chat", "1x3090", "--price_per_gpu_hour", "cheap"], ["--price_per_gpu_hour is cheap, expected a number"]),
        (["qwen2_chat", "1x3090", "--price_per_gpu_hour"], ["--price_per_gpu_hour needs a number"]),
    ],
)
def test_mistakes_are_one_line(launch, arguments, words):
    is_one_line(launch("--plan", *arguments), *words)
