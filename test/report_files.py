"""Shared by the tests of --report: a run, the data in its page, and logs of many steps."""

import json
import re

RUN = ("--data", "text", "--model", "d1", "--batch", 1, "--seq-len", 16, "--eval-batches", 1, "--sample", "tokens=3")


def page_data(path):
    """The data of a page, which must be complete."""
    text = path.read_text()
    assert text.endswith("</html>\n") and text.count("</script>") == 2
    return json.loads(re.search(r'<script id="data" type="application/json">(.*)</script>', text)[1])


def write_log(path, steps, spike=0):
    path.write_text("".join(json.dumps({"step": i, "loss": 100 if i == spike else 5 - i / steps, "grad_norm": 1, "lr": 1e-3, "ms": 1,
                                        "tokens_per_second": 1000}) + "\n" for i in range(1, steps + 1)))
