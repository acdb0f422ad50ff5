"""Models with damaged files: one line names what is wrong, and nothing is written."""

import json
import os

import pytest
from bad_input_models import cut, given, rewrite_header, with_tensors, work
from tokenizers import ByteLevelBPETokenizer
from trainer_runs import command, read_log, refused

USUALLY = "fp32"  # see conftest.py


def past_the_end(fields):
    begin, end = fields["h.1.mlp.c_fc.weight"]["data_offsets"]
    fields["h.1.mlp.c_fc.weight"]["data_offsets"] = [begin + (1 << 30), end + (1 << 30)]


def overlap(fields):
    fields["h.1.mlp.c_fc.weight"]["data_offsets"] = fields["h.0.mlp.c_fc.weight"]["data_offsets"]


NAME = "h.1.mlp.c_fc.weight"


@pytest.mark.parametrize("damage, named", [
    (cut(0), []), (cut(7), []), (cut(100), []), (cut(-1), []), (cut(20000), []),
    (lambda folder: (folder / "model.safetensors").unlink(), []),
    (rewrite_header(past_the_end), [NAME]),
    (rewrite_header(overlap), ["mlp.c_fc.weight", "overlap"]),
    (rewrite_header(lambda fields: fields[NAME].update(dtype="I32")), [NAME, "I32"]),
    (rewrite_header(lambda fields: fields[NAME].update(dtype="F31")), [NAME, "F31"]),
    (rewrite_header(lambda fields: fields[NAME].update(dtype="BF16")), [NAME]),
    (rewrite_header(lambda fields: fields[NAME].update(shape=[192, 48])), [NAME, "[192, 48]", "[48, 192]"]),
    (rewrite_header(lambda fields: fields[NAME].update(shape=[-48, -192])), [NAME]),
    (rewrite_header(lambda fields: fields[NAME].update(shape=[1 << 62, 48, 192])), [NAME]),
    (with_tensors(lambda tensors: tensors.pop(NAME)), [NAME, "missing"]),
    (with_tensors(lambda tensors: tensors.pop("wte.weight")), ["wte.weight", "missing"]),
], ids=["empty", "7 bytes", "100 bytes", "last byte", "half", "gone", "past the end", "overlap", "I32", "F31", "BF16",
        "transposed", "negative", "overflow", "no c_fc", "no wte"])
def test_safetensors(train, work, damage, named):
    damage(work / "model")
    refused(train, work, {}, "model", *named)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_pointers_of_git_lfs(train, work, name):
    (work / "model" / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    refused(train, work, {}, f"model/{name} is a Git LFS pointer", "`git lfs pull`")


def test_weights_of_torch_save(train, work):
    (work / "model" / "model.safetensors").unlink()
    (work / "model" / "training_args.bin").touch()
    refused(train, work, {}, "model has neither model.safetensors nor ")
    (work / "model" / "pytorch_model.bin").touch()
    refused(train, work, {}, "model has pytorch_model.bin and no model.safetensors", 'from_pretrained("model").save_pretrained("DIR")')


@pytest.mark.parametrize("change, named", [
    ({"n_layer": "two"}, ["n_layer"]), ({"n_layer": None}, ["n_layer"]), ({"n_layer": 0}, ["'n_layer' is 0"]),
    ({"n_layer": 3}, ["h.2."]), ({"n_head": 5}, ["n_embd", "48", "n_head", "5"]), ({"n_embd": 1 << 40}, ["n_embd"]),
    ({"vocab_size": -1}, ["vocab_size"]), ({"n_positions": 32}, ["wpe.weight"]),
    ({"model_type": "mixtral"}, ["model_type", "mixtral"]), ({"activation_function": "relu"}, ["activation_function"]),
    ({"tie_word_embeddings": False}, ["tie_word_embeddings"]), ({"n_inner": 100}, ["n_inner"]),
    ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
    ({"layer_norm_epsilon": "1e-6"}, ["layer_norm_epsilon"]), ({"add_cross_attention": True}, ["add_cross_attention"]),
], ids=str)
def test_config(train, work, change, named):
    path = work / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(train, work, {"--data": "text"}, "model", *named)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"n_layer": 2', "\x00\x01"])
def test_config_that_is_no_json(train, work, text):
    (work / "model" / "config.json").write_text(text)
    refused(train, work, {}, "model/config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_nests_deep(train, work, name):
    """Values are copied and written recursively, which could take all of the stack."""
    path = work / "model" / name
    values = (json.loads(path.read_text()) if path.exists() else {}) | {"eos_token_id": "HERE"}
    for value in ("[" * 200000 + "]" * 200000, '{"a":' * 200000 + "1" + "}" * 200000):
        path.write_text(json.dumps(values).replace('"HERE"', value))
        refused(train, work, {"--data": "text"}, f"model/{name}", "nests more than 200 deep")


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json",
                                  "shard.safetensors", "vocab.json", "merges.txt", "tokenizer.json"])
