r"""LaTeX answers as text: one spelling for what prints the same, and cutting outside brackets. Nothing is evaluated."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from erpo.grading.answers import closing_brace, unbox

# --- normalisation: text that prints the same becomes the same text -------------------------------------------------------

_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
     "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ",
     "√": r"\sqrt ", "∅": r"\emptyset ", "≈": r"\approx ", "…": r"\ldots ", "Å": r"\AA ", "\u212b": r"\AA ",
     "，": ",", "。": ".", "；": ";", "：": ":", "（": "(", "）": ")", "％": "%", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
     "\u200b": "", "\u2060": "", "\ufeff": "", "′": "'", "″": "''"}
)  # fmt: skip
_UNICODE |= {
    ord(sign): r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("⁄")) for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
}

_SUPERSCRIPT = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SUPERSCRIPT_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SUBSCRIPT_DIGITS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RADICAND = re.compile(r"√\s*(?:(\d+)|\(([^()]*)\))")
"""The sign takes all digits behind it, `\\sqrt` one."""

_LARGE = {"thousand": "3", "million": "6", "billion": "9", "trillion": "12"}


_INEQUALITY = r"[^,;=<>]*(?:<|>|\\(?:le|lt|ge|gt)(?![a-zA-Z]))[^,;=]*?"


def _rows(found: re.Match[str]) -> str:
    r"""Lines of an aligned calculation as one text: a line that begins with `=` goes on, others are values of their own."""
    joined = re.sub(r"\\cr\s*(?=&?\s*=)", "", re.sub(r"\\cr\s*$", "", found[2]))
    return joined.replace("\\cr", ",").replace("&", "")


def _follows_unit(found: re.Match[str]) -> bool:
    r"""Whether a letter in a text command is the name of a unit behind a number or another unit: `10 \mathrm{~m}^2`."""
    before = found.string[: found.start()].rstrip()
    return found[1] in "msgJNKWVThHlL" and bool(re.search(r"[\d}/]$|\}\{$|\\cdot$", before))


_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\(?:\[[^\[\]]*\])?|\\(?:new|tabular)?(?:line|cr)(?![a-zA-Z])", r"\\cr "),  # kept from the rules about `\\ ` and `\\,`
        (r"^\s*\\begin\{(aligned|align\*?|gathered|split)\}(.*)\\end\{\1\}\s*$", _rows),
        (r"(?:\s*(?:\\cr(?![a-zA-Z])|(?<=\s)\\))+\s*$", ""),  # a line break or a cut `\ ` at the end
        (r"\\[()\[\]]|(?<!\\)\$", ""),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"\\(?:underline|fbox|framebox)\s*(?=\{)", ""),
        (r"\\(?:bf|it|rm|sf|tt|em|bfseries|normalsize|small|tiny|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])", " "),
        (r"\*\*", "^"),
        (r"\{:\}", ":"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\(?:left|right|middle)\s*\.", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
        (r"(?<=\d)\s*(?:,\s*\\!|\\[,;:! ]|\{,\}|~)\s*(?=\d{3}(?!\d))", ""),
        (r"\\!", ""),
        (r"\\[,;:>]|\\ |~|\\(?:en|thin|med|thick)space(?![a-zA-Z])|\\hspace\*?\{[^{}]*\}", " "),
        (r"\\q?quad(?![a-zA-Z])", " , "),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|strut)(?![a-zA-Z])", " "),
        (r"\\(?:[dtc]|nice|s)frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\tag\*?\{[^{}]*\}", ""),
        (r"\\var(phi|epsilon|theta|rho|sigma|kappa)(?![a-zA-Z])", r"\\\1"),
        (r"\\(?:[lc]?dots|dots[bcmoi])(?![a-zA-Z])", r"\\ldots "),
        (r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}"),
        (r"(?<=\.)(\d*)\\bar\s*(?:\{(\d+)\}|(\d))", r"\1\\overline{\2\3}"),
        (r"(?<=\.)(\d*)\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?$", r"\1\\overline{\2\3\4}"),
        (r"\\(?:geqslant|geqq|geq)(?![a-zA-Z])", r"\\ge"),
        (r"\\(?:leqslant|leqq|leq)(?![a-zA-Z])", r"\\le"),
        (r"\\(?:neq|not\s*=)(?![a-zA-Z])", r"\\ne "),
        (r"\\[hv]?phantom\s*\{[^{}]*\}", ""),
        (r"\\(?:varnothing)(?![a-zA-Z])", r"\\emptyset"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:text(?:rm|bf|it|normal|sf|tt)|mbox|mathrm|emph|operatorname\*?|textup)\s*\{", r"\\text{"),
        (r"\\text\s+\{", r"\\text{"),
        (r"(\\text\{[^{}]*\^)\{(-?\d)\}", r"\1\2"),
        (r"\\mu\s*\\text\{\s*(?=[a-zA-Z])|\\text\{\s*\\mu\s*\}\s*\\text\{\s*", r"\\text{u"),
        (r"\\text\{\s*\\AA\s*\}|\\AA(?![a-zA-Z])", r"\\text{ angstrom}"),
        (
            r"(?<=\d)\s*[kM]?\s*(?:\\Omega|Ω)\s*$",
            lambda found: r"\text{ ohm}" if found[0].strip()[0] in "\\Ω" else r"\text{ " + found[0].strip()[0] + "ohm}",
        ),
        (r"(?<=[\d}\s])(?:\\text\{\s*[MLR]\s*\}|[MLR])_(?:\{\\odot\}|\\odot)\s*$", r"\\text{ solar}"),
        (
            r"(?<=[\d}])\s+((?:[kcm]?m|ft|mi|in|[km]?g|k?J|rad|m?L)/(?:s|sec|h|hr|min|[ckm]?m|m?L)(?:\^\{?[23]\}?)?)$",
            r"\\text{ \1}",
        ),
        (r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf)\s*\{([^{}]*)\}", r"\1"),
        (r"\\text\{\s*([^\s{}])\s*\}(?=\^|_)", lambda found: found[0] if _follows_unit(found) else found[1]),
        (r"\\degree(?:s)?(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])", r"^\\circ "),
        (r"\\%", "%"),
        (r"\\text\{\s*(?:percent|per cent|pct)\s*\}|(?<=\d)\s*(?:percent|per cent|pct)\b", "%"),
        (  # either of two inequalities is a union: `x<2 or x>1` is no interval
            rf"^({_INEQUALITY})(?:\\text\{{\s*,?\s*or\s*\}}|(?<=[\d\s)}}\]])or\s|\\(?:lor|vee)(?![a-zA-Z]))({_INEQUALITY})$",
            r"\1 \\cup \2",
        ),
        (r"\\text\{\s*,?\s*(?:and|or)\s*\}|(?<=[\d\s)}\]])(?:,\s*|\s+)(?:and|or)\s+(?![a-z]{2})|\\lor(?![a-zA-Z])", " , "),
        (r"\\frac\{\s*\\text\{([^{}]*)\}\s*\}\{\s*\\text\{([^{}]*)\}(\^(?:\d|\{\d\}))?\s*\}", r"\\text{\1/\2}\3"),
        (
            r"(?<=\d)(?:\s*\\text\{\s*(?:st|nd|rd|th)\s*\}|\^\{?\s*\\text\{\s*(?:st|nd|rd|th)\s*\}\s*\}?|\^\{(?:st|nd|rd|th)\}|(?:st|nd|rd|th)\b)",
            "",
        ),
        (
            r"(?<=\d)\s*(\\text\{\s*)?\b(thousand|million|billion|trillion)s?\b\s*(?(1)\}?)",
            lambda found: r"\times 10^{" + _LARGE[found[2]] + "}" + (r"\text{" if found[1] and found[0][-1] != "}" else ""),
        ),
        (r"(?<=\d)\s+(\d+)/(\d+)(?![\d.])", r"\\frac{\1}{\2}"),
        (r"(?<![\d.])(\d{1,3})((?: \d{3})+)(?![\d.])", lambda found: found[0].replace(" ", "")),
        (r"(?:(?<=:\d\d)\s*|(?<=\d)\s+)(?:(?=[ap]\.?\s?m\.?\s*$|[AP]\.?\s?M\.?\s*$)([aApP])\.?\s?[mM]\.?)\s*$", r"\\text{\1m}"),
        (r"\+\s*\\infty", r"\\infty"),
        (r"(?<![a-zA-Z\\])(?:[iI]nfinity|\\text\{\s*[iI]nfinity\s*\})", r"\\infty"),
        (r"\\\{\s*\\\}", r"\\emptyset"),
        (r"\\text\{\s*(?:in )?base[- ]?\s*(\w+)\s*\}$", r"_{\\text{\1}}"),
        (r"^\s*(?:\\text\{)?\s*all real(?: number)?s\s*\}?\s*$", r"\\mathbb{R}"),
        (r"^\s*(?:\\approx|\\simeq|\\sim|=|:)\s*", ""),
        (r"(?<!frac )(?<!inom )(?<!sqrt )(?:^|(?<=[\s,;(\[=+-]))(\d[\d.]*)\s+(?=\d)", r"\1 , "),  # `1 2` is two values, never 12
        (r"(?<=[a-zA-Z])\s*\^\s*(?:\{\s*((?:\\prime\s*)+)\}|(\\prime)(?![a-zA-Z]))", lambda f: "'" * f[0].count("prime")),
        (r"\\dot\s*(?:\{([a-zA-Z])\}|([a-zA-Z]))", r"\1\2'"),
        (r"\\ddot\s*(?:\{([a-zA-Z])\}|([a-zA-Z]))", r"\1\2''"),
        (r"\\frac\{\s*d\s*([a-zA-Z])\s*\}\{\s*d\s*t\s*\}", r"\1'"),
        (r"\\frac\{\s*d\^(?:2|\{2\})\s*([a-zA-Z])\s*\}\{\s*d\s*t\s*\^(?:2|\{2\})\s*\}", r"\1''"),
        (r"\s+", " "),
        (r",\s*(?=\)|\]|\\\})", ""),
        (r"(?:,\s*)+,|^[\s,]+", lambda found: "," if found[0].strip() and found.start() else ""),
        (r"(?<!\\)[\s,;:]*(?:(?<![.\\])\.)?[\s,;:]*$", ""),  # one full stop; `0.3...` is not 0.3
        (r"\\cr(?![a-zA-Z])\s*", r"\\\\ "),
    )
)


@lru_cache(maxsize=20_000)
def normalise(text: str) -> str:
    """The same answer with one spelling for layout, sizes, spacing, text commands and digit groups."""
    text = _SUPERSCRIPT.sub(lambda found: "^{" + found[0].translate(_SUPERSCRIPT_DIGITS) + "}", unbox(text))
    text = _SUBSCRIPT.sub(lambda found: "_{" + found[0].translate(_SUBSCRIPT_DIGITS) + "}", text)
    text = _RADICAND.sub(lambda found: r"\sqrt{" + (found[1] or found[2]) + "}", text)
    text = trim(text.translate(_UNICODE))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _brace_arguments(text).strip()


def trim(text: str) -> str:
    r"""Without white space around it, but for the blank of a `\ ` at the end."""
    return re.sub(r"(?<!\\)\s+$", "", text.lstrip())


def squeeze(text: str) -> str:
    r"""Normalised text without spaces, text commands and needless braces: equal squeezed texts print the same."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", normalise(text))
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", r"\1{}", text)
    return re.sub(r"\s", "", text)


