"""Chat templates: what they write is what jinja2 writes as transformers sets it up, and what of it is learnt."""

import json
import random
import re
import subprocess

import compare_chat_templates as compare
import numpy as np
import pytest
import transformers
import transformers.utils.chat_template_utils as transformers_templates
from chat_formats import LLAMA3, PLAIN_CHATML, llama3_with_headers, save_tokenizer
from example_files import VOCAB, lines_of, says, tokenizer  # noqa: F401 (a fixture)
from known_tokenizers import encode_all, probe, smollm2
from trainer_runs import make

USUALLY = "fp32"  # see conftest.py

MESSAGES = [says("system", " Be brief. "), says("user", "Hi\u2003"), says("assistant", "x<y & 'z'"), says("user", "日本🙂")]
GIVEN = {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer", "enum": [1, 2.5, None, True]}}}}}],
    "bos_token": "<s>", "number": 7, "float": 1e16, "small": 1.5e-5, "text": "a-b c", "empty": [], "no": None, "yes": True,
    "names": ["b", "A", "c"], "nested": {"k": {"l": [1, 2, 3]}, "items": 5}}

# One construct a line. Each is rendered with the variables above.
CONSTRUCTS = r"""
{{ number }} {{ float }} {{ small }} {{ 1/3 }} {{ 1e300 * 10 }} {{ -0.0 }} {{ 100.0 }} {{ 1e22 }} {{ 0.1 + 0.2 }} {{ 123456789.125 }}
{{ yes }} {{ no }} {{ missing }} {{ [yes, no, 1.0, 'a\'b', "x\ny", '"', '\u00e9\u200b'] }} {{ (1,) }} {{ () }} {{ {'a': [1], 2: none} }}
{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7.5 % 2 }} {{ -7.5 // 2 }} {{ 7 / 2 }} {{ true + 1 }} {{ -number }} {{ +number }}
{{ 'a' ~ 1 ~ none ~ true ~ 2.0 ~ missing }} {{ 'a' + 'b' }} {{ [1] + [2] }} {{ 'ab' * 3 }} {{ [0] * 2 }} {{ '%s-%d-%%' % ('x', 3) }} {{ '%s' % 5 }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }} {{ 1 == 1.0 == true }} {{ [1, 2] < [1, 3] }} {{ 'a' != 'b' }} {{ 2 >= 2 }}
{{ 'a' in 'abc' }} {{ 1 in [1] }} {{ 'k' in nested }} {{ 'z' not in nested }} {{ 1 in missing }} {{ not yes }} {{ yes and 'b' }} {{ no or 'c' }} {{ not no in [none] }}
{{ text[1] }} {{ text[-1] }} {{ text[1:3] }} {{ text[::-1] }} {{ text[::2] }} {{ text[-3:] }} {{ names[:-1] }} {{ names[5:] }} {{ text[10] }}| {{ (1, 2, 3)[1:] }} {{ names[::-2] }}
{{ messages[3].content[0] }}{{ messages[3].content[1:] }}{{ messages[3].content | length }}{{ messages[3].content[::-1] }}
{{ nested.k.l[1] }} {{ nested['k']['l'][-1] }} {{ nested.items() | list }} {{ nested['items'] }} {{ nested.k.z }} {{ nested.get('z', 3) }} {{ nested.get('z') }} {{ nested.keys() | list }}
{{ nested.k is defined }} {{ nested.z is defined }} {{ missing is undefined }} {{ no is none }} {{ text is string }} {{ nested is mapping }} {{ names is iterable }} {{ names is sequence }} {{ nested is sequence }}
{{ 5 is number }} {{ yes is number }} {{ yes is integer }} {{ 5 is integer }} {{ 5.0 is float }} {{ yes is boolean }} {{ yes is true }} {{ 1 is true }} {{ no is false }} {{ 5 is odd }} {{ 4 is even }} {{ 6 is divisibleby 3 }}
{{ 5 is equalto 5 }} {{ 5 is eq(5) }} {{ 5 is gt 3 }} {{ 'a' is in ['a'] }} {{ missing is sequence }} {{ missing is iterable }} {{ none is sameas none }} {{ text is not string }} {{ text.upper is callable }}
{{ ' a b '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'xxa'.lstrip('x') }}|{{ 'axx'.rstrip('x') }}|{{ '\x1c\u2003 a\u3000\x85'.strip() }}|{{ '\u200ba\ufeff' | trim }}|{{ '  a ' | trim }}|{{ 'xax' | trim('x') }}
{{ 'a b  c'.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ ' a b c '.split(none, 1) }} {{ 'a\nb\r\nc\u2028d'.splitlines() }} {{ '</think>'.split('</think>')[-1] == '' }}
{{ text.upper() }} {{ 'ABC'.lower() }} {{ "they're bill's".title() }} {{ 'aBC dEF'.capitalize() }} {{ "they're (bill's) x-y" | title }} {{ 'aBC' | capitalize }} {{ 'é' | upper }} {{ text | upper | lower }}
{{ text.startswith('a') }} {{ text.endswith(('x', 'c')) }} {{ text.find('b') }} {{ text.find('z') }} {{ text.count('-') }} {{ text.index('c') }} {{ ', '.join(names) }} {{ '12'.isdigit() }} {{ 'a1'.isalnum() }} {{ ' '.isspace() }}
{{ 'aaa'.replace('a', 'b', 2) }} {{ 'abc'.replace('', '-') }} {{ 'aaa' | replace('a', 'b') }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }}
{{ tools | tojson }}
{{ tools | tojson(indent=2) }}
{{ [] | tojson(indent=2) }} {{ {} | tojson }} {{ 'é"\\/\n\t\x01\x7f<>&\u2028' | tojson }} {{ 'é🙂\x7f' | tojson(ensure_ascii=true) }} {{ {'b': 1, 'a': [1.0, none, true]} | tojson(sort_keys=true) }} {{ {'a': [1, 2]} | tojson(separators=(',', ':')) }} {{ [{'a': []}] | tojson(indent=4) }} {{ 1e16 | tojson }} {{ {1: 2, none: 3, true: 4} | tojson }}
{{ names | join(', ') }} {{ [1, none, 'a'] | join }} {{ messages | map(attribute='role') | join('/') }} {{ names | map('upper') | list }} {{ [1, 2] | map('string') | join('+') }} {{ messages | map(attribute='x', default='-') | list }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }} {{ messages | rejectattr('role', 'in', ['user']) | list | length }} {{ [1, 2, 3] | select('odd') | list }} {{ [0, 1, ''] | select | list }} {{ [0, 1] | reject | list }} {{ messages | selectattr('nope') | list }} {{ no | selectattr('x') | list }}
{{ names | sort }} {{ names | sort(reverse=true) }} {{ names | sort(case_sensitive=true) }} {{ messages | sort(attribute='role') | map(attribute='role') | list }} {{ {'b': 1, 'A': 2} | dictsort }} {{ {'b': 1, 'a': 2} | dictsort(by='value') }} {{ nested | items | list }}
{{ names | first }} {{ names | last }} {{ empty | first }}| {{ names | length }} {{ nested | count }} {{ names | reverse | list }} {{ 'abc' | reverse }} {{ 'abc' | list }} {{ nested | list }}
{{ missing | default('d') }} {{ no | default('d') }} {{ no | default('d', true) }} {{ '' | default('d', boolean=true) }} {{ missing | d }}| {{ '12' | int }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ 3.9 | int }}
{{ 'a\nb\n\nc' | indent }} {{ 'a\nb' | indent(2, true) }} {{ 'a\n\nb' | indent(1, blank=true) }} {{ 'a' | string }} {{ 5 | string }} {{ '<a>' | safe }} {{ ('<' | safe) + '<&' }} {{ ('<' | safe) ~ '<' }} {{ 'a b' | replace(' ', '_') | upper }}
{{ '%d %i|%d' % (3.7, -3.7, true) }} {{ '%s|%r|%r' % ('é', 'b', 1) }} {{ '%s' % [1] }}
{{ '<{}é|{}>'.format('a', 1) }} {{ '{1}{0}{1}'.format('a', none) }} {{ '{x} {y} {{}} {}'.format(true, x=2.5, y=[1]) }} {{ '{{{}}}'.format('') }} {{ ''.format() }}
{{ 'a-é-b'.find('b') }} {{ 'aébab'.rfind('b') }} {{ 'abab'.find('') }} {{ 'abab'.rfind('') }} {{ 'aaaa'.count('aa') }} {{ 'éb'.count('') }} {{ 'abab'.rindex('a') }} {{ 'abab'.startswith('') }}
{{ ' 12 ' | int }} {{ '\u200312\u3000' | int }} {{ '\x1c+7\x85' | int }} {{ '\u2003-3.9' | int }} {{ '--5' | int }} {{ '' | int(4) }}
{{ messages | selectattr('role', '==', 'user') | list | length }} {{ [1, 2, 3] | select('>=', 2) | list }} {{ [1, 2, 3] | reject('<', 3) | list }} {{ [1, 2] | select('!=', 1) | list }} {{ [1, 2, 3] | select('<=', 2) | list }} {{ [1, 2] | select('>', 1) | list }} {{ 1 is ge 1 }}
{% if [] | select %}yes{% endif %} {% if messages | selectattr('role', 'equalto', 'nobody') %}yes{% else %}no{% endif %} {{ 'a' if names | map('upper') else 'b' }} {% if names | map('upper') | list %}yes{% endif %} {{ ({} | items and 1) }} {{ ([] | reverse and 1) }} {{ ([] | map('upper') or 2) is defined }}
{{ [1, 2, 3] | select | first }} {{ 2 in [1, 2, 3] | select }} {% set g = names | map('upper') %}{{ g[0] is defined }}{{ g.x is defined }} {{ g is iterable }} {{ g is sequence }} {{ g is string }} {{ g == g }}
{% set g = [1, 2] | map('string') %}{% for x in g %}{{ x }}/{{ loop.length }}{% endfor %} {% set a, b = [1, 2] | map('string') %}{{ a ~ b }} {{ [3, 1] | select | sort }} {{ [3, 1] | select | reverse }} {{ [1, 2] | reverse | map('string') | list }}
{% for x in [1, 2, 3] %}{% for y in [] %}{% else %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 3 %}{% break %}{% endif %}{% endfor %}{{ x }}{% endfor %} {% set t = 'old' %}{% for x in [1, 2, 3] %}{% set t %}a{% if x == 2 %}{% break %}{% endif %}b{% endset %}{{ t }}{{ x }}{% endfor %}{{ t }}
{% for x in [1, 2] %}{% set outer = loop %}{% for y in [1, 2] %}{{ outer.index }}{{ loop.index }},{% endfor %}{% endfor %} {% macro of(l) %}{{ l.last }}{% endmacro %}{% for x in [1, 2] %}{{ of(loop) }}{% endfor %} {% set ns = namespace() %}{% for x in [1] %}{% set ns.l = loop %}{% endfor %}{{ ns.l.index }} {% set f = 'ab'.upper %}{{ f() }}
{% for m in messages %}{{ loop.index }}/{{ loop.index0 }}/{{ loop.revindex }}/{{ loop.length }}/{{ loop.first }}/{{ loop.last }}/{{ loop.previtem.role if loop.previtem is defined }}/{{ loop.nextitem.role if loop.nextitem is defined }};{% endfor %}
{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% else %}none{% endfor %} {% for x in empty %}a{% else %}none{% endfor %} {% for k, v in nested.items() %}{{ k }}={{ v }};{% endfor %} {% for c in 'abc' %}{{ c }}.{% endfor %} {% for k in nested %}{{ k }}{% endfor %}
{% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %} {% for x in [1, 2] %}{% if x %}{% continue %}{% endif %}{% else %}none{% endfor %} {% for x in [[1, [2, 3]]] %}{% for a, (b, c) in [x] %}{{ a }}{{ b }}{{ c }}{% endfor %}{% endfor %}
{% set x = 1 %}{% for y in [1, 2] %}{{ x }}{% set x = 5 %}{{ x }}{% endfor %}{{ x }} {% if yes %}{% set x = 2 %}{% endif %}{{ x }} {% set a, b = 1, 2 %}{{ a + b }} {% set ns = namespace(n=0, l=[]) %}{% for y in [1, 2] %}{% set ns.n = ns.n + y %}{% set ns.l = ns.l + [y] %}{% endfor %}{{ ns.n }}{{ ns.l }}{{ ns.z is defined }}
{% set block %} a {{ number }} {% endset %}[{{ block }}] {% set block | trim | upper %} b {% endset %}[{{ block }}] {% set x = namespace() %}{% set x.a = 'b' %}{{ x.a }}
{% macro m(a, b=2, c=a) %}{{ a }}-{{ b }}-{{ c }}-{{ d }};{% endmacro %}{% set d = 9 %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=5, a=4) }}{{ m() }}{{ m(*[7, 8]) }}{{ m(**{'a': 6}) }}{{ m(1) | length }} {% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(3) }}
{{ 'a' if yes else 'b' }} {{ 'a' if no else 'b' }} {{ 'a' if no }}| {{ 'x' if no else 'y' if no else 'z' }} {% if no %}1{% elif yes %}2{% else %}3{% endif %} {{ range(3) | list }} {{ range(1, 6, 2) | list }} {{ range(3, 0, -1) | list }} {{ dict(a=1, b=2) }} {{ dict({'z': 1}, y=2) }}
{% set k, v, i, r = nested.keys(), nested.values(), nested.items(), range(3) %}{{ k | list }} {{ i | length }} {{ 2 in r }} {{ ('a', 1) in i }} {{ k | first }} {{ i | last }} {{ r | reverse | list }} {{ k | join('/') }} {{ k | sort }} {{ r | map('string') | list }} {{ not range(0) }} {{ 1 if {}.keys() else 2 }}{% if k %}k{% endif %} {{ r is iterable }} {{ k is mapping }} {{ k is string }} {{ k == [] }} {% for x in r %}{{ loop.length }}{{ x }}{% endfor %} {% for a, b in i %}{{ a }}{% endfor %} {% set a, b = range(2) %}{{ b }} {{ ', '.join(k) }} {{ v | list | tojson }}
{{ strftime_now('%d %B %Y, %A %j %H:%M %%') }} {{ strftime_now('%Y-%m-%d') }} {# comment {{ x }} #}|{#- c -#} a {% raw %}{{ x }} {% if %}{% endraw %} {{ '{{' }} {{ "a" 'b' "c" }} {{ {'a': {'b': 1}}['a']['b'] }} {{ {'a': 1}.a }} {{ [[1], [2]][1][0] }}
{%- if yes -%} a {%- endif -%} b {{- number -}} c {% if no %}{{ 1 | nofilter }}{{ 1 is notest }}{% endif %} {%+ if yes %} d {% endif +%} e
  {% if yes %}
    indented {{ number }}
  {% endif %}
  {%- for x in [1, 2] %}
  - {{ x }}
  {%- endfor %}
{% generation %}ab{{ number }}é{% endgeneration %} x {% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}
""".strip("\n").split("\n")
# Lines that belong together.
CONSTRUCTS = CONSTRUCTS[:-8] + ["\n".join(CONSTRUCTS[-8:-1]) + "\n", CONSTRUCTS[-1], "a\n\n", "\n", "a\r\nb\r{% if yes %}\r\n x\n{% endif %}"]


