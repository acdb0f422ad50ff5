"""Settings that the files beside a vocabulary have: the tokens are those of transformers' AutoTokenizer."""

import json
import os
import random

import pytest
from known_tokenizers import SCRIPTS, TEXTS, assert_same, encode_all, facts, probe, trained
from tokenizers import AddedToken, models, pre_tokenizers
from trainer_runs import make

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def token(content, **flags):
    usual = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content} | usual | flags


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    library = pytest.importorskip("sentencepiece")
    prefix = str(tmp_path_factory.mktemp("spm") / "tokenizer")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter((SCRIPTS + TEXTS["code"]).splitlines()), model_prefix=prefix, model_type="bpe", vocab_size=1400,
        byte_fallback=True, normalization_rule_name="identity", character_coverage=0.98, remove_extra_whitespaces=False,
        minloglevel=2, control_symbols=["<ctl>"])
    with open(prefix + ".model", "rb") as file:
        return file.read()


@pytest.fixture(scope="module")
def byte_level():
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), size=600)
    tokenizer.add_special_tokens([AddedToken("<tool>"), AddedToken("<x>")])
    return json.loads(tokenizer.to_str())


def write(folder, model_type="llama", **files):
    """Files by name without .json; bytes are a tokenizer.model."""
    for name, content in ({"config": {"model_type": model_type}} | files).items():
        if isinstance(content, bytes):
            (folder / "tokenizer.model").write_bytes(content)
        elif content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))


def check(folder, specials, command="encode"):
    """Random texts with these spellings in words, between words, and at both ends of a text."""
    choose = random.Random(0)
    parts = [*specials, *specials, " ", "  ", "\n", "a", "the ", " free", "▁", "é", "e\u0301", "日本", "🙂", "12", "\t", "가", "\u1100\u1161",
             "'s", "Å"]
    texts = ["".join(choose.choices(parts, k=choose.randrange(1, 9))) for _ in range(80)]
    texts += [form.replace("@", s) for s in [*specials, "b", "▁b"] for form in ("@", " @", "  @ ", "a@a", "a @ @", "@@ b", "\n@")]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = [theirs(text, add_special_tokens=command == "specials")["input_ids"] for text in texts]
    assert_same(encode_all(folder, texts, command=command), expected, texts)
    got = facts(folder)
    assert theirs.eos_token is None or got["end_of_text"] == theirs.eos_token_id
    assert theirs.bos_token is None or got["begin_of_text"] == theirs.bos_token_id


@pytest.mark.parametrize("model_type", ["llama", pytest.param("mistral", marks=pytest.mark.more)])
@pytest.mark.parametrize("settings", [
    None, {}, LLAMA, LLAMA | {"legacy": True}, LLAMA | {"legacy": False}, {"legacy": False}, LLAMA | {"add_prefix_space": False},
    LLAMA | {"legacy": None, "add_prefix_space": None}, LLAMA | {"eos_token": "<new>"}, LLAMA | {"extra_special_tokens": ["<new>"]},
    LLAMA | {"legacy": True, "added_tokens_decoder": {"0": token("<unk>"), "1": token("<s>", rstrip=True), "2": token("</s>"),
                                                      "1400": token("<new>", special=False, lstrip=True)}},
], ids=str)
def test_a_tokenizer_model(tmp_path, sentencepiece_model, settings, model_type):
    write(tmp_path, model_type, model=sentencepiece_model, tokenizer_config=settings)
    check(tmp_path, ["<s>", "</s>", "<unk>", "<new>"])
    if settings == LLAMA:
        write(tmp_path, model_type, tokenizer_config=settings | {"add_bos_token": False, "add_eos_token": True})
        check(tmp_path, [], command="specials")


