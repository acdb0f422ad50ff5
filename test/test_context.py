"""--seq-len auto: the longest sequences that fit, compared with plans of all lengths; and
dev/context_table.py."""

import json
import re

import context_table
import pytest
from trainer_runs import cpu_seconds, make, random_tokens, write_shard

USUALLY = "fp32"  # see conftest.py
LORA = ("--train", "lora", "--lora-rank", 4, "--sample", "tokens=0")
LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make(path / "model", "--family", "llama", "--layers", 3, "--heads", 4, "--channels", 64, "--positions", 5000,
         "--vocab", 301)
    write_shard(path / "data.bin", random_tokens(301, 9000))
    return path


def budget_of(train, llama, tokens, *options):
    """The smallest budget for which --memory finds a configuration with such sequences."""
    error = train("--model", llama / "model", "--plan", "--batch", 1, "--seq-len", tokens, "--memory", "1MiB", *LORA,
                  *options, code=2).stderr.decode()
    return float(re.search(r"the least that this takes is ([\d.]+) MiB", error)[1])


def check_is_the_longest(train, chosen, *options):
    """Checks the plan that --seq-len auto chose: the same length asked for gives this plan, and 64 tokens more do not
    fit."""
    options = (*options, "--batch", 1, "--seq-len")
    assert chosen["seq_len"] % 64 == 0 and chosen["batch"] == 1
    assert chosen == train.plan(*options, chosen["seq_len"])
    longer = train(*options, chosen["seq_len"] + 64, "--plan", code=2).stderr.decode()
    assert "the least that this takes" in longer


def test_is_the_longest(train, llama):
    """In budgets for a known length: neither 64 tokens more nor fewer."""
    for tokens in (128, 1984, 3008):
        memory = f"{int((budget_of(train, llama, tokens) + 0.2) * 2**20)}B"
        options = ("--model", llama / "model", "--memory", memory, *LORA)
        chosen = train.plan(*options, "--seq-len", "auto")
        assert tokens <= chosen["seq_len"] and chosen["totals"]["total"] <= int(memory[:-1])
        check_is_the_longest(train, chosen, *options)


def test_what_else_ends_it(train, llama):
    """Other limits: the model's positions, the data, several sequences at a time."""
    options = ("--model", llama / "model", "--memory", "8GiB", "--seq-len", "auto", "--plan", *LORA)
    data = ("--data", llama / "data.bin")
    for more, said in (((), "5000 tokens, all of the model's positions"),
                       ((*data, "--rope-scaling", "yarn:4"), "8999 tokens, as many as the data have"),
                       ((*data, "--batch", 2), "3000 tokens, as many as the data have"),
                       (("--rope-scaling", "dynamic:1.5"), "7500 tokens, all of the model's positions")):
        text = train(*options, *more).stdout.decode()
        assert re.search(rf"--seq-len auto: {said}; a step takes [\d.e+-]+ s by estimate", text), text
    assert train.plan(*options[:-1 - len(LORA)], *LORA, *data, "--batch", 2)["batch"] == 2


def test_beside_chunks_of_rows(train, llama):
    """A length that is still to be chosen may be less than the chunks' rows."""
    options = ("--model", llama / "model", "--seq-len", "auto", *LORA, "--recompute", "block", "--chunk-rows", "attention=256,mlp=1024")
    assert train.plan(*options)["seq_len"] == 5000
    assert train.plan(*options, "--data", llama / "data.bin", "--batch", 50)["seq_len"] == 176
    assert train.plan(*options, "--data", llama / "data.bin", "--offload", "keys=auto", "--batch", 36)["seq_len"] == 243


def test_of_examples(train, tmp_path):
    """Sequences are as long as the longest example, if memory and positions allow that; other data limit it
    too."""
    make(tmp_path / "model", "--family", "llama", "--layers", 2, "--heads", 4, "--channels", 64, "--positions", 5000,
         "--vocab", 256)
    lines = [json.dumps({"text": "abc" * count}) for count in (5, 700, 60)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "text").write_text("abc" * 500)
    options = ("--model", tmp_path / "model", "--data", tmp_path / "data.jsonl", *LORA)
    for more, tokens, why in (((), 2099, "as many as the data have"), (("--batch", 2), 1146, "as many as the data have"),
                              (("--val-data", tmp_path / "text"), 1499, "as many as the data have"),
                              (("--val-data", tmp_path / "data.jsonl"), 2099, "as many as the data have")):
        out = train(*options, *more, "--seq-len", "auto", "--plan").stdout.decode()
        assert f"--seq-len auto: {tokens} tokens, {why}" in out, out
    (tmp_path / "data.jsonl").write_text("\n".join([*lines, json.dumps({"text": "abc" * 3000})]))
    said = train(*options, "--seq-len", "auto", "--plan").stdout.decode()
    assert "--seq-len auto: 5000 tokens, all of the model's positions" in said
    least = train(*options, "--batch", 1, "--seq-len", 1024, "--plan", "--memory", "1MiB", code=2).stderr.decode()
    least = float(re.search(r"the least that this takes is ([\d.]+) MiB", least)[1])
    memory = f"{int((least + 0.2) * 2**20)}B"
    options = (*options, "--memory", memory)
    chosen = train.plan(*options, "--seq-len", "auto")
    assert 1024 <= chosen["seq_len"] and chosen["totals"]["total"] <= int(memory[:-1])
    check_is_the_longest(train, chosen, *options)