_ARGUMENTS = re.compile(r"\\(frac|binom|sqrt)(?![a-zA-Z])")


def _brace_arguments(text: str) -> str:
    r"""`\frac12`, `\frac{1}2`, `\sqrt2` with braces around every argument."""
    position = 0
    while (found := _ARGUMENTS.search(text, position)) is not None:
        position = found.end()
        if text[position : position + 1] == "[" and found[1] == "sqrt":
            position = text.find("]", position) + 1 or len(text)
        for _ in range(1 if found[1] == "sqrt" else 2):
            argument = re.compile(r"\s*(\{|\\[a-zA-Z]+|[^\s\\{}^_])").match(text, position)
            if argument is None:
                break
            if argument[1] == "{":
                end = closing_brace(text, argument.end())
                if end < 0:
                    break
                text, position = text[:position] + text[argument.start(1) :], position + end + 1 - argument.start(1)
                continue
            text = f"{text[:position]}{{{argument[1]}}}{text[argument.end() :]}"
            position += len(argument[1]) + 2
        position = found.end()
    return text


# --- splitting -----------------------------------------------------------------------------------------------------------

TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = {"{", "(", "[", r"\{", r"\begin", r"\lfloor", r"\lceil", r"\langle"}
_CLOSING = {"}", ")", "]", r"\}", r"\end", r"\rfloor", r"\rceil", r"\rangle"}


def split(text: str, separators: set[str]) -> list[str]:
    """Cut at separators that are inside no bracket of any sort."""
    parts, depth, start = [], 0, 0
    for token in TOKEN.finditer(text):
        if token[0] in _OPENING:
            depth += 1
        elif token[0] in _CLOSING:
            depth -= 1
        elif depth == 0 and token[0] in separators:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def is_one_group(text: str) -> bool:
    """Whether the first bracket closes with the last character."""
    depth = 0
    tokens = list(TOKEN.finditer(text))
    for index, token in enumerate(tokens):
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth <= 0:
            return index == len(tokens) - 1
    return False
