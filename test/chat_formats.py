"""Shared by tests: chat templates, and folders with a tokenizer and such a template."""

import json

from known_tokenizers import from_sentencepiece, llama3
from tokenizers import pre_tokenizers

# Hugging Face's chat templates, shortened.
CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PLAIN_CHATML = ("{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}"
                "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")
LLAMA3 = ("{{- bos_token }}{%- for m in messages %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + "
          "m['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
          "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}")
FIRST_USER = ("{%- if messages[0].role == 'system' %}{%- set system, rest = messages[0].content, messages[1:] %}"
              "{%- else %}{%- set system, rest = none, messages %}{%- endif %}")
LLAMA2 = FIRST_USER + """
{%- for m in rest %}{%- if loop.first and system %}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m.content %}
{%- else %}{%- set content = m.content %}{%- endif %}
{%- if m.role == 'user' %}{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- else %}{{- ' ' + content.strip() + ' ' + eos_token }}{%- endif %}{%- endfor %}"""
MISTRAL = FIRST_USER + """
{{- bos_token }}{%- for m in rest %}{%- if m.role == 'user' %}
{{- OPEN + (system + '\\n\\n' if loop.first and system else '') + m.content + CLOSE }}
{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"""
MISTRAL_1 = MISTRAL.replace("OPEN", "' [INST] '").replace("CLOSE", "' [/INST]'")
MISTRAL_3 = MISTRAL.replace("OPEN", "'[INST] '").replace("CLOSE", "'[/INST]'")
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
GEMMA = FIRST_USER + """
{{- bos_token }}{%- for m in rest %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (system + '\\n\\n' if loop.first and system else '') +
m.content | trim + '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""


def llama3_with_headers():
    tokenizer = llama3()
    tokenizer.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    return tokenizer


def gemma():
    """Gemma's special tokens, in Llama 2's vocabulary and without a space before a text."""
    tokenizer = from_sentencepiece("tokenizer.model.v1", pre_tokenizers.Metaspace(prepend_scheme="never", split=False))
    tokenizer.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    return tokenizer


def save_tokenizer(folder, tokenizer, template, begin, end):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
    config |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
