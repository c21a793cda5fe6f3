"""Regular expressions that come from a file: whether matching the names of modules with them ends."""

import re
import signal
from collections.abc import Iterable
from types import FrameType
from typing import NoReturn

SECONDS = 5  # for all names: usual expressions need milliseconds
# Names of modules as models have them, for where no model is loaded.
TYPICAL = ("lm_head", "model.embed_tokens", "model.layers.31.self_attn.q_proj", "model.norms.after.all.experts.up_and_down_proj")


def problem_of_pattern(pattern: object, names: Iterable[str] = TYPICAL) -> str:
    """What is wrong with a regular expression that is matched with `names`, "" for nothing. Call it in the main thread."""
    if not isinstance(pattern, str):
        return "it is no text"

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        # As accelerate and PEFT do, which also use it for a part of a name.
        for form in (pattern, rf"(.*\.)?({pattern})$", rf"(?:^|.*?\.){pattern}\.(\d+)\."):
            expression = re.compile(form)
            for name in names:
                expression.match(name)
    except (re.error, RecursionError, OverflowError) as error:
        return f"it is no regular expression: {error}"
    except TimeoutError:
        return "this regular expression takes too long"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return ""
