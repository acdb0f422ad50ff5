#!/usr/bin/env python3
"""Writes the first inputs of the fuzz targets, into one folder per target."""

import json
import pathlib
import struct
import sys


def safetensors_seeds():
    def file(header, data=b""):
        return b"\1" + json.dumps(header).encode() + b"\0" + data

    def tensor(dtype, shape, begin, end):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    yield file({})
    yield file({"__metadata__": {"format": "pt"}, "w": tensor("F32", [2, 1], 0, 8)}, bytes(8))
    yield file({"h": tensor("F16", [3], 0, 6), "b": tensor("BF16", [1], 6, 8)}, b"\0\x7c\1\0\xff\xff\x80\x3f")
    yield file({"scalar": tensor("I64", [], 0, 8), "none": tensor("U8", [5, 0], 8, 8)}, bytes(8))
    yield file({"overlap": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 2, 6)}, bytes(6))
    yield file({"huge": tensor("F32", [2**62, 4], 0, 0)})
    header = json.dumps({"w": tensor("F32", [1], 0, 4)}).encode()
    yield b"\0" + struct.pack("<Q", len(header)) + header + bytes(4)


def shard_seeds():
    def shard(choices, seq_len, seed, tokens, magic=20240520, version=1, kind="H"):
        head = struct.pack("<iii", magic, version, len(tokens))
        return bytes([choices, seq_len - 1, seed]) + head + struct.pack(f"<{len(tokens)}{kind}", *tokens)

    yield shard(3, 4, 2, range(40))
    yield shard(3, 1, 3, [50256, 0])
    yield shard(3, 2, 4, [50257, 0, 0, 0])
    yield shard(1, 8, 6, range(9), magic=20240801, version=7, kind="I")
    yield shard(1, 2, 7, [128255, 128256, 2**32 - 1, 0], magic=20240801, version=7, kind="I")
    yield b"\0\3\2" + b"To be, or not to be, that is the question" * 3
    yield bytes([4, 2, 5]) + b"text in two parts " * 8


def json_seeds():
    config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_ctx": 1024, "n_embd": 768,
              "n_layer": 12, "n_head": 12, "n_inner": None, "activation_function": "gelu_new",
              "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "architectures": ["GPT2LMHeadModel"]}
    yield json.dumps(config).encode()
    yield json.dumps(config | {"n_head": 7, "n_inner": -1}).encode()
    yield b'{"a": [1, -2, 3.5e3, "\\u00e9\\ud83d\\ude00", null, true], "a": {}}'


def config_seeds():
    """For each family: its config unchanged, and with one key after another changed, at the top or in an
    object."""
    families, keys = 6, 44
    yield from (bytes([family]) for family in range(families))
    values = ("1", "0", "-1", "2.5", "1e300", "true", "null", '"llama3"', '"linear"', '"sliding_attention"', "[1, 2]")
    for key in range(keys):
        for i, value in enumerate(values):
            yield bytes([(key + i) % families, key, (0, 0, 1, 2)[i % 4]]) + value.encode()
    rope = {33: '"llama3"', 35: "8", 36: "1", 37: "4", 38: "8192", 30: "500000.0"}  # by the number of the key
    for where in (1, 2):
        yield b"\1" + b"\n".join(bytes([key, where]) + value.encode() for key, value in rope.items())
    window = {26: "7", 27: "true", 28: "0"}
    for family in (2, 3, 4):
        yield bytes([family]) + b"\n".join(bytes([key, 0]) + value.encode() for key, value in window.items())


def toml_seeds():
    yield 'lr = 1e-4\nsteps = 0x10 # c\n[offload]\nweights = "disk"\n'.encode()
    yield "[\u00e9]\n\u00e9 = 1\n\"\u00e9\".b = '\u00e9'\n".encode()
    yield b'a.b."c".d = [1, 2.5, true, [nan, -inf]]\n[[t]]\nx = {y = 1979-05-27T07:32:00.5Z, z = 07:32:00}\n'
    yield b"prompt = \"\"\"a\\\n  b\\u00e9\\e\"\"\"\nsample = {stop = '''\\n'''}\nbatch = 0b1_1\nmodel = -0o7\r\n\xff"
    yield b"a" + b".a" * 300 + b" = 1"


