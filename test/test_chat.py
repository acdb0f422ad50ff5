"""Talking to a model: prompts in its chat format, conversations in the terminal, prompts from a file, stop strings, the
settings of generation_config.json, and the choice of tokens as in transformers."""

import json
import os
import pathlib
import pty
import re
import select
import signal
import time

import numpy as np
import peft
import pytest
import torch
import transformers
from adapter_files import make_adapter
from example_files import VOCAB, WORDS, says
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from trainer_runs import error_line, formats_probe, make

USUALLY = "fp32"  # see conftest.py

TEMPLATE = ("{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}"
            "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")
LLAMA = ("--family", "llama", "--heads", 4, "--kv-heads", 2)
GREEDY = ("--sample", "temperature=0")


@pytest.fixture(scope="module")
def tokenizer():
    """All its tokens are of ASCII, so that a random model's text is too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator([" ".join(WORDS) + "\n?!.", "system user assistant"], trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False))
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def save_chat_tokenizer(folder, tokenizer, template=TEMPLATE):
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": template} if template else {})))


def set_generation(folder, **settings):
    (folder / "generation_config.json").write_text(json.dumps(settings))


def make_chat(folder, tokenizer, *options, template=TEMPLATE):
    """A random model of chats, which ends its texts where they end."""
    make(folder, "--layers", 2, "--channels", 64, "--positions", 512, "--vocab", VOCAB, *options)
    save_chat_tokenizer(folder, tokenizer, template)
    set_generation(folder, eos_token_id=tokenizer.token_to_id("<|im_end|>"))
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("chat")
    make_chat(folder / "model", tokenizer, *LLAMA)
    return folder


def written(*messages):
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"


def answer(train, folder, prompt, tokens, *options, raw=False):
    """What a run prints, without its prompt."""
    more = ("--raw-prompt",) if raw else ()
    out = train("--model", "model", "--prompt", prompt, "--sample", f"tokens={tokens}", *GREEDY, *more, *options, cwd=folder).stdout
    return out.removesuffix(b"\n").removeprefix(prompt.encode() if raw else b"")


def answers(train, folder, lines, *options):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = train("--prompts", path, *options, cwd=folder).stdout
    return [json.loads(line) for line in out.decode().splitlines()]


# ---- a prompt


def test_a_prompt_is_written_in_the_format(train_fp32, work):
    user = says("user", "Who art thou?")
    assert answer(train_fp32, work, "Who art thou?", 30) == answer(train_fp32, work, written(user), 30, raw=True)
    assert answer(train_fp32, work, "Who art thou?", 30, raw=True) != answer(train_fp32, work, "Who art thou?", 30)
    assert "--raw-prompt" in error_line(train_fp32, "--model", "model", "--raw-prompt", "--val-data", "x", cwd=work)


def test_a_model_without_a_template(train_fp32, tmp_path, tokenizer):
    """It is of chats if it ends its texts as a chat format does."""
    make_chat(tmp_path / "model", tokenizer, *LLAMA, template=None)
    in_format = answer(train_fp32, tmp_path, written(says("user", "Hello")), 20, raw=True)
    assert answer(train_fp32, tmp_path, "Hello", 20) == in_format
    set_generation(tmp_path / "model", eos_token_id=tokenizer.token_to_id("<|endoftext|>"))
    assert answer(train_fp32, tmp_path, "Hello", 20) == b"Hello" + answer(train_fp32, tmp_path, "Hello", 20, raw=True)
    assert answer(train_fp32, tmp_path, "Hello", 20, "--chat-format", "chatml") == in_format


def test_answers_end_at_every_mark(train_fp32, tmp_path, tokenizer):
    """Of generation_config.json, of the tokenizer, and of the format."""
    make_chat(tmp_path / "model", tokenizer, *LLAMA)
    free = answer(train_fp32, tmp_path, "Hello", 12)
    ids = answers(train_fp32, tmp_path, [{"prompt": "Hello"}], "--model", "model", *GREEDY, "--sample", "tokens=12")
    assert ids[0]["answer"].encode() == free and ids[0]["tokens"] == 12
    tokens = greedy(tmp_path / "model", tokenizer, written(says("user", "Hello")), 12)
    for ends in ([tokens[5], 10**6], [tokens[9], tokens[3]]):
        set_generation(tmp_path / "model", eos_token_id=ends)
        first = min(tokens.index(end) for end in ends if end in tokens)
        [line] = answers(train_fp32, tmp_path, [{"prompt": "Hello"}], "--model", "model", *GREEDY, "--sample", "tokens=12")
        assert line["tokens"] == first + 1 and line["answer"] == tokenizer.decode(tokens[:first])


def greedy(folder, tokenizer, text, count):
    """The tokens of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.encode(text).ids
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                         max_new_tokens=count, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt):].tolist()


