"""--chunk-rows attention=: attention in chunks of a sequence's rows. Forward has the same bits as with all rows at
once, and gradients differ only by the order of fp32 sums."""

import shutil

import peft
import pytest
import reference
from adapter_files import OPTIONS, make_adapter, of_files
from example_files import tokenizer, write_examples
from model_files import fused
from safetensors.torch import load_file
from trainer_runs import by_key, figures, losses, make, random_tokens, read_log, refused, saved_bytes, write_shard

USUALLY = "fp32"  # see conftest.py

VOCAB, LENGTH = 301, 300
DATA = ("--model", "model", "--data", "data.bin", "--batch", 2, "--seq-len", LENGTH, "--recompute", "block")
# Odd shapes of everything that a block may have; windows of less than a chunk and of more.
MODELS = {"gpt2": OPTIONS["gpt2"], "llama": OPTIONS["llama"], "qwen3": OPTIONS["qwen3"], "bloom": OPTIONS["bloom"],
          "gemma3_text-window": OPTIONS["gemma3_text"], "olmo2": OPTIONS["olmo2"],
          "mistral": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--window", 37),
          "qwen2-window": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--window", 140)}


def prepare(path, name):
    make(path / "model", "--family", name.split("-")[0], "--layers", 2, "--vocab", VOCAB, "--positions", 1200,
         "--dtype", "bf16", *MODELS[name])
    write_shard(path / "data.bin", random_tokens(VOCAB, 9000))
    return path


@pytest.fixture(scope="module", params=MODELS)
def work(request, tmp_path_factory):
    return prepare(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def llama(tmp_path):
    return prepare(tmp_path, "llama")


def bound(train, fp32, bf16):
    return fp32 if train.precision == "fp32" else bf16


def step(train, work, name, *options):
    """The loss and the gradients of a step; beta1 0 leaves the gradients in m."""
    shutil.rmtree(work / name, ignore_errors=True)
    train(*DATA, "--steps", 1, "--optimizer", "beta1=0", "--clip", 0, "--sample", "tokens=0", "--out", name, "--log", f"{name}.log",
          *options, cwd=work)
    state = load_file(work / name / "trainer_state.safetensors")
    return losses(read_log(work / f"{name}.log"))[0], {key: x for key, x in state.items() if key.startswith("m.")}


def check_step(train, work, rows, *options):
    (loss, gradients), (wanted, whole) = (step(train, work, name, *options, *more)
                                          for name, more in (("chunks", ("--chunk-rows", f"attention={rows}")), ("whole", ())))
    assert loss == pytest.approx(wanted, rel=bound(train, 1e-6, 1e-4))
    assert gradients.keys() == whole.keys() and whole
    for name in whole:
        assert (gradients[name] - whole[name]).norm() <= bound(train, 2e-6, 1e-2) * whole[name].norm(), name
    return loss == wanted or train.device != "cpu"  # on a GPU cuBLASLt may sum fewer rows in another order


@pytest.mark.parametrize("rows", [128, 256])
def test_full_training(train, work, rows):
    """On a CPU the loss has the same bits, because forward is the same. Also with the MLP in smaller chunks, and with
    dropout of probabilities."""
    for options in ((), ("--chunk-rows", "mlp=40", "--grad-accum", 2), ("--chunk-rows", "mlp=128", "--dropout", 0.2)):
        if "--dropout" in options and not any(name in str(work) for name in ("gpt2", "bloom")):
            continue
        assert check_step(train, work, rows, *options), options


def test_adapters(train, work):
    targets = {"gpt2": ["attn.c_attn", "mlp.c_fc"], "bloom": ["query_key_value"]}
    kind = next((name for name in targets if name in str(work)), None)
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, target_modules=targets.get(kind, "all-linear"),
                                       task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2"))
    for options in ((), ("--base", "nf4"), ("--train", "lora", "--lora-dropout", 0.2)):
        check_step(train, work, 128, "--adapter", "adapter", *options)


@pytest.mark.parametrize("trained", ["all", "lora"])
def test_gradients_of_chunks(train_bf16, tmp_path, trained):
    """Compared with PyTorch in fp32: at most twice the error without chunks."""
    make(tmp_path / "model", "--family", "qwen3", "--layers", 1, "--heads", 4, "--kv-heads", 2, "--channels", 64, "--vocab",
         500, "--positions", 1024, "--dtype", "bf16")
    write_shard(tmp_path / "data.bin", random_tokens(500, 6000))
    data = ("--model", tmp_path / "model", "--data", tmp_path / "data.bin", "--batch", 2, "--seq-len", 1024)
    if trained == "lora":
        make_adapter(tmp_path, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        data += ("--adapter", tmp_path / "adapter")
    list(reference.Trainer(reference.parse_options([*map(str, data), "--steps", "1", "--dump-gradients",
                                                    str(tmp_path / "expected")])).train())
    expected = load_file(tmp_path / "expected")
    (_, whole), (_, chunks) = (step(train_bf16, tmp_path, f"rows{rows}", *data, "--chunk-rows", f"attention={rows},mlp={rows}")
                               for rows in (0, 128))
    assert len(whole) > 8
    for name in whole:
        if trained == "lora":
            wanted = of_files(name.removeprefix("m."), whole[name].shape[0], expected)
        else:
            wanted = fused(name.removeprefix("m."), expected)
        of_whole, of_chunks = ((g[name] - wanted).norm() / wanted.norm() for g in (whole, chunks))
        assert of_chunks <= 2 * of_whole, name


def trained(train, work, name, *options):
    shutil.rmtree(work / name, ignore_errors=True)
    train(*DATA, "--steps", 3, "--out", name, "--log", f"{name}.log", "--sample", "tokens=0", *options, cwd=work)
    return figures(read_log(work / f"{name}.log")), saved_bytes(work / name)


def test_all_that_changes_no_bit_beside_it(train, llama):
    """Threads, offloading, blocks and state on disk, all micro-batches block by block; and updates in
    backward."""
    options = ("--chunk-rows", "attention=128,mlp=64", "--grad-accum", 2)
    first = trained(train, llama, "first", *options)
    for more in (("--threads", 1), ("--offload", "inputs=auto"), ("--offload", "inputs=auto:1"), ("--offload", "inputs=auto", "--by-block"),
                 ("--offload", "weights=disk,state=disk"), ("--by-block",), ("--offload", "gradients=disk")):
        assert trained(train, llama, "other", *options, *more) == first, more
    # The input of one of the two blocks is not offloaded in chunks.
    mix = (*options, "--recompute", "norm:1,block:1")
    assert trained(train, llama, "mix", *mix) == trained(train, llama, "offloaded", *mix, "--offload", "inputs=auto")
    one = (*options[:2], "--advanced", "clip=block")
    assert trained(train, llama, "a", *one) == trained(train, llama, "b", *one, "--update-in-backward")


LONG = 1100
# Four whole pieces of keys, and some more.
PIECES = ("--seq-len", LONG, "--chunk-rows", "attention=256,mlp=256")


def check_parked_keys(train, work, *options):
    """With windows and documents, tiles of keys begin elsewhere, so the last bits differ. On a GPU probabilities are rounded to
    bf16 relative to the largest score so far, which differs too; either way gradients are 1.8% from those in fp32."""
    (loss, gradients), (parked_loss, parked) = (step(train, work, name, *options, *more)
                                                for name, more in (("here", ()), ("offloaded", ("--offload", "keys=auto",))))
    assert loss == pytest.approx(parked_loss, rel=bound(train, 1e-6, 1e-4))
    for name in gradients:
        most = bound(train, 2e-6, 1e-2 if train.device == "cpu" else 2e-2)
        assert (gradients[name] - parked[name]).norm() <= most * gradients[name].norm(), name


def test_parked_keys_change_no_bit(train, work):
    """A validation uses all rows at once."""
    if any(name in str(work) for name in ("mistral", "window")):
        return check_parked_keys(train, work, *PIECES)
    for options in ((), ("--dropout", 0.2)):
        if options and not any(name in str(work) for name in ("gpt2", "bloom")):
            continue
        options = (*PIECES, *options, "--val-data", "data.bin", "--eval-batches", 2)
        first = trained(train, work, "first", *options)
        for more in (("--offload", "keys=auto",), ("--offload", "keys=auto,inputs=auto", "--grad-accum", 1)):
            assert trained(train, work, "other", *options, *more) == first, more


def test_parked_keys_of_windows_wider_than_a_piece(train, tmp_path):
    """A query sees two or three of seven pieces."""
    make(tmp_path / "model", "--family", "mistral", "--layers", 2, "--heads", 4, "--kv-heads", 2, "--channels", 32, "--vocab",
         VOCAB, "--positions", 1700, "--window", 400, "--dtype", "bf16")
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 9000))
    check_parked_keys(train, tmp_path, "--seq-len", 1700, "--chunk-rows", "attention=256", "--batch", 1, "--offload", "inputs=auto")


def test_all_that_changes_no_bit_beside_parked_keys(train, llama):
    """Adapters, blocks on disk, micro-batches block by block, layers at other levels; and a resumed run."""
    for options in (("--grad-accum", 2), ("--threads", 1), ("--train", "lora", "--recompute", "norm:1,block:1"),
                    ("--train", "prompt", "--soft-prompt", 9)):
        first = trained(train, llama, "first", *PIECES, *options)
        for more in (("--offload", "weights=disk"), ("--offload", "inputs=auto", "--by-block")):
            assert trained(train, llama, "other", *PIECES, *options, *more, "--offload", "keys=auto") == first, (options, more)
    options = (*DATA, *PIECES, "--steps", 4, "--sample", "tokens=0", "--save-every", 2, "--keep", 0, "--offload", "keys=auto")
    train(*options, "--out", "out", cwd=llama)
    whole = saved_bytes(llama / "out")
    shutil.rmtree(llama / "out" / "step-00000004")
    train("--resume", "out/step-00000002", cwd=llama)
    assert saved_bytes(llama / "out") == whole


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_only_the_stream_grows_with_the_sequence(train, tmp_path, kind):
    make(tmp_path / "model", "--family", kind, "--layers", 2, "--heads", 2, "--channels", 64, "--vocab", 300, "--positions", 8192)
    options = ("--model", tmp_path / "model", "--batch", 1, "--chunk-rows", "head=64", "--recompute", "block", "--chunk-rows", "mlp=256,attention=256", "--offload", "inputs=auto,keys=auto", "--sample", "tokens=0")
    short, long = (train.plan(*options, "--seq-len", rows) for rows in (4096, 8192))
    sizes = [{(b["name"], tuple(b["shape"])) for b in plan["buffers"]} for plan in (short, long)]
    of_all_rows = {"residual", "losses", "batch"}
    if kind == "bloom":
        of_all_rows |= {"embedded", "d_embedded", "embedding_mean", "embedding_rstd", "column_sums"}
    assert {name for name, *_ in sizes[0] ^ sizes[1]} <= of_all_rows
    if kind == "llama":
        stream = 4096 * 64 * (4 if train.precision == "fp32" else 2)
        assert long["totals"]["activations"] - short["totals"]["activations"] <= 1.1 * stream


def test_where_sequences_are_short_no_keys_are_parked(train, llama):
    """Automatic rows are then 0, and such a run's save can be resumed."""
    options = (*DATA, "--sample", "tokens=0", "--chunk-rows", "attention=auto", "--offload", "keys=auto", "--out", "out", "--log", "log")
    train(*options, "--steps", 2, cwd=llama)
    train("--resume", "out", "--steps", 3, cwd=llama)
    train(*options, "--steps", 4, "--resume", "auto", cwd=llama)
    assert len(losses(read_log(llama / "log"))) == 4


def test_parked_keys_of_a_bench_of_forward(train, llama):
    train("--model", "model", "--batch", 1, "--bench", "forward", "--warmup", "0", "--steps", "1", *PIECES,
          "--offload", "keys=auto", cwd=llama)


def test_memory_parks_keys_where_nothing_else_fits(train):
    options = ("--model", "llama:d4", "--batch", 1, "--seq-len", 65536, "--sample", "tokens=0", "--offload", "weights=device,gradients=device,state=device")
    rows = ("--recompute", "block", "--chunk-rows", f"mlp=512,head=64,attention={length_and_rows(train)[1]}", "--offload", "inputs=auto")
    here, parked = (train.plan(*options, *rows, *more)["totals"]["total"] for more in ((), ("--offload", "keys=auto",)))
    assert parked < here
    host = "" if train.device == "cpu" else ",host=8GiB"  # where keys of a GPU wait
    chosen = train.plan(*options, "--memory", f"{(here + 3 * parked) // 4 >> 20}MiB{host}")
    assert "keys=" in chosen["choice"][0]["placements"] and chosen["attention_rows"] > 0


def test_resume(train, llama):
    options = (*DATA, "--steps", 4, "--sample", "tokens=0", "--save-every", 2, "--keep", 0, "--chunk-rows", "attention=128")
    train(*options, "--out", "out", cwd=llama)
    whole = saved_bytes(llama / "out")
    shutil.rmtree(llama / "out" / "step-00000004")
    train("--resume", "out/step-00000002", cwd=llama)
    assert saved_bytes(llama / "out") == whole


def test_validation(train, work):
    options = ("--model", "model", "--val-data", "data.bin", *DATA[4:-2], "--steps", 0, "--eval-batches", 2, "--log", "log")
    for length in (LENGTH, 257):  # with the latter, the last chunk is one row
        found = []
        for rows in (("attention=0",), ("attention=128",), ("attention=256",), ("attention=256", "--offload", "keys=auto")):
            train(*options, "--seq-len", length, "--chunk-rows", *rows, cwd=work)
            found.append(by_key(read_log(work / "log"), "val_loss")[0])
            (work / "log").unlink()
        windows = any(name in str(work) for name in ("mistral", "window"))
        rounded = pytest.approx(found[0], rel=bound(train, 1e-6, 1e-4))
        expected = found[0] if train.device == "cpu" else rounded
        assert found[1:-1] == [expected] * 2
        assert found[3] == (rounded if windows else expected)


def test_packed_examples(train, tmp_path, tokenizer):
    """Sequences of several documents, whose positions and ends are those of the chunk's rows."""
    folder = tmp_path / "model"
    make(folder, "--family", "llama", "--layers", 2, "--heads", 4, "--kv-heads", 2, "--channels", 48, "--vocab",
         tokenizer.get_vocab_size(), "--positions", 1200, "--dtype", "bf16")
    tokenizer.save(str(folder / "tokenizer.json"))
    write_examples(tmp_path / "data.jsonl", 200, most=12)
    for length in (LENGTH, 257):
        options = ("--data", "data.jsonl", "--val-data", "data.jsonl", "--seq-len", length)
        assert check_step(train, tmp_path, 128, *options)
        assert check_step(train, tmp_path, 128, *options, "--offload", "inputs=auto")
    options = ("--data", "data.jsonl", "--val-data", "data.jsonl", *PIECES)
    check_parked_keys(train, tmp_path, *options)


def test_dropout_from_any_element(train, tmp_path):
    """A sequence whose first element's number in the batch is not a multiple of 4."""
    make(tmp_path / "model", "--family", "gpt2", "--layers", 2, "--heads", 5, "--channels", 50, "--vocab", VOCAB, "--positions",
         2 * LENGTH, "--dtype", "bf16")
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    assert check_step(train, tmp_path, 128, "--seq-len", 131, "--dropout", 0.2)


def test_soft_prompts_and_blocks_from_the_disk(train, llama):
    for options in (("--train", "prompt", "--soft-prompt", 9), ("--train", "lora", "--offload", "weights=disk", "--by-block"),
                    ("--train", "lora", "--offload", "embeddings=disk,inputs=auto")):
        check_step(train, llama, 128, *options, "--grad-accum", 2)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
def test_only_keys_and_values_are_there_of_all_rows(train, tmp_path, kind):
    make(tmp_path / "model", "--family", kind, "--layers", 2, "--heads", 2, "--channels", 64, "--vocab", 300, "--positions", 900)
    options = ("--model", tmp_path / "model", "--batch", 2, "--seq-len", 900, "--chunk-rows", "head=64", "--recompute", "block",
               "--chunk-rows", "mlp=128")
    plan, whole = train.plan(*options, "--chunk-rows", "attention=256"), train.plan(*options)
    chunked = {"norm_1", "d_norm_1", "qkv", "attention", "d_attention", "attention_projected", "residual_middle", "attention_lse"}
    rows = {b["name"]: b["shape"][-2] for b in plan["buffers"] if b["name"] in chunked}
    assert {"norm_1", "qkv", "attention", "d_attention"} <= rows.keys()
    assert all(count <= 256 for name, count in rows.items() if name != "attention_lse"), rows
    assert {b["shape"][0] for b in plan["buffers"] if b["name"] in ("keys_and_values", "d_kv_sums")} == {900}
    assert plan["totals"]["activations"] < whole["totals"]["activations"]
    # Attention computes as many scores in chunks: twice in forward and once in backward.
    flops = [sum(o["flops"] for o in p["operations"] if o["name"].startswith("attention_")) for p in (plan, whole)]
    assert flops[0] == pytest.approx(flops[1], rel=0.02)


def length_and_rows(train):
    """A sequence so long that chunks of these rows, the fewest that --memory chooses, save memory: a GPU's have to fill it."""
    return (16384, 1024) if train.device == "cpu" else (131072, 4096)


def test_memory_chooses_chunks_where_all_rows_do_not_fit(train):
    length, few = length_and_rows(train)
    options = ("--model", "llama:d4", "--batch", 1, "--seq-len", length, "--sample", "tokens=0")
    whole, chunks = (train.plan(*options, "--recompute", "block", "--chunk-rows", f"mlp=512,head=64,attention={rows}")["totals"]["total"]
                     for rows in (0, few))
    assert chunks < whole
    resident = ("--offload", "weights=device,gradients=device,state=device,inputs=device")
    budget = ("--memory", f"{(whole + 3 * chunks) // 4 >> 20}MiB")
    chosen = train.plan(*options, *budget, *resident)
    assert chosen["attention_rows"] > 0 and chosen["choice"][0]["attention_rows"] == chosen["attention_rows"]
    assert train.plan(*options, "--memory", "1000GiB")["attention_rows"] == 0


def test_memory_leaves_given_rows_as_they_are(train, llama):
    given = ("--model", llama / "model", "--data", llama / "data.bin", "--batch", 1, "--seq-len", 512, "--train", "lora",
             "--chunk-rows", "attention=128,mlp=64,head=64", "--sample", "tokens=0")
    moved = train.plan(*given, "--recompute", "block", "--offload", "weights=disk,inputs=auto,embeddings=disk")
    chosen = train.plan(*given, "--memory", f"{moved['totals']['total'] + (1 << 18)}B")
    assert chosen["attention_rows"] == 128


def test_automatic_rows(train):
    length = 32768 if train.device == "cpu" else 131072
    options = ("--model", "llama:d4", "--seq-len", length, "--batch", 1, "--recompute", "block", "--chunk-rows", "mlp=512")
    chunks, whole = train.plan(*options, "--chunk-rows", "attention=auto"), train.plan(*options)
    assert 0 < chunks["attention_rows"] < length and whole["attention_rows"] == 0
    assert chunks["estimated_seconds"] <= 1.02 * whole["estimated_seconds"]
    assert train.plan(*options, "--seq-len", 512, "--chunk-rows", "attention=auto")["attention_rows"] == 0


@pytest.mark.parametrize("values, named", [
    ({"--chunk-rows attention": "-3"}, "--chunk-rows attention"), ({"--chunk-rows attention": "some"}, "--chunk-rows attention"),
    ({"--chunk-rows attention": "64"}, "multiple of 128"), ({"--chunk-rows attention": "256"}, "a sequence has 100;"),
    ({"--chunk-rows attention": "128"}, "--recompute block"),
    ({"--chunk-rows attention": "128", "--recompute": "ffn:1,attention:1"}, "--recompute block"),
    ({"--chunk-rows attention": "256", "--seq-len": "200", "--recompute": "block", "--offload keys": "auto"}, "all rows of a sequence"),
    ({"--offload keys": "auto"}, "--offload keys=auto"), ({"--offload keys": "auto", "--chunk-rows attention": "0"}, "--offload keys=auto")])
def test_what_is_no_number_of_rows(train, llama, values, named):
    refused(train, llama, {"--model": "model", "--data": "data.bin", "--seq-len": "100"} | values, named)