@pytest.fixture(autouse=True)
def fixed_date(monkeypatch):
    monkeypatch.setattr(transformers_templates, "datetime", compare.FixedDate)


def both(cases):
    theirs = [compare.rendered_by_jinja2(template, {"tools": None, "documents": None, "add_generation_prompt": False} | given)
              for template, given in cases]
    return zip(cases, theirs, compare.rendered_by_probe(cases), strict=True)


def test_constructs():
    for (template, _), theirs, ours in both([(template, GIVEN | {"documents": None, "add_generation_prompt": False}) for template in CONSTRUCTS]):
        assert "error" not in theirs, (template, theirs)
        assert ours == theirs, template


# Templates of our own in the manner of the published ones. Fuzzed chats are rendered with each.
TOOL_CHATML = r"""
{%- macro thoughts(text) %}{{- '<think>\n' + text.strip('\n') + '\n</think>\n\n' }}{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == 'user' %}{%- set ns.found = true %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set said = '' %}
        {%- if message.reasoning_content is string %}
            {%- set said = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set said = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or said) %}{{- thoughts(said) }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
HEADERS = r"""
{{- bos_token }}
{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Today: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("One call at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
SCHEMAS = r"""
{%- macro type_of(schema, depth=0) -%}
{%- if schema.enum %}{{ schema.enum | map('tojson') | join(' | ') }}
{%- elif schema.type == 'array' %}{{ type_of(schema['items'], depth + 1) if schema['items'] else 'any' }}[]
{%- elif schema.type == 'object' and schema.properties -%}
{
{%- for name, one in schema.properties.items() %}
{{ '  ' * depth }}{{ name }}{{ '' if name in (schema.required or []) else '?' }}: {{ type_of(one, depth + 1) }}{% if one.description %} // {{ one.description | trim }}{% endif %}
{%- if not loop.last %},{% endif %}
{%- endfor %}
}
{%- else %}{{ schema.type | upper }}{{ schema.default | default('none') if schema.default is defined }}
{%- endif %}
{%- endmacro -%}
{% for tool in tools or [] if tool.function is defined %}
### {{ loop.index }}. {{ tool.function.name | title }}: {{ type_of(tool.function.parameters) }}
{% if tool.function['return'] %}returns {{ tool.function['return'].description }}
{% endif %}
{% else %}
no tools
{% endfor %}
{% for message in messages %}
{% if message.content is string %}{% set text = message.content %}{% else %}{% set text = message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('\n') %}{% endif %}
  {% if message.role == 'assistant' -%}
  [A] {% generation %}{{ text | trim }}{{ eos_token }}{% endgeneration %}

  {%- else %}
[{{ message.role[0] | upper }}{{ loop.index }}] {{ text.split('\n')[0] }} ({{ text | length }})
  {% endif %}
{% endfor %}
"""
TURNS = r"""
{%- set loop_messages = messages %}
{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "ipython" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("Roles must alternate, not " ~ message.role) }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[TOOLS] [" }}
            {%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}{{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- endif %}
            {%- endfor %}{{- "][/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}{{- raise_exception("IDs have 9 characters!") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message.role == "tool" %}{{- "[RESULTS] " ~ message.content ~ "[/RESULTS]" }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported, not " ~ message.role) }}{%- endif %}
{%- endfor %}
"""
OWN = {"tool chatml": TOOL_CHATML, "headers": HEADERS, "schemas": SCHEMAS, "turns": TURNS, "chatml": PLAIN_CHATML, "llama3": LLAMA3}


@pytest.mark.parametrize("name", OWN)
def test_fuzzed_chats(name):
    chats = compare.Chats(seed=random.randrange(2**32))
    cases = [(OWN[name], chats.variables()) for _ in range(120)]
    written = 0
    for (_, given), theirs, ours in both(cases):
        assert compare.is_same(theirs, ours), (json.dumps(given), theirs, ours)
        written += "text" in ours
    assert written >= 20


# ---- what is refused

# Two values that are equal and hold 2^60 numbers, in lists that are shared; and a text of 2 MiB.
DOUBLED = "{% set n = namespace(a=[1], b=[1]) %}{% for x in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
LONG = "{% set n = namespace(a='ab') %}{% for x in range(20) %}{% set n.a = n.a + n.a %}{% endfor %}"
REFUSED = {
    "{% for x in range(100000) %}{% for y in range(100000) %}{% endfor %}{% endfor %}": "does too much: more than 20 million steps, where 16 bytes of text count as one",
    "{% set n = namespace(t='ab') %}{% for x in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}": "does too much",
    "a\n{% for x in range(9999999999) %}{% endfor %}": "(line 2): range(): Range too big",
    "{{ 'x' * 99999999999 }}": "does too much",
    "{% macro m() %}{{ m() }}{% endmacro %}\n{{ m() }}": "the macros call each other too deeply",
    "{% set n = namespace(l=[]) %}{% for x in range(999) %}{% set n.l = [n.l] %}{% endfor %}": "nest more than 200 deep",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}": "nests more than 200 deep", "{{ " + "not " * 300 + "1 }}": "nests more than 200 deep",
    "{% if x %}" * 300: "nests more than 200 deep", "{{ x" + "[0]" * 300 + " }}": "nests more than 200 deep",
    "{{ 1" + " | string" * 300 + " }}": "nests more than 200 deep", "{{ x" + ".y" * 300 + " }}": "nests more than 200 deep",
    "{{ 1" + " + 1" * 100000 + " }}": "an expression nests more than 1000 deep: divide it with {% set %}",
    "{{ x" + " or x" * 100000 + " }}": "nests more than 1000 deep", "{{ x" + " and x" * 100000 + " }}": "nests more than 1000 deep",
    "{{ 2" + " * 2" * 100000 + " }}": "nests more than 1000 deep", "{{ x" + " if x" * 100000 + " }}": "nests more than 1000 deep",
    "{{ " + "f(" * 60 + "1" + (" + 1" * 900 + ")") * 60 + " }}": "nests more than 1000 deep",
    "{% set n = namespace(l=none) %}{% for x in range(999) %}{% for y in [n.l] %}{% set n.l = loop %}{% endfor %}{% endfor %}": "holds a loop is not supported",
    "{% for x in [1] %}{{ [loop] }}{% endfor %}": "holds a loop is not supported", "{{ ['a'.upper] }}": "holds a method is not supported",
    "{% set n = namespace(g=[]) %}{% for x in range(999) %}{% set n.g = [n.g] | select('defined') %}{% endfor %}": "nest more than 200 deep",
    DOUBLED + "{{ n.a }}": "does too much", DOUBLED + "{{ n.a == n.b }}": "does too much", DOUBLED + "{{ n.a < n.b }}": "does too much",
    DOUBLED + "{{ n.a | tojson }}": "does too much",
    LONG + "{{ " + "n.a ~ " * 200 + "1 }}": "does too much", LONG + "{{ '" + "%s" * 200 + "' % (" + "n.a, " * 200 + ") }}": "does too much",
    LONG + "{{ range(9999) | list | tojson(separators=(n.a, ':')) }}": "does too much", LONG + "{{ range(9999) | list | tojson(indent=n.a) }}": "does too much",
    "{{ none[1:] }}": "'NoneType' object cannot be sliced", "{{ 5[:2] }}": "'int' object cannot be sliced", "{{ {}[1:] }}": "'dict' object cannot be sliced",
    "{{ ([1] | select)[1:] }}": "'generator' object cannot be sliced", "{{ [1] | map('string') | length }}": "object of type 'generator' has no len()",
    "{{ [1] | map('string') | last }}": "is not reversible", "{{ [1] | map('string') }}": "a generator, as filters like map and select give, cannot be printed",
    "{{ {}.keys() }}": "cannot be printed", "{{ {'a': 1}.items() ~ '' }}": "cannot be printed", "{{ range(3) | string }}": "cannot be printed",
    "{{ {'a': 1}.keys() | tojson }}": "not JSON serializable", "{{ range(2) | tojson }}": "not JSON serializable", "{{ {'a': 1}.keys()[0] }}": "put | list after it",
    "{{ range(3)[0] }}": "put | list after it", "{{ range(3)[1:] }}": "cannot be sliced", "{{ range(3) + [1] }}": "unsupported operand", "{{ {}.values() * 2 }}": "unsupported operand",
    "{{ range(2) == range(2) }}": "is not compared: put | list after it", "{{ range(2) is sequence }}": "put | list after it", "{{ range(3).start }}": "put | list after it",
    "{{ [1] | map('string') | tojson }}": "not JSON serializable", "{{ ([1] | map('string')) + [1] }}": "unsupported operand", "{{ [1, none] | map('replace') | list }}": 'the filter "map": the filter "replace": misses its argument',
    "{% set g = [1, 2] | select %}{% for x in g %}{% break %}{% endfor %}{{ g | list }}": "a generator is used again: put | list after what makes it",
    "{% set g = [1, 2] | map('string') %}{{ 1 in g }}{{ g | first }}": "a generator is used again",
    "{% for x in [] %}{% else %}{% break %}{% endfor %}": "outside of a loop",
    "{% for x in [1] %}{% generation %}{% break %}{% endgeneration %}{% endfor %}": "outside of a loop",
    "{{ '%.3d' % 1 }}": "is not supported in `%`; %s, %r, %d and %i are", "{{ '%d' % 'a' }}": "%d format: a real number is required, not str",
    "{{ '%5s' % 1 }}": 'the format "%5" is not supported', "{{ '%f' % 1 }}": 'the format "%f" is not supported', "{{ '%' % 1 }}": "is not supported", "{{ '%(a)s' % {'a': 1} }}": "is not supported", "{{ '%d' % 1e300 }}": "too large",
    "{{ [1] | batch(2) }}": 'the filter "batch" is not supported', "{{ 'a' | center }}": 'the filter "center" is not supported',
    **{f"{{{{ 1 | {name} }}}}": f'the filter "{name}" is not supported' for name in ("abs", "attr", "e", "escape", "float", "format", "max", "min", "round", "sum", "unique")},
    **{f"{{{{ 'a' is {name} }}}}": f'the test "{name}" is not supported' for name in ("escaped", "filter", "lower", "test", "upper")},
    **{f"{{{{ 'a'.{name}() }}}}": f"str.{name}(): the method is not supported"
       for name in ("center", "isupper", "ljust", "partition", "rjust", "rpartition", "rsplit", "zfill")},
    "{{ 'ab'.find('b', 1) }}": "takes at most 1 argument", "{{ 2 ** 3 }}": "the operator ** is not supported", "{{ 0x10 }}": "only supported in decimal",
    "{{ 1_000 }}": "only supported in decimal", "{% for x in [1] %}{{ loop.cycle(1) }}{% endfor %}": "loop.cycle() is not supported",
    "{% filter upper %}{% endfilter %}": "the tag {% filter %} is not supported", "{% with a = 1 %}{% endwith %}": "the tag {% with %} is not supported",
    "{{ joiner() }}": "joiner() is not supported", "{% set x = cycler(1) %}": "cycler() is not supported", "{% do x %}": "the tag {% do %} is not supported",
    "{% macro m() %}{{ kwargs }}{% endmacro %}{{ m() }}": "the variable kwargs of a macro is not supported", "{% nosuch %}": "the tag {% nosuch %} is unknown",
    "a\n\n{{ raise_exception('No ' ~\n'system\nrole!') }}": "(line 3): refuses this: No system role!",
    "{{ 1 | nofilter }}": '(line 1): the filter "nofilter" is unknown', "{{ 1 is notest }}": 'the test "notest" is unknown',
    "\n{% if 1 %}{{ 1 | nofilter }}{% endif %}": '(line 2): the filter "nofilter" is unknown',
    "\n{% include 'x' %}": "(line 2): the tag {% include %} is not supported", "{% call m() %}{% endcall %}": "the tag {% call %} is not supported",
    "{% for x in y recursive %}{% endfor %}": "recursive loops are not supported", "{{ '{:5}'.format(1) }}": "a field like ':5' is not supported",
    "{{ '{0.x}'.format(1) }}": "a field like '0.x' is not supported", "{{ '{!r}'.format(1) }}": "a field like '!r' is not supported",
    "{{ '{} {0}'.format(1) }}": "cannot switch", "{{ '{}{}'.format(1) }}": "a replacement index is out of range", "{{ '{99999999}'.format(1) }}": "out of range",
    "{{ '{a}'.format(1) }}": "there is no argument 'a'", "{{ 'a}'.format(1) }}": "Single '}' encountered", "{{ 'a{'.format(1) }}": "expected '}'",
    LONG + "{{ '" + "{}" * 200 + "'.format(" + "n.a, " * 200 + ") }}": "does too much", "{{ 'a'.encode() }}": "str.encode(): the method is not supported",
    "{% if x %}": "{% elif %} is missing", "{{ x": "ends inside of a tag", "{{ x }": "unexpected '}'", "{# x": "a comment does not end",
    "{% raw %}": "{% raw %} does not end", "{{ 'x }}": "a string does not end", "{{ }}": "a tag ends too early", "{{ a b }}": "unexpected 'b'",
    "{% break %}": "outside of a loop", "{% set true = 1 %}": "can't assign to 'true'", "{{ x.y }}": "'x' is undefined",
    "{{ x() }}": "'x' is undefined", "{{ none + 1 }}": "unsupported operand type(s) for +", "{{ 'a' + 1 }}": 'can only concatenate str (not "int")',
    "{{ 1 / 0 }}": "division by zero", "{{ 1 % 0 }}": "division by zero", "{{ [].append(1) }}": "which is not allowed", "{{ {}.update() }}": "which is not allowed",
    "{{ 9223372036854775807 + 1 }}": "a number is too large", "{{ 99999999999999999999 }}": "is too large", "{{ 'ß'.upper() }}": "U+00DF cannot be changed",
    "{% for a, b in [1] %}{% endfor %}": "'int' object is not iterable", "{% for a, b in [[1]] %}{% endfor %}": "not enough values to unpack",
    "{{ 1 in 'a' }}": "requires string as left operand", "{{ 1 < 'a' }}": "not supported between instances", "{{ x | tojson }}": "not JSON serializable",
    "{{ namespace(_a=1) }}": 'cannot have the attribute "_a"', "{% set x.y = 1 %}": "cannot assign attribute on non-namespace",
    "{% macro m() %}{% generation %}{% endgeneration %}{% endmacro %}{{ m() }}": "{% generation %} inside of a macro", "{{ 5 | length }}": "has no len()",
    "{{ '%d' % 'a' }}": "%d format: a real number is required, not str", "{{ '%s' % () }}": "not enough arguments", "{{ '%x' % 1 }}": "is not supported",
    "{{ 'x'[0:1:0] }}": "slice step cannot be zero", "{{ 'a'.split('') }}": "empty separator", "{{ strftime_now(5) }}": "must be str",
    "{{ [1] | map('nofilter') | list }}": 'the filter "nofilter" is unknown', "{{ namespace() }}": "a namespace cannot be printed",
}


def test_what_is_refused():
    """In one line, with the template's line."""
    answers = compare.rendered_by_probe([(template, {}) for template in REFUSED])
    for (template, message), answer in zip(REFUSED.items(), answers, strict=True):
        assert message in answer.get("error", ""), (template[:80], answer)
        assert re.match(r"the chat template \(line \d+\): ", answer["error"]) and "\n" not in answer["error"]


# ---- tokens and what is learnt


def folder_of(path, make_tokenizer, template, begin="<|im_start|>", end="<|im_end|>", **settings):
    folder = save_tokenizer(path, make_tokenizer(), template, begin, end)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def kept_of(folder, lines, command="examples", chat_format="auto"):
    return [np.array(kept, dtype=np.int32) for kept in encode_all(folder, lines, chat_format, command=command)]


def learnt_texts(tokenizer, kept):
    """The texts that are learnt, one for each run of tokens."""
    runs, last = [], False
    for token in kept.tolist():
        if token >= 0:
            runs = runs + [[token]] if not last else runs[:-1] + [runs[-1] + [token]]
        last = token >= 0
    return [tokenizer.decode(run) for run in runs]


def says_with(role, content, **more):
    return says(role, content) | more


CALL = {"id": "abc123xyz", "type": "function", "function": {"name": "weather", "arguments": {"city": "Elsinore", "b": 1, "a": [1.5, None]}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"z": 1, "type": "object", "properties": {}}}}]
CHATS = [
    {"messages": [says("user", "Why?"), says("assistant", "So.")]},
    {"messages": [says("user", "Why?"), says("assistant", "<think>\nhm\n</think>\n\nSo."), says("user", "And?"),
                  says("assistant", "<think>\nwell\n</think>\n\nThus.")]},
    {"messages": [says("system", "Be."), says("user", "Why?"), says_with("assistant", "So.", reasoning_content="hm"), says("user", "x"),
                  says("assistant", "Thus.")]},
    {"messages": [says("user", "Weather?"), says_with("assistant", "", tool_calls=[CALL]), says_with("tool", "rain", name="weather"),
                  says("tool", "more rain"), says("assistant", "It rains.")], "tools": TOOLS},
    {"messages": [says("user", "Weather?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, says("tool", "rain"),
                  says("assistant", "It rains."), says("user", "Thanks"), says("assistant", "Bye.")], "tools": TOOLS},
    {"messages": [says("user", "a"), says_with("assistant", "wrong", weight=0), says("user", "No."), says("assistant", "right")]},
]
LEARNT = [
    ["<think>\n\n</think>\n\nSo.<|im_end|>"],
    ["So.<|im_end|>", "<think>\nwell\n</think>\n\nThus.<|im_end|>"],
    ["So.<|im_end|>", "<think>\n\n</think>\n\nThus.<|im_end|>"],
    ['<tool_call>\n{"name": "weather", "arguments": {"city": "Elsinore", "b": 1, "a": [1.5, null]}}\n</tool_call><|im_end|>',
     "<think>\n\n</think>\n\nIt rains.<|im_end|>"],
    ['<tool_call>\n{"name": "weather", "arguments": {"city": "Elsinore", "b": 1, "a": [1.5, null]}}\n</tool_call><|im_end|>',
     "It rains.<|im_end|>", "<think>\n\n</think>\n\nBye.<|im_end|>"],
    ["<think>\n\n</think>\n\nright<|im_end|>"],
]


def test_tokens_and_what_is_learnt(tmp_path):
    """Tokens are those of apply_chat_template. A thought that the template drops from an earlier answer is not
    learnt there, and the mark that ends an answer is."""
    folder = folder_of(tmp_path / "model", smollm2, TOOL_CHATML)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = lines_of(CHATS)
    for chat, kept, last, learnt in zip(CHATS, kept_of(folder, lines), kept_of(folder, lines, "learn-last"), LEARNT, strict=True):
        text = tokenizer.apply_chat_template(chat["messages"], tools=chat.get("tools"), tokenize=False)
        assert (kept & 0x7fffffff).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert learnt_texts(tokenizer, kept) == learnt
        assert learnt_texts(tokenizer, last) == learnt[-1:]
    [kept] = kept_of(folder, lines[-1:], "learn-all")
    assert "wrong" not in "".join(learnt_texts(tokenizer, kept)) and "No." in "".join(learnt_texts(tokenizer, kept))


GENERATION = (r"{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
              r"{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
              r"{{ '\n' }}{% endfor %}")


def test_generation(tmp_path):
    """What {% generation %} encloses is learnt, as in transformers' masks."""
    folder = folder_of(tmp_path / "model", smollm2, GENERATION)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chats = [{"messages": [says("user", "a" * i), says("assistant", "é🙂 " * i + "b"), says("user", "x"), says("assistant", "y\n")]}
             for i in range(1, 20)]
    for chat, kept in zip(chats, kept_of(folder, lines_of(chats)), strict=True):
        expected = tokenizer.apply_chat_template(chat["messages"], return_dict=True, return_assistant_tokens_mask=True)
        assert (kept & 0x7fffffff).tolist() == expected["input_ids"]
        assert (kept >= 0).astype(int).tolist() == expected["assistant_masks"]
    weighted = {"messages": [says("user", "a"), says_with("assistant", "no", train=False), says("user", "x"), says("assistant", "yes")]}
    [kept], [last] = kept_of(folder, lines_of([weighted])), kept_of(folder, lines_of(chats[:1]), "learn-last")
    assert learnt_texts(tokenizer, kept) == ["yes<|im_end|>"] and learnt_texts(tokenizer, last) == ["y\n<|im_end|>"]


def test_what_cannot_be_told(tmp_path):
    """A template that writes an answer in another way when messages follow."""
    template = ("{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% if m.role == 'assistant' and loop.last %}END"
                "{% elif m.role == 'assistant' %}GO ON{% endif %}{% endfor %}")
    folder = folder_of(tmp_path / "model", smollm2, template)
    [line] = lines_of([{"messages": [says("user", "a"), says("assistant", "b"), says("user", "c"), says("assistant", "d")]}])
    error = probe(folder, "examples", "auto", inputs=[line.encode()], code=2)
    assert error.startswith("a line: message 2: the chat template writes it differently when messages follow, so the text to learn of it cannot be found: ") and error.count("\n") == 1
    assert kept_of(folder, [line], "learn-last")[0].max() > 0


def test_dates_and_special_tokens(tmp_path):
    folder = folder_of(tmp_path / "model", llama3_with_headers, HEADERS, "<|begin_of_text|>", "<|eot_id|>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = {"messages": [says("user", "a\u00a0"), says("assistant", "\u3000b\x1f")], "tools": TOOLS}
    [kept] = kept_of(folder, lines_of([chat]))
    text = tokenizer.apply_chat_template(chat["messages"], tools=TOOLS, tokenize=False)
    assert "Today: 26 Jul 2024" in text and (kept & 0x7fffffff).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert learnt_texts(tokenizer, kept) == ["b<|eot_id|>"]


def test_where_templates_are_found(tmp_path):
    """As transformers finds them: files before tokenizer_config.json, and "tool_use" for chats with tools."""
    def source(name):
        return "{% for m in messages %}{{ '" + name + ":' + m.content + '<|im_end|>' }}{% endfor %}"

    def config(folder, **settings):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    chats = [{"messages": [says("user", "a"), says("assistant", "b")]}, {"messages": [says("user", "a"), says("assistant", "b")], "tools": TOOLS}]
    for kind in ("text", "list", "file", "files", "processor"):
        folder = folder_of(tmp_path / kind, smollm2, source("config") if kind in ("text", "file") else None)
        if kind == "list":
            config(folder, chat_template=[{"name": "default", "template": source("plain")}, {"name": "tool_use", "template": source("tools")}])
        if kind in ("file", "files"):
            (folder / "chat_template.jinja").write_text(source("file"))
        if kind == "files":
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text(source("more"))
        if kind == "processor":  # a processor's file, which transformers' tokenizers do not read
            (folder / "chat_template.json").write_text(json.dumps({"chat_template": source("processor")}))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        for chat, kept in zip(chats, kept_of(folder, lines_of(chats)), strict=True):
            got = tokenizer.decode(kept & 0x7fffffff)
            if kind == "processor":
                assert got == "processor:a<|im_end|>processor:b<|im_end|>"
            else:
                assert got == tokenizer.apply_chat_template(chat["messages"], tools=chat.get("tools"), tokenize=False), kind
    error = probe(folder_of(tmp_path / "broken", smollm2, "{{ x"), "examples", "auto", inputs=[lines_of(chats)[0].encode()], code=2)
    assert error == f"{tmp_path}/broken/tokenizer_config.json: the chat template (line 1): the template ends inside of a tag\n"


def test_dates_that_are_none():
    for date in ("2024-01-01x", "2024-02-30", "2024-13-01", "x"):
        refused = subprocess.run([compare.PROBE, "render", date], capture_output=True, text=True, input="")
        assert (refused.returncode, refused.stderr) == (2, f"--chat-date {date} is no date like 2025-01-31\n")


# ---- runs

RUN = ("--model", "model", "--batch", 2, "--seq-len", 64, "--steps", 2, "--sample", "tokens=0")


@pytest.fixture
def work(tmp_path, tokenizer):  # noqa: F811
    make(tmp_path / "model", "--family", "llama", "--heads", 4, "--channels", 48, "--layers", 2, "--vocab", VOCAB, "--positions", 64)
    save_tokenizer(tmp_path / "model", tokenizer, PLAIN_CHATML, "<|endoftext|>", "<|im_end|>")
    lines = [{"messages": [says("user", f"a {i}"), says("assistant", f"b {i}")]} for i in range(30)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines_of(lines)))
    return tmp_path


def test_a_run_says_what_writes_chats(train_fp32, work):
    out = train_fp32(*RUN, "--data", "data.jsonl", cwd=work).stdout.decode()
    assert "chats: written by the chat template of model/tokenizer_config.json\n" in out
    out = train_fp32(*RUN, "--data", "data.jsonl", "--show-example", 3, cwd=work).stdout.decode()
    assert out.endswith("are learnt:\n<|im_start|>user\na 2<|im_end|>\n<|im_start|>assistant\n\u27e6b 2<|im_end|>\u27e7\n\n")
    assert "data.jsonl: line 3: " in out and "step" not in out
    error = train_fp32(*RUN, "--data", "data.jsonl", "--show-example", 99, cwd=work, code=2).stderr.decode()
    assert error == "train: --show-example 99: the data have 30 examples\n"
    error = train_fp32(*RUN, "--data", "data.jsonl", "--chat-date", "2024-02-30", cwd=work, code=2).stderr.decode()
    assert "'2024-02-30' is no date like 2025-01-31" in error and error.count("\n") == 1


def test_an_end_outside_of_generation_is_named(train_fp32, work):
    """It has no loss, so the model does not learn to write it; with --loss-on all it has one."""
    outside = GENERATION.replace("{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}")
    says_so = b"the chat template writes <|im_end|> behind answers, outside of {% generation %}: the model does not learn to end them\n"
    for template, options, named in ((outside, (), True), (GENERATION, (), False), (outside, ("--loss-on", "all"), False), (PLAIN_CHATML, (), False)):
        (work / "model/chat_template.jinja").write_text(template)
        ran = train_fp32(*RUN, "--data", "data.jsonl", "--show-example", 1, *options, cwd=work)
        assert (says_so in ran.stderr) == named and bool(re.search("\u27e6[^\u27e7]*b 0<.im_end.>", ran.stdout.decode())) != named, ran


def test_a_run_says_which_length_cuts_no_chat(train_fp32, work):
    chats = [{"messages": [says("user", "a b " * n), says("assistant", "c d " * n)]} for n in (1, 2, 4, 3)] * 3
    (work / "long.jsonl").write_text("\n".join(lines_of(chats)))
    run = (*RUN, "--steps", 1, "--data", "long.jsonl", "--val-data", "data.jsonl")
    said = {length: train_fp32(*run, "--seq-len", length, cwd=work).stdout.decode() for length in (24, 30)}
    lengths = {int(re.search(r"long\.jsonl: \d+ examples are longer than --seq-len \d+: their ends are cut off and not learnt; "
                             r"--seq-len (\d+) cuts none\n", out)[1]) for out in said.values()}
    [length] = lengths
    assert "cuts none" not in train_fp32(*run, "--seq-len", length, cwd=work).stdout.decode()
    assert f"; --seq-len {length} cuts none\n" in train_fp32(*run, "--seq-len", length - 1, cwd=work).stdout.decode()


def test_a_run_says_what_its_template_leaves_out(train_fp32, work):
    """Fields of chats of which it writes nothing: what they have cannot be learnt."""
    call = {**says("assistant", "b"), "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}], "reasoning_content": "hm"}
    chats = [{"messages": [says("user", "a"), says("assistant", "b")]}, *[{"messages": [says("user", "a"), call], "tools": [{"name": "f"}]}] * 5]
    (work / "calls.jsonl").write_text("\n".join(lines_of(chats)))
    source = json.loads((work / "model/tokenizer_config.json").read_text())["chat_template"]
    writes = {"tools": "{{ tools }}", "tool_calls": "{% for m in messages %}{{ m.tool_calls }}{% endfor %}",
              "reasoning_content": "{% for m in messages %}{{ m.thinking }}{% endfor %}"}
    for written in ((), ("tools",), ("tool_calls", "reasoning_content"), tuple(writes)):
        (work / "model/chat_template.jinja").write_text("".join(writes[field] for field in written) + source)
        said = train_fp32(*RUN, "--data", "calls.jsonl", "--steps", 1, cwd=work).stderr.decode()
        left_out = re.findall(r'^chats have "(\w+)", but the chat template writes nothing of it', said, re.MULTILINE)
        assert left_out == [field for field in writes if field not in written]
    assert "writes nothing of it" not in train_fp32(*RUN, "--data", "data.jsonl", cwd=work).stderr.decode()


def test_a_run_learns_the_last_answer_and_writes_a_given_date(train_fp32, work):
    settings = work / "model" / "tokenizer_config.json"
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps(config | {"chat_template": "{{ strftime_now('%d %B %Y') }} " + config["chat_template"]}))
    chat = [says("user", "a"), says("assistant", "b"), says("user", "c"), says("assistant", "d")]
    (work / "two.jsonl").write_text("\n".join(lines_of([{"messages": chat}] * 4)))
    out = train_fp32(*RUN, "--data", "two.jsonl", "--loss-on", "last", "--chat-date", "2024-07-26", "--show-example", 1, cwd=work).stdout.decode()
    turns = "26 July 2024<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert out.endswith(turns + "\u27e6d<|im_end|>\u27e7\n\n")
    counted = [re.search(r"(\d+) of them with loss", train_fp32(*RUN, "--data", "two.jsonl", *options, cwd=work).stdout.decode())[1]
               for options in ((), ("--loss-on", "last"))]
    assert int(counted[0]) == 2 * int(counted[1]) > 0


def test_a_shown_example_is_cut_as_in_training(train_fp32, work):
    long = [says("user", "a " * 90), says("assistant", "b")]
    (work / "long.jsonl").write_text("\n".join(lines_of([{"messages": long}] * 3 + [{"text": "c " * 90}])))
    shown = [train_fp32(*RUN, "--data", "long.jsonl", "--show-example", number, cwd=work).stdout.decode() for number in (1, 4)]
    assert re.search(r"line 1: \d+ tokens, cut to 65 by --seq-len 64; the 0 between", shown[0]) and "\u27e6" not in shown[0].split("learnt:")[1]
    assert re.search(r"line 4: \d+ tokens; the \d+ between", shown[1])


def test_a_run_says_where_an_answer_begins_otherwise(train_fp32, work):
    """The template asks for an answer with an empty thought, which answers that are written do not have."""
    settings = work / "model" / "tokenizer_config.json"
    config = json.loads(settings.read_text())
    asks = "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
    template = re.sub(r"\{%-? *if add_generation_prompt.*", "", config["chat_template"], flags=re.S)
    for written, warns in ((template + asks, True), (config["chat_template"], False)):
        settings.write_text(json.dumps(config | {"chat_template": written}))
        ran = train_fp32(*RUN, "--data", "data.jsonl", cwd=work)
        assert (b"the chat template asks for an answer in another way than it writes one" in ran.stderr) == warns, ran.stderr
    shown = train_fp32(*RUN, "--data", "data.jsonl", "--show-example", 3, cwd=work).stdout.decode()
    assert "\u27e6b 2<|im_end|>\u27e7" in shown


def test_lists_of_texts_and_developer_turns(tmp_path):
    """Are written as the template writes them, with the tokens of apply_chat_template."""
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
                "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    folder = folder_of(tmp_path / "model", smollm2, template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parts = [{"type": "text", "text": "é "}, {"type": "text", "text": "\u2003b"}]
    chats = [{"messages": [says("developer", "Be brief."), says("user", parts), says("assistant", "x")]},
             {"messages": [says("user", "a"), says("assistant", parts), says("developer", parts[:1]), says("user", "b"), says("assistant", "c")]}]
    for chat, kept, learnt in zip(chats, kept_of(folder, lines_of(chats)), (["x<|im_end|>"], ["[é ][\u2003b]<|im_end|>", "c<|im_end|>"]), strict=True):
        text = tokenizer.apply_chat_template(chat["messages"], tokenize=False)
        assert (kept & 0x7fffffff).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert learnt_texts(tokenizer, kept) == learnt


def test_a_resumed_run_writes_the_date_of_the_first(train_fp32, work):
    """A day later it reads the same text."""
    settings = work / "model" / "tokenizer_config.json"
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps(config | {"chat_template": "{{ strftime_now('%d %B') }} " + config["chat_template"]}))
    days = [{"TZ": zone} for zone in ("Pacific/Kiritimati", "Etc/GMT+12")]  # whose clocks are 26 hours apart
    for environment, options in zip(days, ((*RUN, "--data", "data.jsonl"), ("--resume", "out", "--steps", 4)), strict=True):
        subprocess.run([train_fp32.path, *map(str, options), *(["--out", "out"] if "--data" in options else [])], cwd=work, check=True,
                       env=train_fp32.environment | environment, capture_output=True, timeout=60)
    assert (work / "out" / "step-00000004").is_dir()