# ---- stop strings


def test_stop_strings(train_fp32, work):
    """Also where they begin or end within a token, and those with commas and line ends."""
    free = answer(train_fp32, work, "Hello", 60).decode()
    for start, length in ((7, 1), (12, 4), (25, 9), (40, 3)):
        stop = free[start:start + length]
        [line] = answers(train_fp32, work, [{"prompt": "Hello"}], "--model", "model", *GREEDY, "--sample", "tokens=60", "--stop", stop,
                         "--stop", "[not there]")
        assert line["answer"] == free[:free.index(stop)]
        quoted = stop.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        said = answer(train_fp32, work, "Hello", 60, "--sample", f'stop="a, b",stop="{quoted}"')
        assert said.decode() == free[:free.index(stop)]
    # What only looks like the beginning of a stop string is shown in the end.
    assert answer(train_fp32, work, "Hello", 60, "--stop", free[-3:] + "!").decode() == free


@pytest.mark.parametrize("options, named", [
    (("--stop", ""), "--sample stop: an empty text"), (("--sample", 'stop=""'), "--sample stop: an empty text"),
    (("--sample", 'stop="a'), "does not end with one"), (("--sample", 'stop="a"b'), "a comma is needed"),
    (("--top-p", 1.5), "--sample top-p"), (("--sample", "min-p=-1"), "--sample min-p"),
    (("--repetition-penalty", 0), "--sample repetition-penalty")], ids=str)
def test_bad_sampling(train_fp32, work, options, named):
    assert named in error_line(train_fp32, "--model", "model", "--prompt", "x", *options, cwd=work)


# ---- the choice of tokens


def kept_by_transformers(logits, text, temperature, top_k, top_p, min_p, penalty):
    scores, ids = torch.tensor([logits]), torch.tensor([text])
    made = []
    if penalty != 1:
        made.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
    made.append(transformers.TemperatureLogitsWarper(temperature))
    made += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    made += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    made += [transformers.MinPLogitsWarper(min_p)] if min_p else []
    for process in made:
        scores = process(ids, scores)
    return torch.softmax(scores[0].double(), 0)


def test_tokens_are_chosen_among_those_of_transformers():
    """Random logits, many of them equal; the same tokens are kept, with the same probabilities. Of equal logits at the
    limit of top-p, transformers keeps any; then as many of them are kept. (No sum of probabilities is as large as a limit,
    where rounding would decide.)"""
    random = np.random.default_rng(5)
    for case in range(300):
        size = int(random.choice([1, 2, 7, 100, 1000]))
        logits = random.normal(0, random.choice([0.1, 1, 5]), size).astype(np.float32)
        if case % 2:
            logits = np.round(logits * 2) / 2
        text = random.integers(0, size, 5).tolist()
        temperature, top_k = float(random.choice([0.1, 0.7, 1, 3])), int(random.choice([0, 1, 2, 50, size]))
        top_p, min_p = float(random.choice([0, 1e-4, 0.3137, 0.9037, 0.99873, 1])), float(random.choice([0, 1e-4, 0.1, 0.77, 1]))
        penalty = float(random.choice([1, 1.2, 0.8, 30]))
        expected = kept_by_transformers(logits.tolist(), text, temperature, top_k, top_p, min_p, penalty).numpy()
        data = np.array([len(text), *text], np.int32).tobytes() + logits.tobytes()
        got = np.frombuffer(formats_probe("kept", temperature, top_k, top_p, min_p, penalty, data=data), np.float64)
        settings = (case, temperature, top_k, top_p, min_p, penalty)
        assert (got > 0).sum() == (expected > 0).sum(), settings
        np.testing.assert_allclose(np.sort(got), np.sort(expected), rtol=1e-5, err_msg=str(settings))
        different = np.flatnonzero((got > 0) != (expected > 0))
        assert len({float(logits[i]) for i in different if i not in text}) <= 1, settings


