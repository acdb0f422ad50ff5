"""Shared by tests: GGUF files, written as llama.cpp's converter writes them."""

import gguf
import numpy as np
import transformers


def pairs(w, heads):
    """Llama's queries or keys in the order of a GGUF."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def apart(w, heads):
    """BLOOM's queries, keys and values in the order of a GGUF."""
    return w.reshape(heads, 3, w.shape[0] // heads // 3, -1).swapaxes(0, 1).reshape(w.shape)


def as_gguf(name, w, config, names):
    """A tensor under its name in a GGUF, with its rows in that order."""
    endings = (".weight", ".bias")
    ours = names.get_name(name, endings) or names.get_name(name.removeprefix("transformer."), endings)
    permuted = config.model_type in ("llama", "mistral", "smollm3", "ministral3", "granite")
    if permuted and "q_proj" in name:
        w = pairs(w, config.num_attention_heads)
    if permuted and "k_proj" in name:
        w = pairs(w, config.num_key_value_heads)
    if "query_key_value" in name:
        w = apart(w, config.num_attention_heads)
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        w = w + 1
    return ours, w


# Where the scales of a block are, in the types that PyPI's gguf only reads.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}


def quantized(w, kind):
    """A matrix in this type; in one of SCALES random blocks with about its spread."""
    if kind.name not in SCALES:
        return gguf.quants.quantize(np.ascontiguousarray(w), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(w.size).integers(0, 256, (w.shape[0], w.shape[1] // block, size), dtype=np.uint8)
    for spread in (1, w.std()):
        scale = np.float16(spread / (1 if spread == 1 else gguf.quants.dequantize(blocks, kind).std()))
        for at in SCALES[kind.name]:
            blocks[..., at:at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(w.shape[0], -1)


def write_gguf(path, model, arch, add_more=lambda writer: None, types=("Q8_0", "Q8_0", "F16", "BF16", "F32")):
    """Writes a model as llama.cpp's converter does, with matrices in these formats in turn."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    add_more(writer)
    layers = config.num_hidden_layers
    writer.add_block_count(layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_context_length(getattr(config, "max_position_embeddings", 2048))
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    if arch == "bloom":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
        if arch == "qwen3":
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        if config.model_type == "mistral" and config.sliding_window:
            writer.add_sliding_window(config.sliding_window)
    arch_number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_number, layers)
    types = [gguf.GGMLQuantizationType[name] for name in types]
    for number, (name, w) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and (config.tie_word_embeddings or arch == "bloom"):
            continue
        ours, w = as_gguf(name, w.float().numpy(), config, names)
        kind = types[number % len(types)] if w.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(ours, quantized(w, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 128}
MODELS = {
    "llama": (transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True, rms_norm_eps=1e-5), "llama"),
    "own head": (transformers.LlamaConfig(**LLAMA, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
                 "llama"),
    "mistral": (transformers.MistralConfig(**LLAMA, sliding_window=32), "llama"),
    "qwen2": (transformers.Qwen2Config(**LLAMA), "qwen2"),
    "qwen3": (transformers.Qwen3Config(**LLAMA, head_dim=32, tie_word_embeddings=True), "qwen3"),
    "bloom": (transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=160), "bloom"),
}


def add_vocabulary(writer, model, tokens, types, merges=None, scores=None, pre=None, **keys):
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    for key, value in keys.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
