"""Other spellings of a right answer, for tests and counts: each function gives a new text, or None where it does not apply."""

import re
from collections.abc import Callable
from fractions import Fraction

_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_INTEGER = re.compile(r"-?\d+")


def _terminates(value: Fraction) -> bool:
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def decimal(answer: str) -> str | None:
    """A fraction as an exact decimal."""
    found = re.fullmatch(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}", answer)
    if not found or not _terminates(Fraction(int(found[2]), int(found[3]))):
        return None
    value = Fraction(int(found[2]), int(found[3]))
    digits = next(n for n in range(60) if (value * 10**n).denominator == 1)
    text = str(int(value * 10**digits)).rjust(digits + 1, "0")
    return found[1] + (text[:-digits] + "." + text[-digits:] if digits else text)


def fraction(answer: str) -> str | None:
    """A decimal as a fraction."""
    if not re.fullmatch(r"-?\d*\.\d+", answer):
        return None
    value = Fraction(answer)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value).numerator}}}{{{value.denominator}}}"


def slash(answer: str) -> str | None:
    return _FRACTION.sub(r"\1/\2", answer) if re.fullmatch(r"-?\\[dt]?frac\{\d+\}\{\d+\}", answer) else None


def display_fractions(answer: str) -> str | None:
    changed = re.sub(r"\\frac(?![a-zA-Z])", r"\\dfrac", answer)
    return changed if changed != answer else None


def text_fractions(answer: str) -> str | None:
    changed = re.sub(r"\\d?frac(?![a-zA-Z])", r"\\tfrac", answer)
    return changed if changed != answer else None


def sized_brackets(answer: str) -> str | None:
    if "\\left" in answer or not re.search(r"[(\[]", answer) or "sqrt[" in answer:
        return None
    return re.sub(r"[)\]]", lambda f: "\\right" + f[0], re.sub(r"[(\[]", lambda f: "\\left" + f[0], answer))


def plain_brackets(answer: str) -> str | None:
    return re.sub(r"\\left\s*|\\right\s*", "", answer) if "\\left" in answer else None


def spaces(answer: str) -> str | None:
    changed = re.sub(r"(?<!\^)(?<!\{)([-+=])(?!\s)", r" \1 ", answer)
    return f" {changed} " if "text" not in answer and "e-" not in answer else None


def thin_spaces(answer: str) -> str | None:
    changed = re.sub(r",(?!\\)\s*", r",\\, ", answer)
    return (
        changed
        if changed != answer and "text" not in answer and "where" not in answer and not re.search(r"\d,\d{3}", answer)
        else None
    )


def dollars(answer: str) -> str | None:
    return f"${answer}$" if "$" not in answer else None


def full_stop(answer: str) -> str | None:
    return answer + "." if answer[-1] != "." else None


def named(answer: str) -> str | None:
    return f"x = {answer}" if re.fullmatch(r"-?[\d.]+|-?\\frac\{\d+\}\{\d+\}", answer) else None


def units(answer: str) -> str | None:
    return answer + r"\text{ cm}" if re.fullmatch(r"-?[\d.]+|-?\\frac\{\d+\}\{\d+\}", answer) else None


def without_units(answer: str) -> str | None:
    changed = re.sub(r"\s*(?:\\(?:text|mbox)\s*\{[^{}]*\}(?:\^\{?-?\d\}?)?\s*)+$|\^\{?\\circ\}?$|^\\\$|\\?%$", "", answer)
    return changed.strip() if changed != answer and re.search(r"\d", changed) else None


def separators(answer: str) -> str | None:
    return f"{int(answer):,}" if re.fullmatch(r"-?\d{4,}", answer) else None


def braced_separators(answer: str) -> str | None:
    return f"{int(answer):,}".replace(",", "{,}") if re.fullmatch(r"-?\d{4,}", answer) else None


def spaced_separators(answer: str) -> str | None:
    return f"{int(answer):,}".replace(",", "\\,") if re.fullmatch(r"-?\d{4,}", answer) else None


def leading_zeros(answer: str) -> str | None:
    return "00" + answer if re.fullmatch(r"\d{1,3}", answer) else None


def trailing_zero(answer: str) -> str | None:
    return answer + ("0" if "." in answer else ".0") if re.fullmatch(r"-?\d+(?:\.\d+)?", answer) else None


def e_notation(answer: str) -> str | None:
    found = re.fullmatch(r"(-?[\d.]+)\s*\\times\s*10\^(?:\{(-?\d+)\}|(\d))", answer)
    return f"{found[1]}e{found[2] or found[3]}" if found else None


def powers_of_ten(answer: str) -> str | None:
    found = re.fullmatch(r"([\d.]+)e(-?\d+)", answer)
    return rf"{found[1]} \times 10^{{{found[2]}}}" if found else None


def dotted_powers(answer: str) -> str | None:
    return answer.replace(r"\times", r"\cdot") if r"\times 10" in answer else None


def _top_level(answer: str) -> list[str]:
    parts, depth = [""], 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def reordered(answer: str) -> str | None:
    r"""Several values in reverse order."""
    inside = answer[2:-2] if answer.startswith(r"\{") and answer.endswith(r"\}") else answer
    parts = _top_level(inside.replace("$", ""))
    if len(parts) < 2 or re.search(r"\d,(?:\\!)?\s?\d{3}(?!\d)|where", answer) or parts == parts[::-1]:
        return None
    joined = ", ".join(parts[::-1])
    return joined if inside is answer else rf"\{{{joined}\}}"


def joined_by_and(answer: str) -> str | None:
    parts = _top_level(answer.replace("$", ""))
    if len(parts) < 2 or re.search(r"\d,(?:\\!)?\s?\d{3}(?!\d)|where", answer):
        return None
    return ", ".join(parts[:-1]) + r" \text{ and } " + parts[-1]


def as_set(answer: str) -> str | None:
    parts = _top_level(answer.replace("$", ""))
    if len(parts) < 2 or len(set(parts)) < len(parts) or re.search(r"\d,(?:\\!)?\s?\d{3}(?!\d)|where|=", answer):
        return None
    return rf"\{{{', '.join(parts)}\}}"


def both_signs(answer: str) -> str | None:
    if answer.count(r"\pm") != 1 or "{" in answer.split(r"\pm")[0]:
        return None
    return answer.replace(r"\pm", "+") + ", " + answer.replace(r"\pm", "-")


FORMS: tuple[Callable[[str], str | None], ...] = (
    decimal, fraction, slash, display_fractions, text_fractions, sized_brackets, plain_brackets, spaces, thin_spaces, dollars,
    full_stop, named, units, without_units, separators, braced_separators, spaced_separators, leading_zeros, trailing_zero,
    e_notation, powers_of_ten, dotted_powers, reordered, joined_by_and, as_set, both_signs,
)  # fmt: skip
