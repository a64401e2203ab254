"""How byte-pair vocabularies cut text before merging: `tokenizer.ggml.pre` -> regular expressions.

Each family is the list of expressions that the model was trained with, applied one after another:
every match, and every stretch between matches, becomes a piece of its own, which the next one cuts
further. They run in Oniguruma (the `tokenizers` wheel): (?i:...), \\p{Lu}, possessive ++ and set
intersection && are available.

Where llama.cpp approximates an expression that its engine cannot run, the original stands here.
Code points are written as escapes: U+212A KELVIN SIGN copied from a screen turns into "K".
"""

from dataclasses import dataclass

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s+(?!\S)|\s+"
ONE_BEFORE_LETTERS = r"[^\r\n\p{L}\p{N}]?"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + SPACES


def cl100k(
    digits: str = r"\p{N}{1,3}",
    contraction: str = CONTRACTION + "|",
    letters: str = ONE_BEFORE_LETTERS + r"\p{L}+",
    punctuation: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    newlines: str = r"\s*[\r\n]+",
) -> str:
    """The expression of GPT-4 and its many descendants, which vary one alternative each."""
    return f"{contraction}{letters}|{digits}|{punctuation}|{newlines}|{SPACES}"


def cased_words(upper: str, lower: str, contraction: str) -> str:
    """Two alternatives that end a word where lower case turns to upper."""
    return (
        f"{ONE_BEFORE_LETTERS}{upper}*{lower}+{contraction}"
        f"|{ONE_BEFORE_LETTERS}{upper}+{lower}*{contraction}"
    )


UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def o200k(digits: str = r"\p{N}{1,3}", contraction: str = CONTRACTION + "?") -> str:
    """The expression of GPT-4o."""
    words = cased_words(UPPER, LOWER, contraction)
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{SPACES}"


# Letters of scripts with two cases, as DeepSeek LLM spells them out.
CASED_LETTERS = (
    "["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]"
)
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
PUNCTUATED_WORD = ASCII_PUNCTUATION + r"[A-Za-z]+"
MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
SYMBOLS_NEWLINES = r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|"
DEEPSEEK_V3 = f"{PUNCTUATED_WORD}|{MARKED_WORD}|{SYMBOLS_NEWLINES}{SPACES}"
SPARK = rf"{PUNCTUATED_WORD}|{MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{SPACES}"

UPPER_NOT_HAN = UPPER[:-1] + r"&&[^\p{Han}]]"
LOWER_NOT_HAN = LOWER[:-1] + r"&&[^\p{Han}]]"
KIMI = (
    r"[\p{Han}]+|"
    + cased_words(UPPER_NOT_HAN, LOWER_NOT_HAN, CONTRACTION + "?")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    + SPACES
)
WORDS_NOT_STOPS = r" ?[^(\s|.,!?…。，、।۔،)]+"
KOREAN_AND_CHINESE = "|".join(
    (
        "[\uac00-\ud7a3\u3131-\u318e]+",
        "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+",
        "[\u3105-\u312f]+",
        HAN_KANA,
    )
)
SCRIPTS_WITHOUT_SPACES = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
JAIS_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))


def threes_from_the_right(digit: str, run: str) -> tuple[str, str]:
    """Cut runs of digits into groups of three that end with the run.

    The usual way to write it, `\\d{1,3}(?=(?:\\d{3})*\\b)`, looks ahead over the whole run from
    every group: 300,000 digits take a minute. Here the run is isolated first, then the one or two
    digits that make the rest a multiple of three; a later expression cuts the rest from the left.
    """
    return run, rf"\A{digit}{{1,2}}(?=(?:{digit}{{3}})++\z)"