def tokenizer_seeds():
    def file(text, model, **parts):
        return json.dumps({"model": {"type": "BPE"} | model} | parts).encode() + b"\0" + text

    def split(regex, **options):
        return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} | options

    def added(number, content, **options):
        return {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} | options

    letters = {c: i for i, c in enumerate("abc' 1\u0120\u010a<>")}
    merges = {"ab": 20, "abc": 21, "\u0120a": 22, "\u0120abc": 23}
    by_bytes = {"vocab": letters | merges, "merges": ["a b", "ab c", "\u0120 a", "\u0120 abc"]}
    text = " abc ab'a 1111 <s> ab\n\n  abc \u00e9\u65e5".encode() + b"\xff\xe6 abcabc"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    yield file(text, by_bytes, pre_tokenizer=byte_level, decoder={"type": "ByteLevel"})
    sequence = {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, split(r"(?i:'s|a)|[^\r\n\p{L}]?\p{L}+|\s+(?!\S)|\s+"),
        byte_level | {"use_regex": False}]}
    tokens = [added(30, "<s>", lstrip=True), added(20, "ab", normalized=True, single_word=True, special=False),
              added(32, "<s>>", rstrip=True)]
    template = {"type": "TemplateProcessing", "special_tokens": {"<s>": {"id": "<s>", "ids": [30], "tokens": ["<s>"]}},
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}
    yield file(text, by_bytes | {"ignore_merges": True, "unk_token": "a", "fuse_unk": True}, pre_tokenizer=sequence,
               normalizer={"type": "NFC"}, added_tokens=tokens, post_processor=template)
    characters = {"vocab": {"<unk>": 0, "\u2581": 1, "a": 2, "b": 3, "\u2581a": 4, "ab": 5, "\u2581\u2581": 6},
                  "merges": [["\u2581", "a"], ["a", "b"], ["\u2581", "\u2581"]], "unk_token": "<unk>", "fuse_unk": True}
    space = {"String": "\u2581"}
    decoder = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": space, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    yield file(text, characters, decoder=decoder, added_tokens=[added(9, "<s>", normalized=True)], normalizer={
        "type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
                                            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]})
    bytes_too = characters | {"byte_fallback": True,
                              "vocab": characters["vocab"] | {f"<0x{b:02X}>": 100 + b for b in range(256)}}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    yield file(text, bytes_too, decoder=decoder, pre_tokenizer=metaspace)
    yield file(text, characters, decoder={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
               pre_tokenizer=metaspace | {"prepend_scheme": "always", "split": True})
    yield file(text, characters, decoder=decoder, pre_tokenizer=split(" ?[^(\\s|[.,!?])]+", behavior="Removed"))
    yield file(text, {"vocab": {"a": 0, "": 1, "aa": 4194303}, "merges": [["a", ""], ["", "a"], ["a", "a"]]})
    yield file(text, {"vocab": {"a": 0, "b": -1, "c": 2**40}, "merges": ["a b"]})
    yield file(text, {"type": "Unigram", "vocab": [["a", -1.5]], "unk_id": 0})
    yield b'{"model": ' + b"[" * 500


def json_lines_seeds():
    def lines(*objects):
        return "\n".join(o if isinstance(o, str) else json.dumps(o, ensure_ascii=False) for o in objects).encode()

    def says(role, content):
        return {"role": role, "content": content}

    chat = [says("system", "Be brief."), says("user", " Hi <s>"), says("assistant", "Hello.\n"), says("user", "Bye"),
            says("assistant", "\u00e9 \U0001f642")]
    for choices in range(24):
        yield bytes([choices, 9]) + lines({"text": "To be"}, {"prompt": "", "completion": "or"}, {"messages": chat},
                                          "", {"messages": chat[1:3], "text": "not read", "id": [1, {}]})
    for wrong in ({"prompt": "a"}, {"completion": ""}, {"text": None}, {"messages": []}, {"messages": chat[:2]},
                  {"messages": [says("tool", "x")]}, {"messages": [says("assistant", "first")]}, [], "{", '{"text": 1}'):
        yield b"\4\5" + lines({"text": "fine"}, wrong)
def jinja_seeds():
    yield from (template.encode() for template in (
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m.content | string | trim }}{% endfor %}",
        "{%- set ns = namespace(n=0) -%}\n  {% for m in messages[::-1] if m.role != 'user' %}{% set ns.n = ns.n + loop.index %}"
        "{% if loop.last %}{% break %}{% else %}{% continue %}{% endif %}{% else %}-{% endfor +%}\n{{ ns.n }}",
        "{% macro m(a, b='x', c=[1, 2.5]) %}{{ a[1:-1:2] ~ b }}{{ m(a, b) if not a }}{% endmacro %}{{ m('abc', b=none) | upper }}",
        "{% for k, v in messages[2].tool_calls[0].function.arguments.items() %}{{ k }}={{ v | tojson(indent=2) }}{% endfor %}",
        "{{ messages | selectattr('content', 'string') | map(attribute='role') | join(', ') | replace('s', 'ß') | title }}",
        "{% set x | trim %} {% raw %}{{ y }}{% endraw %} {# c #}{% endset %}{% generation %}{{ x.split()[0] }}{% endgeneration %}",
        "{{ raise_exception('no ' ~ strftime_now('%d %B')) if 1 < 2 <= 3 and 'a' in 'abc' is string else {'a': (1,)}.a[0] ** 2 // 3 % 2 }}"))


