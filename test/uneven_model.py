"""A Llama each of whose layers has sizes and a window of its own: the trainer's family for tests (llmc/family_uneven.h), in
PyTorch, registered with transformers."""

import copy

import make_model
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

# Neighbours that are alike and others; kinds differ in the window, the heads, their sizes and the MLP's width.
WIDE = {"heads": 6, "kv_heads": 3, "head_size": 12, "mlp_width": 100, "window": 0}
NARROW = {"heads": 4, "kv_heads": 1, "head_size": 20, "mlp_width": 44, "window": 5}
SMALL = {"heads": 3, "kv_heads": 3, "head_size": 8, "mlp_width": 128, "window": 16}
LAYERS = [NARROW, NARROW, WIDE, SMALL, NARROW, WIDE, WIDE]


class UnevenConfig(LlamaConfig):
    model_type = "uneven"
    layer_sizes: list | None = None


class UnevenLayer(LlamaDecoderLayer):
    """A layer that ignores the mask and the angles of the model, and makes its own."""

    def __init__(self, config, number):
        sizes = config.layer_sizes[number]
        own = copy.deepcopy(config)
        own.num_attention_heads, own.num_key_value_heads, own.head_dim = (sizes[key] for key in ("heads", "kv_heads", "head_size"))
        own.intermediate_size = sizes["mlp_width"]
        super().__init__(own, number)
        self.rotary, self.window = LlamaRotaryEmbedding(own), sizes["window"]

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, position_ids=None, **others):
        queries, keys = position_ids[0][:, None], torch.arange(int(position_ids[0, -1]) + 1)[None]
        seen = (keys <= queries) & ((queries - keys < self.window) if self.window else True)
        mask = torch.zeros(seen.shape, dtype=hidden_states.dtype).masked_fill(~seen, torch.finfo(hidden_states.dtype).min)
        angles = self.rotary(hidden_states, position_ids=position_ids)
        return super().forward(hidden_states, attention_mask=mask[None, None], position_embeddings=angles,
                               position_ids=position_ids, **others)


class UnevenForCausalLM(LlamaForCausalLM):
    config_class = UnevenConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = torch.nn.ModuleList(UnevenLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()


AutoConfig.register("uneven", UnevenConfig)
AutoModelForCausalLM.register(UnevenConfig, UnevenForCausalLM)


def make_uneven(folder, vocab, positions, layers=LAYERS, channels=48):
    """A random model with weights that both precisions can store."""
    config = UnevenConfig(num_hidden_layers=len(layers), layer_sizes=layers, hidden_size=channels, vocab_size=vocab,
                          num_attention_heads=4, num_key_value_heads=2, head_dim=12, intermediate_size=96,
                          max_position_embeddings=positions, rms_norm_eps=1e-5, bos_token_id=vocab - 1, eos_token_id=vocab - 1)
    make_model.save(make_model.random_model(config, 0), folder, "bf16", False, None)