def test_without_a_budget(train, llama):
    """Then the budget is the free memory."""
    assert train.plan("--model", llama / "model", "--seq-len", "auto", *LORA)["seq_len"] == 5000


def test_a_run(train, llama, tmp_path):
    """It trains with this length, and the same command continues with it, whatever would fit then."""
    memory = f"{int((budget_of(train, llama, 1024) + 0.2) * 2**20)}B"
    options = ("--model", llama / "model", "--data", llama / "data.bin", "--seq-len", "auto", *LORA,
               "--val-data", llama / "data.bin", "--eval-batches", 1, "--out", "out", "--resume", "auto")
    said = train(*options, "--memory", memory, "--steps", 1, cwd=tmp_path).stdout.decode()
    tokens = int(re.search(r"--seq-len auto: (\d+) tokens, the most that fit [\d.]+ MiB \(--memory\)", said)[1])
    assert 1024 <= tokens <= 2048 and f"sequences of {tokens}" in said
    saved = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["options"]
    assert saved["--seq-len"] == [str(tokens)] and saved["--batch"] == ["1"] and "--memory" not in saved
    said = train(*options, "--memory", "8GiB", "--steps", 2, cwd=tmp_path).stdout.decode()
    assert f"sequences of {tokens}" in said and "--seq-len auto" not in said


def test_is_quick(train_fp32, tmp_path):
    """For a model of eight billion parameters."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    plans = []
    seconds = cpu_seconds(lambda: plans.append(train_fp32.plan(
        "--model", tmp_path, "--seq-len", "auto", "--memory", "24GiB", "--base", "nf4-double", *LORA)))
    assert plans[0]["seq_len"] >= 1024 and seconds < 30


@pytest.mark.parametrize("options, named", [
    (("--batch", "auto"), "one of them must be a number"),
    (("--steps", 0), "is for training"), (("--bench", "forward"), "is for training"), (("--model", "d2"), "new one"),
    (("--memory", "1MiB"), "the least that this takes"), (("--data", "none.jsonl"), "no file matches"),
    (("--memory", "lots"), "--memory 'lots'"), (("--seq-len", "most"), "--seq-len"),
], ids=str)
def test_mistakes(train_fp32, llama, tmp_path, options, named):
    error = train_fp32("--model", llama / "model", "--seq-len", "auto", *options, cwd=tmp_path, code=2).stderr.decode()
    assert named in error and error.count("\n") == 1


# ---- the table


def test_table(train, llama, capsys):
    """A cell has what --seq-len auto chooses, if memory is the limit."""
    budgets = [f"{int(budget_of(train, llama, tokens) + 1)}MiB" for tokens in (192, 1024)]
    context_table.main([train.path, "--model", str(llama / "model"), "--memory", "1MiB", *budgets, "8GiB", "--",
                        *map(str, LORA)])
    head, line, row = capsys.readouterr().out.splitlines()
    assert head == f"| model | 1MiB | {budgets[0]} | {budgets[1]} | 8GiB |" and line.count("---:") == 4
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["model", "none"] and re.fullmatch(r"4,992 \(all it can\), [\d.e+-]+ s", cells[4])
    for memory, cell in zip(budgets, cells[2:4]):
        plan = train.plan("--model", llama / "model", "--memory", memory, "--seq-len", "auto", *LORA)
        beside = sum(plan["outside_device"].values()) / 2**30
        assert cell == f"{plan['seq_len']:,}, {plan['estimated_seconds']:.3g} s" + (f", {beside:.1f} GiB" if beside else "")


@pytest.mark.parametrize("arguments, named", [
    (("no/such/binary", "--model", "{model}", "--memory", "1GiB"), "no/such/binary"),
    (("{train}", "--model", "no/such/model", "--memory", "1GiB"), "no/such/model"),
    (("{train}", "--model", "{model}", "--memory", "lots"), "--memory 'lots'"),
    (("{train}", "--model", "{model}", "--memory", "1GiB", "--", "--lora-rank", "4"), "--train lora"),
], ids=str)
def test_mistakes_of_the_table(train_fp32, llama, capsys, arguments, named):
    with pytest.raises(SystemExit) as ended:
        context_table.main([a.format(train=train_fp32.path, model=llama / "model") for a in arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and named in error and error.count("\n") == 1
