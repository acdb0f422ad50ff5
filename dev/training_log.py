"""Reads training logs: JSON lines, as ./train --log and dev/reference.py --log write them."""

import json
import math


class BrokenLog(Exception):
    """A log is broken; the text is one line that names it and says why."""


def read_log(path, keys):
    """{step: {key: number}} for these keys. A null, which JSON has for NaN, becomes NaN. Steps count from 1, also
    in the log of a version that counted them from 0.

    If a step was logged twice (in a resumed run), the last line counts. A log without any of the keys is
    broken.
    """
    steps, from_0 = {}, 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    step = int(record.get("step", 0))
                    values = {key: math.nan if record[key] is None else float(record[key])
                              for key in keys if key in record}
                except (AttributeError, ValueError, TypeError, OverflowError, RecursionError):
                    step = -1
                if not 0 <= step < 1 << 63:
                    raise BrokenLog(f"{path}, line {number}: not a line of a training log")
                if "step" in record:
                    from_0 |= step == 0 and "loss" in record
                    steps.setdefault(step + (from_0 if "loss" in record else 0), {}).update(values)
    except OSError as error:
        raise BrokenLog(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BrokenLog(f"{path}: {error}") from error
    if not any(steps.values()):
        raise BrokenLog(f"{path}: no step with a loss in it")
    return steps