FAMILIES: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt2": (GPT2,),
    "digits+gpt2": (r"\p{N}", GPT2),
    "cl100k": (cl100k(),),
    "qwen2": (cl100k(digits=r"\p{N}"),),
    "qwen35": (
        cl100k(
            digits=r"\p{N}",
            letters=ONE_BEFORE_LETTERS + r"[\p{L}\p{M}]+",
            punctuation=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        ),
    ),
    "o200k": (o200k(),),
    "tekken": (o200k(digits=r"\p{N}", contraction=""),),
    "deepseek-llm": (
        "[\r\n]",
        rf"\s?{CASED_LETTERS}+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", HAN_KANA, DEEPSEEK_V3),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "bailing": (
        rf"'(?i:[sdmt]|ll|ve|re)|{ONE_BEFORE_LETTERS}\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|{SPACES}",
    ),
    "poro": (WORDS_NOT_STOPS,),
    "viking": (WORDS_NOT_STOPS, r"\p{N}"),
    "gemma4": (r"[^\n]+|[\n]+",),
    "jais-2": (
        rf"{CONTRACTION}|{ONE_BEFORE_LETTERS}\p{{L}}+|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{JAIS_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}",
    ),
    "spark2_5": (r"\p{N}{1,3}", HAN_KANA, SPARK, r"\p{N}"),
    "youtu": (KOREAN_AND_CHINESE, o200k(digits=r"\p{N}")),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
    ),
    # A run counts only where it ends at a word boundary; o200k then cuts in threes.
    "tiny_aya": (*threes_from_the_right(r"\d", r"(?<!\d)\d++\b"), o200k()),
    "kimi-k2": (KIMI,),
    # The last one looks ahead from every digit; long runs are cut into 300s from the right first.
    "superbpe": (
        r"\p{N}+",
        r"(?<!\d)\d{1,300}(?=(?:\d{300})++(?!\d))",
        r"\d{300}",
        r"(?=(\d{3})+(?!\d))",
    ),
    "seed-coder": (cl100k(digits=r"\p{N}", punctuation=r" ?[^\s\p{L}\p{N}\r\n]+"),),
    "ufakzeka": (cl100k(digits=r"\p{N}", contraction=""),),
    "afmoe": (
        *threes_from_the_right(r"\p{N}", r"\p{N}++"),
        r"\p{N}{1,3}",
        SCRIPTS_WITHOUT_SPACES,
        DEEPSEEK_V3,
    ),
    "laguna": (r"[^\n]+|[\n]+", cl100k(digits=r"\p{N}")),
    "exaone-moe": (
        cl100k(
            digits=r"\p{N}",
            letters=ONE_BEFORE_LETTERS + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
            punctuation=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            newlines=r"\s*[\r\n]",
        ),
    ),
    "minicpm5": (r"\p{N}{1,3}", cl100k(digits=r"\p{N}+")),
}


@dataclass(frozen=True)
class Pre:
    """What a value of `tokenizer.ggml.pre` means."""

    family: str
    ignore_merges: bool = False  # a piece that is a token as a whole is not merged up to it
    add_bos: bool = False  # unless the file says otherwise
    escaped_spaces: bool = False  # tokens hold text with U+2581 for a space, not byte letters

    @property
    def expressions(self) -> tuple[str, ...]:
        return FAMILIES[self.family]


PRE: dict[str, Pre] = {}


def _add(pre: Pre, names: str) -> None:
    PRE.update(dict.fromkeys(names.split(), pre))


_add(Pre("default"), "default")
_add(
    Pre("cl100k", ignore_merges=True, add_bos=True),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
)
_add(Pre("cl100k"), "dbrx smaug-bpe chatglm-bpe")
_add(Pre("cl100k", ignore_merges=True), "glm4 glm5")
_add(Pre("deepseek-llm"), "deepseek-llm")
_add(Pre("deepseek-coder"), "deepseek-coder")
_add(Pre("deepseek-v3"), "deepseek-v3 hunyuan-dense hy_v4 joyai-llm")
_add(Pre("falcon"), "falcon")
_add(
    Pre("digits+gpt2"),
    "starcoder refact codeshell exaone minerva-7b mellum2 command-r smollm",
)
_add(
    Pre("gpt2"),
    "gpt-2 mpt phi-2 olmo jais exaone4 modern-bert mellum a.x-4.0 gigachat jina-es jina-de"
    " jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe trillion granite-docling",
)
_add(
    Pre("qwen2"),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2 stablelm2 megrez",
)
_add(Pre("qwen35"), "qwen35")
_add(Pre("tekken", ignore_merges=True, add_bos=True), "tekken")
_add(Pre("o200k"), "gpt-4o llama4 kanana2 talkie minimax-m2")
_add(Pre("o200k", ignore_merges=True), "granite-embed-multi-97m")
_add(Pre("bailing"), "bailingmoe bailingmoe2 llada-moe")
_add(Pre("gemma4", escaped_spaces=True), "gemma4 granite-embed-multi-311m sarvam-moe")
_add(Pre("poro"), "poro-chat bloom gpt3-finnish")
_add(Pre("tiny_aya"), "tiny_aya cohere2moe")
_add(Pre("chameleon", add_bos=True), "chameleon")
_add(Pre("minicpm5", ignore_merges=True), "minicpm5")
_add(Pre("youtu", ignore_merges=True), "youtu")
for _family in (
    "viking jais-2 spark2_5 kimi-k2 superbpe seed-coder ufakzeka afmoe laguna exaone-moe"
).split():
    _add(Pre(_family), _family)