def gguf_file(keys, tensors, version=3):
    def text(value):
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def value(kind, item):
        formats = {0: "B", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q"}
        return text(item) if kind == 8 else struct.pack("<" + formats[kind], item)

    file = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    for name, kind, item in keys:
        file += text(name)
        if isinstance(item, list):
            file += struct.pack("<IIQ", 9, kind, len(item)) + b"".join(value(kind, each) for each in item)
        else:
            file += struct.pack("<I", kind) + value(kind, item)
    data = b""
    for name, dims, kind, size in tensors:
        data += bytes(-len(data) % 32)
        file += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += bytes(range(64)) * (size // 64) + bytes(size % 64)
    return file + bytes(-len(file) % 32) + data


def gguf_seeds():
    def keys(arch):
        sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 128,
                 "attention.head_count": 2}
        named = [("general.architecture", 8, arch)] + [(f"{arch}.{key}", 4, size) for key, size in sizes.items()]
        return named + [(f"{arch}.attention.layer_norm{'' if arch == 'bloom' else '_rms'}_epsilon", 6, 1e-5)]

    def matrix(name, inputs, outputs):
        return (name + ".weight", (inputs, outputs), 8, inputs * outputs // 32 * 34)

    def vector(name, size):
        return (name, (size,), 0, 4 * size)

    tokens = ["<unk>", "<s>", "a", "b", "ab", "\u0120", "\u0120a", "\u2581", "\u2581a", "<0x0A>", "1"]
    tokenizer = [("tokenizer.ggml.tokens", 8, tokens), ("tokenizer.ggml.token_type", 5, [2, 3] + [1] * 7 + [6, 1]),
                 ("tokenizer.ggml.bos_token_id", 4, 1), ("tokenizer.ggml.eos_token_id", 4, 1)]
    by_bytes = tokenizer + [("tokenizer.ggml.model", 8, "gpt2"),
                            ("tokenizer.ggml.merges", 8, ["a b", "\u0120 a"])]
    by_scores = tokenizer + [("tokenizer.ggml.model", 8, "llama"), ("tokenizer.ggml.add_eos_token", 7, True),
                             ("tokenizer.ggml.scores", 6, [float(-i) for i in range(len(tokens))])]
    llama = [matrix("token_embd", 32, 11), matrix("output", 32, 11), vector("output_norm.weight", 32)]
    llama += [vector(f"blk.0.{name}_norm.weight", 32) for name in ("attn", "ffn")]
    llama += [matrix(f"blk.0.attn_{name}", 32, 32) for name in ("q", "k", "v", "output")]
    llama += [matrix(f"blk.0.ffn_{name}", 32, 128) for name in ("gate", "up")] + [matrix("blk.0.ffn_down", 128, 32)]
    yield gguf_file(keys("llama") + by_bytes + [("tokenizer.ggml.pre", 8, "llama-bpe")], llama)
    yield gguf_file(keys("llama") + by_scores, llama + [vector("rope_freqs.weight", 8)], version=2)
    biases = [vector(f"blk.0.attn_{name}.bias", 32) for name in ("q", "k", "v")]
    yield gguf_file(keys("qwen2") + by_bytes + [("tokenizer.ggml.pre", 8, "qwen2")], llama + biases)
    norms = [vector(f"blk.0.attn_{name}_norm.weight", 16) for name in ("q", "k")]
    yield gguf_file(keys("qwen3") + [("qwen3.attention.key_length", 4, 16)] + by_bytes, llama + norms)
    bloom = [matrix("token_embd", 32, 11)]
    for name in ("token_embd_norm", "output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        bloom += [vector(f"{name}.{kind}", 32) for kind in ("weight", "bias")]
    for name, inputs, outputs in (("attn_qkv", 32, 96), ("attn_output", 32, 32), ("ffn_up", 32, 128),
                                  ("ffn_down", 128, 32)):
        bloom += [matrix(f"blk.0.{name}", inputs, outputs), vector(f"blk.0.{name}.bias", outputs)]
    yield gguf_file(keys("bloom") + by_bytes + [("tokenizer.ggml.pre", 8, "bloom")], bloom)
    yield gguf_file([("a", 0, 1), ("b", 10, 2**63), ("c", 7, [True, False])], [("t", (4, 2, 1), 1, 16)])


def nf4_seeds():
    plain = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 32]}
    yield json.dumps(plain).encode()
    nested = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.02534}
    yield json.dumps(plain | nested).encode()
    yield json.dumps(plain | nested | {"nested_offset": 3.5e38}).encode()
    yield json.dumps(plain | {"quant_type": "fp4", "shape": [2**40, 1]}).encode()


def main():
    folder = pathlib.Path(sys.argv[1])
    targets = {"safetensors": safetensors_seeds(), "shards": shard_seeds(), "json": json_seeds(),
               "config": config_seeds(), "toml": toml_seeds(), "tokenizer": tokenizer_seeds(), "gguf": gguf_seeds(),
               "nf4": nf4_seeds(), "json_lines": json_lines_seeds(), "jinja": jinja_seeds()}
    for name, seeds in targets.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds):
            (folder / name / f"seed-{number}").write_bytes(seed)


if __name__ == "__main__":
    main()