def test_files_that_are_none(train, work, name, kind):
    """A pipe without a writer, a device without an end, a file of a terabyte: none is waited for or read."""
    folder = work / "model"
    if name in ("vocab.json", "merges.txt"):
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator([], vocab_size=256, show_progress=False)
        bpe.save_model(str(folder))
    if "index" in name or name.startswith("shard"):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "shard.safetensors"}}')
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    error = train(*command({}), cwd=work, code=2).stderr.decode()
    if kind != "huge":
        said = " is not a regular file"
    elif name.endswith(".safetensors"):
        said = ": broken JSON"
    else:
        said = f" has {1 << 40} bytes"
    assert error.startswith("train: ") and error.count("\n") == 1 and f"model/{name}{said}" in error


def test_damaged_tokenizer(train, work):
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        (work / "model" / name).write_text("{nonsense")
        refused(train, work, {}, "model/", "json")
    (work / "model" / "tokenizer.json").write_text('{"model": {"type": "WordPiece"}}')
    refused(train, work, {}, 'model/tokenizer.json: model type "WordPiece" is not supported')


def write_tokenizer(folder, tokens):
    model = {"vocab": {chr(ord("a") + i): i for i in range(tokens)}, "merges": []}
    decoder = {"type": "Sequence", "decoders": [{"type": "Fuse"}]}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "decoder": decoder}))


def test_a_tokenizer_larger_than_the_model(train, work):
    write_tokenizer(work / "model", 256)
    train(*command({}), cwd=work)
    write_tokenizer(work / "model", 257)
    refused(train, work, {}, "model: its tokenizer has 257 tokens and its model 256")


@pytest.mark.parametrize("model, named", [
    # The only way for a merge to lead to itself.
    ({"merges": [["a", "b"], ["ab", ""]]}, ["merge 1", "not a pair"]),
    ({"merges": [["a", "b"], ["", "ab"]]}, ["merge 1", "not a pair"]),
    ({"merges": [["a", "b"], ["a", "z"]]}, ["merge 1", '"z"', "not in the vocabulary"]),
    ({"merges": ["a b", "b a"]}, ["merge 1", '"ba"', "not in the vocabulary"]),
    ({"merges": None}, ["merges"]), ({"merges": 3}, ["merges"]), ({"merges": {"a": "b"}}, ["merges"]),
    ({"merges": [["a"]]}, ["merge 0"]), ({"merges": [3]}, ["merge 0"]),
    ({"vocab": None}, ["vocab"]), ({"vocab": {"a": 0, "b": 0}}, ["token 0 is given twice"]),
    ({"vocab": {"a": -1}}, ['"a"']), ({"vocab": {"a": 2**40}}, ['"a"']), ({"vocab": {"a": 1.5}}, ['"a"']),
    ({"dropout": 0.5}, ['"dropout" 0.5']), ({"type": "Unigram"}, ["Unigram"]),
], ids=str)
def test_merges_and_vocabulary(train_fp32, work, model, named):
    good = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": [["a", "b"]]}
    decoder = {"type": "Sequence", "decoders": [{"type": "Fuse"}]}
    path = work / "model" / "tokenizer.json"
    for merges in ([["a", "b"]], [["a", "b"], ["a", "b"]]):  # one given twice counts once
        path.write_text(json.dumps({"model": good | {"merges": merges}, "decoder": decoder}))
        train_fp32("--model", "model", "--steps", 0, "--prompt", "abc", "--sample", "tokens=1", cwd=work)
    path.write_text(json.dumps({"model": good | model, "decoder": decoder}))
    refused(train_fp32, work, {}, "model/tokenizer.json: ", *named)


def test_a_prompt_without_tokens(train, work):
    write_tokenizer(work / "model", 26)
    train(*command({"--prompt": "12 c"}), cwd=work)
    refused(train, work, {"--prompt": "12 45"}, "--prompt", "no token", "12 45")


def test_weights_that_are_no_numbers(train, work):
    with_tensors(lambda tensors: tensors["h.0.ln_1.weight"].fill_(float("nan")))(work / "model")
    error = train(*command({}), cwd=work, code=2).stderr.decode()
    assert error.startswith('train: model: tensor "h.0.ln_1.weight" has nan') and error.count("\n") == 1
    assert not (work / "out").exists()


def test_a_loss_that_is_no_number(train, work):
    """The run stops at once. The first update has ruined the weights, so even the first save is not good; it is complete."""
    options = {"--lr": 1000, "--weight-decay": 1000, "--schedule": "constant", "--warmup": 0, "--save-every": 1,
               "--keep": 0, "--steps": 100, "--clip": 0}
    *dead, error = train(*command(options), cwd=work, code=2).stderr.decode().splitlines()
    assert dead[0].startswith("out/step-00000001 is not good, as the step after it has ") and dead[0].endswith("; the last good save: none"), dead
    assert all("far above" in line for line in dead[1:]), dead
    assert error.startswith("train: step ") and error.endswith("; the last good save: none"), error
    assert (work / "out" / "step-00000001" / "model.safetensors").exists()
    step = int(error.split()[2].rstrip(":")) - 1
    assert [line["step"] for line in read_log(work / "log")] == list(range(1, step + 1))