def test_settings_of_generation_config(train_fp32, tmp_path, tokenizer):
    """They are the defaults, and options count instead."""
    folder = make_chat(tmp_path / "model", tokenizer, *LLAMA)
    ends = tokenizer.token_to_id("<|im_end|>")

    def said(*options):
        return train_fp32("--model", "model", "--prompt", "Hello", "--sample", "tokens=20", *options, cwd=tmp_path).stdout

    likeliest, usual = said(*GREEDY), said()
    set_generation(folder, eos_token_id=ends, do_sample=False, temperature=2.0)
    assert said() == likeliest != usual and said("--temperature", 0.8) == usual
    settings = dict(temperature=1.5, top_k=7, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
    set_generation(folder, eos_token_id=ends, do_sample=True, **settings)
    by_file = said()
    set_generation(folder, eos_token_id=ends)
    given = [word for key, value in settings.items() for word in ("--" + key.replace("_", "-"), value)]
    assert said(*given) == by_file != usual
    text = likeliest.decode().strip()
    stop = text[len(text) // 2:][:2]
    stopped = said(*GREEDY, "--stop", stop)
    set_generation(folder, eos_token_id=ends, do_sample=False, stop_strings=[stop, "never said"])
    assert said() == stopped != likeliest and said("--stop", "never said") == likeliest
    for key, value in (("temperature", -1), ("top_p", 2), ("min_p", "x"), ("repetition_penalty", 0), ("stop_strings", ""), ("stop_strings", [1])):
        set_generation(folder, eos_token_id=ends, do_sample=True, **{key: value})
        assert f"generation_config.json: '{key}' is" in error_line(train_fp32, "--model", "model", "--prompt", "x", cwd=tmp_path)


def test_settings_that_are_not_followed_are_named(train_fp32, tmp_path, tokenizer):
    """Each setting with which transformers generates something else, unless its value turns it off."""
    folder = make_chat(tmp_path / "model", tokenizer, *LLAMA)
    set_generation(folder, eos_token_id=1, max_new_tokens=7, no_repeat_ngram_size=1, num_beams=2, suppress_tokens=[3, 4], max_length=None, min_length=0,
                   typical_p=1.0, guidance_scale=1, bad_words_ids=[], token_healing=False, use_cache=True, pad_token_id=0, transformers_version="5")
    named = b"generation_config.json: not followed: max_new_tokens 7, no_repeat_ngram_size 1, num_beams 2, suppress_tokens [3,4]\n"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    for options in (("--prompt", "x"), ("--prompts", "prompts.jsonl")):
        said = train_fp32("--model", "model", *options, "--sample", "tokens=2", cwd=tmp_path).stderr
        assert named in said and said.count(b"not followed") == 1, said
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": " b"}\n' * 4)
    assert b"not followed" not in train_fp32("--model", "model", "--data", "data.jsonl", "--batch", 1, "--seq-len", 16, "--steps", 1, cwd=tmp_path).stderr


# ---- prompts of a file

QUESTIONS = [{"prompt": " ".join(WORDS[i:i + 3 + 5 * (i % 4)])} for i in range(10)] + [
    {"id": 7, "messages": [says("system", "Speak."), says("user", "Who?"), says("assistant", "I."), says("user", "Thou?")]}]


@pytest.mark.parametrize("options", [
    ("--family", "gpt2"), LLAMA, ("--family", "mistral", "--heads", 4, "--kv-heads", 1, "--window", 16),
    ("--family", "qwen3", "--heads", 4), ("--family", "bloom", "--heads", 4)], ids=lambda o: o[1])
def test_several_at_a_time_are_those_of_one_by_one(train_fp32, tmp_path, tokenizer, options):
    """And those of --prompt."""
    make_chat(tmp_path / "model", tokenizer, *options)
    common = ("--model", "model", "--sample", "tokens=24")
    one = answers(train_fp32, tmp_path, QUESTIONS, *common, *GREEDY, "--batch", 1)
    assert [list(line) for line in one] == [[*question, "answer", "tokens"] for question in QUESTIONS]
    assert one[1]["answer"].encode() == answer(train_fp32, tmp_path, QUESTIONS[1]["prompt"], 24)
    assert one[-1]["answer"].encode() == answer(train_fp32, tmp_path, written(*QUESTIONS[-1]["messages"]), 24, raw=True)
    for batch in (3, 8):
        assert answers(train_fp32, tmp_path, QUESTIONS, *common, *GREEDY, "--batch", batch) == one
    drawn = [answers(train_fp32, tmp_path, QUESTIONS, *common, "--temperature", 1, "--batch", batch) for batch in (1, 4)]
    assert drawn[0] == drawn[1] != one


@pytest.mark.parametrize("options, more", [(LLAMA, ()), (("--family", "mistral", "--heads", 4, "--kv-heads", 1, "--window", 16), ()),
                                           (("--family", "bloom", "--heads", 4), ()), (LLAMA, ("--train", "prompt"))], ids=str)
def test_prompts_that_begin_alike(train_fp32, tmp_path, tokenizer, options, more):
    """What they share is processed once, and copied. Each answer is that of the prompt in a file of its own."""
    make_chat(tmp_path / "model", tokenizer, *options)
    if more:
        make_adapter(tmp_path, peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"))
        more = ("--adapter", "adapter", *more)
    lines = [{"messages": [says("system", " ".join(WORDS[:30 if i % 3 else 50])), says("user", " ".join(WORDS[i:2 * i + 1]))]} for i in range(7)]
    common = ("--model", "model", *more, *GREEDY, "--sample", "tokens=16,repetition-penalty=30")
    alone = [answers(train_fp32, tmp_path, [line], *common)[0] for line in lines]
    assert len({line["answer"] for line in alone}) > 3
    for batch in (1, 3, 7):
        assert answers(train_fp32, tmp_path, lines, *common, "--batch", batch) == alone


def test_tools_of_a_prompt(train_fp32, tmp_path, tokenizer):
    """They are beside the messages, and the template writes them."""
    template = "{%- if tools %}{{- '<|im_start|>system\\n' + tools[0].name + '<|im_end|>' + '\\n' }}{%- endif %}" + TEMPLATE
    make_chat(tmp_path / "model", tokenizer, *LLAMA, template=template)
    question = says("user", "Who?")
    lines = [{"messages": [question], "tools": [{"name": "speak"}]}, {"messages": [question]}]
    texts = ["<|im_start|>system\nspeak<|im_end|>\n" + written(question), written(question)]
    out = answers(train_fp32, tmp_path, lines, "--model", "model", *GREEDY, "--sample", "tokens=12")
    expected = [answer(train_fp32, tmp_path, text, 12, raw=True).decode() for text in texts]
    assert [line["answer"] for line in out] == [text.split("<|endoftext|>")[0] for text in expected]  # which ends answers alone
    assert out[0]["answer"] != out[1]["answer"]


def test_fields_of_a_prompt(train_fp32, tmp_path, tokenizer):
    """They are read as those of examples; what is not read is named."""
    make_chat(tmp_path / "model", tokenizer, *LLAMA)
    system, user = says("system", "Speak."), says("user", "Who?")
    told, earlier = [system, user], [user, says("assistant", "I."), says("user", "Thou?\nart")]
    lines = [({"system": "Speak.", "prompt": "Who?"}, told), ({"system": "Speak.", "messages": [user]}, told), ({"prompt": told}, told),
             ({"system": "Speak.", "conversations": [{"from": "human", "value": "Who?"}]}, told), ({"prompt": "Who?"}, [user]),
             ({"prompt": "Thou?", "history": [["Who?", "I."]], "input": "art", "answer": "b", "label": False, "id": 3}, earlier)]
    common = ("--model", "model", *GREEDY, "--sample", "tokens=12")
    out = answers(train_fp32, tmp_path, [line for line, _ in lines], *common)
    assert [list(line) for line in out] == [list(dict.fromkeys([*line, "answer", "tokens"])) for line, _ in lines]
    for line, (_, messages) in zip(out, lines, strict=True):
        assert line["answer"].encode() == answer(train_fp32, tmp_path, written(*messages), 12, raw=True)
    for line, options, named in (({"messages": [user], "history": [["a", "b"]], "input": "c"}, (), "history, input"), (lines[0][0], ("--raw-prompt",), "system"),
                                 (lines[-1][0], (), None)):
        (tmp_path / "prompts.jsonl").write_text(json.dumps(line))
        said = train_fp32(*common, "--prompts", "prompts.jsonl", *options, cwd=tmp_path).stderr.decode()
        assert re.findall("^fields that are not read: (.*)$", said, re.MULTILINE) == [named] * bool(named)


def most_memory_of(run):
    """The peak memory, in bytes, of a run until it ends or writes something."""
    most = 0
    while run.poll() is None and not select.select([run.stdout, run.stderr], [], [], 0)[0]:
        found = re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path(f"/proc/{run.pid}/status").read_text())
        most = max(most, 1024 * int(found[1]) if found else 0)
        time.sleep(0.002)
    return most


@pytest.mark.on_a_cpu("a GPU's plan counts the memory of the GPU, and this measures that of the process")
@pytest.mark.parametrize("kind", ["prompts", "a field", "chat"])
def test_long_texts_stay_in_the_plan(train_fp32, work, kind):
    """A prompt of 8 MB is refused, and so is a line of 8 MB in a chat; a long field that is not read is in the plan. Several
    copies of such a text would not be."""
    options = ["--model", work / "model", "--threads", 2, "--sample", "tokens=2"]
    long = {"id": "x " * 4_000_000, "prompt": "Who?"} if kind == "a field" else {"prompt": "x " * 4_000_000}
    (work / "long.jsonl").write_text(json.dumps(long) + "\n")
    options += ["--chat"] if kind == "chat" else ["--prompts", work / "long.jsonl"]
    total = None if kind == "prompts" else train_fp32.plan(*options)["totals"]["total"]
    with train_fp32.start(*options, stdin=-1, stderr=-1) as run:
        run.stdin.write(b"x " * 4_000_000 + b"\n" if kind == "chat" else b"")
        run.stdin.flush()
        used = most_memory_of(run)
        out, notes = (text.decode() for text in run.communicate(timeout=100))
    if kind == "prompts":
        assert run.returncode == 2 and re.search(r"line 1: 80\d+ bytes are too many for the model's 512 positions$", notes), notes
    else:
        assert run.returncode == 0 and used < total, (used, total, notes)
        assert "that is too long: it has more than" in notes if kind == "chat" else json.loads(out)["tokens"] == 2


@pytest.mark.parametrize("kind", ["lora", "prompt", "8bit", "nf4"])
def test_several_at_a_time_with_adapters_and_quantized(train_fp32, work, tmp_path, kind):
    options = ["--model", work / "model"]
    if kind in ("lora", "prompt"):
        config = (peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
                  if kind == "lora" else peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"))
        make_adapter(work, config)
        options += ["--adapter", work / "adapter", "--train", kind]
    else:
        options += ["--base", kind]
    one = answers(train_fp32, tmp_path, QUESTIONS, *options, *GREEDY, "--sample", "tokens=16", "--batch", 1)
    assert answers(train_fp32, tmp_path, QUESTIONS, *options, *GREEDY, "--sample", "tokens=16") == one
    plain = answers(train_fp32, tmp_path, QUESTIONS, "--model", work / "model", *GREEDY, "--sample", "tokens=16")
    assert plain != one


@pytest.mark.parametrize("more", [(), ("--base", "nf4"), ("--adapter", "adapter", "--train", "lora")], ids=" ".join)
def test_several_at_a_time_in_chunks_of_rows(train_fp32, work, tmp_path, more):
    """With 12 texts and chunks of 8 rows, an MLP processes 8 rows and then 4."""
    make_adapter(work, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"))
    options = ["--model", work / "model", *(work / "adapter" if word == "adapter" else word for word in more), *GREEDY, "--sample", "tokens=9"]
    lines = (QUESTIONS + QUESTIONS)[:12]
    whole, chunks = (answers(train_fp32, tmp_path, lines, *options, "--batch", 12, "--chunk-rows", f"mlp={rows}") for rows in ("all", 8))
    assert chunks == whole


@pytest.mark.not_played("an emulated GPU takes ten minutes for the 150 tokens of each answer")
@pytest.mark.parametrize("kind", ["nf4", "8bit", "q4_k"])
def test_several_at_a_time_on_quantized_matrices(train_bf16, tmp_path, tokenizer, kind):
    """Their products have the bits that each row has alone. In bf16 a last bit often changes an answer, so on a GPU, where
    cuBLASLt rounds the head's products differently for another number of rows, only most answers are the same."""
    make_chat(tmp_path / "model", tokenizer, *LLAMA, "--channels", 256)
    options = ["--model", tmp_path / "model", "--base", kind]
    if kind == "q4_k":
        train_bf16("--model", tmp_path / "model", "--steps", 0, "--export", f"{tmp_path}/m.gguf,type=q4_k_m")
        options = ["--model", tmp_path / "m.gguf"]
    options += [*GREEDY, "--sample", "tokens=150"]
    one = answers(train_bf16, tmp_path, QUESTIONS, *options, "--batch", 1)
    for batch in (2, 8):
        several = answers(train_bf16, tmp_path, QUESTIONS, *options, "--batch", batch)
        same = sum(a == b for a, b in zip(several, one, strict=True))
        assert same == len(one) if train_bf16.device == "cpu" else same > len(one) / 2


@pytest.mark.parametrize("line, named", [
    ("nonsense", "line 2: broken JSON"), ("[1]", "line 2 is no JSON object"), ('{"text": "a"}', 'line 2 has no "prompt"'),
    ('{"prompt": 3}', 'line 2: "prompt" is not a text'), ('{"messages": []}', "line 2"), ('{"messages": [{"role": "user"}]}', "message 1"),
    (json.dumps({"prompt": "x " * 600}), "leaves no room in the model's 512 positions"),
    (json.dumps({"prompt": "x " * 45_000}), "line 2: 90050 bytes are too many for the model's 512 positions"),
    (json.dumps({"messages": [says("user", "a"), says("assistant", "b")]}), "line 2: the last message is the assistant's, which is not continued"),
    ('{"prompt": "a", "continue_final_message": true}', '"continue_final_message" is not supported'), (b'{"prompt": "\xff"}', "line 2 is not UTF-8"),
    ('{"prompt": "a", "functions": [{}]}', '"functions" is not supported'), ('{"prompt": "a", "tools": [{"b": %d}]}' % 10**30, "19 or more digits")], ids=str)
def test_bad_prompts(train_fp32, work, line, named):
    (work / "bad.jsonl").write_bytes(b'{"prompt": "a"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    assert named in error_line(train_fp32, "--model", "model", "--prompts", "bad.jsonl", cwd=work)


def test_what_cannot_be_combined(train_fp32, work):
    (work / "empty.jsonl").write_text("\n")
    (work / "talk.jsonl").write_text(json.dumps({"messages": [says("user", "a")]}) + "\n")
    for options, named in ((("--chat", "--data", "x"), "--chat only answers: leave --data x out"),
                           (("--chat", "--steps", 5), "--chat trains nothing"), (("--chat", "--raw-prompt"), "--raw-prompt"),
                           (("--chat", "--prompts", "empty.jsonl"), "--chat"), (("--chat", "--prompt", "x"), "--prompt x"),
                           (("--chat", "--sample", "tokens=0"), "tokens=0"), (("--prompt", "x", "--sample", "tokens=0"), "nothing to answer"),
                           (("--prompts", "empty.jsonl"), "has no prompt"),
                           (("--prompts", "missing.jsonl"), "missing.jsonl"), (("--prompts", "talk.jsonl", "--raw-prompt"), "line 1 has messages")):
        assert named in error_line(train_fp32, "--model", "model", *options, cwd=work), options
    assert "is a new one" in error_line(train_fp32, "--chat")


# ---- a conversation


def chat(train, folder, text, *options, code=0):
    run = train.start("--model", "model", "--chat", *GREEDY, "--sample", "tokens=12", *options, cwd=folder, stdin=-1, stderr=-1)
    out, notes = run.communicate(text.encode(), timeout=100)
    assert run.returncode == code, notes
    return out.decode(), notes.decode()


def test_a_conversation(train_fp32, work):
    """Each answer is that to the whole conversation before it."""
    said, _ = chat(train_fp32, work, "Who?\n\nAnd thou?\n/reset\nWho?\n/system Be kind.\nWho?\n")
    messages, expected = [], []
    for turn in ("Who?", "And thou?", None, "Who?", says("system", "Be kind."), "Who?"):
        if not isinstance(turn, str):
            messages = [turn] if turn else []
            continue
        messages.append(says("user", turn))
        text = answer(train_fp32, work, written(*messages), 12, raw=True).decode().lstrip(" \n")
        messages.append(says("assistant", text))
        expected.append(text)
    assert said == "".join(text + "\n" for text in expected)


@pytest.mark.parametrize("where", ["gguf", "weights=disk", "embeddings=disk", "save", "resumed"])
def test_a_conversation_wherever_the_model_is(train_fp32, work, tmp_path, where):
    """The template of a GGUF is in its metadata; a save has the one of the model that it began with."""
    text = "Who?\nAnd thou?\n"
    expected, _ = chat(train_fp32, work, text)
    if where == "gguf":
        train_fp32("--model", work / "model", "--steps", 0, "--export", f"{tmp_path}/m.gguf,type=f32")
        options = ("--model", tmp_path / "m.gguf")
    elif "=" in where:
        options = ("--offload", where)
    else:
        (tmp_path / "chats.json").write_text(json.dumps([{"messages": [says("user", "Who?"), says("assistant", "I.")]}]))
        train_fp32("--model", work / "model", "--data", tmp_path / "chats.json", "--steps", 1, "--batch", 1, "--lr", 1e-30,
                   "--min-lr", 0, "--out", tmp_path / "out", "--sample", "tokens=0")
        options = ("--model", tmp_path / "out") if where == "save" else ("--resume", tmp_path / "out")
    assert chat(train_fp32, work, text, *options)[0] == expected


def test_a_conversation_with_a_quantized_model(train_fp32, work):
    """The answer is that of --prompt with the same base, and another one than with whole matrices."""
    said, _ = chat(train_fp32, work, "Who?\n", "--base", "nf4")
    text = answer(train_fp32, work, written(says("user", "Who?")), 12, "--base", "nf4", raw=True).decode().lstrip(" \n")
    assert said == text + "\n" and said != chat(train_fp32, work, "Who?\n")[0]


def test_commands(train_fp32, work):
    out, notes = chat(train_fp32, work, "/nonsense\n/help\n/exit\nWho?\n")
    assert out == "" and "/nonsense: there is no such command" in notes and notes.count("/system TEXT") == 2
    assert all(len(line) < 80 for line in notes.splitlines() if line.startswith("/"))


def test_a_conversation_that_fills_the_window(train_fp32, work):
    """Its beginning is forgotten; what does not fit alone is not answered."""
    out, notes = chat(train_fp32, work, "\n".join(["Who art thou?"] * 8 + ["x " * 100, "Who?"]) + "\n", "--seq-len", 64)
    assert "forgotten" in notes and "that is too long" in notes and out.endswith("\n")


def read_until(master, pattern, seconds=60):
    text, end = b"", time.monotonic() + seconds
    while not re.search(pattern, text):
        assert select.select([master], [], [], max(0, end - time.monotonic()))[0], text
        text += os.read(master, 4096)
    return text


def in_terminal(train, folder, *options):
    """A run whose input and output are a terminal: the process, and the terminal's other end."""
    master, slave = pty.openpty()
    run = train.start("--model", "model", "--chat", *options, cwd=folder, stdin=slave, stdout=slave, stderr=slave,
                      start_new_session=True, preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0))
    os.close(slave)
    return run, master


@pytest.fixture
def terminal(monkeypatch, train_fp32):
    monkeypatch.setitem(train_fp32.environment, "TERM", "xterm")


def test_line_editing(train_fp32, work, terminal):
    left, home, up, delete = b"\033[D", b"\033[H", b"\033[A", b"\033[3~"
    run, master = in_terminal(train_fp32, work, *GREEDY, "--sample", "tokens=12")
    read_until(master, rb"> ")
    expected = answer(train_fp32, work, "Who art thou?", 12).lstrip(b" \n")
    os.write(master, b"art thxou?" + 3 * left + b"\x7f" + home + b"Whoo " + 2 * left + delete + b"\r")
    assert expected + b"\n(12 tokens, " in read_until(master, rb"tokens/s\)[^>]*> ").replace(b"\r\n", b"\n")
    os.write(master, b"/reset\r" + up + up + b"\r")  # the same question again
    assert expected + b"\n(12 tokens, " in read_until(master, rb"tokens/s\)[^>]*> ").replace(b"\r\n", b"\n")
    os.write(master, b"\x04")
    assert run.wait(timeout=30) == 0
    os.close(master)


def test_interrupts(train_fp32, tmp_path, tokenizer, terminal):
    """Ctrl-C stops an answer, and at the prompt the program."""
    make_chat(tmp_path / "model", tokenizer, *LLAMA, "--positions", 1 << 15)
    run, master = in_terminal(train_fp32, tmp_path, *GREEDY)
    read_until(master, rb"> ")
    os.write(master, b"Who?\r")
    read_until(master, rb"(?s)2004l.{12}")
    os.write(master, b"\x03")
    assert b"...\r\n(" in read_until(master, rb"tokens/s\)[^>]*> ")
    os.write(master, b"\x03")
    assert run.wait(timeout=30) == 128 + signal.SIGINT
    os.close(master)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_signals(train_fp32, work, number):
    """They end a conversation that waits for input."""
    with train_fp32.start("--model", "model", "--chat", *GREEDY, "--sample", "tokens=2", cwd=work, stdin=-1) as run:
        run.stdin.write(b"Who?\n")
        run.stdin.flush()
        run.stdout.readline()
        run.stdin.write(b"And")  # a line without an end is not answered
        run.stdin.flush()
        time.sleep(0.1)  # until it reads again; a signal that comes before ends it too
        run.send_signal(number)
        assert run.wait(timeout=30) == 128 + number and run.stdout.read() == b""


# ---- training on chats, and its outputs


def test_outputs_end_where_training_taught_to_end(train_fp32, tmp_path, tokenizer):
    """Saves, adapters, merged models and bases keep the settings, the tokenizer and the template; samples are answers."""
    folder = make_chat(tmp_path / "model", tokenizer, *LLAMA)
    end, text_end = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    set_generation(folder, eos_token_id=text_end, do_sample=True, top_p=0.9, temperature=0.5)
    (tmp_path / "chats.jsonl").write_text("".join(
        json.dumps({"messages": [says("user", " ".join(WORDS[i:i + 3])), says("assistant", WORDS[i])]}) + "\n" for i in range(20)))
    run = ("--model", "model", "--data", "chats.jsonl", "--batch", 1, "--seq-len", 64, "--steps", 2, "--sample", "tokens=5")
    text = train_fp32(*run, "--out", "whole", cwd=tmp_path).stdout.decode()
    assert re.search(rf"--- sample after 2 steps ---\nuser: {re.escape(' '.join(WORDS[:3]))}\nassistant: ", text)
    asked = train_fp32(*run, "--prompt", "Who?", cwd=tmp_path).stdout.decode()
    assert "--- sample after 2 steps ---\nuser: Who?\nassistant: " in asked
    train_fp32(*run, "--train", "lora", "--base", "nf4", "--out", "adapter", "--merge", "merged", "--save-base", "base", cwd=tmp_path)
    train_fp32("--model", "base", "--adapter", "adapter", "--steps", 0, "--merge", "again", cwd=tmp_path)
    for name in ("whole", "adapter", "merged", "base", "again"):
        settings = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert set(settings["eos_token_id"]) == {text_end, end} and settings["top_p"] == 0.9 and settings["do_sample"], name
        config = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert config["chat_template"] == TEMPLATE and (tmp_path / name / "tokenizer.json").exists(), name
    out, _ = chat_of(train_fp32, tmp_path, "adapter", "Who?\n")
    assert out == train_fp32("--model", "adapter", "--prompt", "Who?", *GREEDY, "--sample", "tokens=8", cwd=tmp_path).stdout


def chat_of(train, folder, model, text):
    run = train.start("--model", model, "--chat", *GREEDY, "--sample", "tokens=8", cwd=folder, stdin=-1, stderr=-1)
    out, notes = run.communicate(text.encode(), timeout=100)
    assert run.returncode == 0, notes
    return out, notes