def test_the_usual_system_message_stays(train_fp32, work):
    """That of the model's own template, which --chat-format chatml keeps, and which is then in the save."""
    settings = work / "model" / "tokenizer_config.json"
    usual = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps(config | {"chat_template": usual + config["chat_template"]}))
    run = ("--data", "data.jsonl", "--chat-format", "chatml")
    shown = train_fp32(*RUN, *run, "--show-example", 3, cwd=work).stdout
    assert b"Be kind." in shown
    train_fp32(*RUN, *run, "--out", "out", cwd=work)
    train_fp32("--resume", "out", "--steps", 4, cwd=work)
    assert train_fp32("--model", "out", *RUN[2:], *run, "--show-example", 3, cwd=work).stdout == shown


def test_the_format_is_saved(train_fp32, work):
    """A format of our own is saved as a template, with which transformers writes the same."""
    config = json.loads((work / "model" / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (work / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    out = train_fp32(*RUN, "--data", "data.jsonl", "--out", "out", cwd=work).stdout.decode()
    assert "chats: written by the chat format chatml\n" in out
    messages = [says("system", "s"), says("user", "a"), says("assistant", "b")]
    saved = transformers.AutoTokenizer.from_pretrained(work / "out")
    text = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\n"
    again = train_fp32(*RUN[2:], "--model", "out", "--data", "data.jsonl", cwd=work).stdout.decode()
    assert "chats: written by the chat template of out/step-00000002/chat_template.jinja\n" in again


def test_templates_that_refuse(train_fp32, work):
    for template, message in (("{{ raise_exception('Not\nthis!') }}", "data.jsonl: line 1: the chat template (line 1): refuses this: Not this!"),
                              ("{{ 1 | f }}", 'model/chat_template.jinja: the chat template (line 1): the filter "f" is unknown'),
                              ("{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}",
                               "data.jsonl: line 1: the chat template (line 1): ")):
        (work / "model" / "chat_template.jinja").write_text(template)
        error = train_fp32(*RUN, "--data", "data.jsonl", cwd=work, code=2).stderr.decode()
        assert error.startswith("train: " + message) and error.count("\n") == 1, error