NAMED = {"eos_token": "<new>", "pad_token": "<pad>", "image_token": "<img>", "extra_special_tokens": ["<e>", "<f>"]}
BESIDE = {
    "named": {"tokenizer_config": NAMED},
    "extra": {"tokenizer_config": {"additional_special_tokens": ["<new>"], "extra_special_tokens": []}},
    "described": {"tokenizer_config": {"eos_token": token("<new>", lstrip=True) | {"__type": "AddedToken"}}},
    "a word": {"tokenizer_config": {"eos_token": "the"}},
    "added": {"added_tokens": {"<new>": 602}, "tokenizer_config": {"pad_token": "<new>"}},
    "the map": {"tokenizer_config": {"eos_token": "<tool>"}, "special_tokens_map": {"eos_token": "<x>", "additional_special_tokens": ["<new>"]}},
    "no map": {"tokenizer_config": {"eos_token": "<tool>", "added_tokens_decoder": {}}, "special_tokens_map": {"eos_token": "<x>"}},
    "decoder": {"tokenizer_config": {"added_tokens_decoder": {
        "600": token("<tool>", lstrip=True), "601": token("<x>", special=False), "602": token("<new>"), "603": token("<e>", special=False)}}},
    "a space first": {"tokenizer_config": {"add_prefix_space": True}},
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("of_class", ["PreTrainedTokenizerFast", *(pytest.param(c, marks=pytest.mark.more) for c in (
    "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast"))])
def test_files_beside_a_tokenizer_json(tmp_path, byte_level, name, of_class):
    files = BESIDE[name] | {"tokenizer": byte_level}
    files["tokenizer_config"] = {"tokenizer_class": of_class} | files["tokenizer_config"]
    write(tmp_path, **files)
    if name == "a space first" and of_class == "Qwen2Tokenizer":
        assert '"add_prefix_space" after another pre_tokenizer is not supported' in probe(tmp_path, "facts", code=2)
    else:
        check(tmp_path, ["<tool>", "<x>", "<new>", "<pad>", "<img>", "<e>", "<f>", "the"])


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("model_type", ["llama", pytest.param("mistral", marks=pytest.mark.more)])
def test_the_class_of_a_tokenizer_json_replaces_its_components(tmp_path, legacy, model_type):
    """LlamaTokenizer has a Metaspace of its own; Qwen2Tokenizer composes characters and splits at each digit."""
    characters = {c: i for i, c in enumerate(["<unk>", "<s>", "</s>", "▁a", *sorted(set("▁ab 12日本🙂é\n\u0301'sthefre"))])}
    tokenizer = json.loads(trained(pre_tokenizers.ByteLevel(), size=300).to_str())
    tokenizer["model"] |= {"vocab": characters, "merges": ["▁ a"], "unk_token": "<unk>"}
    tokenizer |= {"added_tokens": [{"id": i} | token(t) for t, i in list(characters.items())[:3]], "pre_tokenizer": None, "post_processor": None,
                  "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                                                                     {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
                  "decoder": {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}}
    write(tmp_path, model_type, tokenizer=tokenizer, tokenizer_config=LLAMA | {"legacy": legacy})
    check(tmp_path, ["<s>", "</s>", "<unk>"])


@pytest.mark.parametrize("settings", [None, {"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": "Qwen2Tokenizer"}], ids=str)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_composes_characters(tmp_path, byte_level, settings, model_type):
    write(tmp_path, model_type, tokenizer=byte_level, tokenizer_config=settings)
    check(tmp_path, ["<tool>", "<|endoftext|>"])


@pytest.mark.parametrize("settings", [None, {"add_bos_token": True, "add_eos_token": True}, {"add_prefix_space": True}, {"pad_token": "<new>"},
                                      {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<new>"}], ids=str)
def test_a_vocab_json(tmp_path, settings):
    trained(pre_tokenizers.ByteLevel(add_prefix_space=False), size=600).model.save(str(tmp_path))
    qwen = bool(settings) and "tokenizer_class" in settings
    write(tmp_path, "qwen3" if qwen else "gpt2", tokenizer_config=settings)
    check(tmp_path, ["<|endoftext|>", "<new>"], command="specials" if not qwen else "encode")


@pytest.mark.parametrize("family, settings", [("mistral", LLAMA), ("qwen2", None), ("llama", LLAMA)], ids=str)
def test_tokens_of_an_adapters_save_are_those_of_its_base(train_fp32, tmp_path, byte_level, sentencepiece_model, family, settings):
    """Its folder has no config.json, which decides the class of Mistral's and Qwen's tokenizers."""
    base = tmp_path / "model"
    make(base, "--family", family, "--layers", 1, "--heads", 2, "--channels", 32, "--vocab", 1408)
    files = {"tokenizer": byte_level} if family == "qwen2" else {"model": sentencepiece_model}
    write(base, config=json.loads((base / "config.json").read_text()), tokenizer_config=settings, **files)
    (tmp_path / "text").write_text(SCRIPTS)
    train_fp32("--model", "model", "--data", "text", "--train", "lora", "--steps", 1, "--batch", 1, "--seq-len", 16, "--sample", "tokens=0", "--out",
               "out", cwd=tmp_path)
    texts = ["a<s>b", " a  b<s> b", "e\u0301 12", "a <unk>b"]
    expected = [transformers.AutoTokenizer.from_pretrained(base)(text, add_special_tokens=False)["input_ids"] for text in texts]
    saved = tmp_path / "out/latest"
    assert not (saved / "config.json").exists()
    assert_same(encode_all(saved, texts), expected, texts)
    assert [transformers.AutoTokenizer.from_pretrained(saved)(text, add_special_tokens=False)["input_ids"] for text in texts] == expected
    if family == "llama":  # whose save needs no other class
        assert (saved / "tokenizer_config.json").read_bytes() == (base / "tokenizer_config.json").read_bytes()


def test_what_is_refused(tmp_path, byte_level):
    write(tmp_path, tokenizer=byte_level, tokenizer_config={"split_special_tokens": True})
    assert probe(tmp_path, "facts", code=2) == (f'{tmp_path}/tokenizer_config.json: "split_special_tokens" true is not supported: chats '
                                                "would have no special tokens; set it to false\n")
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {"609": token("<new>")}})
    assert probe(tmp_path, "facts", code=2) == f'{tmp_path}: added token 609 "<new>": its number must be 602\n'
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {"x": token("<new>")}})
    assert probe(tmp_path, "facts", code=2) == f'{tmp_path}/tokenizer_config.json: added token "x" is not a number with "content"\n'
    write(tmp_path, tokenizer_config={}, added_tokens={"<new>": "602"})
    assert probe(tmp_path, "facts", code=2) == f'{tmp_path}/added_tokens.json: added token "\\x22602\\x22" is not a number with "content"\n'
