#!/usr/bin/env python3
"""Renders fuzzed chats with every chat template of some folders, with jinja2 as transformers sets it up and
with the trainer's interpreter (llmc/jinja.h), and names the differences.

    make build/test/fast/formats_probe
    .venv/bin/python dev/compare_chat_templates.py FOLDER|FILE... [--chats 200] [--seed 0]

Templates are files NAME.jinja, and tokenizer_config.json with "chat_template". A difference is another text,
or an error on one side alone. Exits with code 1 if there is any."""

import argparse
import datetime
import json
import pathlib
import random
import subprocess
import sys

import jinja2
import transformers.utils.chat_template_utils as transformers_templates

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROBE = ROOT / "build/test/fast/formats_probe"
DATE = datetime.datetime(2024, 7, 26)
SPACES = "".join(chr(c) for c in (*range(9, 14), *range(28, 33), 0x85, 0xa0, 0x1680, *range(0x2000, 0x200b), 0x2028, 0x2029,
                                  0x202f, 0x205f, 0x3000)) + "\u200b\ufeff"
WORDS = ["a", "Where is it?", "Hier, mein Fürst.", "日本語", "🙂", "<b>&'\"", "{{ x }}", "{% if %}", "\\n", "\\", "'", '"', "</think>",
         "<think>\nhm\n</think>\n\n", "<tool_call>", "1", "x: y", "#", "[INST]", "\u007f", "é", "é\u0301", "\ufb01", "ß"]
NAMES = ["weather", "get_stock", "f", "search-web", "ipython"]


class FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DATE


class Chats:
    """Random conversations."""

    def __init__(self, seed):
        self.choose = random.Random(seed)

    def chance(self, p):
        return self.choose.random() < p

    def space(self):
        return "".join(self.choose.choice(SPACES) for _ in range(self.choose.choice((0, 0, 1, 3))))

    def text(self):
        words = [self.choose.choice(WORDS) for _ in range(self.choose.randint(0, 5))]
        return self.space() + self.choose.choice((" ", "\n", "")).join(words) + self.space()

    def value(self, depth=0):
        kind = self.choose.randrange(9 if depth < 3 else 6)
        if kind < 2:
            return self.text()
        if kind < 6:
            return [self.choose.randint(-10**6, 10**6), self.choose.random() * 10**self.choose.randint(-8, 20),
                    self.choose.choice((True, False)), None][kind - 2]
        if kind == 6:
            return [self.value(depth + 1) for _ in range(self.choose.randint(0, 3))]
        return {f"k{i}" if self.chance(.8) else self.text(): self.value(depth + 1) for i in range(self.choose.randint(0, 3))}

    def content(self):
        if self.chance(.07):
            return [{"type": "text", "text": self.text()} for _ in range(self.choose.randint(1, 3))]
        return self.text()

    def schema(self, depth=0):
        kind = self.choose.choice(("string", "integer", "number", "boolean", "array", "object"))
        schema = {"type": kind}
        if self.chance(.6):
            schema["description"] = self.text()
        if self.chance(.2):
            schema["enum"] = [self.text() for _ in range(2)]
        if self.chance(.1):
            schema["default"] = self.value()
        if self.chance(.1):
            schema["nullable"] = True
        if kind == "array" and depth < 2:
            schema["items"] = self.schema(depth + 1)
        if kind == "object" and depth < 2:
            schema |= self.parameters(depth + 1)
        return schema

    def parameters(self, depth=0):
        names = [f"p{i}" for i in range(self.choose.randint(0, 3))]
        made = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        if self.chance(.7):
            made["required"] = [name for name in names if self.chance(.5)]
        return made

    def tool(self):
        function = {"name": self.choose.choice(NAMES), "description": self.text(), "parameters": self.parameters()}
        if self.chance(.2):
            function["return"] = {"type": "string", "description": self.text()}
        return {"type": "function", "function": function}

    def call(self):
        arguments = {f"k{i}": self.value() for i in range(self.choose.randint(0, 3))}
        if self.chance(.15):
            arguments = json.dumps(arguments)
        call = {"type": "function", "function": {"name": self.choose.choice(NAMES), "arguments": arguments}}
        if self.chance(.7):
            call["id"] = "".join(self.choose.choice("abcXYZ019") for _ in range(9))
        return call

    def assistant(self):
        message = {"role": "assistant", "content": self.content()}
        if self.chance(.2):
            message[self.choose.choice(("reasoning_content", "thinking", "reasoning"))] = self.text()
        if self.chance(.25):
            message["tool_calls"] = [self.call() for _ in range(self.choose.randint(1, 2))]
            if self.chance(.5):
                message["content"] = self.choose.choice(("", None))
            if self.chance(.2):
                del message["content"]
        return message

    def messages(self):
        messages = []
        if self.chance(.5):
            messages.append({"role": self.choose.choice(("system", "system", "system", "developer")), "content": self.content()})
        for _ in range(self.choose.randint(1, 5)):
            messages.append({"role": "user", "content": self.content()})
            answer = self.assistant()
            messages.append(answer)
            for call in answer.get("tool_calls", ()):
                if self.chance(.9):
                    messages.append({"role": self.choose.choice(("tool", "tool", "ipython")), "content": self.text(),
                                     "name": call["function"]["name"]} | ({"tool_call_id": call["id"]} if "id" in call else {}))
            if "tool_calls" in answer and self.chance(.8):
                messages.append(self.assistant())
        if self.chance(.3):
            messages.pop()
        if self.chance(.05):
            self.choose.shuffle(messages)
        return messages[:9] or [{"role": "user", "content": "x"}]

    def variables(self):
        """What a template is given, as transformers prepares it."""
        messages = transformers_templates._alias_reasoning_fields(transformers_templates._normalize_chat_messages(self.messages()))
        variables = {"messages": messages, "tools": [self.tool() for _ in range(self.choose.randint(1, 2))] if self.chance(.4) else None,
                     "documents": None, "add_generation_prompt": self.chance(.3), "bos_token": "<s>", "eos_token": "</s>"}
        if self.chance(.2):
            variables["pad_token"] = "<pad>"
        if self.chance(.2):
            variables["enable_thinking"] = self.chance(.5)
        return variables


