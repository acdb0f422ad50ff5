"""Times training steps of a PyTorch model on random tokens, as ./train --bench does. Shared by the scripts
that have one.

PyTorch at its best: fused AdamW, foreach norms. In bf16 it uses autocast over fp32 weights, which is closest
to ./train's bf16 weights with an fp32 master, unless the model's own weights are bf16.
"""

import json
import resource
import time

import torch


def add_options(parser):
    """The options of every such script."""
    add = parser.add_argument
    add("--batch", type=int, default=4)
    add("--seq-len", type=int, default=64)
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=0, help="CPU threads, 0 for PyTorch's choice")
    add("--warmup", type=int, default=2, help="steps that are not timed")
    add("--steps", type=int, default=5, help="steps that are timed")
    add("--compile", action="store_true", help="torch.compile the model")


def make_optimizer(model):
    """AdamW with decay for matrices and none for vectors, in one fused kernel if the device has one."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim == 2], "weight_decay": 0.1},
              {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0}]
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
    try:
        return torch.optim.AdamW(groups, fused=True, **settings), "fused"
    except RuntimeError:
        return torch.optim.AdamW(groups, **settings), "foreach"


class Steps:
    """`model` takes (tokens, targets) and returns the loss; tokens are drawn below `vocabulary`."""

    def __init__(self, options, model, vocabulary):
        self.options, self.vocabulary = options, vocabulary
        self.model = model.to(options.device)
        self.optimizer, self.optimizer_kind = make_optimizer(self.model)
        self.loss = torch.compile(self.model) if options.compile else self.model
        fp32 = next(p for p in model.parameters() if p.requires_grad).dtype == torch.float32
        self.autocast = options.precision == "bf16" and fp32
        self.loss_before = None

    def step(self):
        """Runs a step, including the copy of its tokens to the device. Its loss is read once the next step is
        running."""
        o = self.options
        window = torch.randint(self.vocabulary, (o.batch, o.seq_len + 1), pin_memory=o.device == "cuda")
        window = window.to(o.device, non_blocking=True)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(o.device, torch.bfloat16, enabled=self.autocast):
            loss = self.loss(window[:, :-1], window[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.loss_before is not None:
            self.loss_before.item()
        self.loss_before = loss.detach()

    def times(self, count):
        """The milliseconds of `count` steps, each measured from the end of the step before it to its own
        end."""
        cuda = self.options.device == "cuda"

        def mark():
            if not cuda:
                return time.perf_counter()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        marks = [mark()]
        for _ in range(count):
            self.step()
            marks.append(mark())
        if cuda:
            torch.cuda.synchronize()
        return [a.elapsed_time(b) if cuda else 1000 * (b - a) for a, b in zip(marks, marks[1:])]


def peak_bytes(device):
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(options, make_model, **facts):
    """Times steps of what make_model() returns, a model and its vocabulary, and prints one JSON object."""
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    run = Steps(options, *make_model())
    warmup_ms, steps_ms = run.times(max(1, options.warmup)), run.times(options.steps)
    print(json.dumps({
        "device": options.device, "precision": options.precision, "compile": options.compile, **facts,
        "threads": torch.get_num_threads(), "optimizer": run.optimizer_kind, "warmup_ms": warmup_ms,
        "steps_ms": steps_ms, "peak_bytes": peak_bytes(options.device), "torch": torch.__version__,
        "cuda": torch.version.cuda, "parameters": sum(p.numel() for p in run.model.parameters())}))