def rendered_by_jinja2(template, variables):
    """The text and the spans that are generated, or an error."""
    try:
        text, spans = transformers_templates._render_with_assistant_indices(
            transformers_templates._compile_jinja_template(template), variables["messages"], variables["tools"],
            variables["documents"], variables["add_generation_prompt"],
            **{key: value for key, value in variables.items() if key not in ("messages", "tools", "documents", "add_generation_prompt")})
        return {"text": text, "spans": [[len(text[:at].encode()) for at in span] for span in spans]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def rendered_by_probe(cases):
    lines = "".join(json.dumps({"template": template, "variables": variables}) + "\n" for template, variables in cases)
    result = subprocess.run([PROBE, "render", DATE.strftime("%Y-%m-%d")], input=lines.encode(), capture_output=True, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def is_same(a, b):
    return "error" in a and "error" in b or "error" not in a and a == b


def templates_in(paths):
    """(name, source) of each template in these files and folders."""
    found = []
    for path in map(pathlib.Path, paths):
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in (".jinja", ".jinja2"):
                found.append((str(file), file.read_text()))
            elif file.name == "tokenizer_config.json":
                template = json.loads(file.read_text()).get("chat_template", [])
                named = [{"name": "", "template": template}] if isinstance(template, str) else template
                found += [(f"{file} {one['name']}", one["template"]) for one in named]
    return found


def compare(name, template, chats, show=2):
    """The number of chats that the two render differently, after printing some of them."""
    variables = [chats.variables() for _ in range(chats.count)]
    ours = rendered_by_probe([(template, v) for v in variables])
    theirs = [rendered_by_jinja2(template, v) for v in variables]
    different = [case for case in zip(variables, theirs, ours, strict=True) if not is_same(*case[1:])]
    errors = sum("error" in t for t in theirs)
    print(f"{name}: {len(variables)} chats, {errors} refused by both or one, {len(different)} differ", flush=True)
    for given, expected, got in different[:show]:
        print("    chat:  ", json.dumps(given, ensure_ascii=False)[:1500])
        if "error" in expected or "error" in got:
            print("    jinja2:", str(expected)[:300], "\n    ours:  ", str(got)[:300])
            continue
        a, b = expected["text"], got["text"]
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        print(f"    jinja2: ...{a[max(0, at - 60):at + 60]!r}\n    ours:   ...{b[max(0, at - 60):at + 60]!r}",
              expected["spans"], got["spans"])
    return len(different)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="FOLDER|FILE")
    parser.add_argument("--chats", type=int, default=200, help="chats for each template (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    transformers_templates.datetime = FixedDate
    found = templates_in(options.paths)
    different = 0
    for name, template in found:
        chats = Chats(options.seed)
        chats.count = options.chats
        different += compare(name, template, chats) > 0
    print(f"{len(found)} templates, {different} with differences; jinja2 {jinja2.__version__}")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
